"""The successor table against a dict of contexts, its bound and its claims against the allocator."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_decoding.recycle import NUM_BUCKETS, ORDERS, Successors, SuccessorTable

AMPLE = 2**30
OWN_BYTES = 16 * 2**10
"""What the memory test itself holds, mostly its random state."""


def row(number: int) -> Successors:
    """A row of its own: equal ones are told apart by it."""
    return Successors.of([number], [-1.0])


def bytes_per_entry() -> int:
    table = SuccessorTable(AMPLE)
    table.put([1], row(0))
    return table.nbytes


class PlainTable:
    """A dict from every context to its newest row, in the order in which they were told."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.rows: dict[tuple[int, ...], Successors] = {}

    def put(self, context: list[int], found: Successors) -> None:
        for order in (3, 2, 1):
            if len(context) >= order:
                key = tuple(context[len(context) - order :])
                self.rows.pop(key, None)
                self.rows[key] = found
        while len(self.rows) > self.max_entries:
            del self.rows[next(iter(self.rows))]

    def get(self, context: list[int]) -> list[tuple[int, Successors]]:
        found: list[tuple[int, Successors]] = []
        for order in (3, 2, 1):
            key = tuple(context[len(context) - order :]) if len(context) >= order else None
            if key in self.rows and all(self.rows[key] is not other for _, other in found):
                found.append((order, self.rows[key]))
        return found


contexts = st.lists(st.integers(0, 2), max_size=5)


@settings(deadline=None, max_examples=300)
@given(put=st.lists(contexts, max_size=30), asked=st.lists(contexts, max_size=6), max_entries=st.integers(0, 20))
def test_a_table_is_a_dict_of_the_last_contexts_of_three_lengths(
    put: list[list[int]], asked: list[list[int]], max_entries: int
) -> None:
    table = SuccessorTable(max_entries * bytes_per_entry())
    plain = PlainTable(max_entries)
    for number, context in enumerate(put):
        table.put(context, row(number))
        plain.put(context, row(number))
        for each in [context, *asked]:
            assert [*table.get(each)] == plain.get(each)
        assert len(table) == len(plain.rows)
        assert table.nbytes == len(table) * bytes_per_entry() <= table.max_bytes


def test_the_longest_context_comes_first() -> None:
    table = SuccessorTable(AMPLE)
    rows = [row(number) for number in range(3)]
    for context, found in zip(([3], [2, 3], [1, 2, 3]), rows, strict=True):
        table.put(context, found)
    # What was told of a long context holds for its ends, too, until they are told of again.
    assert [*table.get([1, 2, 3])] == [(3, rows[2])]
    table.put([9, 3], rows[0])
    assert [*table.get([0, 1, 2, 3])] == [(3, rows[2]), (1, rows[0])]
    assert [*table.get([9, 3])] == [(2, rows[0])]
    assert [*table.get([8, 2, 3])] == [(2, rows[2]), (1, rows[0])]
    assert [*table.get([7])] == [*table.get([])] == []


def test_orders_are_descending_so_that_a_row_is_told_by_its_longest() -> None:
    assert list(ORDERS) == sorted(ORDERS, reverse=True)
    table = SuccessorTable(AMPLE)
    table.put([1, 2, 3, 4], row(0))
    assert [order for order, _ in table.get([2, 3, 4])] == [3]
    assert [order for order, _ in table.get([4])] == [1]


def test_equal_rows_of_different_steps_count_as_two() -> None:
    table = SuccessorTable(AMPLE)
    table.put([1, 2], row(5))
    table.put([7, 2], row(5))
    assert [order for order, _ in table.get([1, 2])] == [2, 1]


def test_the_contexts_told_longest_ago_give_way_first() -> None:
    table = SuccessorTable(3 * bytes_per_entry())
    for context in ([1], [2], [3], [1], [4]):
        table.put(context, row(context[0]))
    assert [[*table.get([token])] for token in (1, 2, 3, 4)] == [[(1, row(1))], [], [(1, row(3))], [(1, row(4))]]


def test_asking_keeps_nothing_alive() -> None:
    table = SuccessorTable(2 * bytes_per_entry())
    table.put([1], row(1))
    table.put([2], row(2))
    assert [*table.get([1])] == [(1, row(1))]
    table.put([3], row(3))
    assert [*table.get([1])] == []


def test_a_bound_below_one_entry_keeps_none() -> None:
    table = SuccessorTable(bytes_per_entry() - 1)
    table.put([1, 2, 3], row(0))
    assert len(table) == table.nbytes == 0
    assert [*table.get([1, 2, 3])] == []


@settings(deadline=None, max_examples=200)
@given(log_probs=st.lists(st.floats(-1e6, 5, allow_nan=False), max_size=8))
def test_a_bucket_is_half_a_nat_wide_and_the_last_takes_what_is_below(log_probs: list[float]) -> None:
    found = Successors.of(range(len(log_probs)), log_probs)
    assert list(found.tokens) == [*range(len(log_probs))]
    for bucket, log_prob in zip(found.buckets, log_probs, strict=True):
        assert 0 <= bucket < NUM_BUCKETS
        if bucket > 0:
            assert log_prob <= -bucket / 2
        if bucket < NUM_BUCKETS - 1:
            assert log_prob > -(bucket + 1) / 2


def test_buckets_begin_at_certainty() -> None:
    found = Successors.of([1, 2, 3, 4, 5, 6], [0.0, -0.49, -0.5, -1.0, -5.99, -6.0])
    assert list(found.buckets) == [0, 0, 1, 2, 11, 12]
    assert found == Successors.of([1, 2, 3, 4, 5, 6], [0.0, -0.4, -0.6, -1.1, -5.6, -700.0])


def random_tokens() -> Iterator[int]:
    rng = random.Random(0)
    while True:
        yield rng.randrange(1000, 50_000)


def few_tokens() -> Iterator[int]:
    rng = random.Random(0)
    while True:
        yield rng.randrange(1000, 1020)


def like_a_text() -> Iterator[int]:
    """The n-th token is 1/n as frequent as the first, as words are."""
    rng = random.Random(0)
    while True:
        yield 1000 + int(50_000 ** rng.random())


def one_row_per_context() -> Iterator[int]:
    """Every third token is new, the others never: the contexts of one and two tokens are always told of again."""
    number = 2000
    while True:
        number += 1
        yield from (number, 1000, 1001)


@pytest.mark.parametrize("max_bytes", [2**17, AMPLE])
@pytest.mark.parametrize("tokens_of", [random_tokens, few_tokens, like_a_text, one_row_per_context])
def test_memory_is_what_is_claimed_within_a_factor_of_two(
    tokens_of: Callable[[], Iterator[int]], max_bytes: int
) -> None:
    rng = random.Random(1)
    text = tokens_of()
    table = SuccessorTable(max_bytes)
    taken = []
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        context = [next(text) for _ in range(3)]
        for i in range(1, 2001):
            context = [*context[1:], next(text) + 10**6 - 10**6]  # an int object of its own
            successors = [rng.randrange(1000, 50_000) for _ in range(8)]
            table.put(context, Successors.of(successors, [-rng.random() * 8 for _ in successors]))
            assert table.nbytes <= max_bytes
            if i % 500 == 0:
                gc.collect()  # also empties CPython's free lists, which are nobody's
                taken.append((tracemalloc.get_traced_memory()[0] - before, table.nbytes))
    finally:
        tracemalloc.stop()
    assert len(taken) == 4
    for real, claimed in taken:
        assert real <= claimed + OWN_BYTES
        assert claimed <= 2 * real
