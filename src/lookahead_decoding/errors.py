"""Everything this library raises on purpose.

LookaheadError
├── ConfigError (also a ValueError)   an option that does not exist or cannot be
├── UnsupportedModelError             a model whose cache cannot be decoded in parallel
├── UnsupportedOptionError            a generation option that is refused; ``param`` names it
├── ModelNotFoundError                no model under that name
├── FileFormatError                   a file that is not what its name says
├── CapacityError                     a request that does not fit the context or the memory
└── ModelOutputError                  the model produced NaN where a token had to be chosen

Each message is one sentence or two: what is wrong, what was given, what to do.
"""

from __future__ import annotations


class LookaheadError(Exception):
    """Base of all errors raised by lookahead_decoding."""


class ConfigError(LookaheadError, ValueError):
    """An unknown or impossible configuration value."""


class UnsupportedModelError(LookaheadError):
    """The model cannot be decoded in parallel, by its layer types or by the probe."""


class UnsupportedOptionError(LookaheadError):
    """A generation option that is refused; :attr:`param` is its name."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFoundError(LookaheadError):
    """No model could be found under the given name or path."""


class FileFormatError(LookaheadError):
    """A file is not what its name or its place says it is."""


class CapacityError(LookaheadError):
    """The request does not fit the model's context or the machine's memory."""


class ModelOutputError(LookaheadError):
    """The model's logits are not numbers, so no token can be chosen."""
