"""What one step will compute: the value that crosses from the integers to the tensors and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lookahead_decoding.config import WINDOW, LookaheadConfig
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
        reads: the nodes whose logits are read, ascending: the start, what can be accepted, the newest row.
        newest: the window's newest row, whose draws continue its columns; empty without a window.
        sources: the nodes the walk may step on, each with the names of the sources that proposed it, the one
            to be credited first.
    """

    tree: TokenTree
    start: int
    reads: tuple[int, ...]
    newest: tuple[int, ...] = ()
    sources: Mapping[int, Sequence[str]] = field(default_factory=dict)

    @property
    def decides(self) -> bool:
        """Whether this pass decides at least one token."""
        return self.start >= 0

    @property
    def num_nodes(self) -> int:
        """The step's width: the last accepted token and everything guessed behind it."""
        return len(self.tree) - self.start if self.decides else 0


def plan_prefill(tokens: Sequence[int]) -> StepPlan:
    """A pass that only fills the cache."""
    return StepPlan(TokenTree.chain(tokens), start=-1, reads=())


def plan_step(
    trunk: Sequence[int],
    sources: Mapping[str, DraftSource],
    window: JacobiWindow | None,
    config: LookaheadConfig,
    *,
    max_draft_tokens: int,
    max_depth: int,
) -> StepPlan:
    """Lay out a deciding step.

    Args:
        trunk: accepted tokens that are not cached yet, at least the last one.
        sources: draft sources by name, in the order in which they are credited.
        window: the lookahead branch, if any; taken whole or, where it reaches too deep, not at all.
        config: the session's.
        max_draft_tokens: a draft is cut to so many tokens: more could not be accepted.
        max_depth: no node lies deeper below the last accepted token: the model has no position for it.
    """
    tree = TokenTree.chain(trunk)
    start = len(tree) - 1
    proposed: dict[int, list[str]] = {}

    if window is None or window.is_warm or config.verify_during_warmup:
        longest = min(max_draft_tokens, max_depth, config.ngram - 1 if config.keep_bonus else config.ngram - 2)
        _add_drafts(tree, start, sources, config.guesses, longest, proposed)

    newest: list[int] = []
    if window is not None and window.depth <= max_depth:
        nodes, newest = window.add_to(tree, start)
        if config.verify_window:
            for node in nodes:
                _credit(proposed, node, WINDOW)
    order = [*sources, WINDOW]
    for names in proposed.values():
        names.sort(key=order.index)
    reads = sorted({start, *proposed, *newest})
    return StepPlan(tree, start, tuple(reads), tuple(newest), proposed)


def _add_drafts(
    tree: TokenTree,
    start: int,
    sources: Mapping[str, DraftSource],
    guesses: int,
    max_tokens: int,
    proposed: dict[int, list[str]],
) -> None:
    """Take the sources' drafts in turn, one each, until ``guesses`` of them added nodes."""
    if guesses == 0 or max_tokens <= 0:
        return
    drafts = {name: iter(source.propose(max_tokens)) for name, source in sources.items()}
    while drafts:
        for name in list(drafts):
            if (draft := next(drafts[name], None)) is None:
                del drafts[name]
                continue
            known = len(tree)
            node = start
            for token in draft[:max_tokens]:
                node = tree.add(node, token)
                _credit(proposed, node, name)
            guesses -= len(tree) > known
            if guesses == 0:
                return


def _credit(proposed: dict[int, list[str]], node: int, name: str) -> None:
    """Note that a source proposed a node, too."""
    names = proposed.setdefault(node, [])
    if name not in names:
        names.append(name)
