"""Everything that belongs to one request: its text, its guesses, its cache, its way to choose and to stop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lookahead_decoding.acceptance import AcceptanceModel
from lookahead_decoding.cache import KVStore
from lookahead_decoding.config import WINDOW, LookaheadConfig
from lookahead_decoding.draft import Observation, load_source
from lookahead_decoding.memory import DraftMemory
from lookahead_decoding.model import ModelRunner
from lookahead_decoding.plan import StepPlan, TreeGrower
from lookahead_decoding.recycle import ORDERS
from lookahead_decoding.sampling import TokenDrawer, likeliest
from lookahead_decoding.statistics import DecodingStatistics
from lookahead_decoding.stopping import StopRules
from lookahead_decoding.text import TextStream
from lookahead_decoding.verify import Walk, walk
from lookahead_decoding.window import JacobiWindow

UNBOUNDED = 1 << 30
MODEL = ""
"""The source of a token that nobody had guessed: the model's own draw at the end of a step."""

_WINDOW_GAIN = 0.3
"""Tokens per step that only the window is thought to guess, before it was tried and some time after it was not."""

_SAMPLED_SUCCESSORS = 3
"""Sampling takes less likely tokens, and its noise tells which: so many times the successors are remembered."""


@dataclass(frozen=True)
class Advance:
    """What a step added to one session.

    Attributes:
        tokens: token ids; none when the step was a prefill chunk before the last.
        sources: who guessed each of them; :data:`MODEL` for those nobody did.
        pieces: the text that became certain, one piece per token; empty without a tokenizer.
        end: why generation ended with the last token, or None.
    """

    tokens: Sequence[int] = ()
    sources: Sequence[str] = ()
    pieces: Sequence[str] = ()
    end: str | None = None


class Session:
    """One request being decoded. The engine makes it, steps it, and takes its cache back.

    Args:
        prompt: token ids, at least one.
        config: how it guesses.
        runner: the model.
        store: its KV cache; what it holds already is the prompt's beginning.
        drawer: chooses tokens.
        stop: ends it.
        text: its text, if it has a tokenizer.
        references: token ids that are expected to be seen again.
        memory: what earlier requests learned; what this one learns is added at its end.
        sampling: the options the drawer was made with, for the record.
        row: which of the drawer's rows this is.
        seen: ids ``[1, n]`` that processors and criteria see in place of the prompt, padding included.
        embeddings: ``[len(prompt), hidden]``, computed in place of the prompt's tokens.
        known: the prompt's tokens, for drafting, where ``prompt`` only stands in for them.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        config: LookaheadConfig,
        runner: ModelRunner,
        store: KVStore,
        drawer: TokenDrawer,
        stop: StopRules,
        text: TextStream | None = None,
        references: Sequence[Sequence[int]] = (),
        memory: DraftMemory | None = None,
        sampling: Mapping[str, Any] | None = None,
        row: int = 0,
        seen: Tensor | None = None,
        embeddings: Tensor | None = None,
        known: Sequence[int] | None = None,
    ) -> None:
        self.prompt = list(prompt)
        self.row = row
        self.config = config
        self.store = store
        self.drawer = drawer
        self.stop = stop
        self.end: str | None = None
        self.cached_tokens = store.length
        self.sampling = dict(sampling or {})
        self.statistics = DecodingStatistics()
        self._runner = runner
        self._text = text
        self._pieces: list[str] = []
        self._ids = list(self.prompt)
        self.seen = torch.tensor([self.prompt], device=runner.device) if seen is None else seen
        self._embeddings = embeddings
        known = self.prompt if known is None else known
        self._window = (
            JacobiWindow(config.window, config.ngram, known or [0], config.window_seed) if config.window else None
        )
        sources = {name: load_source(name, config) for name in config.sources if config.guesses}
        self._sources = {name: source for name, source in sources.items() if config.window or not source.needs_window}
        self._window_gain = _WINDOW_GAIN
        self._acceptance = AcceptanceModel(
            {name: source.weights for name, source in self._sources.items()}, drawer.temperature
        )
        successors = max((source.successors for source in self._sources.values()), default=0)
        self._successors = successors * _SAMPLED_SUCCESSORS if drawer.temperature else successors
        self._memory = memory
        for source in self._sources.values():
            if memory is not None:
                source.recall(memory)
            for reference in references:
                source.refer(reference)
            source.extend(known)

    @property
    def tokens(self) -> list[int]:
        """The generated tokens so far."""
        return self._ids[len(self.prompt) :]

    @property
    def text(self) -> str:
        """The generated text so far; "" without a tokenizer."""
        return "".join(self._pieces)

    @property
    def pool_bytes(self) -> int:
        """Memory of what its draft sources remember."""
        return sum(source.nbytes for source in self._sources.values())

    @property
    def cached_ids(self) -> list[int]:
        """The token ids that the store holds keys and values of."""
        return self._ids[: self.store.length]

    @property
    def next_embeddings(self) -> Tensor | None:
        """What stands in for the tokens that the next pass computes first, ``[k, hidden]``; None past the prompt."""
        if self._embeddings is None or self.store.length >= len(self._embeddings):
            return None
        return self._embeddings[self.store.length :]

    def plan(self, cost: Callable[[int], float]) -> TreeGrower:
        """This session's share of the next step, to be grown as wide as pays.

        Args:
            cost: time of a step by its number of nodes.
        """
        if self._runner.must_recompute(len(self._ids), self.store.length):
            self.store.truncate(0)
        config, window, sources = self.config, self._window, self._sources
        pending = self._ids[self.store.length :]
        # Rotary frequencies that depend on the pass's last position want the whole prompt in one pass, and rows
        # that decide together have to begin together.
        at_once = self._runner.rope_switch is not None or self.drawer.rows > 1
        decides = len(pending) <= config.prefill_chunk or at_once
        max_depth = self._runner.max_depth(len(self._ids) - 1)
        deepest = UNBOUNDED if max_depth is None else max_depth
        max_length = self.stop.max_length
        left = UNBOUNDED if max_length is None else max_length - self.seen.shape[1]
        if (room := self.drawer.room) is not None:
            left = min(left, room)
        if window is not None:
            if not decides or window.depth > deepest or not self._window_pays(window.num_guesses, cost):
                window = None
            elif not (window.is_warm or config.verify_during_warmup):
                sources = {}
        return TreeGrower(
            pending if decides else pending[: config.prefill_chunk],
            sources,
            self._acceptance,
            max_depth=min(deepest, left - 1),
            gumbel=functools.partial(self.drawer.gumbel, row=self.row) if self.drawer.knows_noise else None,
            window=window,
            verify_window=config.verify_window,
            read_all=self._successors > 0,
            decides=decides,
            vocab_size=self._runner.vocab_size,
        )

    def advance(self, plan: StepPlan, logits: Tensor, decided: Walk) -> Advance:
        """Move everything on by the tokens that a step decided.

        Args:
            plan: what :meth:`plan` grew into.
            logits: ``[len(plan.reads), V]``, the forward pass's.
            decided: the walk's outcome.
        """
        path = [*range(plan.start + 1), *decided.path]
        self._learn(plan, logits, decided, path)
        self.store.keep(path)
        self.statistics.record(plan, decided)
        self.end = decided.end
        if self.end is not None:
            self.close()
        pieces = self._text.take(last=decided.end is not None) if self._text is not None else []
        self._pieces += pieces
        credited = [plan.sources[node][0] for node in decided.path]
        return Advance(
            tokens=decided.tokens,
            sources=credited + [MODEL] * (len(decided.tokens) - len(credited)),
            pieces=pieces,
            end=decided.end,
        )

    def close(self) -> None:
        """Leave the generator as plain decoding would, and to the memory what was learned."""
        self.drawer.close()
        if self._memory is not None:
            for source in self._sources.values():
                source.teach(self._memory)
            self._memory = None

    def _window_pays(self, nodes: int, cost: Callable[[int], float]) -> bool:
        """Whether the window's nodes fit the budget and, where that adapts, have been worth their time."""
        if self.config.budget is not None and nodes >= self.config.budget:
            return False
        if not self.config.adaptive:
            return True
        width = round(self.statistics.nodes_per_step) or 1
        gain = self._window_gain / (self.statistics.tokens_per_step or 1.0)
        return cost(width + nodes) <= (1 + gain) * cost(width)

    def _learn(self, plan: StepPlan, logits: Tensor, decided: Walk, path: Sequence[int]) -> None:
        """Tell everyone who guesses what came of it, while the cache still ends where the plan begins."""
        for node, token in zip(path[plan.start :], decided.tokens, strict=False):
            if node in plan.candidates:
                self._acceptance.learn(plan.candidates[node], token)
        sources = self._sources.values()
        if self._successors:
            rows = dict(zip(plan.reads, likeliest(logits, self._successors), strict=True))
            cached = self.store.length
            seen = Observation(plan.tree, self._ids[max(0, cached - ORDERS[0]) : cached], rows, path)
            for source in sources:
                source.observe(seen)
        if self._window is not None:
            ngrams = self._advance_window(self._window, plan, logits, decided)
            for source in sources:
                source.learn(ngrams)
        for source in sources:
            source.extend(decided.tokens)

    def _advance_window(
        self, window: JacobiWindow, plan: StepPlan, logits: Tensor, decided: Walk
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Move the window on by its draws, and keep account of what it is worth: the n-grams it completed."""
        if not plan.newest:
            self._window_gain += 0.01 * (_WINDOW_GAIN - self._window_gain)
            return []
        own = {WINDOW, *(name for name, source in self._sources.items() if source.needs_window)}
        gained = sum(own.issuperset(plan.sources[node]) for node in decided.path)
        self._window_gain += 0.05 * (gained - self._window_gain)
        row = {node: i for i, node in enumerate(plan.reads)}
        draws = logits[[row[node] for node in plan.newest]].float().argmax(dim=-1).tolist()
        return list(window.advance(plan.tree.tokens[plan.start], draws, len(decided.tokens)))

    def append(self, token: int) -> None:
        """Let processors and criteria see a token from now on."""
        self._ids.append(token)
        self.seen = torch.cat([self.seen, self.seen.new_tensor([[token]])], dim=1)


def commit(steps: Sequence[tuple[Session, StepPlan, Tensor]]) -> list[Advance]:
    """Decide the tokens of a step, and move on by them.

    Args:
        steps: a session, what it planned, and the forward pass's logits ``[len(plan.reads), V]``; every session of
            the drawer, in the order of its rows, where several decide together.
    """
    sessions: list[Session] = [session for session, _, _ in steps]
    plans = [plan for _, plan, _ in steps]
    logits = [rows for _, _, rows in steps]
    drawer, stop = sessions[0].drawer, sessions[0].stop
    if not plans[0].decides:
        sessions[0].store.keep(range(len(plans[0].tree)))
        return [Advance()]
    row_of = [{node: row for row, node in enumerate(plan.reads)} for plan in plans]

    def draw(nodes: Sequence[int]) -> Sequence[int]:
        rows = [row[node] for row, node in zip(row_of, nodes, strict=True)]
        given = _joined([each[row : row + 1] for each, row in zip(logits, rows, strict=True)])
        return stop.pad(drawer.draw(_joined([session.seen for session in sessions]), given))

    def ends(tokens: Sequence[int]) -> Sequence[str | None] | None:
        for session, token in zip(sessions, tokens, strict=True):
            session.append(token)
        return stop.check(_joined([session.seen for session in sessions]), tokens, drawer.scores)

    decided = walk(plans, draw, ends)
    return [session.advance(plan, rows, each) for (session, plan, rows), each in zip(steps, decided, strict=True)]


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """``[1, ...]`` each to ``[R, ...]``."""
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))
