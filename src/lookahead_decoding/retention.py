"""Keys and values of finished sessions, kept for a prompt that begins alike: the next turn of a chat."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead_decoding.cache import KVStore


class RetainedStores:
    """KV stores with the token ids they hold, the most recent ones within a bound.

    Args:
        max_bytes: of all stores together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._stores: list[tuple[Sequence[int], KVStore]] = []  # oldest first

    def put(self, ids: Sequence[int], store: KVStore) -> None:
        """Keep ``store``, which holds the keys and values of ``ids``; the oldest give way."""
        self._stores.append((ids, store))
        while sum(store.nbytes for _, store in self._stores) > self.max_bytes:
            del self._stores[0]

    def take(self, prompt: Sequence[int]) -> KVStore | None:
        """The store that shares the longest beginning with ``prompt``, cut to it and no longer kept here."""
        shared, best = 0, -1
        for i, (ids, _) in enumerate(self._stores):
            if (common := _common_length(ids, prompt)) > shared:
                shared, best = common, i
        if best < 0:
            return None
        _, store = self._stores.pop(best)
        store.truncate(shared)
        return store

    def clear(self) -> None:
        """Drop everything."""
        self._stores.clear()


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many elements two sequences begin with alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
