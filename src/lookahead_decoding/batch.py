"""The rows of one ``generate()`` call as sessions, and what they come to as the tensors that it returns.

Most batches need nothing of each other: every row is a session that moves at its own pace. Rows decide together,
the t-th token of all before the next of any, where plain decoding looks at all of them at once: a processor or
criterion that is not known to treat rows one by one, scores, logits or a cache that somebody sees.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation import EpsilonLogitsWarper, EtaLogitsWarper, GenerateDecoderOnlyOutput

from lookahead_decoding.attention import FULL
from lookahead_decoding.cache import KVStore, append_to, check_memory
from lookahead_decoding.config import LookaheadConfig
from lookahead_decoding.errors import ConfigError, UnsupportedOptionError
from lookahead_decoding.model import ModelRunner
from lookahead_decoding.request import Request
from lookahead_decoding.sampling import NoiseStream, RowNoise
from lookahead_decoding.session import Session
from lookahead_decoding.stopping import StopRules, ends_at_eos

ROW_BY_ROW = {
    EosTokenCriteria, EpsilonLogitsWarper, EtaLogitsWarper, ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor, ForcedEOSTokenLogitsProcessor, InfNanRemoveLogitsProcessor, LogitNormalization,
    MaxLengthCriteria, MaxTimeCriteria, MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor, MinPLogitsWarper,
    NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor, StopStringCriteria, SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper,
}  # fmt: skip
"""Processors and criteria of Transformers that give a row the same alone as in a batch."""

_END_ALL_ROWS = {MaxLengthCriteria, MaxTimeCriteria}


class Batch:
    """A request's rows, each a session.

    Args:
        request: from :func:`lookahead_decoding.request.resolve`.
        runner: the model.
        config: how all rows guess.
        references: token ids that are expected to be seen again, by every row.

    Raises:
        UnsupportedOptionError: the model does not decode these rows as plain decoding does.
        CapacityError: the KV caches do not fit into memory.
    """

    def __init__(
        self,
        request: Request,
        runner: ModelRunner,
        config: LookaheadConfig,
        references: Sequence[Sequence[int]] = (),
    ) -> None:
        self._request = request
        self._visible = request.visible
        self._length = request.length
        stop = StopRules(request.criteria)
        _refuse_unlike_plain(request, runner, stop.max_length)
        if stop.max_length is not None:
            new = stop.max_length - request.input_ids.shape[1]
            check_memory(runner.spec, sum(len(slots) + new for slots in self._visible))
        rows = request.rows
        share = rows == 1 or decide_together(request)
        stream = NoiseStream(runner.vocab_size, None, request.input_ids.device, rows)
        drawer = request.drawer(runner.vocab_size, noise=stream, rows=rows)
        stop = StopRules(request.criteria, rows=rows, padding=request.padding)
        live: dict[int, int] = {}
        ended: dict[int, int] = {}
        self.sessions = []
        for row, slots in enumerate(self._visible):
            if not share:
                noise = RowNoise(stream, row, live, ended)
                drawer = _of_row(request, row).drawer(runner.vocab_size, noise=noise)
                stop = StopRules(request.criteria)
            prompt, known = self._prompt(row)
            embeddings = None if request.embeddings is None else request.embeddings[row, slots].to(runner.device)
            store = KVStore(runner.spec)
            if request.cache is not None and request.cached_tokens:
                store.load(request.cache, row, [slot for slot in slots if slot < request.cached_tokens])
            self.sessions.append(
                Session(
                    prompt,
                    config=config,
                    runner=runner,
                    store=store,
                    drawer=drawer,
                    stop=stop,
                    references=references,
                    sampling=request.sampling(),
                    row=row if share else 0,
                    seen=request.input_ids[row : row + 1],
                    embeddings=embeddings,
                    known=known,
                )
            )

    def _prompt(self, row: int) -> tuple[list[int], list[int]]:
        """A row's token at each visible position, 0 where only its keys or its embedding are known; those known."""
        ids = self._request.input_ids[row].tolist()
        first = self._length - len(ids)
        if self._request.embeddings is not None and first:
            ids, first = [], self._length
        known = [ids[slot - first] for slot in self._visible[row] if slot >= first]
        return [0] * (len(self._visible[row]) - len(known)) + known, known

    @property
    def input_ids(self) -> Tensor:
        """The prompts, ``[rows, n]``."""
        return self._request.input_ids

    @property
    def num_ready(self) -> int:
        """How many new tokens every row has, or would be padded to."""
        lengths = [len(session.tokens) for session in self.sessions if session.end is None]
        return min(lengths, default=max(len(session.tokens) for session in self.sessions))

    def tokens(self, first: int, end: int) -> Tensor:
        """The new tokens ``first..end`` of every row, ``[rows, end - first]``, padded as plain decoding pads."""
        rows = [session.tokens[first:end] for session in self.sessions]
        padded = [[*row, *[self._request.padding] * (end - first - len(row))] for row in rows]
        return self._request.input_ids.new_tensor(padded)

    def output(self) -> Tensor | GenerateDecoderOnlyOutput:
        """What ``generate()`` returns once all rows have ended; a cache that somebody sees is filled."""
        request = self._request
        sequences = torch.cat([request.input_ids, self.tokens(0, self.num_ready)], dim=1)
        if request.returns_cache:
            self._fill(self._length + self.num_ready - 1)
        if not request.generation_config.return_dict_in_generate:
            return sequences
        drawer = self.sessions[0].drawer
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=None if drawer.scores is None else tuple(drawer.scores),
            logits=None if drawer.logits is None else tuple(drawer.logits),
            **{request.cache_name: request.cache},
        )

    def _fill(self, length: int) -> None:
        assert self._request.cache is not None
        rows = [
            (session.store, [*slots, *range(self._length, length)])
            for session, slots in zip(self.sessions, self._visible, strict=True)
        ]
        append_to(self._request.cache, rows, self._request.cached_tokens, length)


def _of_row(request: Request, row: int) -> Request:
    """The request with processors that know of one row only."""
    processors = LogitsProcessorList(request.processors)
    for index, processor in enumerate(processors):
        # The repetition penalty is told how much of each row is padding.
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor) and len(ignored) > 1:
            processors[index] = copy.copy(processor)
            processors[index].prompt_ignore_length = ignored[row : row + 1]
    return dataclasses.replace(request, processors=processors)


def decide_together(request: Request) -> bool:
    """Whether several rows of a request have to move together for the result to be plain decoding's."""
    kinds = {type(part) for part in [*request.processors, *request.criteria]}
    # Without an end-of-sequence token, a row that a criterion ends goes on until all have ended.
    may_go_on = not ends_at_eos(request.criteria) and not {type(part) for part in request.criteria} <= _END_ALL_ROWS
    return bool(request.returns_cache or may_go_on or kinds - ROW_BY_ROW)


def _refuse_unlike_plain(request: Request, runner: ModelRunner, max_length: int | None) -> None:
    """What depends on a batch's padded shape in plain decoding, for some models."""
    switch, limit = runner.rope_switch, request.length + (max_length or 2**62) - request.input_ids.shape[1]
    special = {
        "a batch": request.rows > 1,
        "inputs_embeds": request.embeddings is not None,
        "a cache": request.cached_tokens > 0,
    }
    for what, given in special.items():
        if given and switch is not None and limit > switch.position:
            raise UnsupportedOptionError(
                f"{what} that may reach position {switch.position}, where this model's rotary frequencies change, is "
                "not decoded; give one row of token ids, or fewer new tokens",
                param="max_new_tokens",
            )
    holes = any(slots != list(range(slots[0], request.length)) for slots in request.visible)
    if holes and any(reach != FULL for reach in runner.reaches):
        raise UnsupportedOptionError(
            "attention_mask hides tokens inside a text, which this model's attention windows count; leave them out",
            param="attention_mask",
        )
    width = runner.model.get_input_embeddings().weight.shape[1]
    if request.embeddings is not None and request.embeddings.shape[2] != width:
        raise ConfigError(f"inputs_embeds are {request.embeddings.shape[2]} wide and the model's are {width}")
