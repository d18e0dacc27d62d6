"""Errors, interrupts and closed pipes: one sentence at most, and an exit code."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from lookahead_decoding.errors import ConfigError, LookaheadError, ModelNotFoundError

EXIT_FAILED, EXIT_USAGE, EXIT_NO_MODEL, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, 3, 130, 141


def print_error(message: object) -> None:
    """One line on standard error."""
    print("error:", " ".join(str(message).split()), file=sys.stderr)


def exits_cleanly(command: Callable[..., int]) -> Callable[..., int]:
    """The command, its exceptions turned into exit codes; tracebacks are for ``--verbose``."""

    @functools.wraps(command)
    def run(**options: Any) -> int:
        try:
            with _log_on_stderr():
                code = command(**options)
                sys.stdout.flush()
                return code
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            # The reader has gone. Python flushes once more at exit, and must not find it gone then.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_PIPE
        except Exception as error:
            expected = isinstance(error, LookaheadError)
            print_error(error if expected else f"{type(error).__name__}: {error}")
            if options["verbose"] and not expected:
                traceback.print_exception(error)
            return _exit_code(error)

    return run


def _exit_code(error: Exception) -> int:
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    return EXIT_NO_MODEL if isinstance(error, ModelNotFoundError) else EXIT_FAILED


@contextlib.contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Show what the library logs, such as that a model is being converted."""
    logger = logging.getLogger("lookahead_decoding")
    handler = logging.StreamHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
