"""The n-gram pool: what followed a token before, most recent kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

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
    """

    def __init__(self, ngram: int, guesses: int, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        if ngram < 2:
            raise ValueError(f"an n-gram has a first token and at least one more; got ngram={ngram}")
        self.ngram = ngram
        self.guesses = guesses
        self.max_bytes = max_bytes
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
        """What followed ``key``, the most recent first: tuples of N-1 tokens, at most G of them."""
        return reversed(self._by_key.get(key, {}))

    def _drop_oldest(self) -> None:
        key = next(iter(self._by_key))
        continuations = self._by_key[key]
        continuations.popitem(last=False)
        self.nbytes -= self._ngram_bytes
        if not continuations:
            del self._by_key[key]
            self.nbytes -= _BYTES_PER_KEY
