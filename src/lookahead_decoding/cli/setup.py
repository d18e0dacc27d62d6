"""From options to a loaded engine."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookahead_decoding.cli.options import ModelOptions
from lookahead_decoding.errors import ConfigError

if TYPE_CHECKING:
    from lookahead_decoding.engine import Engine
    from lookahead_decoding.threads import ThreadChoice


def open_engine(
    model: str | None,
    options: ModelOptions,
    lookahead: Mapping[str, Any] | None = None,
    *,
    tuned: bool = True,
    verbose: bool = False,
) -> tuple[Engine, ThreadChoice]:
    """Load a model, settle the number of threads for it, and then take its tuned profile, if it has one."""
    from lookahead_decoding import profile
    from lookahead_decoding.engine import Engine
    from lookahead_decoding.threads import settle_threads

    if not verbose:
        _silence_transformers()
    engine = Engine.from_pretrained(
        model,
        dtype=options.dtype,
        device=options.device,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        lookahead=lookahead or {},
        tuned=False,  # which profile is the engine's depends on the number of threads
    )
    choice = settle_threads(engine, options.threads)
    engine.use_profile(profile.find(engine.profile_key) if tuned else None)
    return engine, choice


@contextlib.contextmanager
def remembering(engine: Engine, path: Path | None) -> Iterator[None]:
    """Guess from what a file says earlier runs learned, and add this run to it, however it ends."""
    if path is None:
        yield
        return
    from lookahead_decoding.memory import DraftMemory

    if not path.parent.is_dir():
        raise ConfigError(f"the folder of --memory {path} does not exist; make it first")
    size = engine.runner.vocab_size
    try:
        engine.memory = (
            DraftMemory.load(path, vocab_size=size) if path.exists() else DraftMemory.empty(engine.name, size)
        )
    except OSError as error:
        raise ConfigError(f"cannot read --memory {path}: {error.strerror}") from error
    try:
        yield
    finally:
        engine.memory.save(path)


def _silence_transformers() -> None:
    """No warnings and no progress bars, but those of downloads on a terminal."""
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    show_downloads = sys.stderr.isatty() and not are_progress_bars_disabled()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # the Hub's as well
    if show_downloads:
        enable_progress_bars()
