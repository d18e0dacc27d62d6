"""Everything that belongs to one request: its text, its guesses, its cache, its way to choose and to stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lookahead_decoding.cache import KVStore
from lookahead_decoding.config import LookaheadConfig
from lookahead_decoding.draft import load_source
from lookahead_decoding.model import ModelRunner
from lookahead_decoding.plan import StepPlan, plan_prefill, plan_step
from lookahead_decoding.sampling import TokenDrawer
from lookahead_decoding.statistics import DecodingStatistics
from lookahead_decoding.stopping import StopRules
from lookahead_decoding.text import TextStream
from lookahead_decoding.verify import walk
from lookahead_decoding.window import JacobiWindow

UNBOUNDED = 1 << 30
MODEL = ""
"""The source of a token that nobody had guessed: the model's own draw at the end of a step."""


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
        sampling: the options the drawer was made with, for the record.
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
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.prompt = list(prompt)
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
        self._ids_tensor = torch.tensor([self.prompt], device=runner.device)
        self._window = (
            JacobiWindow(config.window, config.ngram, self.prompt, config.window_seed) if config.window else None
        )
        self._sources = {name: load_source(name, config) for name in config.sources if config.guesses}
        for source in self._sources.values():
            source.extend(self.prompt)

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

    def plan(self) -> StepPlan:
        """This session's share of the next step."""
        if self._runner.must_recompute(len(self._ids), self.store.length):
            self.store.truncate(0)
        pending = self._ids[self.store.length :]
        # Rotary frequencies that depend on the pass's last position want the whole prompt in one pass.
        if len(pending) > self.config.prefill_chunk and self._runner.rope_switch is None:
            return plan_prefill(pending[: self.config.prefill_chunk])
        max_depth = self._runner.max_depth(len(self._ids) - 1)
        max_length = self.stop.max_length
        return plan_step(
            pending,
            self._sources,
            self._window,
            self.config,
            max_draft_tokens=UNBOUNDED if max_length is None else max_length - len(self._ids) - 1,
            max_depth=UNBOUNDED if max_depth is None else max_depth,
        )

    def commit(self, plan: StepPlan, logits: Tensor) -> Advance:
        """Decide the step's tokens and move everything on by them.

        Args:
            plan: what :meth:`plan` returned.
            logits: ``[len(plan.reads), V]``, the forward pass's.
        """
        if not plan.decides:
            self.store.keep(range(len(plan.tree)))
            return Advance()
        row = {node: i for i, node in enumerate(plan.reads)}
        last_token = self._ids[-1]

        def draw(node: int) -> int:
            return self.drawer.draw(self._ids_tensor, logits[row[node]])

        def stop(token: int) -> str | None:
            self._append(token)
            return self.stop.check(self._ids_tensor, token)

        decided = walk(plan, draw, stop)
        self.store.keep([*range(plan.start + 1), *decided.path])
        self.statistics.record(plan, decided)
        self.end = decided.end
        if self._window is not None and plan.newest:
            draws = logits[[row[node] for node in plan.newest]].float().argmax(dim=-1).tolist()
            ngrams = list(self._window.advance(last_token, draws, len(decided.tokens)))
            for source in self._sources.values():
                source.learn(ngrams)
        for source in self._sources.values():
            source.extend(decided.tokens)
        pieces = self._text.take(last=decided.end is not None) if self._text is not None else []
        self._pieces += pieces
        credited = [plan.sources[node][0] for node in decided.path]
        return Advance(
            tokens=decided.tokens,
            sources=credited + [MODEL] * (len(decided.tokens) - len(credited)),
            pieces=pieces,
            end=decided.end,
        )

    def _append(self, token: int) -> None:
        self._ids.append(token)
        self._ids_tensor = torch.cat([self._ids_tensor, self._ids_tensor.new_tensor([[token]])], dim=1)
