"""How far a long command has come: a bar on standard error, if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

Report = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""


@contextlib.contextmanager
def progress_bar(*, between_lines: bool = False) -> Iterator[Report]:
    """A bar for each thing that is reported.

    Args:
        between_lines: standard output gets lines meanwhile; there is no bar where they would be on one terminal.
    """
    console = Console(stderr=True)
    is_shown = console.is_terminal and not (between_lines and sys.stdout.isatty())
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    # Redirected, what is printed would go where the bar is.
    with Progress(*columns, console=console, disable=not is_shown, redirect_stdout=False) as progress:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done)

        yield report
