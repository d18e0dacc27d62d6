"""A suffix automaton: the longest earlier occurrence of any suffix, and everything that ever followed it.

The online construction of Blumer et al. (1985): every state is a class of substrings that end at the same
positions, a transition reads one token, and a state's link leads to its longest suffix that ends at more
positions. Adding a token costs amortised constant time, so a long text costs no more per token than a short one.
A lookup follows a bounded number of links.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

ROOT = 0
Place = tuple[int, int]
"""``(state, length)``: a context of ``length`` tokens that occurred in the text."""

# CPython sizes, measured with tracemalloc (see tests/test_suffix.py): two states per token at most, each with a
# dict of mostly one transition and its numbers in the arrays.
_BYTES_PER_STATE = 410
_MAX_LINKS = 16


class SuffixAutomaton:
    """All substrings of a text that grows at its end."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._last_seen = [0]
        self._last = ROOT
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def nbytes(self) -> int:
        """Memory, in bytes."""
        return len(self._next) * _BYTES_PER_STATE

    def append(self, token: int) -> None:
        """The text grew by ``token``."""
        self._num_tokens += 1
        state = self._add_state({}, self._length[self._last] + 1, ROOT)
        place = self._last
        while place != -1 and token not in self._next[place]:
            self._next[place][token] = state
            place = self._link[place]
        if place != -1:
            target = self._next[place][token]
            if self._length[target] != self._length[place] + 1:
                target = self._split(place, token, target)
            self._link[state] = target
        self._last = state
        # The most recent continuation of a context is the likeliest: remember when each was seen. Contexts far
        # up the links are short and seen all the time; a loop's links are as many as its tokens.
        for _ in range(_MAX_LINKS):
            if state == ROOT:
                break
            self._last_seen[state] = self._num_tokens
            state = self._link[state]

    def end(self) -> Place:
        """The place of the longest suffix of the text that occurred earlier in it."""
        state = max(self._link[self._last], ROOT)
        return state, self._length[state]

    def follow(self, place: Place, token: int) -> Place:
        """Where a context leads with one more token: its longest suffix, ``token`` included, that occurred."""
        state, length = place
        for _ in range(_MAX_LINKS):
            if token in self._next[state] or state == ROOT:
                break
            state = self._link[state]
            length = self._length[state]
        else:
            state, length = ROOT, 0
        following = self._next[state].get(token)
        return (ROOT, 0) if following is None else (following, length + 1)

    def continuations(self, place: Place, count: int) -> Iterator[tuple[int, int]]:
        """What followed a context: at most ``count`` tokens, each with the length of the context it followed.

        The longest context first, then its suffixes; within one the most recent first; each token once.
        """
        state, length = place
        known: set[int] = set()
        for _ in range(_MAX_LINKS):
            if state == ROOT or len(known) == count:
                return
            following = self._next[state]
            recent: Iterable[int] = following
            if len(following) > 1:
                recent = heapq.nlargest(count, following, key=lambda token: self._last_seen[following[token]])
            for token in recent:
                if token not in known:
                    if len(known) == count:
                        return
                    known.add(token)
                    yield token, length
            state = self._link[state]
            length = self._length[state]

    def _split(self, place: int, token: int, target: int) -> int:
        """A state for the shorter substrings of ``target``, which from now on end at more positions."""
        clone = self._add_state(dict(self._next[target]), self._length[place] + 1, self._link[target])
        self._last_seen[clone] = self._last_seen[target]
        self._link[target] = clone
        while place != -1 and self._next[place].get(token) == target:
            self._next[place][token] = clone
            place = self._link[place]
        return clone

    def _add_state(self, following: dict[int, int], length: int, link: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._last_seen.append(0)
        return len(self._next) - 1
