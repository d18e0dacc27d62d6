"""Tree attention over a packed row: every session's nodes side by side, each attending to its own text.

``packed`` runs one scaled-dot-product attention per session on that session's store; grouped heads share
keys and values (``enable_gqa``). ``masked`` leaves attention to the model and hands it one mask over all
sessions: slower with several of them, but right wherever the model takes a 4-D mask, and the oracle that
``packed`` is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lookahead_decoding.cache import KVStore
from lookahead_decoding.errors import UnsupportedModelError
from lookahead_decoding.tree import ROOT, TokenTree


@dataclass(frozen=True)
class Reach:
    """How far back a layer looks.

    ``full``: to the beginning. ``sliding``: ``size`` positions, its own included. ``chunked``: to the last
    multiple of ``size``.
    """

    kind: str
    size: int = 0


FULL = Reach("full")


@dataclass
class Segment:
    """One session's share of a packed row: tokens ``begin..end``; the first may be given as embeddings."""

    tree: TokenTree
    store: KVStore
    begin: int
    embeddings: Tensor | None = None
    _masks: dict[tuple[Reach, int], Tensor | None] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.begin + len(self.tree)

    @property
    def kv_length(self) -> int:
        """Cached tokens and the step's own."""
        return self.store.length + len(self.tree)

    @cached_property
    def positions(self) -> list[int]:
        """Position id of each node: cached tokens before it, plus its depth."""
        return [self.store.length + depth for depth in self.tree.depths]

    @cached_property
    def is_causal(self) -> bool:
        """Whether plain causal attention is the mask: a chain with nothing cached before it."""
        return self.store.length == 0 and self.tree.is_chain

    def visible(self, reach: Reach) -> np.ndarray:
        """Which of the ``kv_length`` tokens each node sees, ``[T, kv_length]`` bool."""
        prefix = self.store.length
        visible = np.ones((len(self.tree), self.kv_length), dtype=bool)
        visible[:, prefix:] = ancestor_mask(self.tree)
        if reach.kind != "full":
            query = np.asarray(self.positions)[:, None]
            key = np.concatenate([np.arange(prefix), self.positions])[None]
            if reach.kind == "sliding":
                visible &= query - key < reach.size
            else:
                visible &= query // reach.size == key // reach.size
        return visible

    def bias(self, reach: Reach, like: Tensor, repeats: int = 1) -> Tensor | None:
        """The mask as a sum term ``[1, 1, repeats * T, kv_length]``: 0 or -inf; None when all see all."""
        key = reach, repeats
        if key not in self._masks:
            visible = self.visible(reach)
            self._masks[key] = None if visible.all() else _additive(np.tile(visible, (repeats, 1)), like, -torch.inf)
        mask = self._masks[key]
        return mask if mask is None else mask.to(like.device)


def ancestor_mask(tree: TokenTree) -> np.ndarray:
    """``[T, T]`` bool: entry (i, j) is true when j is i or an ancestor of i."""
    size = len(tree)
    if tree.is_chain:
        return np.tri(size, dtype=bool)
    mask = np.zeros((size, size), dtype=bool)
    for node, parent in enumerate(tree.parents):
        if parent != ROOT:
            mask[node] = mask[parent]
        mask[node, node] = True
    return mask


def block_mask(segments: Sequence[Segment], reach: Reach) -> np.ndarray:
    """One mask over all sessions' tokens, ``[sum T, sum kv_length]``: each sees its own text alone."""
    rows = sum(len(segment.tree) for segment in segments)
    mask = np.zeros((rows, sum(segment.kv_length for segment in segments)), dtype=bool)
    column = 0
    for segment in segments:
        mask[segment.begin : segment.end, column : column + segment.kv_length] = segment.visible(reach)
        column += segment.kv_length
    return mask


def mask_for_model(segments: Sequence[Segment], reach: Reach, like: Tensor, *, additive: bool) -> Tensor:
    """:func:`block_mask` as models take it, ``[1, 1, sum T, sum kv_length]``: bool, or 0 and the dtype's least."""
    mask = block_mask(segments, reach)
    if additive:
        return _additive(mask, like, torch.finfo(like.dtype).min)
    return torch.from_numpy(mask)[None, None].to(like.device)


def _additive(visible: np.ndarray, like: Tensor, hidden: float) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=like.dtype)
    mask.masked_fill_(torch.from_numpy(~visible), hidden)
    return mask[None, None].to(like.device)


@dataclass(frozen=True)
class PackedBatch:
    """What the packed attention function needs to know of a pass."""

    segments: Sequence[Segment]
    reach: Sequence[Reach]  # of each layer


PACKED = "lookahead_packed"
"""Name under which :func:`packed_attention` is registered with Transformers."""

BATCH_ARGUMENT = "lookahead_batch"
"""Keyword argument of the model's forward that carries the :class:`PackedBatch` to the attention layers."""

# Keywords a model may hand to its attention function that change nothing here.
_IRRELEVANT = {
    "attention_mask", "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "is_causal",
    "kwargs", "layer_idx", "max_length_k", "max_length_q", "output_attentions", "output_hidden_states",
    "output_router_logits",
    "past_key_value", "past_key_values", "position_embeddings", "position_ids", "sliding_window", "target_dtype",
    "training", "use_cache", "return_dict",
}  # fmt: skip


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    lookahead_batch: PackedBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for Transformers' ``AttentionInterface``.

    Args:
        module: the attention layer; its ``layer_idx`` names the layer.
        query: ``[1, heads, sum T, dim]``.
        key, value: unused: the step's are in the stores already.
        attention_mask: unused: visibility follows from the trees.
        scaling: factor on the products; None is ``dim ** -0.5``.
        dropout: unused: models are in evaluation mode.
        lookahead_batch: the pass.
        kwargs: whatever else the model hands over; what would change the result raises.

    Returns:
        ``[1, sum T, heads, dim]``, and None for the weights.
    """
    if lookahead_batch is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not hand its keyword arguments to attention")
    for name, given in kwargs.items():
        if given is not None and name not in _IRRELEVANT:
            raise UnsupportedModelError(
                f"{type(module).__name__} uses {name!r}, which packed attention does not implement"
            )
    layer = module.layer_idx
    assert isinstance(layer, int)
    reach = lookahead_batch.reach[layer]
    outputs = [
        _attend(query[:, :, segment.begin : segment.end], segment, layer, reach, scaling)
        for segment in lookahead_batch.segments
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output.transpose(1, 2).contiguous(), None


def _attend(query: Tensor, segment: Segment, layer: int, reach: Reach, scaling: float | None) -> Tensor:
    """One session's attention: ``[1, heads, T, dim]`` to the same."""
    keys, values = segment.store.read(layer, segment.kv_length)
    group = query.shape[1] // keys.shape[1]
    if segment.is_causal and reach == FULL and len(segment.tree) > 1:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=group > 1)
    # The heads that share keys are further rows: one product in place of several, or of copies of the keys.
    rows = query.reshape(1, keys.shape[1], group * query.shape[2], query.shape[3])
    bias = segment.bias(reach, query, group)
    output = F.scaled_dot_product_attention(rows, keys, values, attn_mask=bias, scale=scaling)
    return output.reshape(*query.shape[:3], values.shape[3])
