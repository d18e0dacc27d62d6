"""The n-gram pool against a list, its bounds against the allocator."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_decoding.pool import DEFAULT_MAX_BYTES, NgramPool

TEXT_LENGTH = 32_768
FRESH = 10**6
OWN_BYTES = 16 * 2**10
"""What the memory test itself holds, mostly its random state."""


def prices(ngram: int) -> tuple[int, int]:
    """What a pool claims for a key and for an n-gram."""
    pool = NgramPool(ngram, guesses=2)
    claims = [0]
    for token in (1, 2):
        pool.put(0, (token,) * (ngram - 1))
        claims.append(pool.nbytes)
    per_ngram = claims[2] - claims[1]
    return claims[1] - per_ngram, per_ngram


class NaivePool:
    """Everything in one list, the most recent last."""

    def __init__(self, ngram: int, guesses: int, max_bytes: int) -> None:
        self.guesses, self.max_bytes = guesses, max_bytes
        self.per_key, self.per_ngram = prices(ngram)
        self.held: list[tuple[int, tuple[int, ...]]] = []
        self.fed: list[int] = []  # keys, the one fed last at the end

    def put(self, key: int, continuation: tuple[int, ...]) -> None:
        self.held = [known for known in self.held if known != (key, continuation)] + [(key, continuation)]
        self.fed = [known for known in self.fed if known != key] + [key]
        if len(self.get(key)) > self.guesses:
            self.held.remove((key, self.get(key)[-1]))
        while self.nbytes > self.max_bytes:
            oldest = next(key for key in self.fed if self.get(key))
            self.held.remove((oldest, self.get(oldest)[-1]))

    def get(self, key: int) -> list[tuple[int, ...]]:
        return [continuation for known, continuation in reversed(self.held) if known == key]

    @property
    def nbytes(self) -> int:
        return self.per_key * len({key for key, _ in self.held}) + self.per_ngram * len(self.held)


@settings(deadline=None, max_examples=200)
@given(
    puts=st.lists(st.tuples(st.integers(0, 4), st.tuples(st.integers(0, 2), st.integers(0, 2))), max_size=40),
    guesses=st.integers(1, 4),
    max_bytes=st.sampled_from([0, 1500, 4096, 8000, 10**6]),
)
def test_a_pool_is_the_list_of_all_puts_cut_to_its_bounds(
    puts: list[tuple[int, tuple[int, int]]], guesses: int, max_bytes: int
) -> None:
    pool, naive = NgramPool(3, guesses, max_bytes), NaivePool(3, guesses, max_bytes)
    for key, continuation in puts:
        pool.put(key, continuation)
        naive.put(key, continuation)
        assert [list(pool.get(key)) for key in range(5)] == [naive.get(key) for key in range(5)]
        assert len(pool) == len(naive.held)
        assert pool.nbytes == naive.nbytes <= max_bytes


def test_the_most_recent_comes_first_and_a_known_one_becomes_the_most_recent() -> None:
    pool = NgramPool(3, guesses=3)
    for continuation in ([1, 1], [2, 2], [3, 3], [1, 1]):
        pool.put(9, continuation)
    assert list(pool.get(9)) == [(1, 1), (3, 3), (2, 2)]
    pool.put(9, [4, 4])
    assert list(pool.get(9)) == [(4, 4), (1, 1), (3, 3)]


def test_the_keys_fed_longest_ago_give_way_first() -> None:
    per_key, per_ngram = prices(2)
    pool = NgramPool(2, guesses=5, max_bytes=3 * (per_key + per_ngram))
    for key in (1, 2, 3):
        pool.put(key, [0])
    pool.put(1, [0])
    pool.put(4, [0])
    assert [list(pool.get(key)) for key in (1, 2, 3, 4)] == [[(0,)], [], [(0,)], [(0,)]]


def test_a_bound_below_one_ngram_keeps_none() -> None:
    pool = NgramPool(3, guesses=2, max_bytes=100)
    pool.put(1, [2, 3])
    assert len(pool) == pool.nbytes == 0
    assert list(pool.get(1)) == []


def test_a_pool_of_0_guesses_stays_empty() -> None:
    pool = NgramPool(3, guesses=0)
    pool.put(1, [2, 3])
    assert len(pool) == pool.nbytes == 0
    assert list(pool.get(1)) == []


@pytest.mark.parametrize("continuation", [[], [1, 2], [1, 2, 3, 4]])
def test_a_continuation_of_another_length_is_refused(continuation: list[int]) -> None:
    pool = NgramPool(4, guesses=2)
    with pytest.raises(ValueError, match=f"expected 3 tokens after the key, got {len(continuation)}"):
        pool.put(1, continuation)
    assert len(pool) == 0


def test_an_ngram_of_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="ngram=1"):
        NgramPool(1, guesses=1)


def random_tokens() -> Iterator[int]:
    rng = random.Random(0)
    while True:
        yield rng.randrange(1000, 50_000)


def repetitive_tokens() -> Iterator[int]:
    """One phrase again and again, now and then interrupted by another token."""
    rng = random.Random(0)
    phrase = [rng.randrange(1000, 50_000) for _ in range(50)]
    while True:
        for token in phrase:
            yield token if rng.random() < 0.99 else rng.randrange(1000, 50_000)


def few_tokens() -> Iterator[int]:
    """So few different ones that every key has all the n-grams it may have."""
    rng = random.Random(0)
    while True:
        yield rng.randrange(1000, 1100)


def ngrams_of(tokens: Iterator[int], ngram: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """A text's n-grams, every token an int object of its own: the most memory that they can take."""
    text = deque((next(tokens) for _ in range(ngram - 1)), maxlen=ngram)
    for _ in range(TEXT_LENGTH):
        text.append(next(tokens))
        first, *rest = (token + FRESH - FRESH for token in text)
        yield first, tuple(rest)


@pytest.mark.parametrize(
    ("tokens_of", "ngram", "guesses", "max_bytes"),
    [
        (random_tokens, 2, 1, 4096),
        (random_tokens, 5, 15, 2**20),
        (random_tokens, 4, 7, DEFAULT_MAX_BYTES),
        (repetitive_tokens, 4, 7, DEFAULT_MAX_BYTES),
        (few_tokens, 2, 15, DEFAULT_MAX_BYTES),
        (few_tokens, 5, 15, DEFAULT_MAX_BYTES),
    ],
)
def test_a_pool_never_takes_more_memory_than_it_claims_nor_claims_more_than_its_bound(
    tokens_of: Callable[[], Iterator[int]], ngram: int, guesses: int, max_bytes: int
) -> None:
    ngrams = ngrams_of(tokens_of(), ngram)
    pool = NgramPool(ngram, guesses, max_bytes)
    taken = []
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i, (key, continuation) in enumerate(ngrams, start=1):
            pool.put(key, continuation)
            assert pool.nbytes <= max_bytes
            if i % (TEXT_LENGTH // 8) == 0:
                gc.collect()  # also empties CPython's free lists, which are nobody's
                taken.append((tracemalloc.get_traced_memory()[0] - before, pool.nbytes))
    finally:
        tracemalloc.stop()
    assert len(taken) == 8
    for real, claimed in taken:
        assert real <= claimed + OWN_BYTES
        assert real >= claimed / 3


class CountedInt(int):
    """Counts how often containers look at one."""

    num_looks = 0

    def __hash__(self) -> int:
        CountedInt.num_looks += 1
        return int(self)

    def __eq__(self, other: object) -> bool:
        CountedInt.num_looks += 1
        return int(self) == int(other)  # type: ignore[call-overload]


@pytest.mark.parametrize("max_bytes", [2**16, DEFAULT_MAX_BYTES])
@pytest.mark.parametrize("tokens_of", [random_tokens, repetitive_tokens])
def test_no_put_or_get_looks_at_more_than_a_few_tokens_however_long_the_text(
    tokens_of: Callable[[], Iterator[int]], max_bytes: int
) -> None:
    tokens = tokens_of()
    pool = NgramPool(4, 7, max_bytes)
    text = deque((CountedInt(next(tokens)) for _ in range(3)), maxlen=4)
    most = 0
    for _ in range(TEXT_LENGTH):
        text.append(CountedInt(next(tokens)))
        key, *continuation = text
        CountedInt.num_looks = 0
        pool.put(key, continuation)
        assert len([*pool.get(key)]) <= 7
        most = max(most, CountedInt.num_looks)
    # A put hashes a key and a few n-grams of 4, a get at most 7 of them.
    assert 4 <= most <= 4 * (4 + 2 * 7)
    assert len(pool) > 20
