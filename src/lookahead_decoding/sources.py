"""The built-in draft sources."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from lookahead_decoding.config import LookaheadConfig
from lookahead_decoding.draft import ChainSource, DraftSource, Observation
from lookahead_decoding.memory import DraftMemory
from lookahead_decoding.pool import NgramPool
from lookahead_decoding.recycle import NUM_BUCKETS, ORDERS, Successors, SuccessorTable
from lookahead_decoding.suffix import Place, SuffixAutomaton


class _PooledSource(ChainSource):
    """Proposes what a pool holds behind the last token."""

    def __init__(self, config: LookaheadConfig) -> None:
        super().__init__(config)
        self.pool = NgramPool(config.ngram, config.guesses, config.pool_bytes)
        self._last_token: int | None = None

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes

    def extend(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._last_token = tokens[-1]

    def propose(self) -> Iterable[Sequence[int]]:
        if self._last_token is None:
            return ()
        kept = None if self.config.keep_bonus else -1
        return (ngram[:kept] for ngram in self.pool.get(self._last_token))


class WindowNgrams(_PooledSource):
    """The paper's pool: n-grams the window produced."""

    needs_window = True

    def recall(self, memory: DraftMemory) -> None:
        if memory.ngrams is not None and memory.ngrams.ngram == self.pool.ngram:
            self.pool.base = memory.ngrams

    def teach(self, memory: DraftMemory) -> None:
        if memory.ngrams is None:
            memory.ngrams = NgramPool(self.pool.ngram, self.pool.guesses, memory.successors.max_bytes)
        if memory.ngrams.ngram == self.pool.ngram:  # what it holds of another length is not given up
            memory.ngrams.merge(self.pool)

    def learn(self, ngrams: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        for first, rest in ngrams:
            self.pool.put(first, rest)


class PromptNgrams(_PooledSource):
    """N-grams of the prompt and of the output so far, those that the text's end cuts short included."""

    def __init__(self, config: LookaheadConfig) -> None:
        super().__init__(config)
        self._tail: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        super().extend(tokens)
        N = self.config.ngram
        text = [*self._tail, *tokens]
        for i in range(len(text) - N + 1):
            self.pool.put(text[i], text[i + 1 : i + N])
        self._tail = text[-(N - 1) :]

    def propose(self) -> Iterable[Sequence[int]]:
        # The text's end has no whole n-gram yet; a short loop is seen here first.
        for i in range(len(self._tail) - 2, -1, -1):
            if self._tail[i] == self._last_token:
                yield self._tail[i + 1 :]
        yield from super().propose()


_BREAK = -1
"""Between texts that do not follow each other: no token."""


class Suffix(DraftSource):
    """What followed the longest earlier occurrence of the text's end, in the references, the prompt and the output."""

    _CONTINUATIONS = 4
    _LONGEST = (1, 2, 3, 5, 8, 15)  # match lengths up to which a class of kinds goes; one more for longer ones
    _RANKS = 3
    weights = (
        *(0.8, 0.8, 0.9),  # one token matched; the most recent continuation, the second, others
        *(1.4, 0.7, 0.5),
        *(1.8, 0.7, 0.7),
        *(3.0, 1.2, 0.5),  # 4 or 5
        *(3.7, 1.6, 0.5),  # 6 to 8
        *(4.4, 1.6, 1.0),  # 9 to 15
        *(5.9, 1.8, 1.0),
    )

    def __init__(self, config: LookaheadConfig) -> None:
        super().__init__(config)
        self._automaton = SuffixAutomaton()
        lengths = range(self._LONGEST[-1] + 2)
        self._class = [self._RANKS * sum(length > most for most in self._LONGEST) for length in lengths]

    @property
    def nbytes(self) -> int:
        return self._automaton.nbytes

    def refer(self, tokens: Sequence[int]) -> None:
        self.extend([*tokens, _BREAK])

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._automaton.append(token)

    def start(self) -> Place:
        return self._automaton.end()

    def follow(self, place: Place, token: int) -> Place:
        return self._automaton.follow(place, token)

    def guesses(self, place: Place) -> Sequence[tuple[int, int]]:
        classes, longest, last_rank = self._class, len(self._class) - 1, self._RANKS - 1
        return [
            (token, classes[min(length, longest)] + min(rank, last_rank))
            for rank, (token, length) in enumerate(self._automaton.continuations(place, self._CONTINUATIONS))
            if token != _BREAK
        ]


class Recycled(DraftSource):
    """What the model itself thought would follow, wherever it computed the last tokens before.

    Every row of every step is remembered: guesses that were wrong, too, are contexts that may come. A token that no
    row has seen yet, the commonest reason for a short step, is covered by its neighbours: by what was to follow the
    tokens guessed in its place, by what else was expected in its place, and by what is common.
    """

    successors = 8
    _INSTEAD, _LATE, _COMMON = 8, 4, 16
    weights = (
        *(3.0, 2.9, 2.7, 2.0, 1.7, 1.3, 1.0, 0.9, 0.7, 0.7, 0.7, 0.7, 0.7),  # behind one token, by log-probability
        *(3.5, 3.2, 2.8, 2.3, 1.8, 1.5, 1.3, 1.3, 0.9, 0.9, 0.9, 0.8, 0.5),  # behind two
        *(3.8, 3.3, 3.0, 2.6, 2.2, 1.9, 1.5, 1.2, 1.2, 1.1, 1.0, 0.9, 0.7),  # behind three
        *(1.8, 1.3, 1.1, 0.7, 0.5, 0.4, 0.3, 0.3),  # behind the tokens guessed in the last one's place
        *(1.0, 0.6, 0.3, 0.2),  # expected in the last one's place
        *(0.5, 0.2, 0.1, 0.0, -0.2, -0.3, -0.3, -0.4),  # common tokens, two of each kind
    )
    _INSTEAD_KIND = NUM_BUCKETS * len(ORDERS)
    _LATE_KIND = _INSTEAD_KIND + _INSTEAD
    _COMMON_KIND = _LATE_KIND + _LATE

    def __init__(self, config: LookaheadConfig) -> None:
        super().__init__(config)
        self.table = SuccessorTable(config.pool_bytes)
        self._tail: tuple[int, ...] = ()
        self._frequency: dict[int, float] = {}
        self._instead: list[int] = []
        self._late: list[int] = []

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    def recall(self, memory: DraftMemory) -> None:
        self.table.base = memory.successors

    def teach(self, memory: DraftMemory) -> None:
        memory.successors.merge(self.table)

    def extend(self, tokens: Sequence[int]) -> None:
        self._tail = (*self._tail, *tokens)[-ORDERS[0] :]

    def observe(self, seen: Observation) -> None:
        tree, rows = seen.tree, seen.rows
        contexts: list[tuple[int, ...]] = []
        root = tuple(seen.text[-(ORDERS[0] - 1) :])
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            before = root if parent < 0 else contexts[parent]
            contexts.append((*before, token)[-ORDERS[0] :])
        # Where a context occurs twice, the node nearer to the text knows better, so it is told last.
        for node in sorted(rows, reverse=True):
            self.table.put(contexts[node], rows[node])
        for node in seen.path:
            if node in rows:
                for token, bucket in zip(rows[node].tokens, rows[node].buckets, strict=True):
                    self._frequency[token] = self._frequency.get(token, 0.0) + _PROBABILITIES[bucket]
        last = seen.path[-1]
        expected = rows.get(last)
        if expected is not None:
            self._late = list(expected.tokens)
            self._instead = self._behind_children(seen, last, expected)

    def _behind_children(self, seen: Observation, node: int, expected: Successors) -> list[int]:
        """What was to follow the children of a node, the likeliest first."""
        bucket_of = dict(zip(expected.tokens, expected.buckets, strict=True))
        best: dict[int, int] = {}
        for token, child in seen.tree.children(node):
            if child in seen.rows:
                bucket = bucket_of.get(token, NUM_BUCKETS)
                row = seen.rows[child]
                for successor, its_bucket in zip(row.tokens, row.buckets, strict=True):
                    best[successor] = min(best.get(successor, 99), bucket + its_bucket)
        return heapq.nsmallest(self._INSTEAD, best, key=best.__getitem__)

    def start(self) -> tuple[tuple[int, ...], bool]:
        return self._tail, True

    def follow(self, place: tuple[tuple[int, ...], bool], token: int) -> tuple[tuple[int, ...], bool]:
        return (*place[0], token)[-ORDERS[0] :], False

    def guesses(self, place: tuple[tuple[int, ...], bool]) -> Sequence[tuple[int, int]]:
        context, is_start = place
        guesses: list[tuple[int, int]] = []
        for order, row in self.table.get(context):
            first = (order - 1) * NUM_BUCKETS
            guesses += [(token, first + bucket) for token, bucket in zip(row.tokens, row.buckets, strict=True)]
        if is_start:
            drawn = context[-1] if context else None
            guesses += [(token, self._INSTEAD_KIND + rank) for rank, token in enumerate(self._instead)]
            late = [token for token in self._late if token != drawn][: self._LATE]
            guesses += [(token, self._LATE_KIND + rank) for rank, token in enumerate(late)]
            if len(guesses) < self._COMMON:
                common = heapq.nlargest(self._COMMON, self._frequency, key=self._frequency.__getitem__)
                guesses += [(token, self._COMMON_KIND + rank // 2) for rank, token in enumerate(common)]
        return guesses


_PROBABILITIES = [math.exp(-bucket / 2) for bucket in range(NUM_BUCKETS)]
