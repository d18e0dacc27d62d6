"""What a completion cost, in words: for standard error, behind the text."""

from __future__ import annotations

import statistics as statistics_
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from lookahead_decoding.compare import Comparison, Difference
    from lookahead_decoding.completion import Completion
    from lookahead_decoding.engine import Engine
    from lookahead_decoding.statistics import DecodingStatistics


def note(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr)


def speed(statistics: DecodingStatistics) -> str:
    """Tokens, steps and their ratios."""
    return (
        f"{statistics.new_tokens} tokens in {statistics.steps} steps "
        f"({statistics.tokens_per_step:.2f} per step), {statistics.tokens_per_second:.1f} tokens/s"
    )


def summary(completion: Completion) -> str:
    """One line: what was made, how fast, why it ended, how it was drawn."""
    parts = [speed(completion.statistics), f"ended by {completion.finish_reason}"]
    if completion.cached_tokens:
        parts.append(f"{completion.cached_tokens} of {completion.prompt_tokens} prompt tokens reused")
    if completion.sampling["do_sample"]:
        options = (f"{name}={value}" for name, value in completion.sampling.items() if value is not None)
        parts.append(" ".join(options))
    return ", ".join(parts)


def details(completion: Completion) -> None:
    """Statistics, memory and config of a completion."""
    statistics = completion.statistics
    print_statistics(statistics)
    note(f"time: prefill {statistics.prefill_seconds:.2f} s, decoding {statistics.decode_seconds:.2f} s")
    note(f"memory: KV {mebibytes(completion.kv_bytes)}, draft sources {mebibytes(completion.pool_bytes)}")
    note(f"model: {completion.model}, {completion.dtype}, {completion.device}, threads: {completion.threads}")
    note("config: " + " ".join(f"{name}={value}" for name, value in completion.config.to_dict().items()))


def tuning(engine: Engine) -> str:
    """Whether the engine goes by a tuned profile, and how far."""
    from lookahead_decoding.profile import path_of

    profile = engine.profile
    if profile is None:
        return "no profile for this model, dtype, device and number of threads; `lookahead tune` makes one"
    chosen = how_to_guess(profile.fields)
    if engine.config != profile.config:
        chosen = f"step times only, as options come before {chosen}"
    return f"{chosen} ({path_of(profile.key)})"


def how_to_guess(fields: Mapping[str, Any]) -> str:
    """A config's fields that are tuned, in one line."""
    return "W={window} N={ngram} G={guesses} budget={budget}".format(**fields)


def print_statistics(statistics: DecodingStatistics) -> None:
    """Accepted of proposed tokens, per source and depth."""
    note(f"nodes per step: {statistics.nodes_per_step:.1f} ({_widths(statistics.widths)})")
    if statistics.cost:
        note(f"speed-up over plain decoding, by the step times: {statistics.estimated_speedup:.2f}x")
    counts = statistics.to_dict()
    proposed, accepted = counts["proposed"], counts["accepted"]
    if not proposed:
        return
    depths = len(next(iter(proposed.values())))
    names = [f"depth {depth + 1}" for depth in range(min(depths, _DEPTHS))]
    if depths > _DEPTHS:
        names.append("deeper")
    table = Table("source", "credited", *names, box=None)
    for name, of_source in proposed.items():
        taken = [*accepted.get(name, []), *[0] * depths][:depths]
        shares = [f"{taken[i]}/{of_source[i]}" for i in range(min(depths, _DEPTHS))]
        if depths > _DEPTHS:
            shares.append(f"{sum(taken[_DEPTHS:])}/{sum(of_source[_DEPTHS:])}")
        table.add_row(name, str(statistics.accepted_by_source[name]), *shares)
    Console(stderr=True).print(table)


_DEPTHS = 5


def _widths(widths: Sequence[int]) -> str:
    """Step widths over time in a few characters: the mean of each eighth."""
    eighth = max(1, -(-len(widths) // 8))
    means = [statistics_.mean(widths[i : i + eighth]) for i in range(0, len(widths), eighth)]
    return "over time " + " ".join(f"{mean:.0f}" for mean in means)


def verdict(comparison: Comparison, engine: Engine) -> str:
    """One line: the speed-up over plain decoding, and whether the tokens are the same."""
    plain, lookahead = (c.statistics.tokens_per_second for c in (comparison.plain, comparison.lookahead))
    speeds = f"{comparison.speedup:.2f}x over plain decoding ({lookahead:.1f} against {plain:.1f} tokens/s)"
    difference = comparison.difference
    if difference is None:
        return f"{speeds}, identical tokens"

    evidence = ""
    if difference.bound is not None:
        evidence = f" (gap in float32 {gap_of(difference)}, rounding explains {bound_of(difference)})"
    plain_token, lookahead_token = (
        quoted_token(engine, token) for token in (difference.plain_token, difference.lookahead_token)
    )
    return (
        f"{speeds}, first difference at token {difference.index}: plain has {plain_token}, "
        f"lookahead {lookahead_token}: {difference.label}{evidence}"
    )


def token_text(engine: Engine, token: int | None) -> str | None:
    """What a token decodes to, its number without a tokenizer; None where a text had ended."""
    if token is None:
        return None
    return str(engine.tokenizer.decode([token])) if engine.tokenizer is not None else str(token)


def quoted_token(engine: Engine, token: int | None) -> str:
    """The same for people."""
    text = token_text(engine, token)
    return "the end" if text is None else repr(text)


def gap_of(difference: Difference) -> str:
    """A difference's gap for people; it belongs to a bound."""
    if difference.bound is None:
        return "-"
    return "infinite" if difference.gap is None else f"{difference.gap:.3g}"


def bound_of(difference: Difference) -> str:
    """The gap that rounding explains, for people."""
    return "-" if difference.bound is None else f"{difference.bound:.3g}"


def mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
