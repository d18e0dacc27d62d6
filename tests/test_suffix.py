"""The suffix automaton against a search through the whole text, its size against the theory and the allocator."""

from __future__ import annotations

import gc
import itertools
import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_decoding.suffix import ROOT, Place, SuffixAutomaton

BYTES_PER_STATE = SuffixAutomaton().nbytes
OWN_BYTES = 16 * 2**10
"""What the memory test itself holds."""

tokens = st.integers(0, 2)
texts = st.lists(tokens, max_size=40)
# A context is remembered as seen along 16 links: in texts of 16 tokens those are all there are.
short_texts = st.lists(tokens, max_size=16)


def automaton_of(text: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    return automaton


def num_states(automaton: SuffixAutomaton) -> int:
    return automaton.nbytes // BYTES_PER_STATE


def ends(text: Sequence[int], context: Sequence[int]) -> list[int]:
    """Where a context ends in the text, that is, where the token behind it stands."""
    size = len(context)
    return [i for i in range(size, len(text) + 1) if list(text[i - size : i]) == list(context)]


def longest_suffix(text: Sequence[int], context: Sequence[int], times: int = 1) -> list[int]:
    """The longest suffix of a context that occurs so many times in the text."""
    return next(
        list(context[i:]) for i in range(len(context) + 1) if len(ends(text, context[i:])) >= times or i == len(context)
    )


def followers(text: Sequence[int], context: Sequence[int]) -> list[tuple[int, int]]:
    """``(token, length)`` of what followed a context's suffixes, the longest first, then the most recent."""
    found: dict[int, int] = {}
    for length in range(len(context), 0, -1):
        for i in reversed(ends(text, context[len(context) - length :])):
            if i < len(text):
                found.setdefault(text[i], length)
    return list(found.items())


@settings(deadline=None, max_examples=300)
@given(text=texts)
def test_the_end_is_the_longest_suffix_that_occurred_before_however_the_text_grew(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for n, token in enumerate(text, start=1):
        automaton.append(token)
        _, length = automaton.end()
        assert length == len(longest_suffix(text[:n], text[1:n], times=2))
        assert len(automaton) == n


@settings(deadline=None, max_examples=300)
@given(text=texts, path=st.lists(st.integers(0, 3), max_size=12))
def test_following_from_the_end_keeps_the_longest_suffix_that_occurs(text: list[int], path: list[int]) -> None:
    automaton = automaton_of(text)
    place = automaton.end()
    context = text[len(text) - place[1] :]
    for token in path:
        place = automaton.follow(place, token)
        context = longest_suffix(text, [*context, token])
        assert place[1] == len(context)
        assert automaton.follow((ROOT, 0), token)[1] == (token in text)


def place_of(automaton: SuffixAutomaton, context: Sequence[int]) -> Place:
    place = (ROOT, 0)
    for token in context:
        place = automaton.follow(place, token)
    return place


@settings(deadline=None, max_examples=300)
@given(text=st.lists(tokens, min_size=1, max_size=40), token=st.integers(0, 3), data=st.data())
def test_following_leads_from_any_context_to_its_longest_suffix(
    text: list[int], token: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    context = text[start : data.draw(st.integers(start, len(text)))]
    automaton = automaton_of(text)
    place = place_of(automaton, context)
    assert place[1] == len(context)
    found = automaton.follow(place, token)
    expected = longest_suffix(text, [*context, token])
    assert found[1] == len(expected)
    assert [*automaton.continuations(found, 9)] == [*automaton.continuations(place_of(automaton, expected), 9)]


@settings(deadline=None, max_examples=300)
@given(text=short_texts, path=st.lists(st.integers(0, 3), max_size=3), count=st.integers(0, 4))
def test_continuations_are_those_of_the_longest_context_first_then_the_most_recent(
    text: list[int], path: list[int], count: int
) -> None:
    automaton = automaton_of(text)
    place = automaton.end()
    for token in path:
        place = automaton.follow(place, token)
    context = [*text, *path][len(text) + len(path) - place[1] :]
    assert [*automaton.continuations(place, count)] == followers(text, context)[:count]


@settings(deadline=None, max_examples=100)
@given(text=st.lists(st.integers(0, 4), max_size=120), count=st.integers(1, 6))
def test_continuations_of_a_long_text_are_its_followers_by_length_each_once(text: list[int], count: int) -> None:
    automaton = automaton_of(text)
    place = automaton.end()
    found = [*automaton.continuations(place, count)]
    expected = followers(text, text[len(text) - place[1] :])
    assert len(found) == min(count, len(expected))
    assert [length for _, length in found] == [length for _, length in expected[:count]]
    assert len({token for token, _ in found}) == len(found)
    assert set(found) <= set(expected)


def test_a_text_that_never_repeats_has_no_end_and_no_continuations() -> None:
    for text in ([], [5], [5, 6, 7]):
        automaton = automaton_of(text)
        assert automaton.end() == (ROOT, 0)
        assert [*automaton.continuations(automaton.end(), 4)] == []


def test_the_most_recent_follower_of_a_context_comes_first() -> None:
    # 1 2 was followed by 7, by 8, and by 7 again; 2 alone by 9 as well.
    automaton = automaton_of([1, 2, 7, 1, 2, 8, 5, 2, 9, 3, 1, 2, 7, 4, 1, 2])
    assert [*automaton.continuations(automaton.end(), 4)] == [(7, 2), (8, 2), (9, 1)]
    assert [*automaton.continuations(automaton.end(), 2)] == [(7, 2), (8, 2)]


def test_a_place_survives_a_token_that_its_context_was_never_followed_by() -> None:
    automaton = automaton_of([1, 2, 3, 9, 2, 4, 1, 2])
    assert automaton.end()[1] == 2
    _, length = automaton.follow(automaton.end(), 4)  # 1 2 4 did not occur, 2 4 did
    assert length == 2
    assert automaton.follow(automaton.end(), 77) == (ROOT, 0)


@pytest.mark.parametrize("period", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [30, 400])
def test_a_loop_goes_on_as_it_did(period: int, length: int) -> None:
    text = [i % period for i in range(length)]
    automaton = automaton_of(text)
    place = automaton.end()
    assert place[1] == length - period
    for i in range(length, length + 3 * period):
        assert next(automaton.continuations(place, 4))[0] == i % period
        place = automaton.follow(place, i % period)


def random_tokens(num_different: int) -> Iterator[int]:
    rng = random.Random(0)
    while True:
        yield rng.randrange(1000, 1000 + num_different)


def loop(period: int) -> Iterator[int]:
    return itertools.cycle(range(1000, 1000 + period))


def worst_case() -> Iterator[int]:
    """One token, then another again and again: the text with the most states."""
    return itertools.chain([1000], itertools.repeat(1001))


def quoting() -> Iterator[int]:
    """New tokens and copies of earlier passages, as texts are."""
    rng = random.Random(0)
    text: list[int] = []
    while True:
        passage = [rng.randrange(1000, rng.choice((1100, 50_000))) for _ in range(rng.randrange(1, 20))]
        if text and rng.random() < 0.5:
            begin = rng.randrange(len(text))
            passage = text[begin : begin + rng.randrange(1, 40)]
        text += passage
        yield from passage


SOURCES: dict[str, Callable[[], Iterator[int]]] = {
    "many tokens": lambda: random_tokens(50_000),
    "some tokens": lambda: random_tokens(100),
    "few tokens": lambda: random_tokens(3),
    "loop of 1": lambda: loop(1),
    "loop of 50": lambda: loop(50),
    "worst case": worst_case,
    "quoting": quoting,
}


class CountedInt(int):
    """Counts how often dicts look at one."""

    num_looks = 0

    def __hash__(self) -> int:
        CountedInt.num_looks += 1
        return int(self)

    def __eq__(self, other: object) -> bool:
        CountedInt.num_looks += 1
        return int(self) == int(other)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", SOURCES)
def test_a_token_costs_two_states_and_a_few_lookups_on_average_however_long_the_text(name: str) -> None:
    automaton = SuffixAutomaton()
    CountedInt.num_looks = 0
    for n, token in enumerate(itertools.islice(SOURCES[name](), 4096), start=1):
        automaton.append(CountedInt(token))
        assert num_states(automaton) <= 2 * n
        assert CountedInt.num_looks <= 20 * n
    assert num_states(automaton) > 4096


@settings(deadline=None, max_examples=200)
@given(text=texts)
def test_there_are_never_more_than_two_states_per_token(text: list[int]) -> None:
    assert 1 + len(text) <= num_states(automaton_of(text)) <= max(1 + len(text), 2 * len(text))


@pytest.mark.parametrize("name", SOURCES)
def test_memory_is_what_is_claimed_within_a_factor_of_two(name: str) -> None:
    tokens = SOURCES[name]()
    for size in (2000, 8000):
        text = [*itertools.islice(tokens, size)]
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            automaton = SuffixAutomaton()
            for token in text:
                automaton.append(token + 10**6 - 10**6)  # an int object of its own
            gc.collect()
            real = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert real <= automaton.nbytes + OWN_BYTES
        assert automaton.nbytes <= 2 * real


@pytest.mark.parametrize("period", [1, 3])
def test_a_loop_is_looked_up_in_bounded_time(period: int, monkeypatch: pytest.MonkeyPatch) -> None:
    automaton = automaton_of([i % period for i in range(3000)])
    asked = 0

    class Counted(list[int]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal asked
            asked += 1
            return super().__getitem__(index)

    monkeypatch.setattr(automaton, "_link", Counted(automaton._link))
    place = automaton.end()
    assert next(iter(automaton.continuations(place, 4))) == (3000 % period, place[1])
    list(automaton.continuations(place, 4))
    assert automaton.follow(place, 77) == (ROOT, 0)
    assert 0 < asked < 60
