"""Run by ``make wheel`` in an environment that holds the wheel and what it depends on, and nothing else."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lookahead_decoding


def main() -> None:
    package = Path(lookahead_decoding.__file__).parent
    assert "site-packages" in package.parts, package
    assert (package / "py.typed").is_file()
    assert version("lookahead-decoding") == lookahead_decoding.__version__
    for module in pkgutil.walk_packages([str(package)], "lookahead_decoding."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.tensor([[3, 4, 5, 3, 4, 5]])
    expected = model.generate(prompt, max_new_tokens=20, do_sample=False)
    found = lookahead_decoding.generate(model, prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(found, expected)
    print("the wheel works")


if __name__ == "__main__":
    main()
