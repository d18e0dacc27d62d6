"""The exactness grid can fail: each planted fault changes its tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import lookahead_decoding
from lookahead_decoding import attention, cache, sampling, tree
from test_exactness import looping
from zoo import tiny

CONFIGS = ("default", "paper", "jacobi", "paper-reference")


def tokens_differ() -> bool:
    """Whether a small grid finds a token that plain decoding does not give."""
    model = tiny("llama", initializer_range=0.1)
    for seed in range(3):
        prompt = torch.tensor([looping(12, seed)])
        for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.5}):
            torch.manual_seed(seed)
            expected = model.generate(prompt, max_new_tokens=40, **options)
            for config in CONFIGS:
                torch.manual_seed(seed)
                found = lookahead_decoding.generate(model, prompt, lookahead=config, max_new_tokens=40, **options)
                if not torch.equal(found, expected):
                    return True
    return False


def _siblings_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "ancestor_mask", lambda tree: np.tri(len(tree), dtype=bool))


def _positions_by_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def positions(segment: attention.Segment) -> list[int]:
        return [segment.store.length + node for node in range(len(segment.tree))]

    monkeypatch.setattr(attention.Segment, "positions", property(positions))


def _wrong_path_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(store: cache.KVStore, nodes: list[int]) -> None:
        store.length += len(nodes)

    monkeypatch.setattr(cache.KVStore, "keep", keep)


def _any_child_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def child(self: tree.TokenTree, node: int, token: int) -> int | None:
        children = self._children[node]
        return children.get(token, next(iter(children.values()), None))

    monkeypatch.setattr(tree.TokenTree, "child", child)


def _noise_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    at = sampling.NoiseStream.at
    monkeypatch.setattr(sampling.NoiseStream, "at", lambda self, position: at(self, position // 2 * 2))


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "mask": _siblings_visible,
    "positions": _positions_by_order,
    "cache path": _wrong_path_kept,
    "accept rule": _any_child_accepted,
    "noise key": _noise_of_the_step,
}


def test_without_a_fault_the_tokens_are_the_same() -> None:
    assert not tokens_differ()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_tokens(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The probe would refuse a model with a wrong mask; it is not what is tested here.
    monkeypatch.setattr("lookahead_decoding.probe._TOLERANCE", {torch.float32: float("inf")})
    FAULTS[fault](monkeypatch)
    assert tokens_differ()


@pytest.mark.parametrize("fault", ["mask", "positions", "cache path"])
def test_the_probe_refuses_a_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    with pytest.raises(lookahead_decoding.UnsupportedModelError, match="off by"):
        lookahead_decoding.generate(tiny("llama"), torch.tensor([[5, 6, 7]]), max_new_tokens=2)
