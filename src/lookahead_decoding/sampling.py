"""From a node's logits to the next token: Transformers' own processors, then argmax or one draw.

Noise belongs to the position, not to the node. ``torch.multinomial(p, 1)`` is ``argmax(p / q)`` with q drawn
from Exp(1) per token, so the i-th generated token uses the i-th q of the request's generator wherever in the
tree it is decided, and sampled text equals plain decoding's under the same seed.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from lookahead_decoding.errors import ModelOutputError


class NoiseStream:
    """Exp(1) noise by position, drawn from a generator in order and kept until its position has passed.

    Args:
        vocab_size: V, length of a draw.
        generator: where the noise comes from; None is torch's global generator of ``device``.
        device: where the draws are made, as plain decoding would make them.
    """

    def __init__(self, vocab_size: int, generator: torch.Generator | None, device: torch.device) -> None:
        self._shape = (1, vocab_size)
        self._generator = generator
        self._device = device
        self._first = 0
        self._drawn: deque[Tensor] = deque()

    def at(self, position: int) -> Tensor:
        """The noise ``[1, V]`` of the ``position``-th generated token; earlier positions are forgotten."""
        if position < self._first:
            raise ValueError(f"the noise of position {position} was given up; the stream is at {self._first}")
        while self._first + len(self._drawn) <= position:
            noise = torch.empty(self._shape, device=self._device)
            self._drawn.append(noise.exponential_(generator=self._generator))
        while self._first < position:
            self._drawn.popleft()
            self._first += 1
        return self._drawn[0]


class TokenDrawer:
    """Chooses tokens as plain decoding does, and keeps what was asked to be kept.

    Args:
        processors: applied to a node's fp32 logits ``[1, V]`` with the ids of its path ``[1, n]``.
        noise: for sampling; None is greedy decoding.
        keep_scores, keep_logits: collect the processed scores, the raw logits, one ``[1, V]`` per token.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        noise: NoiseStream | None,
        *,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ) -> None:
        self.processors = processors
        self.noise = noise
        self.scores: list[Tensor] | None = [] if keep_scores else None
        self.logits: list[Tensor] | None = [] if keep_logits else None
        self._num_drawn = 0

    def draw(self, ids: Tensor, logits: Tensor) -> int:
        """The next token behind ``ids``.

        Args:
            ids: ``[1, n]``, the text so far.
            logits: ``[V]``, the model's, of any float type.

        Raises:
            ModelOutputError: the scores are NaN.
        """
        raw = logits[None].to(torch.float32, copy=True)
        scores = self.processors(ids, raw)
        if self.logits is not None:
            self.logits.append(raw)
        if self.scores is not None:
            self.scores.append(scores)
        noise = self.noise.at(self._num_drawn) if self.noise is not None else None
        weights = scores if noise is None else scores.softmax(dim=-1) / noise
        best, token = weights.max(dim=-1)
        if best.isnan():
            raise ModelOutputError(
                f"the model's scores for token {ids.shape[1] + 1} are not numbers (NaN); "
                "try a wider dtype (float32 or bfloat16) or check the weights"
            )
        self._num_drawn += 1
        return int(token)
