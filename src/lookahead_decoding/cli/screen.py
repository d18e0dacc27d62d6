"""The text on standard output as it is made; on a terminal, shaded by who guessed it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from lookahead_decoding.config import WINDOW, LookaheadConfig

if TYPE_CHECKING:
    from lookahead_decoding.completion import Chunk, Completion

_COLORS = ("green", "cyan", "yellow", "magenta", "blue")


class Screen:
    """Standard output for one completion.

    Args:
        config: names the sources to shade by.
        no_color: do not shade, even on a terminal.
        mute: print nothing at all.

    Attributes:
        text: what was shown so far.
    """

    def __init__(self, config: LookaheadConfig, *, no_color: bool = False, mute: bool = False) -> None:
        self._styles = {} if no_color or mute or not _shows_colors() else _styles(config)
        self._mute = mute
        self.text = ""

    def legend(self) -> None:
        """Say on standard error which colour is which source, where there are any."""
        if self._styles and sys.stderr.isatty():
            names = ", ".join(_shade(name, style) for name, style in self._styles.items())
            print(f"Tokens guessed by {names}; the others were not guessed.", file=sys.stderr)

    def stream(self, chunks: Iterator[Chunk]) -> Completion:
        """Print a completion as it is made, and end its last line whatever happens."""
        completion = None
        try:
            for chunk in chunks:
                self._show(chunk)
                completion = chunk.completion
        finally:
            if self.text and not self.text.endswith("\n") and not self._mute:
                print(flush=True)
        assert completion is not None  # the last chunk has it
        return completion

    def _show(self, chunk: Chunk) -> None:
        self.text += chunk.text
        if chunk.text and not self._mute:
            print(self._shaded(chunk) if self._styles else chunk.text, end="", flush=True)

    def _shaded(self, chunk: Chunk) -> str:
        pieces = zip(chunk.pieces, chunk.sources, strict=True)
        return "".join(_shade(piece, self._styles.get(source)) for piece, source in pieces)


def _shows_colors() -> bool:
    """Whether standard output is a terminal with colours, and NO_COLOR is not set."""
    console = Console()
    return sys.stdout.isatty() and console.color_system is not None and not console.no_color


def _styles(config: LookaheadConfig) -> dict[str, Style]:
    """A style for each source of guesses that the config uses."""
    names = list(config.sources) if config.guesses else []
    if config.window and config.verify_window:
        names.append(WINDOW)
    return {name: Style.parse(color) for name, color in zip(names, itertools.cycle(_COLORS), strict=False)}


def _shade(text: str, style: Style | None) -> str:
    return text if style is None else style.render(text, color_system=ColorSystem.STANDARD)
