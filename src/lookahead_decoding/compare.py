"""Where two decodings of one prompt part, and whether rounding explains it.

In bfloat16 and float16 a pass's width changes how its sums are rounded, as batch size does in every engine,
so two tokens whose logits almost agree may swap. The same weights in float32 tell such a *tie* from a *bug*.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead_decoding.cache import KVStore, free_memory
from lookahead_decoding.completion import Completion
from lookahead_decoding.config import preset
from lookahead_decoding.engine import Engine
from lookahead_decoding.errors import CapacityError
from lookahead_decoding.model import ModelRunner
from lookahead_decoding.plan import StepPlan, plan_prefill
from lookahead_decoding.request import resolve
from lookahead_decoding.tree import TokenTree

TIE, BUG = "tie", "bug"

_WARM_UP_PROMPT, _WARM_UP_TOKENS = 32, 8
_CHUNK = preset("plain").prefill_chunk
"""Prompt tokens per pass of plain decoding."""
_EXACT = (torch.float32, torch.float64)
"""In these any difference is a bug: what rounding leaves open is far below any gap that is met."""


@dataclass(frozen=True)
class Difference:
    """The first token that differs.

    Attributes:
        index: its place, counted from the first new token.
        plain_token, lookahead_token: what either decoding has there; None where it had ended.
        label: ``tie`` or ``bug``.
        gap: how far apart the two tokens are in float32; None where that was not computed or is infinite.
        bound: the gap that rounding explains; None where that was not computed.
    """

    index: int
    plain_token: int | None
    lookahead_token: int | None
    label: str
    gap: float | None = None
    bound: float | None = None

    @property
    def is_bug(self) -> bool:
        return self.label == BUG

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "index": self.index,
            "plain_token": self.plain_token,
            "lookahead_token": self.lookahead_token,
            "label": self.label,
            "gap": self.gap,
            "bound": self.bound,
        }


@dataclass(frozen=True)
class Comparison:
    """One prompt decoded both ways by one engine."""

    plain: Completion
    lookahead: Completion
    difference: Difference | None

    @property
    def identical(self) -> bool:
        """Whether both have the same tokens."""
        return self.difference is None

    @property
    def is_bug(self) -> bool:
        return self.difference is not None and self.difference.is_bug

    @property
    def speedup(self) -> float:
        """Ratio of tokens per second, of this one run each."""
        plain = self.plain.statistics.tokens_per_second
        return self.lookahead.statistics.tokens_per_second / plain if plain else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The lookahead completion's object, with four keys more."""
        return {
            **self.lookahead.to_dict(),
            "plain": self.plain.to_dict(),
            "speedup": round(self.speedup, 4),
            "identical": self.identical,
            "first_difference": None if self.difference is None else self.difference.to_dict(),
        }


def decode_afresh(engine: Engine, prompt_ids: Sequence[int], **options: Any) -> Completion:
    """A completion that takes nothing over from an earlier one's cache, so that its time can be compared.

    Args:
        engine: the engine.
        prompt_ids: the prompt.
        options: those of ``Engine.generate``.
    """
    engine.forget()
    completion = engine.generate(prompt_ids, **options)
    assert isinstance(completion, Completion)
    return completion


def warm_up(engine: Engine, prompt_ids: Sequence[int]) -> None:
    """Decode a little of the prompt's beginning both ways, as the first passes of a process are slow."""
    for lookahead in (engine.config, "plain"):
        decode_afresh(
            engine,
            prompt_ids[:_WARM_UP_PROMPT],
            lookahead=lookahead,
            temperature=0,
            max_new_tokens=_WARM_UP_TOKENS,
        )


def compare_with_plain(engine: Engine, prompt_ids: Sequence[int], lookahead: Completion, **options: Any) -> Comparison:
    """Decode a prompt plainly as well, and compare.

    Args:
        engine: the one that made the other completion.
        prompt_ids: the prompt.
        lookahead: the other completion.
        options: those it was made with; its seed is used if they name none.
    """
    if lookahead.sampling["do_sample"]:
        options["seed"] = lookahead.sampling["seed"]
    plain = decode_afresh(engine, prompt_ids, **options, lookahead="plain")
    return Comparison(plain, lookahead, first_difference(engine, prompt_ids, plain, lookahead))


def first_difference(
    engine: Engine, prompt_ids: Sequence[int], plain: Completion, other: Completion
) -> Difference | None:
    """The first token in which two completions of one prompt differ, judged by a :class:`Judge` of its own.

    Args:
        engine: the one that made both.
        prompt_ids: the prompt.
        plain: made with the preset ``plain``.
        other: made with the same options and, when sampling, the same seed.
    """
    with Judge(engine) as judge:
        return judge.first_difference(prompt_ids, plain.token_ids, other.token_ids, plain.sampling)


class Judge:
    """Tells ties from bugs, in a ``with`` block.

    In bfloat16 and float16 a difference is a tie only if, behind the tokens that both share, the two are float32's
    first two and no further apart than twice the largest rounding error of a logit in plain decoding's pass. They are
    ranked by their processed scores; when sampling, by score - log q with the position's noise q. In float32 and
    float64, and where one text merely ended earlier, it is a bug.

    What it goes by is computed without trees, guesses and kept noise: a fault in those cannot excuse itself.

    The first difference in bfloat16 or float16 copies the weights to float32, four bytes per parameter; the end of the
    block releases them.

    Args:
        engine: the one that made the texts.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._exact: ModelRunner | None = None

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._exact = None

    def first_difference(
        self, prompt_ids: Sequence[int], plain: Sequence[int], other: Sequence[int], sampling: Mapping[str, Any]
    ) -> Difference | None:
        """The first token that differs, and whether it is a tie or a bug; None where all are equal.

        Args:
            prompt_ids: the prompt.
            plain, other: the new tokens of plain decoding, and those to be judged.
            sampling: both texts', as :attr:`Completion.sampling` has it.

        Raises:
            CapacityError: the weights in float32 do not fit the memory.
        """
        index = _first_unequal(plain, other)
        if index is None:
            return None
        plain_token, other_token = _at(plain, index), _at(other, index)
        if plain_token is None or other_token is None or self._engine.model.dtype in _EXACT:
            return Difference(index, plain_token, other_token, BUG)
        runner = self._exact_runner()
        with torch.inference_mode():
            exact = _logits_along(runner, prompt_ids, plain[:index])
            rounding = (_logits_along(self._engine.runner, prompt_ids, plain[:index]) - exact).abs().max().item()
            scores = _scores(self._engine, sampling, prompt_ids, plain[:index], exact)
        gap = (scores[plain_token] - scores[other_token]).abs().item()
        bound = 2 * rounding / sampling.get("temperature", 1.0)
        lower = torch.minimum(scores[plain_token], scores[other_token])
        are_first_two = int((scores > lower).sum()) <= 1
        label = TIE if are_first_two and gap <= bound else BUG
        return Difference(index, plain_token, other_token, label, gap if math.isfinite(gap) else None, bound)

    def _exact_runner(self) -> ModelRunner:
        """The same weights in float32."""
        if self._exact is None:
            model, device = self._engine.model, self._engine.runner.device
            needed = 4 * sum(parameter.numel() for parameter in model.parameters())
            free = free_memory(device)
            if free is not None and needed > free:
                raise CapacityError(
                    f"to tell a tie from a bug takes the weights in float32, {needed / 2**20:,.0f} MiB, and {device} "
                    f"has {free / 2**20:,.0f} MiB free; use a smaller model, or --dtype float32, where nothing is a tie"
                )
            exact: PreTrainedModel = copy.deepcopy(model).float()
            self._exact = ModelRunner(exact, self._engine.runner.attention)
        return self._exact


class PlainPath:
    """One text, computed by the passes of plain decoding: the prompt in chunks, then a token at a time.

    Args:
        runner: the model.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._store = KVStore(runner.spec)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits ``[V]`` in float32 of the token behind ``ids``, which go on where those of the last call ended."""
        runner, store = self._runner, self._store
        if runner.must_recompute(len(ids), store.length):
            store.truncate(0)
        chunk = _CHUNK if runner.rope_switch is None else len(ids)
        while len(ids) - store.length > chunk:
            runner.forward([(plan_prefill(ids[store.length : store.length + chunk]), store, None)])
            store.keep(range(chunk))
        pending = ids[store.length :]
        last = len(pending) - 1
        (logits,) = runner.forward([(StepPlan(TokenTree.chain(pending), start=last, reads=(last,)), store, None)])
        store.keep(range(len(pending)))
        return logits[0].float()


def _first_unequal(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two sequences part, at the shorter's end if need be; None when they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b)) if len(a) != len(b) else None


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def _logits_along(runner: ModelRunner, prompt_ids: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Logits ``[V]`` in float32 behind a prompt and new tokens, by the passes that plain decoding makes."""
    path = PlainPath(runner)
    ids = list(prompt_ids)
    logits = path.logits(ids)
    for token in tokens:
        ids.append(token)
        logits = path.logits(ids)
    return logits


def _scores(
    engine: Engine, sampling: Mapping[str, Any], prompt_ids: Sequence[int], tokens: Sequence[int], logits: Tensor
) -> Tensor:
    """What the next token is the largest of, ``[V]``: the processed logits; when sampling, minus log q."""
    ids = torch.tensor([[*prompt_ids, *tokens]], device=engine.runner.device)
    options = {name: value for name, value in sampling.items() if name != "seed" and value is not None}
    request = resolve(engine.model, ids[:, : len(prompt_ids)], max_new_tokens=len(tokens) + 1, **options)
    scores: Tensor = request.processors(ids, logits[None].clone())
    if request.samples:
        # As torch.multinomial draws it, a row per token from the first on.
        generator = torch.Generator(ids.device).manual_seed(sampling["seed"])
        noise = torch.empty_like(scores)
        for _ in range(len(tokens) + 1):
            noise.exponential_(generator=generator)
        scores = scores - noise.log()
    return scores[0]
