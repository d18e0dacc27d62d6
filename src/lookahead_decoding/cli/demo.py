"""``lookahead demo``: the same text in fewer passes, shown and measured in about two minutes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from lookahead_decoding.cli.failures import EXIT_FAILED
from lookahead_decoding.cli.options import Model, ModelOptions, NoColor, Threads, Verbose
from lookahead_decoding.cli.prompt import as_chat
from lookahead_decoding.cli.screen import Screen
from lookahead_decoding.cli.setup import open_engine
from lookahead_decoding.config import DEFAULT_DTYPE

if TYPE_CHECKING:
    from lookahead_decoding.compare import Comparison
    from lookahead_decoding.completion import Completion
    from lookahead_decoding.engine import Engine

# Neither holds text that its answer could copy. Their tokens per step are about the median of MT-Bench's prompts, and
# a little below that of HumanEval's.
PROMPTS = {
    "chat": "Explain how rainbows form, to a curious child.",
    "code": "Write a Python function that checks whether a string is a palindrome, with a docstring and tests.",
}
_TRANSFORMERS, _PLAIN, _LOOKAHEAD = "transformers", "plain", "default"
"""What is timed: Transformers' own ``generate``, and the engine under two presets."""

_HEADINGS = {
    _TRANSFORMERS: "Transformers' generate",
    _PLAIN: "plain decoding",
    _LOOKAHEAD: "lookahead decoding",
}

MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens per answer.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs of each kind.")]


@dataclass(frozen=True)
class Measurement:
    """One prompt's speeds.

    Attributes:
        prompt: its name.
        tokens_per_second: of each kind of decoding, by its median run.
        comparison: the latest plain and lookahead run.
    """

    prompt: str
    tokens_per_second: Mapping[str, float]
    comparison: Comparison

    def speedup_over(self, kind: str) -> float:
        return self.tokens_per_second[_LOOKAHEAD] / self.tokens_per_second[kind]


def demo(
    model: Model = None,
    max_new_tokens: MaxNewTokens = 128,
    repeats: Repeats = 3,
    threads: Threads = None,
    no_color: NoColor = False,
    verbose: Verbose = False,
) -> int:
    """Show the same text made sooner: two prompts, an exact check, a table of speeds."""
    engine, choice = open_engine(model, ModelOptions(dtype="float32", threads=threads), verbose=verbose)
    print(f"{engine.name} on {engine.runner.device}, threads: {choice.threads} ({choice.reason})")
    Screen(engine.config, no_color=no_color).legend()
    prompts = {name: as_chat(engine, text) for name, text in PROMPTS.items()}
    are_equal = [_check(engine, name, ids, max_new_tokens, no_color) for name, ids in prompts.items()]

    del engine  # its weights need not stay while the next ones come
    engine, _ = open_engine(model, ModelOptions(threads=choice.threads), verbose=verbose)
    print(f"\nTiming in {DEFAULT_DTYPE}: {len(prompts)} prompts, {repeats} runs of each kind in turn ...")
    measurements = [_measure(engine, name, ids, max_new_tokens, repeats) for name, ids in prompts.items()]
    Console().print(_table(measurements))
    print(
        f"Greedy, {max_new_tokens} new tokens, medians of one run of this program: where other work shares "
        "the machine, the next run's ratios will differ."
    )
    ok = all(are_equal) and not any(measurement.comparison.is_bug for measurement in measurements)
    return 0 if ok else EXIT_FAILED


def _check(engine: Engine, name: str, ids: list[int], max_new_tokens: int, no_color: bool) -> bool:
    """Show lookahead's text; whether plain decoding makes the same tokens in float32."""
    from lookahead_decoding.compare import decode_afresh

    print(f"\n[{name}] {PROMPTS[name]}\n")
    options = {"temperature": 0, "max_new_tokens": max_new_tokens}
    screen = Screen(engine.config, no_color=no_color)
    lookahead = screen.stream(engine.stream(ids, **options))
    plain = decode_afresh(engine, ids, lookahead="plain", **options)
    is_equal = lookahead.token_ids == plain.token_ids
    print(
        f"\n[{name}] float32: {lookahead.statistics.steps} steps instead of {plain.statistics.steps}, "
        f"{'identical tokens' if is_equal else 'DIFFERENT TOKENS'}"
    )
    return is_equal


def _measure(engine: Engine, prompt: str, ids: list[int], max_new_tokens: int, repeats: int) -> Measurement:
    """Time all kinds of decoding in turn, in the opposite order every other time."""
    from lookahead_decoding.compare import Comparison, decode_afresh, first_difference, warm_up

    completions: dict[str, Completion] = {}

    def decode_with(preset: str) -> Sequence[int]:
        completions[preset] = decode_afresh(engine, ids, lookahead=preset, temperature=0, max_new_tokens=max_new_tokens)
        return completions[preset].token_ids

    runs: dict[str, Callable[[], Sequence[int]]] = {
        _TRANSFORMERS: lambda: _generate(engine, ids, max_new_tokens),
        _PLAIN: lambda: decode_with(_PLAIN),
        _LOOKAHEAD: lambda: decode_with(_LOOKAHEAD),
    }
    warm_up(engine, ids)
    _generate(engine, ids, 8)
    speeds: dict[str, list[float]] = {kind: [] for kind in runs}
    for repeat in range(repeats):
        for kind in list(runs) if repeat % 2 == 0 else reversed(runs):
            begun = time.perf_counter()
            tokens = runs[kind]()
            speeds[kind].append(len(tokens) / (time.perf_counter() - begun))
    plain, lookahead = completions[_PLAIN], completions[_LOOKAHEAD]
    return Measurement(
        prompt,
        {kind: statistics.median(of_kind) for kind, of_kind in speeds.items()},
        Comparison(plain, lookahead, first_difference(engine, ids, plain, lookahead)),
    )


def _generate(engine: Engine, ids: list[int], max_new_tokens: int) -> list[int]:
    """The tokens that Transformers' own ``generate`` makes."""
    import torch

    prompt = torch.tensor([ids], device=engine.runner.device)
    output = engine.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, do_sample=False
    )
    new: list[int] = output[0, len(ids) :].tolist()
    return new


def _table(measurements: Sequence[Measurement]) -> Table:
    """A column per prompt."""
    table = Table("", *(measurement.prompt for measurement in measurements))
    for kind in (_TRANSFORMERS, _PLAIN, _LOOKAHEAD):
        speeds = (f"{measurement.tokens_per_second[kind]:.1f}" for measurement in measurements)
        table.add_row(f"{_HEADINGS[kind]}, tokens/s", *speeds)
    steps = (f"{m.comparison.lookahead.statistics.tokens_per_step:.2f}" for m in measurements)
    table.add_row("lookahead, tokens per step", *steps)
    for kind in (_TRANSFORMERS, _PLAIN):
        speedups = (f"{measurement.speedup_over(kind):.2f}x" for measurement in measurements)
        table.add_row(f"speed-up over {_HEADINGS[kind]}", *speedups)
    differences = [measurement.comparison.difference for measurement in measurements]
    table.add_row("identical to plain", *("yes" if d is None else f"{d.label} at token {d.index}" for d in differences))
    return table
