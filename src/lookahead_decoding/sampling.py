"""From a node's logits to the next token: Transformers' own processors, then argmax or one draw.

Noise belongs to the position, not to the node. ``torch.multinomial(p, 1)`` is ``argmax(p / q)`` with q drawn
from Exp(1) per token, so the i-th generated token uses the i-th q of the request's generator wherever in the
tree it is decided, and sampled text equals plain decoding's under the same seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from lookahead_decoding.errors import ModelOutputError
from lookahead_decoding.recycle import Successors


class NoiseStream:
    """Exp(1) noise by position, drawn from a generator in order and kept until its position has passed.

    Args:
        vocab_size: V, length of a draw.
        generator: where the noise comes from; None is torch's global generator of ``device``.
        device: where the draws are made, as plain decoding would make them.
    """

    def __init__(self, vocab_size: int, generator: torch.Generator | None, device: torch.device) -> None:
        self._shape = (1, vocab_size)
        self._generator = _global_generator(device) if generator is None else generator
        self._device = device
        self._first = 0
        self._drawn: deque[tuple[Tensor, Tensor]] = deque()  # a position's noise, the generator's state before it

    def at(self, position: int) -> Tensor:
        """The noise ``[1, V]`` of the ``position``-th generated token; earlier positions are forgotten."""
        noise = self.ahead(position)
        while self._first < position:
            self._drawn.popleft()
            self._first += 1
        return noise

    def ahead(self, position: int) -> Tensor:
        """The same without forgetting: what later tokens will be drawn with is known before they are guessed."""
        if position < self._first:
            raise ValueError(f"the noise of position {position} was given up; the stream is at {self._first}")
        while self._first + len(self._drawn) <= position:
            state = self._generator.get_state()
            noise = torch.empty(self._shape, device=self._device).exponential_(generator=self._generator)
            self._drawn.append((noise, state))
        return self._drawn[position - self._first][0]

    def rewind(self, position: int) -> None:
        """Leave the generator as plain decoding does that has drawn ``position`` tokens."""
        unused = position - self._first
        if unused < len(self._drawn):
            self._generator.set_state(self._drawn[unused][1])
            while len(self._drawn) > unused:
                self._drawn.pop()


def _global_generator(device: torch.device) -> torch.Generator:
    """Torch's own generator of a device."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


class TokenDrawer:
    """Chooses tokens as plain decoding does, and keeps what was asked to be kept.

    Args:
        processors: applied to a node's fp32 logits ``[1, V]`` with the ids of its path ``[1, n]``.
        noise: for sampling; None is greedy decoding.
        keep_scores, keep_logits: collect the processed scores, the raw logits, one ``[1, V]`` per token.
        temperature: that the processors divide by, for guessing.
        draws_ahead: whether the noise of later tokens may be drawn early: nobody else draws from its generator
            between two tokens.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        noise: NoiseStream | None,
        *,
        keep_scores: bool = False,
        keep_logits: bool = False,
        temperature: float = 1.0,
        draws_ahead: bool = False,
    ) -> None:
        self.temperature = temperature if noise is not None else 0.0
        self.knows_noise = noise is not None and draws_ahead
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

    def gumbel(self, depth: int, tokens: Sequence[int]) -> list[float]:
        """``-log q`` of some tokens for the draw ``depth`` tokens ahead, 1 being the next.

        The draw takes the token with the largest ``log p - log q``, so this is what is known of it before.
        """
        assert self.noise is not None
        row = self.noise.ahead(self._num_drawn + depth - 1)[0]
        return row[torch.tensor(tokens, device=row.device)].log().neg().tolist()

    def close(self) -> None:
        """Leave the generator as plain decoding would have left it."""
        if self.noise is not None:
            self.noise.rewind(self._num_drawn)


_BLOCK = 128
_ROWS = 64


def likeliest(logits: Tensor, count: int) -> list[Successors]:
    """The ``count`` likeliest tokens behind each row of ``[R, V]`` logits, for guessing.

    They are found among the blocks of vocabulary with the largest maxima, and their log-probabilities are relative
    to the sum over the blocks' maxima: a tenth of the time of a log-softmax.
    """
    found: list[Successors] = []
    count = min(count, logits.shape[1])
    for rows in torch.split(logits, _ROWS):
        if tail := -rows.shape[1] % _BLOCK:
            rows = torch.nn.functional.pad(rows, (0, tail), value=-torch.inf)
        blocks = rows.reshape(len(rows), -1, _BLOCK)
        maxima = blocks.amax(dim=-1)
        best = maxima.topk(min(count, maxima.shape[1]), dim=-1).indices
        inside = blocks.gather(1, best[:, :, None].expand(-1, -1, _BLOCK)).flatten(1).float()
        values, places = inside.topk(count, dim=-1)
        tokens = best.gather(1, places // _BLOCK) * _BLOCK + places % _BLOCK
        log_probs = values - maxima.float().logsumexp(dim=-1, keepdim=True)
        found += map(Successors.of, tokens.tolist(), log_probs.tolist())
    return found
