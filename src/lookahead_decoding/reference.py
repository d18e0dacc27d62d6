"""Plain decoding, one token per pass, through the model's own forward: what everything else is compared with."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lookahead_decoding.request import Request


@torch.no_grad()
def decode_plainly(model: PreTrainedModel, request: Request, generator: torch.Generator | None = None) -> list[int]:
    """The tokens that a request gives without any lookahead.

    Args:
        model: a Transformers causal LM in evaluation mode.
        request: one prompt's, from :func:`lookahead_decoding.request.resolve`; its criteria end the loop.
        generator: the sampling noise's; None is torch's global one.
    """
    parameters = inspect.signature(model.forward).parameters
    cache_argument = "cache" if "cache" in parameters else "past_key_values"
    cache = DynamicCache(config=model.config)
    ids: Tensor = request.input_ids
    new: Tensor = ids
    while True:
        logits = model(new, **{cache_argument: cache}, use_cache=True).logits[:, -1]
        scores = request.processors(ids, logits.to(torch.float32, copy=True))
        if request.samples:
            new = torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)
        else:
            new = scores.argmax(dim=-1, keepdim=True)
        ids = torch.cat([ids, new], dim=1)
        if request.criteria(ids, None).all():
            return ids[0, request.input_ids.shape[1] :].tolist()
