"""Benchmark prompts from the public data sets, as chat messages. The files are not part of this repository."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


_TASKS: dict[str, Callable[[Mapping[str, Any]], Messages]] = {
    # lm-sys/FastChat's questions, first turn.
    "mt-bench": lambda row: _user(row["turns"][0]),
    # openai/human-eval, as a request.
    "humaneval": lambda row: _user("Complete this Python function:\n" + row["prompt"]),
}
TASKS = tuple(_TASKS)


def load_prompts(task: str, path: Path, stride: int) -> list[Messages]:
    """Every ``stride``-th row of a JSON-lines file (optionally .gz), as the task asks it."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return [_TASKS[task](row) for row in rows[::stride]]
