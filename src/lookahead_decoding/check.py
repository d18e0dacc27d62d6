"""Whether decoding with lookahead gives plain decoding's tokens: one prompt at a time, each difference judged.

Plain is the engine's own pass of width 1, drawn by torch itself: in :func:`plain_tokens` there is no session, no tree
and no noise that is kept, so that a fault in those shows as a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lookahead_decoding.compare import Difference, Judge, PlainPath, decode_afresh
from lookahead_decoding.completion import Completion
from lookahead_decoding.engine import Engine
from lookahead_decoding.request import engine_options, resolve
from lookahead_decoding.statistics import DecodingStatistics


@dataclass(frozen=True)
class Check:
    """One prompt, decoded both ways.

    Attributes:
        plain_tokens: plain decoding's new tokens.
        lookahead: the completion under test.
        difference: the first token that differs, if any does.
    """

    plain_tokens: Sequence[int]
    lookahead: Completion
    difference: Difference | None

    @property
    def compared_tokens(self) -> int:
        """How many tokens are known to be right: all, or those before the first difference."""
        return len(self.plain_tokens) if self.difference is None else self.difference.index

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        statistics = self.lookahead.statistics
        return {
            "prompt_tokens": self.lookahead.prompt_tokens,
            "new_tokens": len(self.plain_tokens),
            "compared_tokens": self.compared_tokens,
            "steps": statistics.steps,
            "nodes_per_step": round(statistics.nodes_per_step, 4),
            "identical": self.difference is None,
            "first_difference": None if self.difference is None else self.difference.to_dict(),
        }


def check_prompt(engine: Engine, judge: Judge, prompt_ids: Sequence[int], *, seed: int, **options: Any) -> Check:
    """Decode a prompt plainly and with the engine's lookahead, and judge the first difference.

    Args:
        engine: the one under test.
        judge: of that engine.
        prompt_ids: the prompt.
        seed: of the draws, where the options ask for any.
        options: those of ``Engine.generate`` that become logits processors, warpers or stopping criteria, and
            ``max_new_tokens``.

    Raises:
        ConfigError: an unknown option or an impossible value.
        CapacityError: the prompt does not fit the context, its cache or the weights in float32 the memory.
    """
    lookahead = decode_afresh(engine, prompt_ids, seed=seed, **options)
    plain = plain_tokens(engine, prompt_ids, seed=seed, **options)
    difference = judge.first_difference(prompt_ids, plain, lookahead.token_ids, lookahead.sampling)
    return Check(plain, lookahead, difference)


def plain_tokens(
    engine: Engine, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int, **options: Any
) -> list[int]:
    """The new tokens of plain decoding: one per pass, by argmax or ``torch.multinomial``.

    Args:
        engine: whose model, packed weights and attention are used.
        prompt_ids: the prompt.
        max_new_tokens, seed, options: as for :func:`check_prompt`.
    """
    runner = engine.runner
    ids = torch.tensor([list(prompt_ids)], device=runner.device)
    options = {"attention_mask": torch.ones_like(ids), **engine_options(options)}
    request = resolve(engine.model, ids, max_new_tokens=max_new_tokens, **options)
    generator = torch.Generator(runner.device).manual_seed(seed)
    path, context = PlainPath(runner), runner.max_position
    with torch.inference_mode():
        while True:
            scores = request.processors(ids, path.logits(ids[0].tolist())[None])
            if request.samples:
                new = torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)
            else:
                new = scores.argmax(dim=-1, keepdim=True)
            ids = torch.cat([ids, new], dim=1)
            if request.criteria(ids, None).all() or ids.shape[1] == context:
                tokens: list[int] = ids[0, len(prompt_ids) :].tolist()
                return tokens


def summarise(checks: Sequence[Check]) -> dict[str, Any]:
    """Counts over several prompts, JSON-ready."""
    differences = [check.difference for check in checks if check.difference is not None]
    total = sum((check.lookahead.statistics for check in checks), start=DecodingStatistics())
    bugs = sum(difference.is_bug for difference in differences)
    return {
        "prompts": len(checks),
        "identical": len(checks) - len(differences),
        "ties": len(differences) - bugs,
        "bugs": bugs,
        "new_tokens": sum(len(check.plain_tokens) for check in checks),
        "compared_tokens": sum(check.compared_tokens for check in checks),
        "tokens_per_step": round(total.tokens_per_step, 4),
        "nodes_per_step": round(total.nodes_per_step, 4),
    }
