"""Whether a model decodes a token tree as it decodes its paths: tried once on every model, whatever its name.

Some models take a tree without an error and compute something else (GPT-Neo and MPT, say, build their masks from
the order of the tokens), so a list of supported models could only be documentation. The probe is the safety net.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lookahead_decoding.attention import Segment
from lookahead_decoding.cache import CacheSpec, KVStore
from lookahead_decoding.errors import UnsupportedModelError
from lookahead_decoding.tree import TokenTree

if TYPE_CHECKING:
    from lookahead_decoding.model import ModelRunner

ATTENTION_BACKENDS = ("packed", "masked")
"""Fastest first; ``auto`` takes the first that passes."""

# Bound on a logit's error, in standard deviations of the logits. Rounding stays orders of magnitude below it, a
# wrong mask or position is far above it.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_HALF = 0.3

_PARENTS = (-1, 0, 0, 1, 2, 2)
_KEPT = (0, 2, 5)

_Key = tuple[str, torch.dtype, torch.device]
"""The backend that was asked for, and what the model can be moved to."""

_results: WeakKeyDictionary[PreTrainedModel, dict[_Key, tuple[CacheSpec, str]]] = WeakKeyDictionary()


def probe(runner: ModelRunner, attention: str) -> tuple[CacheSpec, str]:
    """The shapes of the model's keys and values, and the first backend that is right.

    Args:
        runner: the model's.
        attention: ``auto``, or the only backend to try.

    Raises:
        UnsupportedModelError: none is; the message says what each did.
    """
    known = _results.setdefault(runner.model, {})
    key = attention, runner.model.dtype, runner.device
    if key not in known:
        known[key] = _run(runner, ATTENTION_BACKENDS if attention == "auto" else (attention,))
    return known[key]


def _run(runner: ModelRunner, backends: Sequence[str]) -> tuple[CacheSpec, str]:
    model = runner.model
    training = model.training
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE_HALF)
    reasons = []
    try:
        model.eval()
        with torch.inference_mode():
            tree = _ProbedTree(runner)
            for backend in backends:
                try:
                    error = tree.error(backend)
                except Exception as failure:  # a model may trip over a tree in any way it likes
                    reasons.append(f"{backend}: {_first_line(failure)}")
                    continue
                if error <= tolerance:
                    return tree.spec, backend
                reasons.append(f"{backend}: logits of a small token tree are off by {error:.2g} standard deviations")
    finally:
        if training:
            model.train()
    raise UnsupportedModelError(
        f"{type(model).__name__} cannot be decoded in parallel ({'; '.join(reasons)}); use the model's own generate()"
    )


class _ProbedTree:
    """Six nodes behind a short prefix, what plain passes say about them, and the shapes those left in a cache."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        switch = runner.rope_switch
        length = 7 if switch is None else max(1, min(7, switch.position - len(_PARENTS)))
        rng = random.Random(0)
        self._prefix = [rng.randrange(runner.vocab_size) for _ in range(length)]
        # Siblings must differ, or they would be one node.
        first, *tokens = rng.sample(range(runner.vocab_size), len(_PARENTS) + 1)
        self._tree = TokenTree()
        for parent, token in zip(_PARENTS, tokens, strict=True):
            self._tree.add(parent, token)
        self._last = first

        self._expected: dict[int, Tensor] = {}
        for leaf in sorted(set(range(len(_PARENTS))) - set(_PARENTS)):
            logits = self._plain([*self._prefix, *self._tree.path_tokens(leaf)])
            self._expected.update(zip(self._tree.path(leaf), logits[length:], strict=True))
        cache = DynamicCache(config=runner.model.config)
        kept = [self._tree.tokens[node] for node in _KEPT]
        self._expected_last = self._plain([*self._prefix, *kept, self._last], cache)[-1]
        self.spec = CacheSpec.of(cache)

    def _plain(self, ids: Sequence[int], cache: DynamicCache | None = None) -> Tensor:
        """Logits ``[n, V]`` of a pass without anything of ours."""
        runner = self._runner
        arguments = {"use_cache": False} if cache is None else {"use_cache": True, runner.cache_argument: cache}
        logits = runner.model(torch.tensor([list(ids)], device=runner.device), **arguments).logits[0]
        assert isinstance(logits, Tensor)
        return _wide(logits)

    def error(self, backend: str) -> float:
        """The largest error of a logit, in standard deviations of the expected ones."""
        store = KVStore(self.spec)
        view = self._runner.view(backend)

        def logits(tree: TokenTree, keep: Sequence[int]) -> Tensor:
            store.reserve(store.length + len(tree))
            rows = self._runner.run(view, [Segment(tree, store, 0)], range(len(tree)))
            store.keep(keep)
            return _wide(rows)

        logits(TokenTree.chain(self._prefix), range(len(self._prefix)))
        of_tree = logits(self._tree, _KEPT)
        of_last = logits(TokenTree.chain([self._last]), [0])[0]
        found = torch.stack([*(of_tree[node] for node in self._expected), of_last])
        expected = torch.stack([*self._expected.values(), self._expected_last])
        error = (found - expected).abs().max() / expected.std()
        return float(error.nan_to_num(nan=torch.inf))


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
