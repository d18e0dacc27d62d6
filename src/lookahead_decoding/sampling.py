"""From a node's logits to the next token: Transformers' own processors, then argmax or one draw.

Noise belongs to the position, not to the node. ``torch.multinomial(p, 1)`` is ``argmax(p / q)`` with q drawn
from Exp(1) per token, so the i-th generated token uses the i-th q of the request's generator wherever in the
tree it is decided, and sampled text equals plain decoding's under the same seed.
"""

from __future__ import annotations

import math
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
        rows: R, of a batch that plain decoding would draw for at once.
    """

    def __init__(self, vocab_size: int, generator: torch.Generator | None, device: torch.device, rows: int = 1) -> None:
        self._shape = (rows, vocab_size)
        self._generator = _global_generator(device) if generator is None else generator
        self._device = device
        self._first = 0
        self._drawn: deque[tuple[Tensor, Tensor]] = deque()  # a position's noise, the generator's state before it

    @property
    def capacity(self) -> int:
        """How many positions may be kept at once."""
        return max(_LEAST_AHEAD, _NOISE_BYTES // (4 * math.prod(self._shape)))

    def at(self, position: int) -> Tensor:
        """The noise ``[R, V]`` of the ``position``-th generated token; earlier positions are forgotten."""
        noise = self.ahead(position)
        self.forget(position)
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

    def forget(self, position: int) -> None:
        """Give up the noise before ``position``, which has been drawn."""
        while self._first < position:
            self._drawn.popleft()
            self._first += 1

    def rewind(self, position: int) -> None:
        """Leave the generator as plain decoding does that has drawn ``position`` tokens."""
        unused = position - self._first
        if unused < len(self._drawn):
            self._generator.set_state(self._drawn[unused][1])
            while len(self._drawn) > unused:
                self._drawn.pop()


_NOISE_BYTES = 256 * 2**20
_LEAST_AHEAD = 8


class RowNoise:
    """One row of a batch's noise, read at the row's own pace, with the methods of a :class:`NoiseStream`.

    Plain decoding draws ``[R, V]`` once per step, so row b's t-th token has row b of the t-th draw. A row that has
    ended goes on consuming noise there until the last one ends.

    Args:
        stream: the batch's.
        row: which row.
        live: the positions of the rows that have not ended, shared among all readers; this one adds its own.
        ended: the lengths of those that have, shared as well.
    """

    def __init__(self, stream: NoiseStream, row: int, live: dict[int, int], ended: dict[int, int]) -> None:
        self._stream = stream
        self._row = row
        self._live = live
        self._ended = ended
        live[row] = 0

    @property
    def room(self) -> int:
        """How many tokens this row may decide before the noise that it and the slowest row need takes too much."""
        ahead = self._live[self._row] - min(self._live.values())
        return max(1, self._stream.capacity - ahead)

    def at(self, position: int) -> Tensor:
        """The noise ``[1, V]`` of the row's ``position``-th token."""
        noise = self.ahead(position)
        self._live[self._row] = position
        self._stream.forget(min(self._live.values()))
        return noise

    def ahead(self, position: int) -> Tensor:
        """The same without moving on."""
        return self._stream.ahead(position)[self._row : self._row + 1]

    def rewind(self, position: int) -> None:
        """The row ends with ``position`` tokens; the last one to end leaves the generator as plain decoding does."""
        self._ended[self._row] = position
        if self._live.pop(self._row, None) is not None and not self._live:
            self._stream.rewind(max(self._ended.values()))


def _global_generator(device: torch.device) -> torch.Generator:
    """Torch's own generator of a device."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


class TokenDrawer:
    """Chooses the tokens of one row, or of R rows that decide together, and keeps what was asked to be kept.

    Args:
        processors: applied to fp32 logits ``[R, V]`` with the ids of their paths ``[R, n]``.
        noise: for sampling; None is greedy decoding.
        rows: R. Sessions that share a drawer decide together: the t-th token of all before the next of any.
        keep_scores, keep_logits: collect the processed scores, the raw logits, one ``[R, V]`` per token.
        temperature: that the processors divide by, for guessing.
        draws_ahead: whether the noise of later tokens may be drawn early: nobody else draws from its generator
            between two tokens.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        noise: NoiseStream | RowNoise | None,
        *,
        rows: int = 1,
        keep_scores: bool = False,
        keep_logits: bool = False,
        temperature: float = 1.0,
        draws_ahead: bool = False,
    ) -> None:
        self.temperature = temperature if noise is not None else 0.0
        self.knows_noise = noise is not None and draws_ahead
        self.processors = processors
        self.noise = noise
        self.rows = rows
        self.scores: list[Tensor] | None = [] if keep_scores else None
        self.logits: list[Tensor] | None = [] if keep_logits else None
        self._num_drawn = 0

    @property
    def room(self) -> int | None:
        """How many tokens may be decided in one step for the sake of the noise; None is no bound."""
        return self.noise.room if isinstance(self.noise, RowNoise) else None

    def draw(self, ids: Tensor, logits: Tensor) -> list[int]:
        """The next token of each row.

        Args:
            ids: ``[R, n]``, the texts so far.
            logits: ``[R, V]``, the model's, of any float type.

        Raises:
            ModelOutputError: the scores are NaN.
        """
        raw = logits.to(torch.float32, copy=True)
        scores = self.processors(ids, raw)
        if self.logits is not None:
            self.logits.append(raw)
        if self.scores is not None:
            self.scores.append(scores)
        noise = self.noise.at(self._num_drawn) if self.noise is not None else None
        weights = scores if noise is None else scores.softmax(dim=-1) / noise
        best, tokens = weights.max(dim=-1)
        if best.isnan().any():
            raise ModelOutputError(
                f"the model's scores for token {ids.shape[1] + 1} are not numbers (NaN); "
                "try a wider dtype (float32 or bfloat16) or check the weights"
            )
        self._num_drawn += 1
        return tokens.tolist()  # type: ignore[no-any-return]

    def gumbel(self, depth: int, tokens: Sequence[int], row: int = 0) -> list[float]:
        """``-log q`` of some tokens for a row's draw ``depth`` tokens ahead, 1 being the next.

        The draw takes the token with the largest ``log p - log q``, so this is what is known of it before.
        """
        assert self.noise is not None
        noise = self.noise.ahead(self._num_drawn + depth - 1)[row]
        return noise[torch.tensor(tokens, device=noise.device)].log().neg().tolist()

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
