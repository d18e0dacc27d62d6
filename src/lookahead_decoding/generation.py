"""``generate()`` for users of Transformers: the same call, decoded with lookahead."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerateDecoderOnlyOutput

from lookahead_decoding.budget import CostCurve
from lookahead_decoding.config import LookaheadConfig
from lookahead_decoding.engine import Engine
from lookahead_decoding.profile import ProfileKey
from lookahead_decoding.prompts import encode_reference
from lookahead_decoding.request import Request, resolve

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
    **generate_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """What ``model.generate(inputs, **generate_kwargs)`` returns, token for token, in fewer forward passes.

    Args:
        model: a Transformers causal LM.
        inputs: token ids ``[1, n]``, or give ``input_ids=``.
        lookahead: a preset's name, a dict of :class:`LookaheadConfig` fields, or a config.
        tokenizer: for ``stop_strings``.
        streamer: gets every token once, in order.
        references: token ids that are expected to be seen again; no part of the prompt.
        generate_kwargs: arguments of ``model.generate``. Sampling draws from torch's global generator, as
            there, and leaves it in the same state.

    Returns:
        ``LongTensor [1, n + new]``, or a ``GenerateDecoderOnlyOutput`` with ``return_dict_in_generate``.

    Raises:
        UnsupportedModelError, UnsupportedOptionError: what lookahead decoding does not do, in one sentence.
    """
    training = model.training
    try:
        engine = Engine(model, lookahead=lookahead, pack_weights=False, retained_bytes=0)
        engine.costs = _costs.setdefault(model, {}).setdefault(engine.profile_key, engine.costs)
        return _decode(
            engine,
            resolve(model, inputs, tokenizer=tokenizer, streamer=streamer, **generate_kwargs),
            streamer,
            references,
        )
    finally:
        model.train(training)


def _decode(
    engine: Engine, request: Request, streamer: Any, references: Sequence[Sequence[int]]
) -> Tensor | GenerateDecoderOnlyOutput:
    ids = request.input_ids
    known = [encode_reference(reference, None, engine.runner.vocab_size) for reference in references]
    session = engine.open(ids[0].tolist(), request, references=known)
    for _, advance in engine.run([session]):
        if streamer is not None:
            for token in advance.tokens:
                streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    sequences = torch.cat([ids, ids.new_tensor([session.tokens])], dim=1)
    if not request.generation_config.return_dict_in_generate:
        return sequences
    drawer = session.drawer
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=None if drawer.scores is None else tuple(drawer.scores),
        logits=None if drawer.logits is None else tuple(drawer.logits),
    )
