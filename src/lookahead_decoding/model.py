"""The one module that knows how Transformers' models run a forward pass."""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, GenerationMixin, PreTrainedModel
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
from lookahead_decoding.cache import CacheSpec, CacheWrite, KVStore, StepCache
from lookahead_decoding.errors import ConfigError, UnsupportedModelError
from lookahead_decoding.plan import StepPlan
from lookahead_decoding.tree import TokenTree

AttentionInterface.register(PACKED, packed_attention)

ATTENTION_BACKENDS = ("packed", "masked")
"""Fastest first; ``auto`` takes the first whose probe passes."""

_REACH_BY_LAYER_TYPE = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "dummy": "full",  # shares another layer's keys and values, or has no attention at all
}

# The probe's bound on a logit's error, in standard deviations of the logits. Rounding stays orders of
# magnitude below it, a wrong mask or position is far above it.
_PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_PROBE_TOLERANCE_HALF = 0.3


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


class ModelRunner:
    """A causal LM as the engine sees it: token trees in, logits out.

    Args:
        model: a Transformers causal LM in evaluation mode; it is not changed.
        attention: ``auto``, ``packed`` or ``masked``.

    Raises:
        UnsupportedModelError: a layer type that keeps no attention cache, or wrong logits in the probe.
    """

    def __init__(self, model: PreTrainedModel, attention: str = "auto") -> None:
        if attention not in ("auto", *ATTENTION_BACKENDS):
            raise ConfigError(f"attention is auto, {' or '.join(ATTENTION_BACKENDS)}; got {attention!r}")
        self.model = model
        self.text_config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = self.text_config.vocab_size
        layer_types = _layer_types(model)
        self._reach = tuple(reach for _, reach in layer_types)
        self._reach_by_type = dict(layer_types)
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._configs = _attention_configs(model)
        self.rope_switch = _rope_switch(model)
        self._dynamic_ropes = [m for m in model.modules() if hasattr(m, "max_seq_len_cached")]
        self.spec, self.attention = self._probe(attention)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        device = self.model.get_input_embeddings().weight.device
        assert isinstance(device, torch.device)
        return device

    @property
    def max_position(self) -> int | None:
        """Number of positions the model was made for; None where its config does not say."""
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

    def forward(self, steps: Sequence[tuple[StepPlan, KVStore]]) -> list[Tensor]:
        """One forward pass over all sessions.

        Args:
            steps: each session's plan and store. The nodes' keys and values are written behind the store's
                length, which stays; the caller keeps what it wants.

        Returns:
            Per session the logits ``[len(plan.reads), V]`` of the nodes it reads.
        """
        segments, rows, begin = [], [], 0
        for plan, store in steps:
            store.reserve(store.length + len(plan.tree))
            segments.append(Segment(plan.tree, store, begin))
            rows += [begin + node for node in plan.reads]
            begin += len(plan.tree)
        logits = self._forward(segments, rows, self.attention)
        return list(logits.split([len(plan.reads) for plan, _ in steps]))

    def _forward(self, segments: Sequence[Segment], rows: Sequence[int], attention: str) -> Tensor:
        """Logits ``[len(rows), V]`` of the packed row's given rows."""
        device = self.device
        ids = torch.tensor([[token for s in segments for token in s.tree.tokens]], device=device)
        positions = torch.tensor([[position for s in segments for position in s.positions]], device=device)
        self._forget_rope_history()
        writes = [CacheWrite(s.store, s.begin, s.end) for s in segments]
        arguments: dict[str, Any] = {
            self._cache_argument: StepCache(writes, len(self._reach), gather=attention != "packed"),
            "use_cache": True,
            "return_dict": True,
        }
        # A pass nobody reads still has to name a row.
        read = torch.tensor(rows or [0], device=device)
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = read
        implementation = PACKED if attention == "packed" else self._model_attention()
        if attention == "packed":
            arguments[BATCH_ARGUMENT] = PackedBatch(segments, self._reach)
            arguments["attention_mask"] = None
        else:
            arguments["attention_mask"] = self._masks(segments, additive=implementation == "eager")
        with self._attend_with(implementation):
            logits = self.model(ids, position_ids=positions, **arguments).logits[0]
        assert isinstance(logits, Tensor)
        if not self._takes_logits_to_keep:
            logits = logits[read.to(logits.device)]
        return logits[: len(rows)]

    def _forget_rope_history(self) -> None:
        """Let ``dynamic`` frequencies follow this pass alone, not the longest text seen before it."""
        if self.rope_switch is not None and self.rope_switch.every_position:
            for rope in self._dynamic_ropes:
                rope.inv_freq = rope.original_inv_freq
                rope.max_seq_len_cached = rope.original_max_seq_len

    def _masks(self, segments: Sequence[Segment], *, additive: bool) -> Tensor | dict[str, Tensor]:
        like = torch.empty(0, dtype=self.model.dtype, device=self.device)
        masks = {
            layer_type: mask_for_model(segments, reach, like, additive=additive)
            for layer_type, reach in self._reach_by_type.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _model_attention(self) -> str:
        """The model's own attention, or the nearest that takes a 4-D mask."""
        implementation = self.text_config._attn_implementation
        if implementation in ("eager", "sdpa"):
            return str(implementation)
        return "sdpa" if getattr(self.model, "_supports_sdpa", False) else "eager"

    @contextmanager
    def _attend_with(self, implementation: str) -> Iterator[None]:
        """Set the attention implementation for one pass; other threads' passes of this model wait."""
        with _lock_of(self.model):
            before = [config._attn_implementation for config in self._configs]
            try:
                for config in self._configs:
                    config._attn_implementation_internal = implementation
                yield
            finally:
                for config, name in zip(self._configs, before, strict=True):
                    config._attn_implementation_internal = name

    def _probe(self, attention: str) -> tuple[CacheSpec, str]:
        """The cache's shapes, and the first backend that decodes a small tree as plain passes do."""
        known = _probed.setdefault(self.model, {})
        if attention not in known:
            known[attention] = self._run_probe(attention)
        return known[attention]

    def _run_probe(self, attention: str) -> tuple[CacheSpec, str]:
        training = self.model.training
        reasons = []
        with torch.inference_mode():
            self.model.eval()
            try:
                probe = _Probe(self)
                for backend in ATTENTION_BACKENDS if attention == "auto" else (attention,):
                    try:
                        error = probe.error(backend)
                    except (UnsupportedModelError, RuntimeError, TypeError, ValueError, IndexError, KeyError) as failure:
                        reasons.append(f"{backend}: {_first_line(failure)}")
                        continue
                    if error <= probe.tolerance:
                        return probe.spec, backend
                    reasons.append(f"{backend}: logits of a small token tree are off by {error:.2g} standard deviations")
            finally:
                if training:
                    self.model.train()
        raise UnsupportedModelError(
            f"{type(self.model).__name__} cannot be decoded in parallel ({'; '.join(reasons)}); "
            "use the model's own generate()"
        )


class _Probe:
    """A six-node tree behind a short prefix, and what plain forward passes say about it."""

    PARENTS = (-1, 0, 0, 1, 2, 2)
    KEPT = (0, 2, 5)

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        rng = random.Random(0)
        length = 7
        if runner.rope_switch is not None:
            length = max(1, min(length, runner.rope_switch.position - 5))
        self._prefix, self._nodes, (self._last,) = (
            [rng.randrange(runner.vocab_size) for _ in range(count)] for count in (length, len(self.PARENTS), 1)
        )
        self._tree = TokenTree()
        for parent, token in zip(self.PARENTS, self._nodes, strict=True):
            self._tree.add(parent, token)
        cache = DynamicCache(config=runner.model.config)
        leaves = set(range(len(self._tree))) - set(self._tree.parents)
        self._expected: dict[int, Tensor] = {}
        for leaf in sorted(leaves):
            path = self._tree.path(leaf)
            logits = self._plain([*self._prefix, *self._tree.path_tokens(leaf)])
            self._expected.update(zip(path, logits[len(self._prefix) :], strict=True))
        kept = [self._nodes[node] for node in self.KEPT]
        self._expected_last = self._plain([*self._prefix, *kept, self._last], cache)[-1]
        self.spec = CacheSpec.of(cache)
        if len(self._tree) != len(self.PARENTS):
            raise AssertionError("the probe's siblings must differ")

    @property
    def tolerance(self) -> float:
        return _PROBE_TOLERANCE.get(self._runner.model.dtype, _PROBE_TOLERANCE_HALF)

    def _plain(self, ids: Sequence[int], cache: DynamicCache | None = None) -> Tensor:
        runner = self._runner
        arguments = {runner._cache_argument: cache, "use_cache": True} if cache is not None else {"use_cache": False}
        with runner._attend_with(runner._model_attention()):
            logits = runner.model(torch.tensor([list(ids)], device=runner.device), **arguments).logits[0]
        return logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)

    def error(self, backend: str) -> float:
        """The largest error of a logit, in standard deviations of the expected logits."""
        store = KVStore(self.spec)

        def logits(tree: TokenTree, keep: Sequence[int]) -> Tensor:
            store.reserve(store.length + len(tree))
            rows = self._runner._forward([Segment(tree, store, 0)], range(len(tree)), backend)
            store.keep(keep)
            return rows.to(self._expected_last.dtype)

        logits(TokenTree.chain(self._prefix), range(len(self._prefix)))
        of_tree = logits(self._tree, self.KEPT)
        of_last = logits(TokenTree.chain([self._last]), [0])[0]
        found = torch.stack([*(of_tree[node] for node in self._expected), of_last])
        expected = torch.stack([*self._expected.values(), self._expected_last])
        error = (found - expected).abs().max() / expected.std()
        return float(error.nan_to_num(nan=torch.inf))


_probed: WeakKeyDictionary[PreTrainedModel, dict[str, tuple[CacheSpec, str]]] = WeakKeyDictionary()
_locks: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()


def _lock_of(model: PreTrainedModel) -> threading.RLock:
    return _locks.setdefault(model, threading.RLock())


def _layer_types(model: PreTrainedModel) -> list[tuple[str, Reach]]:
    """Each layer's type and reach, as its config has it."""
    config = model.config.get_text_config(decoder=True)
    types, arguments = get_layer_types_and_kwargs(config)
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
        raise UnsupportedModelError(f"{type(model).__name__} is an encoder-decoder; lookahead decodes decoder-only models")
    return layers


def _attention_configs(model: PreTrainedModel) -> list[Any]:
    """The config objects that the model's layers read their attention implementation from."""
    configs = {id(config): config for config in (model.config, model.config.get_text_config(decoder=True))}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    return list(configs.values())


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


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
