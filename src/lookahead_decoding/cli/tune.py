"""``lookahead tune``: measure the machine once, so that every later run guesses as far as it pays there."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from lookahead_decoding.cli.demo import PROMPTS as DEMO_PROMPTS
from lookahead_decoding.cli.options import AsJson, ModelArgument, ModelOptions, Prompts, Verbose, output_option
from lookahead_decoding.cli.progress import progress_bar
from lookahead_decoding.cli.prompt import as_chat, read_prompts
from lookahead_decoding.cli.report import how_to_guess, note
from lookahead_decoding.cli.setup import open_engine
from lookahead_decoding.errors import ConfigError

if TYPE_CHECKING:
    from lookahead_decoding.profile import Profile, StepTimes
    from lookahead_decoding.tune import Tuning

PROMPTS = (
    *DEMO_PROMPTS.values(),
    """Add type hints and a docstring to this function, and change nothing else:

def moving_average(values, size):
    if size < 1:
        raise ValueError("size is at least 1")
    averages = []
    total = 0
    for i, value in enumerate(values):
        total += value
        if i >= size:
            total -= values[i - size]
        if i >= size - 1:
            averages.append(total / size)
    return averages
""",
    """Summarise this text in two or three sentences:

The lighthouse on the northern cape was built in 1874, after three ships had been lost on the reef in a single winter. \
Its first keeper lived there with his family for thirty years. Twice a day he carried the oil up the hundred and \
twelve steps to the lamp, and in his log he noted the weather, the passing ships and the birds that had flown into the \
glass. When the lamp was changed to electric light in 1931, a keeper was still needed to look after the engine that \
made the current. Only in 1988 did the light become automatic. The last keeper left in the spring of that year. Since \
then the house has stood empty for most of the time, but in summer a group of volunteers opens it to visitors, who can \
read the old logs and climb the stairs to the lamp. The light itself still turns every night, as there are ships that \
trust their eyes more than their instruments.
""",
)
"""What is tried if no file of prompts is given: two questions, a text to edit, a text to shorten."""

Contexts = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Numbers of cached tokens to time steps over, cut to what the model takes.",
        show_default="128,1024,4096",
    ),
]
MaxNodes = Annotated[int, typer.Option(min=2, max=128, help="The widest step to time.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs of each kind.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=2, help="Tokens per answer.")]
Plot = Annotated[Path | None, output_option(metavar="FILE.png", help="Draw the step times.")]
DryRun = Annotated[bool, output_option("--dry-run", help="Store nothing.")]


def tune(
    *,
    model: ModelArgument = None,
    load: ModelOptions,
    contexts: Contexts = None,
    max_nodes: MaxNodes = 128,
    repeats: Repeats = 7,
    max_new_tokens: MaxNewTokens = 96,
    prompts: Prompts = None,
    plot: Plot = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> int:
    """Measure how step time grows here, choose how to guess, and keep that for every later run."""
    lengths = None if contexts is None else _read_contexts(contexts)
    texts = PROMPTS if prompts is None else read_prompts(prompts)
    if plot is not None:
        _check_plot(plot)
    engine, choice = open_engine(model, load, tuned=False, verbose=verbose)
    note(f"{engine.name}, {engine.profile_key.dtype} on {engine.profile_key.device} ({choice.reason})")

    from lookahead_decoding import profile
    from lookahead_decoding.tune import CONTEXTS
    from lookahead_decoding.tune import tune as measure_and_choose

    with progress_bar() as report:
        tuning = measure_and_choose(
            engine,
            [as_chat(engine, text) for text in texts],
            contexts=lengths or CONTEXTS,
            max_nodes=max_nodes,
            repeats=repeats,
            max_new_tokens=max_new_tokens,
            progress=report,
        )
    # What took minutes to measure is shown before anything can go wrong with storing it.
    if as_json:
        print(json.dumps(tuning.profile.to_dict()))
    else:
        _show(tuning)
    if plot is not None:
        _draw(tuning.profile, plot)
    stored = "nothing is stored (--dry-run)" if dry_run else f"stored in {profile.save(tuning.profile)}"
    if as_json:
        note(stored)
    else:
        print(stored)
        print(how_to_guess(tuning.profile.fields))
    return 0


# Input


def _read_contexts(text: str) -> list[int]:
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isascii() and number.isdecimal() and 0 < int(number) <= 2**24 for number in numbers):
        raise ConfigError(f"--contexts is a list of whole numbers above 0, such as 128,1024; got {text!r}")
    return [int(number) for number in numbers]


# Output


def _show(tuning: Tuning) -> None:
    console = Console()
    console.print(_times_table(tuning.profile.times))
    console.print(_trials_table(tuning))
    print("Expected on the sample prompts by the step times above; what the guessing itself takes is left out.")


def _times_table(times: StepTimes) -> Table:
    """A row per width; a column per context, and beside it the ratio to one node."""
    table = Table("nodes", title="Step time, ms, by cached tokens", title_justify="left")
    for context in times.contexts:
        table.add_column(f"{context}", justify="right")
        table.add_column("of 1 node", justify="right", style="dim")
    for column, width in enumerate(times.nodes):
        cells: list[str] = []
        for row in times.seconds:
            cells += [_milliseconds(row[column]), f"{row[column] / row[0]:.2f}x"]
        table.add_row(str(width), *cells)
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


def _trials_table(tuning: Tuning) -> Table:
    """A row per way to guess, plain decoding the first."""
    table = Table("guessing", title="Ways to guess; * is the best", title_justify="left")
    for heading in ("tokens/step", "nodes/step", "FLOPs/step", "tokens/s", "speed-up"):
        table.add_column(heading, justify="right")
    plain = tuning.best.plain_tokens_per_second
    table.add_row("plain", "1.00", "1.0", "1.0x", f"{plain:.1f}", "1.00x")
    for trial in tuning.trials:
        config = trial.config
        how = f"W={config.window} N={config.ngram} G={config.guesses}" if config.window else "no window"
        table.add_row(
            f"{how} *" if trial is tuning.best else how,
            f"{trial.tokens_per_step:.2f}",
            f"{trial.nodes_per_step:.1f}",
            f"{trial.flops_per_step:.1f}x",
            f"{trial.tokens_per_second:.1f}",
            f"{trial.speedup:.2f}x",
            style="bold" if trial is tuning.best else None,
        )
    return table


def _check_plot(path: Path) -> None:
    """Refuse a plot that could not be drawn, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs the package matplotlib; run `pip install 'lookahead-decoding[plot]'`")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot takes a FILE.png; got {str(path)!r}")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"the plot {str(path)!r} cannot be written there")


def _draw(profile: Profile, path: Path) -> None:
    """Step time over nodes, a line per context: measured points on the curve that is used between them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    times = profile.times
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    widths = range(1, times.nodes[-1] + 1)
    for context, row in zip(times.contexts, times.seconds, strict=True):
        (line,) = axes.plot(widths, [1000 * profile.cost(width, context) for width in widths], label=f"{context}")
        axes.plot(times.nodes, [1000 * seconds for seconds in row], "o", color=line.get_color())
    axes.set_xlabel("nodes per step")
    axes.set_ylabel("step time, ms")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{profile.key.model}, {profile.key.dtype}\n{profile.key.device}", fontsize="medium")
    axes.legend(title="cached tokens")
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"the plot {str(path)!r} cannot be written: {error.strerror}") from error
