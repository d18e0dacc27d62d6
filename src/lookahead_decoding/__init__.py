"""Exact parallel decoding of causal language models, without a draft model, training or a datastore."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lookahead_decoding.config import PRESETS, LookaheadConfig
from lookahead_decoding.draft import ChainSource, DraftSource
from lookahead_decoding.errors import (
    CapacityError,
    ConfigError,
    FileFormatError,
    LookaheadError,
    ModelNotFoundError,
    ModelOutputError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from lookahead_decoding.memory import DraftMemory

if TYPE_CHECKING:
    from lookahead_decoding.completion import Chunk, Completion
    from lookahead_decoding.enabling import disable, enable
    from lookahead_decoding.engine import Engine
    from lookahead_decoding.generation import custom_generate, generate
    from lookahead_decoding.statistics import DecodingStatistics

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "CapacityError",
    "ChainSource",
    "Chunk",
    "Completion",
    "ConfigError",
    "DecodingStatistics",
    "DraftMemory",
    "DraftSource",
    "Engine",
    "FileFormatError",
    "LookaheadConfig",
    "LookaheadError",
    "ModelNotFoundError",
    "ModelOutputError",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "custom_generate",
    "disable",
    "enable",
    "generate",
]

# What needs torch is imported when it is asked for, so that the integer core works without it.
_WITH_TORCH = {
    "Chunk": "lookahead_decoding.completion",
    "Completion": "lookahead_decoding.completion",
    "Engine": "lookahead_decoding.engine",
    "DecodingStatistics": "lookahead_decoding.statistics",
    "custom_generate": "lookahead_decoding.generation",
    "disable": "lookahead_decoding.enabling",
    "enable": "lookahead_decoding.enabling",
    "generate": "lookahead_decoding.generation",
}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
