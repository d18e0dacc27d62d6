"""The one module that knows how Transformers' models run a forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, GenerationMixin, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from lookahead_decoding.attention import (
    BATCH_ARGUMENT,
    FULL,
    PACKED,
    PackedBatch,
    Reach,
    Segment,
    mask_for_model,
    packed_attention,
)
from lookahead_decoding.cache import CacheWrite, KVStore, StepCache
from lookahead_decoding.errors import ConfigError, UnsupportedModelError
from lookahead_decoding.packing import pack_linears, should_pack
from lookahead_decoding.plan import StepPlan
from lookahead_decoding.probe import ATTENTION_BACKENDS, probe
from lookahead_decoding.view import input_device, view_of

AttentionInterface.register(PACKED, packed_attention)

_REACH_BY_LAYER_TYPE = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "dummy": "full",  # shares another layer's keys and values, or has no attention at all
}


@dataclass(frozen=True)
class RopeSwitch:
    """Rotary embeddings whose frequencies depend on the largest position in the pass.

    Attributes:
        position: the first position at which they change.
        every_position: they change again with every further one (``dynamic``); else once (``longrope``).
        recomputes: plain decoding computes the whole text anew when it crosses the position (Phi-3 and its
            kin, in their ``prepare_inputs_for_generation``).
    """

    position: int
    every_position: bool
    recomputes: bool = False


@dataclass(frozen=True)
class ModelView:
    """A model as one attention backend runs it.

    Attributes:
        model: a view of the user's model.
        attention: the backend's name.
        implementation: what the view's config calls it.
    """

    model: PreTrainedModel
    attention: str
    implementation: str

    def forget_rope_history(self) -> None:
        """Let ``dynamic`` frequencies follow the next pass alone, not the longest text seen before it."""
        for module in self.model.modules():
            if hasattr(module, "max_seq_len_cached"):
                module.inv_freq = module.original_inv_freq
                module.max_seq_len_cached = module.original_max_seq_len


class ModelRunner:
    """A causal LM as the engine sees it: token trees in, logits out.

    Args:
        model: a Transformers causal LM in evaluation mode; it is not changed.
        attention: ``auto``, ``packed`` or ``masked``.
        pack_weights: multiply by packed copies of the weights on a CPU; None is where it pays and fits.

    Raises:
        UnsupportedModelError: a layer type that keeps no attention cache, or wrong logits in the probe.
    """

    def __init__(self, model: PreTrainedModel, attention: str = "auto", *, pack_weights: bool | None = False) -> None:
        if attention not in ("auto", *ATTENTION_BACKENDS):
            raise ConfigError(f"attention is auto, {' or '.join(ATTENTION_BACKENDS)}; got {attention!r}")
        self.model = model
        self.text_config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = self.text_config.vocab_size
        layers = _layers(model)
        self.layer_types = tuple(layer_type for layer_type, _ in layers)
        self.reaches = tuple(reach for _, reach in layers)
        self._reach_by_type = dict(layers)
        parameters = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self.rope_switch = _rope_switch(model)
        self.spec, self.attention = probe(self, attention)
        self._view = self.view(self.attention)
        self.packs_weights = should_pack(model) if pack_weights is None else pack_weights
        if self.packs_weights:
            pack_linears(self._view.model)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return input_device(self.model)

    @property
    def max_position(self) -> int | None:
        """Number of positions the model was made for; None where it has no end: ``dynamic`` frequencies follow."""
        if self.rope_switch is not None and self.rope_switch.every_position:
            return None
        length = getattr(self.text_config, "max_position_embeddings", None)
        return int(length) if length else None

    @property
    def has_position_table(self) -> bool:
        """Whether positions come from a table that ends, so that a pass beyond it fails."""
        return not getattr(self.text_config, "rope_parameters", None) and self.max_position is not None

    def pass_group(self, last_position: int) -> int:
        """Sessions of different groups cannot share a pass: their rotary frequencies differ.

        Args:
            last_position: of a session's part of the pass.
        """
        switch = self.rope_switch
        if switch is None or last_position < switch.position:
            return -1
        return last_position if switch.every_position else switch.position

    def can_reuse(self, length: int) -> bool:
        """Whether a text of so many tokens has the same keys and values whatever it is the beginning of."""
        return self.rope_switch is None or length <= self.rope_switch.position

    def must_recompute(self, length: int, cached: int) -> bool:
        """Whether a text of ``length`` tokens, ``cached`` of them in the KV cache, is to be computed anew."""
        switch = self.rope_switch
        return switch is not None and switch.recomputes and cached <= switch.position < length

    def max_depth(self, position: int) -> int | None:
        """How far below the token at ``position`` guesses may lie; None is no bound.

        They stay inside the position table, and before a rotary switch that plain decoding has not crossed.
        """
        bounds = []
        if self.has_position_table:
            assert self.max_position is not None
            bounds.append(self.max_position - 1 - position)
        if (switch := self.rope_switch) is not None:
            if position < switch.position:
                bounds.append(switch.position - 1 - position)
            elif switch.every_position:
                bounds.append(0)
        return max(0, min(bounds)) if bounds else None

    def view(self, attention: str) -> ModelView:
        """The model as a backend runs it."""
        implementation = PACKED if attention == "packed" else self._masked_attention()
        return ModelView(view_of(self.model, implementation), attention, implementation)

    def forward(self, steps: Sequence[tuple[StepPlan, KVStore, Tensor | None]]) -> list[Tensor]:
        """One forward pass over all sessions.

        Args:
            steps: each session's plan and store, and embeddings ``[k, hidden]`` that stand in for those of its first
                k nodes, if any. The nodes' keys and values are written behind the store's length, which stays; the
                caller keeps what it wants.

        Returns:
            Per session the logits ``[len(plan.reads), V]`` of the nodes it reads.
        """
        segments, rows, begin = [], [], 0
        for plan, store, embeddings in steps:
            store.reserve(store.length + len(plan.tree))
            segments.append(Segment(plan.tree, store, begin, embeddings))
            rows += [begin + node for node in plan.reads]
            begin += len(plan.tree)
        logits = self.run(self._view, segments, rows)
        return list(torch.split(logits, [len(plan.reads) for plan, _, _ in steps]))

    def run(self, view: ModelView, segments: Sequence[Segment], rows: Sequence[int]) -> Tensor:
        """Logits ``[len(rows), V]`` of the given rows of a packed pass."""
        device = self.device
        inputs: dict[str, Tensor] = {
            "input_ids": torch.tensor([[token for s in segments for token in s.tree.tokens]], device=device)
        }
        if any(s.embeddings is not None for s in segments):
            inputs = {"inputs_embeds": self._embedded(inputs["input_ids"], segments)}
        positions = torch.tensor([[position for s in segments for position in s.positions]], device=device)
        if self.rope_switch is not None and self.rope_switch.every_position:
            view.forget_rope_history()
        writes = [CacheWrite(s.store, s.begin, s.end) for s in segments]
        arguments: dict[str, Any] = {
            self.cache_argument: StepCache(writes, len(self.reaches), gather=view.attention == "masked"),
            "use_cache": True,
            "return_dict": True,
        }
        # A pass nobody reads still has to name a row.
        read = torch.tensor(rows or [0], device=device)
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = read
        if view.attention == "packed":
            arguments[BATCH_ARGUMENT] = PackedBatch(segments, self.reaches)
            arguments["attention_mask"] = None
        else:
            arguments["attention_mask"] = self._masks(segments, additive=view.implementation == "eager")
        logits = view.model(**inputs, position_ids=positions, **arguments).logits[0]
        assert isinstance(logits, Tensor)
        if not self._takes_logits_to_keep:
            logits = logits[read.to(logits.device)]
        return logits[: len(rows)]

    def _embedded(self, ids: Tensor, segments: Sequence[Segment]) -> Tensor:
        """``[1, sum T, hidden]``: the given embeddings, and the model's own of every other token."""
        embedded: Tensor = self.model.get_input_embeddings()(ids).clone()
        for segment in segments:
            if segment.embeddings is not None:
                given = segment.embeddings[: len(segment.tree)]
                embedded[0, segment.begin : segment.begin + len(given)] = given
        return embedded

    def _masks(self, segments: Sequence[Segment], *, additive: bool) -> Tensor | dict[str, Tensor]:
        like = torch.empty(0, dtype=self.model.dtype, device=self.device)
        masks = {
            layer_type: mask_for_model(segments, reach, like, additive=additive)
            for layer_type, reach in self._reach_by_type.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _masked_attention(self) -> str:
        """The model's own attention, or the nearest that takes a 4-D mask."""
        implementation = self.text_config._attn_implementation
        if implementation in ("eager", "sdpa"):
            return str(implementation)
        return "sdpa" if getattr(self.model, "_supports_sdpa", False) else "eager"


def _layers(model: PreTrainedModel) -> list[tuple[str, Reach]]:
    """Each layer's type and reach, as its config has it."""
    config = model.config.get_text_config(decoder=True)
    types, arguments = get_layer_types_and_kwargs(config)
    if isinstance(arguments, dict):  # one for all layers, in older versions
        arguments = [arguments] * len(types)
    layers = []
    for layer_type, argument in zip(types, arguments, strict=True):
        kind = _REACH_BY_LAYER_TYPE.get(layer_type)
        if kind is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has layers of type {layer_type!r}, which keep no attention cache that a "
                "token tree could be verified on; use the model's own generate()"
            )
        size = argument.get("sliding_window")
        layers.append((layer_type, Reach(kind, size) if kind != "full" and size else FULL))
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder; lookahead decodes decoder-only models"
        )
    return layers


def _rope_switch(model: PreTrainedModel) -> RopeSwitch | None:
    config = model.config.get_text_config(decoder=True)
    recomputes = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    switches = []
    for rope in by_layer_type:
        if "dynamic" in rope.get("rope_type", ""):
            switches.append(RopeSwitch(config.max_position_embeddings, every_position=True))
        elif rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            switches.append(RopeSwitch(original, every_position=False, recomputes=recomputes))
    return min(switches, key=lambda switch: switch.position) if switches else None
