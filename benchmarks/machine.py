"""The machine and the versions that a set of figures was made with, as one JSON object."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "processor": processor(),
                "cpu_capability": torch.backends.cpu.get_cpu_capability(),
                "cores": os.cpu_count(),
                "threads": torch.get_num_threads(),
                "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "transformers", "lookahead-decoding")},
            },
            indent=1,
        )
    )
