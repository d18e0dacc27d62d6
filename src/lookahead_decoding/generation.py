"""``generate()`` for users of Transformers: the same call, decoded with lookahead."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput

from lookahead_decoding.batch import Batch
from lookahead_decoding.budget import CostCurve
from lookahead_decoding.config import LookaheadConfig, as_config
from lookahead_decoding.engine import Engine
from lookahead_decoding.errors import ConfigError, UnsupportedModelError, UnsupportedOptionError
from lookahead_decoding.profile import ProfileKey
from lookahead_decoding.prompts import encode_reference
from lookahead_decoding.request import Request, check, resolve
from lookahead_decoding.statistics import DecodingStatistics
from lookahead_decoding.view import unwrapped

logger = logging.getLogger(__name__)

_costs: weakref.WeakKeyDictionary[PreTrainedModel, dict[ProfileKey, CostCurve]] = weakref.WeakKeyDictionary()
"""The step times that earlier calls with a model measured, by dtype, device and threads."""


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    lookahead: str | Mapping[str, Any] | LookaheadConfig = "default",
    tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: Any = None,
    references: Sequence[Sequence[int]] = (),
    on_unsupported: str = "raise",
    statistics: DecodingStatistics | None = None,
    **generate_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """What ``model.generate(inputs, **generate_kwargs)`` returns, token for token, in fewer forward passes.

    Args:
        model: a Transformers causal LM.
        inputs: token ids ``[batch, n]``, or give ``input_ids=`` or ``inputs_embeds=``.
        lookahead: a preset's name, a dict of :class:`LookaheadConfig` fields, or a config.
        tokenizer: for ``stop_strings``.
        streamer: gets the prompt, every token once, in order, and ``end()``.
        references: token ids that are expected to be seen again; no part of the prompt.
        on_unsupported: ``raise``, or ``plain``: let ``model.generate`` do what lookahead does not, with a warning.
        statistics: what decoding cost is added to it, of all rows together.
        generate_kwargs: arguments of ``model.generate``. Sampling draws from torch's global generator, as
            there, and leaves it in the same state.

    Returns:
        ``LongTensor [batch, n + new]``, or a ``GenerateDecoderOnlyOutput`` with ``return_dict_in_generate``.

    Raises:
        UnsupportedModelError, UnsupportedOptionError: what lookahead decoding does not do, in one sentence.
    """
    return decode(
        functools.partial(engine_for, model),
        model,
        inputs,
        lookahead=lookahead,
        tokenizer=tokenizer,
        streamer=streamer,
        references=references,
        on_unsupported=on_unsupported,
        statistics=statistics,
        **generate_kwargs,
    )


def decode(
    make_engine: Callable[[], Engine],
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    lookahead: str | Mapping[str, Any] | LookaheadConfig = "default",
    tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: Any = None,
    references: Sequence[Sequence[int]] = (),
    on_unsupported: str = "raise",
    statistics: DecodingStatistics | None = None,
    **generate_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """:func:`generate` on an engine of the caller's."""
    if on_unsupported not in ("raise", "plain"):
        raise ConfigError(f"on_unsupported is raise or plain; got {on_unsupported!r}")
    as_config(lookahead)  # refused before anything is done
    model = unwrapped(model)
    with evaluating(model):
        try:
            engine = make_engine()
            request = resolve(model, inputs, tokenizer=tokenizer, **generate_kwargs)
            batch = _batch(engine, request, lookahead, references)
        except (UnsupportedModelError, UnsupportedOptionError) as error:
            if on_unsupported == "raise":
                raise
            logger.warning("decoding plainly: %s", error)
            own = {"tokenizer": tokenizer, "streamer": streamer}
            generate_kwargs |= {name: given for name, given in own.items() if given is not None}
            return type(model).generate(model, inputs, **generate_kwargs)
        if streamer is not None:
            streamer.put(batch.input_ids.cpu())
        return _decode(engine, batch, streamer, statistics)


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    lookahead: str | Mapping[str, Any] | LookaheadConfig = "default",
    references: Sequence[Sequence[int]] = (),
    statistics: DecodingStatistics | None = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """The decoding method for ``model.generate(..., custom_generate=lookahead_decoding.custom_generate)``.

    ``lookahead``, ``references`` and ``statistics`` may be given to ``model.generate`` beside it. Transformers builds
    ``stop_strings`` for its own methods only: with those call :func:`generate`.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: from Transformers.
        lookahead, references, statistics: as in :func:`generate`.
        streamer: as in :func:`generate`; it has the prompt already.

    Raises:
        UnsupportedModelError, UnsupportedOptionError: what lookahead decoding does not do, in one sentence.
    """
    request = Request(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
    check(request)
    with evaluating(model):
        engine = engine_for(model)
        batch = _batch(engine, request, lookahead, references)
        return _decode(engine, batch, streamer or _streamer_of_caller(), statistics)


def _streamer_of_caller() -> Any:
    """The streamer of the ``model.generate`` that called: up to 5.24 it is not handed to a custom method."""
    caller = sys._getframe(2)
    return caller.f_locals.get("streamer") if caller.f_code.co_name == "generate" else None


@contextlib.contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Put the model back into training mode behind an engine, if it was."""
    training = model.training
    try:
        yield
    finally:
        model.train(training)


def engine_for(model: PreTrainedModel, *, pack_weights: bool | None = False) -> Engine:
    """An engine that goes by the step times of the calls before."""
    engine = Engine(model, pack_weights=pack_weights, retained_bytes=0)
    engine.costs = _costs.setdefault(engine.model, {}).setdefault(engine.profile_key, engine.costs)
    return engine


def _batch(
    engine: Engine,
    request: Request,
    lookahead: str | Mapping[str, Any] | LookaheadConfig,
    references: Sequence[Sequence[int]],
) -> Batch:
    known = [encode_reference(reference, None, engine.runner.vocab_size) for reference in references]
    return Batch(request, engine.runner, engine.configured(lookahead), known)


def _decode(
    engine: Engine, batch: Batch, streamer: Any, statistics: DecodingStatistics | None
) -> Tensor | GenerateDecoderOnlyOutput:
    given = 0
    for _ in engine.run(batch.sessions, max_sessions=len(batch.sessions)):
        if streamer is not None:
            for tokens in batch.tokens(given, batch.num_ready).T.cpu():
                streamer.put(tokens)
            given = max(given, batch.num_ready)
    if streamer is not None:
        streamer.end()
    if statistics is not None:
        for session in batch.sessions:
            statistics += session.statistics
    return batch.output()
