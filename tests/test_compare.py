"""Ties and bugs: planted ones must be told apart."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lookahead_decoding import Completion, Engine
from lookahead_decoding.compare import (
    Comparison,
    compare_with_plain,
    decode_afresh,
    first_difference,
    warm_up,
)
from zoo import VOCAB, tiny

PROMPT = [5, 17, 33, 8]
GREEDY = {"temperature": 0, "max_new_tokens": 12}
SAMPLED = {"temperature": 0.7, "top_k": 20, "seed": 1, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def half() -> Engine:
    return Engine(tiny("llama", dtype=torch.bfloat16, eos_token_id=None))


@pytest.fixture(scope="module")
def full() -> Engine:
    return Engine(tiny("llama", eos_token_id=None))


def plain_completion(engine: Engine, options: dict[str, Any]) -> Completion:
    return decode_afresh(engine, PROMPT, lookahead="plain", **options)


def with_tokens(completion: Completion, tokens: Sequence[int]) -> Completion:
    return dataclasses.replace(completion, token_ids=list(tokens))


def with_token(completion: Completion, index: int, token: int) -> Completion:
    tokens = list(completion.token_ids)
    tokens[index] = token
    return with_tokens(completion, tokens)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_equal_tokens_have_no_difference(full: Engine, options: dict[str, Any]) -> None:
    options = {**options, "max_new_tokens": 96}
    plain = plain_completion(full, options)
    lookahead = decode_afresh(full, PROMPT, lookahead="paper", **options)
    assert lookahead.statistics.steps < 96  # or there was nothing to compare
    assert first_difference(full, PROMPT, plain, lookahead) is None


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("index", [0, 7])
def test_a_planted_wrong_token_is_a_bug(half: Engine, options: dict[str, Any], index: int) -> None:
    plain = plain_completion(half, options)
    right = plain.token_ids[index]
    labels = []
    for wrong in range(3, VOCAB, 29):
        if wrong != right:
            difference = first_difference(half, PROMPT, plain, with_token(plain, index, wrong))
            assert difference is not None
            assert (difference.index, difference.plain_token, difference.lookahead_token) == (
                index,
                right,
                wrong,
            )
            labels.append(difference.label)
    # One of them may happen to come second, a rounding error behind the first.
    assert labels.count("bug") >= len(labels) - 1


@pytest.mark.parametrize("options", [GREEDY, {**SAMPLED, "temperature": 0.001, "top_k": 0}], ids=["greedy", "sampled"])
def test_a_twin_of_the_right_token_is_a_tie_in_bfloat16_and_a_bug_in_float32(options: dict[str, Any]) -> None:
    model = tiny("llama", dtype=torch.bfloat16, eos_token_id=None)
    right = plain_completion(Engine(model), options).token_ids[0]
    twin = 3 if right != 3 else 4
    with torch.no_grad():  # equal logits, and no third token near them
        model.lm_head.weight[right] *= 2
        model.lm_head.weight[twin] = model.lm_head.weight[right]
    engine = Engine(model)
    plain = plain_completion(engine, options)
    places = [i for i, token in enumerate(plain.token_ids) if token in (right, twin)]
    for index in (places[0], places[-1]):
        other = with_token(plain, index, right + twin - plain.token_ids[index])
        difference = first_difference(engine, PROMPT, plain, other)
        assert difference is not None
        assert difference.label == "tie"
        assert difference.gap is not None
        assert difference.bound is not None
        assert 0 <= difference.gap <= difference.bound
    exact = first_difference(Engine(model.float()), PROMPT, plain, other)
    assert exact is not None
    assert exact.is_bug


def test_a_token_that_a_processor_forbids_is_a_bug(half: Engine) -> None:
    options = {**SAMPLED, "top_k": 1}
    plain = plain_completion(half, options)
    wrong = (plain.token_ids[3] + 1) % VOCAB
    difference = first_difference(half, PROMPT, plain, with_token(plain, 3, wrong))
    assert difference is not None
    assert difference.is_bug
    assert difference.gap is None  # minus infinity is no JSON
    json.dumps(difference.to_dict(), allow_nan=False)


@pytest.mark.parametrize("shorter", ["plain", "lookahead"])
def test_ending_earlier_is_a_difference(half: Engine, shorter: str) -> None:
    whole = plain_completion(half, GREEDY)
    cut = with_tokens(whole, whole.token_ids[:5])
    plain, other = (cut, whole) if shorter == "plain" else (whole, cut)
    difference = first_difference(half, PROMPT, plain, other)
    assert difference is not None
    assert difference.index == 5
    assert (difference.plain_token is None) == (shorter == "plain")
    assert (difference.lookahead_token is None) == (shorter == "lookahead")
    assert difference.is_bug


def test_the_model_is_left_as_it_was(half: Engine) -> None:
    plain = plain_completion(half, GREEDY)
    first_difference(half, PROMPT, plain, with_token(plain, 2, plain.token_ids[2] ^ 1))
    assert half.model.dtype == torch.bfloat16
    assert plain_completion(half, GREEDY).token_ids == plain.token_ids


def test_a_comparison_decodes_with_the_same_seed_and_without_the_others_cache(full: Engine) -> None:
    options = {name: value for name, value in SAMPLED.items() if name != "seed"}
    warm_up(full, PROMPT)
    lookahead = decode_afresh(full, PROMPT, **options)
    comparison = compare_with_plain(full, PROMPT, lookahead, **options)
    assert comparison.identical
    assert comparison.plain.config.is_plain
    assert comparison.plain.sampling == lookahead.sampling
    assert comparison.plain.cached_tokens == lookahead.cached_tokens == 0
    assert comparison.speedup > 0
    assert isinstance(comparison, Comparison)
    found = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert found["first_difference"] is None
    assert found["plain"]["token_ids"] == found["token_ids"]
