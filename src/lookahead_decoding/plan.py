"""What one step will compute: the value that crosses from the integers to the tensors and back."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lookahead_decoding.acceptance import AcceptanceModel, Candidates
from lookahead_decoding.config import WINDOW
from lookahead_decoding.draft import DraftSource
from lookahead_decoding.tree import TokenTree
from lookahead_decoding.window import JacobiWindow


@dataclass(frozen=True)
class StepPlan:
    """One session's share of a forward pass.

    Attributes:
        tree: every token the pass computes.
        start: the last accepted token's node, where the walk begins; -1 for a prefill chunk that ends before
            the prompt does and so decides nothing.
        reads: the nodes whose logits are read, ascending.
        newest: the window's newest row, whose draws continue its columns; empty without a window.
        sources: the nodes the walk may step on, each with the names of the sources that named it, the one
            to be credited first.
        candidates: what was guessed at a node, computed or not, to be judged when the walk comes by.
        expected_tokens: how many tokens the step is expected to decide.
    """

    tree: TokenTree
    start: int
    reads: tuple[int, ...]
    newest: tuple[int, ...] = ()
    sources: Mapping[int, Sequence[str]] = field(default_factory=dict)
    candidates: Mapping[int, Candidates] = field(default_factory=dict)
    expected_tokens: float = 1.0

    @property
    def decides(self) -> bool:
        """Whether this pass decides at least one token."""
        return self.start >= 0

    @property
    def num_nodes(self) -> int:
        """The step's width: the last accepted token and everything guessed behind it."""
        return len(self.tree) - self.start if self.decides else 0

    def guess(self, node: int, token: int) -> int | None:
        """The child of ``node`` that guesses ``token`` and that the walk may step on."""
        child = self.tree.child(node, token)
        return child if child in self.sources else None


PROMPT_ROWS = 256
"""The end of a prompt whose logits are read, too, where sources want to see what follows each token."""


def plan_prefill(tokens: Sequence[int]) -> StepPlan:
    """A pass that decides nothing and fills the cache."""
    return StepPlan(TokenTree.chain(tokens), start=-1, reads=())


class TreeGrower:
    """A deciding step's tree, grown guess by guess, the likeliest first.

    The chance that a guess is accepted is its own, given its parent, times its parent's: best-first growth makes
    the tree that decides the most tokens among all of its size.

    Args:
        trunk: accepted tokens that are not cached yet, at least the last one.
        sources: draft sources by name, in the order in which they are credited.
        acceptance: judges their guesses.
        max_depth: no guess lies deeper below the last accepted token.
        gumbel: when sampling, the noise at a depth for some tokens, if it is known.
        window: the lookahead branch to take along, whole.
        verify_window: whether the walk may step on its tokens.
        read_all: read every node's logits, for sources that want to see what follows each.
        decides: False for a prefill chunk that ends before the prompt does.
        vocab_size: V; a source that names another token fails.
    """

    def __init__(
        self,
        trunk: Sequence[int],
        sources: Mapping[str, DraftSource],
        acceptance: AcceptanceModel,
        *,
        max_depth: int,
        gumbel: Callable[[int, Sequence[int]], Sequence[float]] | None = None,
        window: JacobiWindow | None = None,
        verify_window: bool = True,
        read_all: bool = False,
        decides: bool = True,
        vocab_size: int = 2**31,
    ) -> None:
        self.tree = TokenTree.chain(trunk)
        self.start = len(self.tree) - 1 if decides else -1
        self.expected_tokens = 1.0
        self._sources = sources
        self._acceptance = acceptance
        self._max_depth = max_depth
        self._gumbel = gumbel
        self._newest: Sequence[int] = ()
        self._window_nodes: Sequence[int] = ()
        self._verifies_window = verify_window
        self._reads_all = read_all
        self._vocab_size = vocab_size
        if window is not None:
            self._window_nodes, self._newest = window.add_to(self.tree, self.start)
        self._candidates: dict[int, Candidates] = {}
        self._places: dict[int, list[Any]] = {}
        self._grown: list[float] = []
        # (-chance, order of arrival, parent, its chance, its guesses, index of this one)
        self._heap: list[tuple[float, int, int, float, list[tuple[int, float]], int]] = []
        self._arrivals = 0
        self._failure: Exception | None = None
        if decides and sources and max_depth > 0:
            self._expand(self.start, 1.0, [source.start() for source in sources.values()])
            self._take_known()

    @property
    def num_nodes(self) -> int:
        """The step's width so far."""
        return len(self.tree) - self.start

    @property
    def chance(self) -> float:
        """Of the likeliest guess that is not in the tree; 0 when there is none."""
        return -self._heap[0][0] if self._heap else 0.0

    def grow(self) -> None:
        """Add the likeliest guess. Where a source fails, the tree has no more guesses and :meth:`finish` raises."""
        self._grown.append(self.expected_tokens)
        try:
            self._add()
            self._take_known()
        except Exception as error:
            self._failure = error
            self._heap.clear()

    def undo(self) -> None:
        """Take the last guess back, for good."""
        self.tree.pop()
        self.expected_tokens = self._grown.pop()

    def finish(self) -> StepPlan:
        """The plan; raises what a source raised meanwhile."""
        if self._failure is not None:
            raise self._failure
        tree = self.tree
        if self.start < 0:
            return plan_prefill(tree.tokens)
        proposed: dict[int, Sequence[str]] = {}
        for node in range(self.start + 1, len(tree)):
            candidates = self._candidates.get(tree.parents[node])
            if candidates is not None and (names := candidates.sources(tree.tokens[node])):
                proposed[node] = names
        if self._verifies_window:
            for node in dict.fromkeys(self._window_nodes):  # two rows may guess one node
                proposed[node] = [*proposed.get(node, ()), WINDOW]
        known = range(max(0, self.start + 1 - PROMPT_ROWS), len(tree))
        reads = known if self._reads_all else sorted({self.start, *proposed, *self._newest})
        return StepPlan(
            tree, self.start, tuple(reads), tuple(self._newest), proposed, self._candidates, self.expected_tokens
        )

    def _take_known(self) -> None:
        """Guesses that are in the tree already, for the window's sake, cost nothing."""
        while self._heap:
            _, _, parent, _, guesses, index = self._heap[0]
            if self.tree.child(parent, guesses[index][0]) is None:
                return
            self._add()

    def _add(self) -> None:
        negative, _, parent, parents_chance, guesses, index = heapq.heappop(self._heap)
        self._push(parent, parents_chance, guesses, index + 1)
        token = guesses[index][0]
        if not 0 <= token < self._vocab_size:
            names = " and ".join(self._candidates[parent].sources(token))
            raise ValueError(f"{names} named the token {token}, and the model's are 0 to {self._vocab_size - 1}")
        node = self.tree.add(parent, token)
        self.expected_tokens -= negative
        if self.tree.depths[node] - self.tree.depths[self.start] < self._max_depth:
            places = [
                source.follow(place, token)
                for source, place in zip(self._sources.values(), self._places[parent], strict=True)
            ]
            self._expand(node, -negative, places)

    def _expand(self, node: int, chance: float, places: list[Any]) -> None:
        self._places[node] = places
        evidence = []
        for (name, source), place in zip(self._sources.items(), places, strict=True):
            if guesses := source.guesses(place):
                evidence.append((name, guesses))
        if not evidence:
            return
        depth = self.tree.depths[node] - self.tree.depths[self.start] + 1
        candidates = self._candidates[node] = self._acceptance.judge(evidence, depth, self._gumbel)
        ranked = sorted(candidates.chances.items(), key=lambda item: -item[1])
        self._push(node, chance, ranked, 0)

    def _push(self, node: int, chance: float, guesses: list[tuple[int, float]], index: int) -> None:
        if index < len(guesses):
            self._arrivals += 1
            heapq.heappush(self._heap, (-chance * guesses[index][1], self._arrivals, node, chance, guesses, index))
