"""Draft sources: where guesses about the next tokens come from.

A source is told the text as it grows and names tokens that may come next: behind the text, and behind any path of
guesses that the tree takes. Whatever it names is verified, so a source decides about speed alone. The built-in
ones are in :mod:`lookahead_decoding.sources`. A new one is a class named in ``LookaheadConfig.sources`` as
``module:attr``; docs/draft-sources.md has an example.
"""

from __future__ import annotations

import importlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from lookahead_decoding.config import BUILTIN_SOURCES, LookaheadConfig
from lookahead_decoding.errors import ConfigError
from lookahead_decoding.memory import DraftMemory
from lookahead_decoding.recycle import Successors
from lookahead_decoding.tree import TokenTree


class DraftSource(ABC):
    """One session's guesses of one kind. Made once per request with the session's config.

    Attributes:
        weights: log-odds of a token by kind of evidence (see :mod:`lookahead_decoding.acceptance`), before anything
            was learned.
        needs_window: whether it lives on what the window finds.
        successors: how many of each row's likeliest tokens :meth:`observe` wants, three times as many when sampling;
            0 when it wants none.
    """

    weights: ClassVar[Sequence[float]]
    needs_window: ClassVar[bool] = False
    successors: ClassVar[int] = 0

    def __init__(self, config: LookaheadConfig) -> None:
        self.config = config

    @property
    def nbytes(self) -> int:
        """Memory of what it remembers."""
        return 0

    def recall(self, memory: DraftMemory) -> None:  # noqa: B027 - optional
        """Guess from what earlier requests learned, too."""

    def teach(self, memory: DraftMemory) -> None:  # noqa: B027 - optional
        """Add what this request learned."""

    def refer(self, tokens: Sequence[int]) -> None:  # noqa: B027 - optional
        """Text that is expected to be seen again, before the prompt; never part of it."""

    def extend(self, tokens: Sequence[int]) -> None:  # noqa: B027 - optional
        """The text grew by ``tokens``: first the whole prompt, then what each step accepted."""

    def learn(self, ngrams: Iterable[tuple[int, tuple[int, ...]]]) -> None:  # noqa: B027 - optional
        """The window completed these n-grams: ``(first token, the N-1 tokens behind it)``."""

    def observe(self, seen: Observation) -> None:  # noqa: B027 - optional
        """The model's likeliest tokens behind every node of a step, told before the step's :meth:`extend`."""

    @abstractmethod
    def start(self) -> Any:
        """The source's *place* where the text ends."""

    @abstractmethod
    def follow(self, place: Any, token: int) -> Any:
        """The place behind ``place`` and one more token, whoever guessed it."""

    @abstractmethod
    def guesses(self, place: Any) -> Sequence[tuple[int, int]]:
        """``(token, kind)`` of what may come at a place; ``kind`` is an index of :attr:`weights`."""


class Observation(NamedTuple):
    """What a step's logits say.

    Attributes:
        tree: the tokens it computed.
        text: the text before the tree.
        rows: the likeliest tokens behind each node that was read.
        path: the nodes that are part of the text now, root first.
    """

    tree: TokenTree
    text: Sequence[int]
    rows: Mapping[int, Successors]
    path: Sequence[int]


class ChainSource(DraftSource):
    """A source that proposes whole continuations of the text, at most G a step: the simplest kind.

    Its kinds are the rank of a proposal, for the first token and for the later ones.
    """

    _RANKS = 6
    weights = (2.5, 2.0, 1.6, 1.3, 1.0, 0.8, 4.0, 3.5, 3.0, 2.5, 2.5, 2.5)

    @abstractmethod
    def propose(self) -> Iterable[Sequence[int]]:
        """Continuations of the text so far, best first, each of token ids."""

    def start(self) -> Any:
        return 0, list(enumerate(itertools.islice(self.propose(), self.config.guesses)))

    def follow(self, place: Any, token: int) -> Any:
        depth, chains = place
        return depth + 1, [chain for chain in chains if depth < len(chain[1]) and chain[1][depth] == token]

    def guesses(self, place: Any) -> Sequence[tuple[int, int]]:
        depth, chains = place
        first = 0 if depth == 0 else self._RANKS
        named: dict[int, int] = {}
        for rank, chain in chains:
            if depth < len(chain):
                named.setdefault(chain[depth], first + min(rank, self._RANKS - 1))
        return list(named.items())


def load_source(name: str, config: LookaheadConfig) -> DraftSource:
    """The source of this name: built in, or ``module:attr`` (a callable that takes the config).

    Raises:
        ConfigError: it cannot be imported, or does not make a :class:`DraftSource`.
    """
    module_name, _, attribute = BUILTIN_SOURCES.get(name, name).partition(":")
    try:
        source = getattr(importlib.import_module(module_name), attribute)(config)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"the draft source {name!r} cannot be loaded: {error}") from error
    if not isinstance(source, DraftSource):
        raise ConfigError(f"the draft source {name!r} made {type(source).__name__}, which is no DraftSource")
    return source
