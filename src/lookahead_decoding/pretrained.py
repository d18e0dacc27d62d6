"""Transformers' ``from_pretrained`` as we use it: silent, strict about weights, and with short errors."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from lookahead_decoding.errors import FileFormatError

_LONGEST_GIST = 240


def load_tokenizer_and_model(
    path: str, label: str, tokenizer_options: dict[str, Any], model_options: dict[str, Any]
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Load both, the tokenizer first.

    Raises:
        FileFormatError: weights are missing, which Transformers would fill with random numbers.
    """
    tokenizer = AutoTokenizer.from_pretrained(path, **tokenizer_options)
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **model_options)
    missing = sorted(info["missing_keys"])
    if missing:
        raise FileFormatError(f"the weights of {label!r} are incomplete: {len(missing)} missing, such as {missing[0]}")
    return tokenizer, model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Transformers' warnings and progress bars from stderr."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def gist(error: BaseException) -> str:
    """The first line of an error's message, without its last stop; or the error's name."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = lines[0].rstrip(".: ")
    return line if len(line) <= _LONGEST_GIST else f"{line[:_LONGEST_GIST]}..."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the machine's or the GPU's memory is exhausted."""
    # The CPU's allocator raises a plain RuntimeError.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
