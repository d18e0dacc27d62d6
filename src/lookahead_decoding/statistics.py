"""What decoding cost and what the guesses were worth."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from lookahead_decoding.plan import StepPlan
from lookahead_decoding.verify import Walk


@dataclass
class DecodingStatistics:
    """Counts of one session, or of several added up.

    Attributes:
        steps: forward passes that decided at least one token; prefill chunks before the last do not count.
        new_tokens: tokens decided.
        nodes: widths of those steps added up (the last accepted token and the guesses behind it).
        accepted_by_source: guessed tokens that were right, each credited to the first source that proposed
            it; they sum to ``new_tokens - steps``.
        proposed, accepted: guessed and accepted tokens per source and depth (1 = the next token); a token
            that several sources proposed counts for each.
        widths: of those steps, in their order.
        expected_tokens: how many tokens those steps were expected to decide, by what had been accepted before.
        cost, plain_cost: what the steps after the first token, and plain decoding of their tokens, cost on the
            engine's curve of step times.
        prefill_seconds: time until the first token was decided. decode_seconds: time after that.
    """

    steps: int = 0
    new_tokens: int = 0
    nodes: int = 0
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    proposed: Counter[tuple[str, int]] = field(default_factory=Counter)
    accepted: Counter[tuple[str, int]] = field(default_factory=Counter)
    widths: list[int] = field(default_factory=list)
    expected_tokens: float = 0.0
    cost: float = 0.0
    plain_cost: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    _timed_tokens: int = 0

    def record(self, plan: StepPlan, walk: Walk) -> None:
        """Count one deciding step."""
        self.steps += 1
        self.new_tokens += len(walk.tokens)
        self.nodes += plan.num_nodes
        self.widths.append(plan.num_nodes)
        self.expected_tokens += plan.expected_tokens
        start_depth = plan.tree.depths[plan.start]
        for node, names in plan.sources.items():
            for name in names:
                self.proposed[name, plan.tree.depths[node] - start_depth] += 1
        for node in walk.path:
            names = plan.sources[node]
            self.accepted_by_source[names[0]] += 1
            for name in names:
                self.accepted[name, plan.tree.depths[node] - start_depth] += 1

    def add_time(self, seconds: float, *, prefill: bool, cost: float = 0.0, plain_cost: float = 0.0) -> None:
        """Count the time of one step, shared or not.

        Args:
            seconds: measured.
            prefill: whether no token had been decided before.
            cost: of the step on the curve of step times.
            plain_cost: of one step of plain decoding in the same company.
        """
        if prefill:
            self.prefill_seconds += seconds
        else:
            self.decode_seconds += seconds
            self.cost += cost
            self.plain_cost += plain_cost * (self.new_tokens - self._timed_tokens)
        self._timed_tokens = self.new_tokens

    @property
    def tokens_per_step(self) -> float:
        """New tokens per deciding forward pass; plain decoding has 1."""
        return self.new_tokens / self.steps if self.steps else 0.0

    @property
    def nodes_per_step(self) -> float:
        """Mean width of a deciding forward pass."""
        return self.nodes / self.steps if self.steps else 0.0

    @property
    def seconds(self) -> float:
        """Prefill and decoding together."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, prefill included."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def estimated_speedup(self) -> float:
        """Over plain decoding, by the engine's curve of step times; 0 when nothing was decoded after the prefill."""
        return self.plain_cost / self.cost if self.cost else 0.0

    def __add__(self, other: DecodingStatistics) -> DecodingStatistics:
        return DecodingStatistics(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __iadd__(self, other: DecodingStatistics) -> DecodingStatistics:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        return self

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the counts per depth as ``{source: [depth 1, depth 2, ...]}``."""
        return {
            "steps": self.steps,
            "new_tokens": self.new_tokens,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "nodes_per_step": round(self.nodes_per_step, 2),
            "widths": self.widths,
            "expected_tokens_per_step": round(self.expected_tokens / self.steps, 4) if self.steps else 0.0,
            "estimated_speedup": round(self.estimated_speedup, 4),
            "accepted_by_source": dict(self.accepted_by_source),
            "proposed": _by_depth(self.proposed),
            "accepted": _by_depth(self.accepted),
            "seconds": {"prefill": round(self.prefill_seconds, 4), "decode": round(self.decode_seconds, 4)},
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


def _by_depth(counts: Counter[tuple[str, int]]) -> dict[str, list[int]]:
    names = sorted({name for name, _ in counts})
    deepest = max((depth for _, depth in counts), default=0)
    return {name: [counts[name, depth] for depth in range(1, deepest + 1)] for name in names}
