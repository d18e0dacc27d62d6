"""Draft sources: where guesses about the next tokens come from.

A source is told the text as it grows and proposes continuations of it, best first. Whatever it proposes is
verified, so a source decides about speed alone. A new one is a class like those below, named in
``LookaheadConfig.sources`` as ``module:attr``; docs/draft-sources.md has an example.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from lookahead_decoding.config import BUILTIN_SOURCES, LookaheadConfig
from lookahead_decoding.errors import ConfigError
from lookahead_decoding.pool import NgramPool


class DraftSource(ABC):
    """One session's guesses of one kind. Made once per request with the session's config."""

    def __init__(self, config: LookaheadConfig) -> None:
        self.config = config

    @abstractmethod
    def propose(self, max_tokens: int) -> Iterable[Sequence[int]]:
        """Continuations of the text so far, best first, each of token ids; only ``max_tokens`` of each are used."""

    @property
    def nbytes(self) -> int:
        """Memory of what it remembers."""
        return 0

    def extend(self, tokens: Sequence[int]) -> None:  # noqa: B027 - optional
        """The text grew by ``tokens``: first the whole prompt, then what each step accepted."""

    def learn(self, ngrams: Iterable[tuple[int, tuple[int, ...]]]) -> None:  # noqa: B027 - optional
        """The window completed these n-grams: ``(first token, the N-1 tokens behind it)``."""


class _PooledSource(DraftSource):
    """Proposes what a pool holds behind the last token."""

    def __init__(self, config: LookaheadConfig) -> None:
        super().__init__(config)
        self.pool = NgramPool(config.ngram, config.guesses, config.pool_bytes)
        self._last_token: int | None = None

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes

    def extend(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._last_token = tokens[-1]

    def propose(self, max_tokens: int) -> Iterable[Sequence[int]]:
        return () if self._last_token is None else self.pool.get(self._last_token)


class WindowNgrams(_PooledSource):
    """The paper's pool: n-grams the window produced."""

    def learn(self, ngrams: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        for first, rest in ngrams:
            self.pool.put(first, rest)


class PromptNgrams(_PooledSource):
    """N-grams of the prompt and of the output so far, those that the text's end cuts short included."""

    def __init__(self, config: LookaheadConfig) -> None:
        super().__init__(config)
        self._tail: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        super().extend(tokens)
        N = self.config.ngram
        text = [*self._tail, *tokens]
        for i in range(len(text) - N + 1):
            self.pool.put(text[i], text[i + 1 : i + N])
        self._tail = text[-(N - 1) :]

    def propose(self, max_tokens: int) -> Iterable[Sequence[int]]:
        # The text's end has no whole n-gram yet; a short loop is seen here first.
        for i in range(len(self._tail) - 2, -1, -1):
            if self._tail[i] == self._last_token:
                yield self._tail[i + 1 :]
        yield from super().propose(max_tokens)


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
