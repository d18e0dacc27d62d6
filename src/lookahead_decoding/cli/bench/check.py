"""``lookahead bench check``: the proof, on prompts of yours, that lookahead changes no token."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lookahead_decoding.cli.failures import EXIT_FAILED
from lookahead_decoding.cli.options import GuessingOptions, ModelArgument, ModelOptions, Prompts, Verbose, output_option
from lookahead_decoding.cli.progress import progress_bar
from lookahead_decoding.cli.prompt import as_chat, read_prompts
from lookahead_decoding.cli.report import bound_of, gap_of, note, quoted_token, token_text, tuning
from lookahead_decoding.cli.setup import open_engine
from lookahead_decoding.cli.tune import PROMPTS
from lookahead_decoding.errors import CapacityError

if TYPE_CHECKING:
    from lookahead_decoding.check import Check
    from lookahead_decoding.engine import Engine

SCHEMA = 1
"""Version of the JSON lines."""

_SHOWN = 32
"""Characters of a prompt in the table."""

Limit = Annotated[int | None, typer.Option(min=1, help="Take so many prompts of the file.", show_default="all")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="The most tokens per answer.")]
Temperature = Annotated[float, typer.Option("--temperature", "--temp", min=0, help="0 is greedy.")]
Seed = Annotated[int, typer.Option(metavar="INT", min=0, max=2**63 - 1, help="Of the draws, for each prompt.")]
AsJsonLines = Annotated[
    bool, output_option("--json", help="Print a JSON line per prompt as it is finished, and one with the counts.")
]


def check(
    *,
    model: ModelArgument = None,
    load: ModelOptions,
    guessing: GuessingOptions,
    prompts: Prompts = None,
    limit: Limit = None,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    as_json: AsJsonLines = False,
    verbose: Verbose = False,
) -> int:
    """Decode prompts with and without lookahead, and tell ties of rounding from bugs. Exit code 1: a bug."""
    lookahead = guessing.resolve()
    texts = list(itertools.islice(PROMPTS if prompts is None else read_prompts(prompts), limit))
    engine, choice = open_engine(model, load, lookahead, verbose=verbose)
    if verbose:
        note(f"{engine.name}, {engine.model.dtype} on {engine.runner.device}, threads: {choice.threads}")
        note(f"tuned: {tuning(engine)}")

    from lookahead_decoding.check import check_prompt, summarise
    from lookahead_decoding.compare import Judge

    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    if temperature:
        # Rounding moves the edges of top-k and top-p, which the rule for ties has no word about.
        options |= {"top_k": 0, "top_p": 1.0}
    checks: list[Check] = []
    with Judge(engine) as judge, progress_bar(between_lines=as_json) as report:
        for number, text in enumerate(texts, start=1):
            report("prompts", number - 1, len(texts))
            try:
                checks.append(check_prompt(engine, judge, as_chat(engine, text), **options))
            except CapacityError as error:
                raise CapacityError(f"prompt {number}: {error}") from error
            if as_json:
                print(json.dumps({"schema": SCHEMA, "prompt": number, **_line(engine, checks[-1])}), flush=True)
        report("prompts", len(texts), len(texts))
    summary = summarise(checks)
    if as_json:
        print(json.dumps({"schema": SCHEMA, **summary, **_circumstances(engine, checks[0])}))
    else:
        _show(engine, texts, checks, summary)
    return EXIT_FAILED if summary["bugs"] else 0


def _line(engine: Engine, check: Check) -> dict[str, Any]:
    """A prompt's JSON object; the tokens that differ are there as text too."""
    found = check.to_dict()
    if (difference := check.difference) is not None:
        found["first_difference"] |= {
            "plain_text": token_text(engine, difference.plain_token),
            "lookahead_text": token_text(engine, difference.lookahead_token),
        }
    return found


def _circumstances(engine: Engine, check: Check) -> dict[str, Any]:
    """What all prompts have in common."""
    completion = check.lookahead.to_dict()
    return {name: completion[name] for name in ("sampling", "config", "model", "dtype", "device", "threads")}


def _show(engine: Engine, texts: Sequence[str], checks: Sequence[Check], summary: dict[str, Any]) -> None:
    console = Console()
    names = ("prompts", "identical", "ties", "bugs")
    counts = Table(*names)
    counts.add_row(*(str(summary[name]) for name in names))
    console.print(counts)
    table = Table("prompt", "", "index", "plain", "lookahead", "gap", "bound", "label")
    for number, (text, check) in enumerate(zip(texts, checks, strict=True), start=1):
        if (difference := check.difference) is None:
            continue
        table.add_row(
            str(number),
            escape(_beginning(text)),
            str(difference.index),
            escape(quoted_token(engine, difference.plain_token)),
            escape(quoted_token(engine, difference.lookahead_token)),
            gap_of(difference),
            bound_of(difference),
            difference.label,
            style="bold red" if difference.is_bug else None,
        )
    if table.row_count:
        console.print(table)
    compared, new = summary["compared_tokens"], summary["new_tokens"]
    behind = "" if compared == new else f" of {new}, the others lie behind a difference"
    print(
        f"Tokens compared: {compared}{behind}. Lookahead decided {summary['tokens_per_step']:.2f} tokens per step with "
        f"{summary['nodes_per_step']:.1f} nodes."
    )


def _beginning(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."
