"""The successor table: what the model thought would follow a context, remembered from every row it computed."""

from __future__ import annotations

import itertools
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lookahead_decoding.fileformat import SUCCESSORS, Part, reading, write

ORDERS = (3, 2, 1)
"""Lengths of the contexts a row is remembered under, the longest first."""

NUM_BUCKETS = 13
"""Log-probabilities are kept in steps of half a nat: bucket b is about ``-b / 2``, the last one everything below."""

_PARAMETERS = {"longest": ORDERS[0], "buckets": NUM_BUCKETS}
_MAX_ROW = 64
"""Successors in a row, so that one in a file is never larger than it claims here."""

# CPython sizes, measured with tracemalloc (see tests/test_recycle.py): a row is an array, bytes and a tuple, an
# entry a key tuple with its ints and a place in an OrderedDict.
_BYTES_PER_ROW = 300
_BYTES_PER_ENTRY = 310


class Successors(NamedTuple):
    """The likeliest tokens behind a context, best first.

    Attributes:
        tokens: their ids.
        buckets: of their log-probabilities, see :data:`NUM_BUCKETS`.
    """

    tokens: Sequence[int]
    buckets: bytes

    @classmethod
    def of(cls, tokens: Sequence[int], log_probs: Sequence[float]) -> Successors:
        """Of token ids and their natural log-probabilities; what is impossible or not a number is left out."""
        last = NUM_BUCKETS - 1
        possible = [
            (token, min(last, max(0, int(-2 * p)))) for token, p in zip(tokens, log_probs, strict=True) if p > -math.inf
        ]
        return cls(array("i", [token for token, _ in possible]), bytes([bucket for _, bucket in possible]))


class SuccessorTable:
    """Successors by context, the most recent kept.

    Args:
        max_bytes: bound on the memory; the contexts that were fed longest ago give way first.
        base: a table to look further in, which is neither changed nor counted, saved or merged with this one.
    """

    def __init__(self, max_bytes: int, *, base: SuccessorTable | None = None) -> None:
        self.max_bytes = max_bytes
        self.base = base
        self._rows: OrderedDict[tuple[int, ...], Successors] = OrderedDict()
        self._bytes_per_entry = _BYTES_PER_ENTRY + _BYTES_PER_ROW // len(ORDERS)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Memory, in bytes."""
        return len(self._rows) * self._bytes_per_entry

    def put(self, context: Sequence[int], row: Successors) -> None:
        """Remember what follows ``context``, under as many of its last tokens as :data:`ORDERS` say."""
        row = Successors(row.tokens[:_MAX_ROW], row.buckets[:_MAX_ROW])
        self._remember([(tuple(context[-order:]), row) for order in ORDERS if order <= len(context)])

    def get(self, context: Sequence[int]) -> Iterator[tuple[int, Successors]]:
        """``(order, row)`` of what is known behind ``context``, the longest order first, each row once.

        Where there is no row of an order here, the base's counts.
        """
        known: Successors | None = None
        for order in ORDERS:
            if order <= len(context):
                row = self._row(tuple(context[-order:]))
                if row is not None and row is not known:
                    known = row
                    yield order, row

    def merge(self, other: SuccessorTable) -> None:
        """Take over all rows of ``other``, its oldest first, so that they are the newest here."""
        self._remember([*other._rows.items()])

    def save(self, path: str | Path) -> None:
        """Write a file for :meth:`load`; see :func:`lookahead_decoding.fileformat.write`."""
        write(path, [self.to_part()])

    @classmethod
    def load(cls, path: str | Path, max_bytes: int) -> SuccessorTable:
        """The table in a file, its most recent contexts within ``max_bytes``.

        Raises:
            FileFormatError: see :func:`lookahead_decoding.fileformat.reading`.
        """
        with reading(path, SUCCESSORS, max_bytes) as contents:
            return cls.from_part(contents.parts[SUCCESSORS], max_bytes)

    def to_part(self) -> Part:
        """This table for a file; a ValueError if a row is none."""
        orders, sizes, buckets = array("B"), array("B"), array("B")
        contexts, rows, tokens = array("i"), array("i"), array("i")
        index_of: dict[int, int] = {}  # by identity, which get() goes by, too
        for context, row in self._rows.items():
            index = index_of.setdefault(id(row), len(sizes))
            if index == len(sizes):
                _check(len(row.tokens) == len(row.buckets) <= _MAX_ROW and max(row.buckets, default=0) < NUM_BUCKETS)
                sizes.append(len(row.tokens))
                tokens.fromlist(list(row.tokens))
                buckets.frombytes(row.buckets)
            orders.append(len(context))
            contexts.fromlist(list(context))
            rows.append(index)
        arrays = {"orders": orders, "contexts": contexts, "rows": rows}
        return Part(SUCCESSORS, _PARAMETERS, {**arrays, "sizes": sizes, "tokens": tokens, "buckets": buckets})

    @classmethod
    def from_part(cls, part: Part, max_bytes: int) -> SuccessorTable:
        """The table of :meth:`to_part`; a ValueError if there is none."""
        orders, contexts, rows = (part.arrays[name] for name in ("orders", "contexts", "rows"))
        sizes, tokens, buckets = (part.arrays[name] for name in ("sizes", "tokens", "buckets"))
        _check(part.parameters == _PARAMETERS)
        _check(set(orders) <= set(ORDERS) and sum(orders) == len(contexts) and len(rows) == len(orders))
        _check(min(rows, default=0) >= 0 and max(rows, default=-1) < len(sizes) and max(sizes, default=0) <= _MAX_ROW)
        _check(sum(sizes) == len(tokens) == len(buckets) and max(buckets, default=0) < NUM_BUCKETS)
        table = cls(max_bytes)
        starts = array("i", itertools.accumulate(sizes, initial=0))
        first = max(0, len(orders) - max_bytes // table._bytes_per_entry)
        at = sum(orders[:first])
        row_at: dict[int, Successors] = {}
        for order, index in zip(orders[first:], rows[first:], strict=True):
            if index not in row_at:
                start, end = starts[index : index + 2]
                row_at[index] = Successors(tokens[start:end], buckets[start:end].tobytes())
            table._rows[tuple(contexts[at : at + order])] = row_at[index]
            at += order
        return table

    def _remember(self, entries: Sequence[tuple[tuple[int, ...], Successors]]) -> None:
        for context, row in entries:
            self._rows[context] = row
            self._rows.move_to_end(context)
            while self.nbytes > self.max_bytes:
                self._rows.popitem(last=False)

    def _row(self, context: tuple[int, ...]) -> Successors | None:
        row = self._rows.get(context)
        return self.base._row(context) if row is None and self.base is not None else row


def _check(holds: bool) -> None:
    if not holds:
        raise ValueError("its successors have impossible orders, rows or buckets")
