"""Where two decodings of one prompt part, and whether rounding explains it.

In bfloat16 and float16 a pass's width changes how its sums are rounded, as batch size does in every engine,
so two tokens whose logits almost agree may swap. The same weights in float32 tell such a *tie* from a *bug*.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead_decoding.cache import KVStore
from lookahead_decoding.completion import Completion
from lookahead_decoding.engine import Engine
from lookahead_decoding.model import ModelRunner
from lookahead_decoding.plan import StepPlan, plan_prefill
from lookahead_decoding.request import resolve
from lookahead_decoding.sampling import NoiseStream
from lookahead_decoding.tree import TokenTree

TIE, BUG = "tie", "bug"

_WARM_UP_PROMPT, _WARM_UP_TOKENS = 32, 8
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
    """The first token in which two completions of one prompt differ, and whether it is a tie or a bug.

    In bfloat16 and float16 it is a tie only if, behind the tokens that both share, the two are float32's
    first two and no further apart than twice the largest rounding error of a logit in a plain pass of width
    1. They are ranked by their processed scores; when sampling, by score - log q with the position's noise q.
    In float32 and float64, and where one completion merely ended earlier, it is a bug.

    For a tie to be told, the weights are copied to float32 for a moment: that takes four bytes per parameter.

    Args:
        engine: the one that made both.
        prompt_ids: the prompt.
        plain: made with the preset ``plain``.
        other: made with the same options and, when sampling, the same seed.
    """
    index = _first_unequal(plain.token_ids, other.token_ids)
    if index is None:
        return None
    plain_token, other_token = _at(plain.token_ids, index), _at(other.token_ids, index)
    if plain_token is None or other_token is None or engine.model.dtype in _EXACT:
        return Difference(index, plain_token, other_token, BUG)
    context = [*prompt_ids, *plain.token_ids[:index]]
    with torch.no_grad():
        exact = _exact_logits(engine, context)
        rounding = (_plain_logits(engine.runner, context) - exact).abs().max().item()
        scores = _scores(engine, plain.sampling, context, len(prompt_ids), exact)
    gap = (scores[plain_token] - scores[other_token]).abs().item()
    bound = 2 * rounding / plain.sampling.get("temperature", 1.0)
    lower = torch.minimum(scores[plain_token], scores[other_token])
    are_first_two = int((scores > lower).sum()) <= 1
    label = TIE if are_first_two and gap <= bound else BUG
    return Difference(index, plain_token, other_token, label, gap if math.isfinite(gap) else None, bound)


def _first_unequal(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two sequences part, at the shorter's end if need be; None when they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b)) if len(a) != len(b) else None


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def _exact_logits(engine: Engine, context: Sequence[int]) -> Tensor:
    """Logits ``[V]`` of the next token from the same weights in float32."""
    model: PreTrainedModel = copy.deepcopy(engine.model).float()
    return _plain_logits(ModelRunner(model, engine.runner.attention), context)


def _plain_logits(runner: ModelRunner, context: Sequence[int]) -> Tensor:
    """Logits ``[V]`` in float32 of a plain step: the last token alone, on a cache of those before it."""
    *before, last = context
    store = KVStore(runner.spec)
    if before:
        runner.forward([(plan_prefill(before), store, None)])
        store.keep(range(len(before)))
    (logits,) = runner.forward([(StepPlan(TokenTree.chain([last]), start=0, reads=(0,)), store, None)])
    return logits[0].float()


def _scores(
    engine: Engine, sampling: dict[str, Any], context: Sequence[int], num_prompt: int, logits: Tensor
) -> Tensor:
    """What the next token is the largest of, ``[V]``: the processed logits; when sampling, minus log q."""
    ids = torch.tensor([list(context)], device=engine.runner.device)
    options = {name: value for name, value in sampling.items() if name != "seed" and value is not None}
    index = len(context) - num_prompt
    request = resolve(engine.model, ids[:, :num_prompt], max_new_tokens=index + 1, **options)
    scores: Tensor = request.processors(ids, logits[None].clone())
    if request.samples:
        generator = torch.Generator(ids.device).manual_seed(sampling["seed"])
        noise = NoiseStream(engine.runner.vocab_size, generator, ids.device)
        scores = scores - noise.at(index).log()
    return scores[0]
