"""What a user gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lookahead_decoding.config import LookaheadConfig
from lookahead_decoding.statistics import DecodingStatistics

SCHEMA = 1
"""Version of :meth:`Completion.to_dict`."""


@dataclass(frozen=True)
class Chunk:
    """What one step added to a streamed completion.

    Attributes:
        text: what became certain; it can lag behind the tokens by a part of a character or of a stop string.
        token_ids: the tokens decided.
        sources: who guessed each token; ``""`` for those the model drew without a guess.
        pieces: ``text`` in one piece per token.
        finish_reason: set on the last chunk: ``eos``, ``stop`` (a stop string), ``criterion`` or ``length``.
        completion: the whole, on the last chunk.
    """

    text: str
    token_ids: Sequence[int]
    sources: Sequence[str]
    pieces: Sequence[str]
    finish_reason: str | None = None
    completion: Completion | None = None


@dataclass(frozen=True)
class Completion:
    """A finished generation and what it cost.

    Attributes:
        text: the new text, without special tokens, ending before a stop string; "" without a tokenizer.
        token_ids: the new tokens, an end-of-sequence token included.
        prompt_tokens: length of the prompt. cached_tokens: how many of them were taken from an earlier cache.
        finish_reason: ``eos``, ``stop`` (a stop string), ``criterion`` or ``length``.
        sampling: the options that were used, defaults resolved.
        statistics: steps, acceptance, seconds.
        config: how it guessed.
        kv_bytes, pool_bytes: memory of the KV cache, and of what the draft sources remember, at the end.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: str
    sampling: dict[str, Any]
    statistics: DecodingStatistics
    config: LookaheadConfig
    model: str
    dtype: str
    device: str
    threads: int
    kv_bytes: int
    pool_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The object that the command line prints with ``--json``."""
        return {
            "schema": SCHEMA,
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            **self.statistics.to_dict(),
            "finish_reason": self.finish_reason,
            "sampling": self.sampling,
            "config": self.config.to_dict(),
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "kv_bytes": self.kv_bytes,
            "pool_bytes": self.pool_bytes,
        }
