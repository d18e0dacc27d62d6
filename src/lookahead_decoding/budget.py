"""How wide a step is: the tree that is expected to decide the most tokens per second."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from lookahead_decoding.config import MAX_BUDGET, LookaheadConfig
from lookahead_decoding.plan import TreeGrower


def allot(growers: Sequence[tuple[TreeGrower, LookaheadConfig]], seconds: Callable[[int], float]) -> None:
    """Grow the trees of a step: those of fixed width to their budgets, the others as far as it pays.

    Args:
        growers: each session's tree and config.
        seconds: time of a step by its number of nodes.
    """
    fixed = [(grower, config.budget) for grower, config in growers if not config.adaptive]
    for grower, budget in fixed:
        fill(grower, budget)
    nodes = sum(len(grower.tree) for grower, _ in fixed)
    share(
        [(grower, config.budget) for grower, config in growers if config.adaptive],
        lambda more: seconds(nodes + more),
    )


def fill(grower: TreeGrower, budget: int | None) -> None:
    """Grow a tree to its budget, or as far as there are guesses."""
    most = MAX_BUDGET if budget is None else budget
    while grower.chance > 0 and grower.num_nodes < most:
        grower.grow()


def share(growers: Sequence[tuple[TreeGrower, int | None]], seconds: Callable[[int], float]) -> None:
    """Grow the trees of a step together, as far as it pays.

    The likeliest guess of all is the next one, whoever's it is. Among the sizes on the way the one with the most
    expected tokens per second is taken; no guess at all, plain decoding, is the first of them.

    Args:
        growers: a tree per session, and how many nodes it may have.
        seconds: time of a step by its number of nodes.
    """
    if not growers:
        return
    nodes = sum(len(grower.tree) for grower, _ in growers)
    tokens = sum(grower.expected_tokens for grower, _ in growers)
    best_rate, best_size = tokens / seconds(nodes), 0
    grown: list[TreeGrower] = []
    heap = [(-grower.chance, i) for i, (grower, _) in enumerate(growers)]
    heapq.heapify(heap)
    while heap:
        _, i = heap[0]
        grower, budget = growers[i]
        chance = grower.chance
        if chance <= 0 or grower.num_nodes >= (_MOST if budget is None else budget):
            heapq.heappop(heap)
            continue
        # No later guess is likelier than this one, which bounds what any larger tree comes to.
        if all((tokens + chance * most) / seconds(nodes + least) <= best_rate for least, most in _FURTHER):
            break
        before = grower.expected_tokens
        grower.grow()
        grown.append(grower)
        nodes += 1
        tokens += grower.expected_tokens - before
        heapq.heapreplace(heap, (-grower.chance, i))
        if (rate := tokens / seconds(nodes)) > best_rate:
            best_rate, best_size = rate, len(grown)
    while len(grown) > best_size:
        grown.pop().undo()


def _ranges(end: int) -> Iterator[tuple[int, int]]:
    """``1..end`` in ranges ``least..most`` that grow by a quarter."""
    least = 1
    while least <= end:
        most = max(least, least * 5 // 4)
        yield least, most
        least = most + 1


_MOST = 256
"""Nodes of one session without a budget, should they cost nothing on this machine."""

_FURTHER = tuple(_ranges(_MOST))


class CostCurve:
    """Step time over nodes and context, learned from the steps that were made.

    The prior says how time grows; measurements near a point shift the prior there, and all of them together scale
    it where nothing was measured.

    Args:
        prior: seconds, up to a factor, by number of nodes and of cached tokens.
    """

    def __init__(self, prior: Callable[[int, int], float]) -> None:
        self._prior = prior
        self._seen: dict[tuple[int, int], deque[tuple[float, int, int]]] = {}  # seconds, nodes, context of each
        self._points: dict[tuple[int, int], _Point] = {}
        self._num_records = 0
        self._fit = 1.0, 1.0
        self._tables: dict[int, _Table] = {}

    def record(self, nodes: int, context: int, seconds: float) -> None:
        """A step of ``nodes`` over ``context`` cached tokens took so long."""
        key = _width_class(nodes), _class_of(context + 256)
        seen = self._seen.setdefault(key, deque(maxlen=_MEMORY))
        seen.append((seconds, nodes, context))
        self._num_records += 1
        # Other work makes steps slower, never faster: the lower quartile is what they cost undisturbed.
        self._points[key] = _Point(*sorted(seen)[len(seen) // 4], len(seen), self._num_records)
        if self._num_records < _MEMORY or self._num_records % 4 == 0:
            self._fit = self._fitted()
            self._tables.clear()

    def at(self, context: int) -> Callable[[int], float]:
        """Step time by number of nodes, at a context length."""
        return self._table(context).seconds

    def hoped(self, context: int) -> Callable[[int], float]:
        """The same, to plan a step by.

        Now and then growth is halved or doubled, so that a wider or a narrower step is tried: what they cost is
        known from steps alone.
        """
        table = self._table(context)
        trial, step = divmod(self._num_records, _TRY_EVERY)
        if step < _TRY_EVERY - 1:
            return table.seconds
        return table.halved if trial % 2 else table.doubled

    def _table(self, context: int) -> _Table:
        column = _class_of(context + 256)
        table = self._tables.get(column)
        if table is None:
            table = self._tables[column] = _Table(self._fitted_at, self._differences(column), 2**column - 256)
        return table

    def _differences(self, column: int) -> list[tuple[float, float, float]]:
        """``(log2 of the width, weight, log of the factor)`` by which steps differed from the fitted time."""
        return [
            (
                math.log2(point.nodes),
                # A step or two may have been disturbed, which more of them would not all have been.
                self._certainty(point) * point.steps * _nearness(its_column - column),
                math.log(point.seconds / self._fitted_at(point.nodes, point.context)),
            )
            for (_, its_column), point in list(self._points.items())
        ]

    def _fitted_at(self, nodes: int, context: int) -> float:
        level, growth = self._fit
        plain = self._prior(1, context)
        return level * plain + growth * (self._prior(nodes, context) - plain)

    def _fitted(self) -> tuple[float, float]:
        """The prior's level and growth, each with a factor of its own: least squares of relative errors.

        A weak wish that both factors are the same decides where the steps say nothing about growth.
        """
        aa = ab = bb = ay = by = 0.0
        for point in list(self._points.values()):
            plain = self._prior(1, point.context)
            a = plain / point.seconds
            b = (self._prior(point.nodes, point.context) - plain) / point.seconds
            weight = self._certainty(point)
            aa, ab, bb = aa + weight * a * a, ab + weight * a * b, bb + weight * b * b
            ay, by = ay + weight * a, by + weight * b
        wish = 1e-3 * aa
        determinant = (aa + wish) * (bb + wish) - (ab - wish) ** 2
        growth = ((aa + wish) * by - (ab - wish) * ay) / determinant
        if growth <= 0:
            return ay / aa, 0.0
        return max((ay * (bb + wish) - by * (ab - wish)) / determinant, 0.01 * ay / aa), growth

    def _certainty(self, point: _Point) -> float:
        """What was slow for a while is not tried again: it has to be forgotten to be found out."""
        return float(point.steps * 0.5 ** ((self._num_records - point.record) / _HALF_LIFE))


class _Table:
    """A curve over one context, worked out as far as it is asked for."""

    def __init__(
        self,
        fitted: Callable[[int, int], float],
        differences: Sequence[tuple[float, float, float]],
        context: int,
    ) -> None:
        self._fitted = fitted
        self._differences = differences
        self._context = context
        self._values = [self._estimate(1)] * 2

    def seconds(self, nodes: int) -> float:
        """Of a step of so many nodes; never less than of a narrower one."""
        values = self._values
        while len(values) <= nodes:
            # Every width up to 16, then fewer; those in between lie on a straight line.
            width = len(values) - 1
            more = max(1, width // 8)
            slope = (max(values[-1], self._estimate(width + more)) - values[-1]) / more
            values += [values[-1] + slope * i for i in range(1, more + 1)]
        return values[nodes]

    def halved(self, nodes: int) -> float:
        """The same, if further nodes cost half."""
        return (self._values[1] + self.seconds(nodes)) / 2

    def doubled(self, nodes: int) -> float:
        """The same, if further nodes cost double."""
        return 2 * self.seconds(nodes) - self._values[1]

    def _estimate(self, nodes: int) -> float:
        """The fitted time, moved by how much the steps nearby differed from theirs."""
        total, weights, place = 0.0, _DOUBT, math.log2(nodes)
        for its_place, weight, difference in self._differences:
            weight *= _nearness((its_place - place) / 0.12)
            total += weight * difference
            weights += weight
        return self._fitted(nodes, self._context) * math.exp(total / weights)


class _Point(NamedTuple):
    seconds: float
    nodes: int
    context: int
    steps: int  # it stands for
    record: int  # when it was made


_DOUBT = 9.0
_MEMORY = 15
_HALF_LIFE = 100
_TRY_EVERY = 16


def _nearness(distance: float) -> float:
    """How much a measurement says elsewhere: never nothing, so that the nearest there is counts."""
    return math.exp(-(distance**2)) + 0.003


def _class_of(number: int) -> int:
    return round(math.log2(number))


def _width_class(nodes: int) -> int:
    """Every width up to 16 is a class of its own, then eight per doubling."""
    return nodes if nodes <= 16 else round(8 * math.log2(nodes)) - 16


def usual_cost(device: str, dtype: str) -> Callable[[int, int], float]:
    """How step time grows where nothing was measured: with nodes, and with nodes times context.

    Args:
        device: ``cpu`` or ``cuda``.
        dtype: of the weights.

    Returns:
        Seconds, up to a factor, by number of nodes and of cached tokens.
    """
    per_node = 0.004 if device == "cuda" else 0.02 if dtype in ("bfloat16", "float16") else 0.047
    return lambda nodes, context: 1 + per_node * nodes * (1 + context / 2048)
