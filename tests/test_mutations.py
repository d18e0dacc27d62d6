"""The exactness grid can fail: each planted fault changes its tokens, or the random state they leave."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import lookahead_decoding
from lookahead_decoding import attention, cache, sampling, tree
from lookahead_decoding.config import BUILTIN_SOURCES
from test_exactness import looping
from zoo import VOCAB, tiny

ALL_FILLED = {"sources": list(BUILTIN_SOURCES), "window": 3, "adaptive": False}
ENDS = [2, *range(10, VOCAB, 20)]
"""Many, so that sampled texts end before they are as long as they may be."""
CONFIGS = ("default", "paper", "jacobi", "paper-reference", ALL_FILLED)


def something_differs() -> bool:
    """Whether a small grid finds a token, or a random state afterwards, that plain decoding does not give."""
    model = tiny("llama", initializer_range=0.1)
    for seed in range(3):
        prompt = torch.tensor([looping(12, seed)])
        for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.5, "eos_token_id": ENDS}):
            torch.manual_seed(seed)
            expected = model.generate(prompt, max_new_tokens=40, **options)
            state = torch.get_rng_state()
            for config in CONFIGS:
                torch.manual_seed(seed)
                found = lookahead_decoding.generate(model, prompt, lookahead=config, max_new_tokens=40, **options)
                if not torch.equal(found, expected) or not torch.equal(torch.get_rng_state(), state):
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


def _noise_ahead_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling.NoiseStream, "rewind", lambda self, position: None)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "mask": _siblings_visible,
    "positions": _positions_by_order,
    "cache path": _wrong_path_kept,
    "accept rule": _any_child_accepted,
    "noise key": _noise_of_the_step,
    "noise ahead": _noise_ahead_is_spent,
}


def test_without_a_fault_nothing_differs() -> None:
    assert not something_differs()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The probe would refuse a model with a wrong mask; it is not what is tested here.
    monkeypatch.setattr("lookahead_decoding.probe._TOLERANCE", {torch.float32: float("inf")})
    FAULTS[fault](monkeypatch)
    assert something_differs()


@pytest.mark.parametrize("fault", ["mask", "positions", "cache path"])
def test_the_probe_refuses_a_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    with pytest.raises(lookahead_decoding.UnsupportedModelError, match="off by"):
        lookahead_decoding.generate(tiny("llama"), torch.tensor([[5, 6, 7]]), max_new_tokens=2)
