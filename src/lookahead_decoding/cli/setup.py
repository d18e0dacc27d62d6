"""From options to a loaded engine."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from lookahead_decoding.cli.options import ModelOptions
from lookahead_decoding.config import LookaheadConfig

if TYPE_CHECKING:
    from lookahead_decoding.engine import Engine
    from lookahead_decoding.threads import ThreadChoice


def open_engine(
    model: str | None, options: ModelOptions, config: LookaheadConfig | None = None, *, verbose: bool = False
) -> tuple[Engine, ThreadChoice]:
    """Load a model and settle the number of threads for it."""
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
        lookahead=config or LookaheadConfig(),
    )
    return engine, settle_threads(engine, options.threads)


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
