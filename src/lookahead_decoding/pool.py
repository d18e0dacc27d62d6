"""The n-gram pool: what followed a token before, most recent kept."""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from lookahead_decoding.fileformat import NGRAMS, Part, reading, write

DEFAULT_MAX_BYTES = 32 * 2**20

# CPython sizes, measured with tracemalloc (see tests/test_pool.py): a pooled n-gram is a tuple, its token
# ints and one OrderedDict entry; a key is an int, an OrderedDict and its entry in the outer one.
_BYTES_PER_NGRAM = 300
_BYTES_PER_NGRAM_TOKEN = 40
_BYTES_PER_KEY = 700


class NgramPool:
    """N-grams by their first token, bounded per key and in bytes.

    Args:
        ngram: N, tokens per n-gram, the key included (at least 2).
        guesses: G, n-grams kept per key; the oldest gives way. 0 keeps none.
        max_bytes: bound on the memory of all n-grams together; the keys that were fed longest ago give
            way first.
        base: a pool to look further in, which is neither changed nor counted, saved or merged with this one.
    """

    def __init__(
        self, ngram: int, guesses: int, max_bytes: int = DEFAULT_MAX_BYTES, *, base: NgramPool | None = None
    ) -> None:
        if ngram < 2:
            raise ValueError(f"an n-gram has a first token and at least one more; got ngram={ngram}")
        if base is not None:
            base._refuse_other(ngram)
        self.ngram = ngram
        self.guesses = guesses
        self.max_bytes = max_bytes
        self.base = base
        self.nbytes = 0
        self._by_key: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()
        self._ngram_bytes = _BYTES_PER_NGRAM + _BYTES_PER_NGRAM_TOKEN * (ngram - 1)

    def __len__(self) -> int:
        return sum(len(continuations) for continuations in self._by_key.values())

    def put(self, key: int, continuation: Sequence[int]) -> None:
        """Remember that ``key`` was followed by ``continuation`` (N-1 tokens); a known one becomes the newest."""
        if self.guesses == 0:
            return
        continuation = tuple(continuation)
        if len(continuation) != self.ngram - 1:
            raise ValueError(f"expected {self.ngram - 1} tokens after the key, got {len(continuation)}")
        continuations = self._by_key.get(key)
        if continuations is None:
            continuations = self._by_key[key] = OrderedDict()
            self.nbytes += _BYTES_PER_KEY
        else:
            self._by_key.move_to_end(key)
        if continuation in continuations:
            continuations.move_to_end(continuation)
            return
        continuations[continuation] = None
        self.nbytes += self._ngram_bytes
        if len(continuations) > self.guesses:
            continuations.popitem(last=False)
            self.nbytes -= self._ngram_bytes
        while self.nbytes > self.max_bytes and self._by_key:
            self._drop_oldest()

    def get(self, key: int) -> Iterator[tuple[int, ...]]:
        """What followed ``key``, the most recent first, then the base's: tuples of N-1 tokens, at most G of them."""
        own: dict[tuple[int, ...], None] = self._by_key.get(key, {})
        if self.base is None:
            return reversed(own)
        others = (continuation for continuation in self.base.get(key) if continuation not in own)
        return itertools.islice(itertools.chain(reversed(own), others), self.guesses)

    def merge(self, other: NgramPool) -> None:
        """Put all n-grams of ``other``, its oldest first, so that they are the newest here."""
        other._refuse_other(self.ngram)
        for key, continuation in [*other._oldest_first()]:
            self.put(key, continuation)

    def save(self, path: str | Path) -> None:
        """Write a file for :meth:`load`; see :func:`lookahead_decoding.fileformat.write`."""
        write(path, [self.to_part()])

    @classmethod
    def load(cls, path: str | Path, max_bytes: int = DEFAULT_MAX_BYTES) -> NgramPool:
        """The pool in a file, its most recent n-grams within ``max_bytes``.

        Raises:
            FileFormatError: see :func:`lookahead_decoding.fileformat.reading`.
        """
        with reading(path, NGRAMS, max_bytes) as contents:
            return cls.from_part(contents.parts[NGRAMS], max_bytes)

    def to_part(self) -> Part:
        """This pool for a file."""
        tokens = array("i")
        for key, continuation in self._oldest_first():
            tokens.append(key)
            tokens.extend(continuation)
        return Part(NGRAMS, {"ngram": self.ngram, "guesses": self.guesses}, {"ngrams": tokens})

    @classmethod
    def from_part(cls, part: Part, max_bytes: int = DEFAULT_MAX_BYTES) -> NgramPool:
        """The pool of :meth:`to_part`; a ValueError if there is none."""
        pool = cls(part.parameters["ngram"], part.parameters["guesses"], max_bytes)
        tokens = part.arrays["ngrams"]
        for i in range(0, len(tokens), pool.ngram):
            pool.put(tokens[i], tokens[i + 1 : i + pool.ngram])
        return pool

    def _oldest_first(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """All n-grams in an order in which they can be put again."""
        for key, continuations in self._by_key.items():
            for continuation in continuations:
                yield key, continuation

    def _refuse_other(self, ngram: int) -> None:
        if self.ngram != ngram:
            raise ValueError(f"n-grams of {self.ngram} tokens do not go with those of {ngram}")

    def _drop_oldest(self) -> None:
        key = next(iter(self._by_key))
        continuations = self._by_key[key]
        continuations.popitem(last=False)
        self.nbytes -= self._ngram_bytes
        if not continuations:
            del self._by_key[key]
            self.nbytes -= _BYTES_PER_KEY
