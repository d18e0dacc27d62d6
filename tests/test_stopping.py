"""Why generation ends, and that every rule is asked about every token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from lookahead_decoding.stopping import CRITERION, EOS, LENGTH, STOP, StopRules
from lookahead_decoding.text import IncrementalDetokenizer, TextStream

PROMPT = [50, 51]
EOS_IDS = [2, 7]


class Letters:
    """A tokenizer of one letter per token."""

    all_special_ids = ()

    def decode(self, tokens: list[int], **_: object) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


class Watching(StoppingCriteria):  # type: ignore[misc]
    """Remembers what it was called with, and fires at some lengths."""

    def __init__(self, log: list[tuple[str, list[int]]], name: str, *fires_at: int) -> None:
        self.log, self.name, self.fires_at = log, name, fires_at

    def __call__(self, input_ids: Tensor, *_: object, **__: object) -> Tensor:
        self.log.append((self.name, input_ids[0].tolist()))
        return torch.tensor([input_ids.shape[1] in self.fires_at])


def checked(rules: StopRules, tokens: list[int]) -> list[str | None]:
    """What the rules say to each token of a continuation."""
    ids, ends = list(PROMPT), []
    for token in tokens:
        ids.append(token)
        found = rules.check(torch.tensor([ids]), [token])
        ends.append(None if found is None else found[0])
    return ends


def eos() -> StoppingCriteria:
    return EosTokenCriteria(EOS_IDS)


def custom() -> StoppingCriteria:
    return Watching([], "", 3)


def length() -> StoppingCriteria:
    return MaxLengthCriteria(3)


def text() -> TextStream:
    return TextStream(IncrementalDetokenizer(Letters()), ["h"])  # type: ignore[arg-type]


# Token 7 is an end-of-sequence token, the stop string "h", the third of all and the last.
@pytest.mark.parametrize(
    ("criteria", "stream", "end"),
    [
        ([length, custom, eos], text, EOS),
        ([length, custom, eos], None, EOS),
        ([length, custom], text, STOP),
        ([length, custom], None, CRITERION),
        ([length], text, STOP),
        ([length], None, LENGTH),
        ([], None, None),
    ],
)
def test_of_several_reasons_the_first_is_given(
    criteria: list[Callable[[], StoppingCriteria]], stream: Callable[[], TextStream] | None, end: str | None
) -> None:
    for made in (criteria, criteria[::-1]):
        rules = StopRules(
            StoppingCriteriaList([make() for make in made]), text=stream() if stream is not None else None
        )
        assert checked(rules, [7]) == [end]


@pytest.mark.parametrize("token", EOS_IDS)
def test_every_eos_id_ends_generation(token: int) -> None:
    rules = StopRules(StoppingCriteriaList([eos()]))
    assert checked(rules, [3, 4, token]) == [None, None, EOS]


def test_every_criterion_is_asked_about_every_token_in_order_whatever_the_others_said() -> None:
    log: list[tuple[str, list[int]]] = []
    first = Watching(log, "first", 3, 4)
    rules = StopRules(StoppingCriteriaList([eos(), first, Watching(log, "second", 4), Watching(log, "third")]))
    assert checked(rules, [7, 1, 1]) == [EOS, EOS, EOS]  # why it ended stays
    expected = []
    for ids in ([50, 51, 7], [50, 51, 7, 1], [50, 51, 7, 1, 1]):
        expected += [(name, ids) for name in ("first", "second", "third")]
    assert log == expected


def test_the_text_hears_every_token_whatever_the_criteria_said() -> None:
    stream = TextStream(IncrementalDetokenizer(Letters()), ["zz"])  # type: ignore[arg-type]
    rules = StopRules(StoppingCriteriaList([Watching([], "", 3, 4, 5)]), text=stream)
    checked(rules, [0, 1, 2])
    assert stream.take(last=True) == ["a", "b", "c"]


def test_a_stop_string_may_be_spread_over_tokens() -> None:
    stream = TextStream(IncrementalDetokenizer(Letters()), ["bcd"])  # type: ignore[arg-type]
    rules = StopRules(StoppingCriteriaList(), text=stream)
    assert checked(rules, [1, 2, 1, 2, 3]) == [None, None, None, None, STOP]


def test_running_out_of_time_is_a_criterion() -> None:
    rules = StopRules(StoppingCriteriaList([MaxTimeCriteria(max_time=1.0, initial_timestamp=0.0)]))
    assert checked(rules, [1]) == [CRITERION]


@pytest.mark.parametrize(
    ("criteria_length", "own_length", "bound"),
    [(5, None, 5), (None, 4, 4), (5, 4, 4), (4, 5, 4), (None, None, None)],
)
def test_the_shorter_of_both_lengths_ends_generation(
    criteria_length: int | None, own_length: int | None, bound: int | None
) -> None:
    criteria = [] if criteria_length is None else [MaxLengthCriteria(criteria_length)]
    rules = StopRules(StoppingCriteriaList(criteria), max_length=own_length)
    assert rules.max_length == bound
    ends = checked(rules, [1, 1, 1, 1])
    assert ends == [LENGTH if bound is not None and n >= bound else None for n in (3, 4, 5, 6)]
