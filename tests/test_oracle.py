"""The model seam, tested at the logits: every node of every tree against a plain forward of its root path."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead_decoding.cache import KVStore
from lookahead_decoding.errors import UnsupportedModelError
from lookahead_decoding.model import ModelRunner
from lookahead_decoding.plan import StepPlan
from lookahead_decoding.probe import ATTENTION_BACKENDS
from lookahead_decoding.tree import ROOT, TokenTree
from zoo import CONFIGS, MIXTURES, VOCAB, tiny

# Which backends an architecture has; the others must be refused by the probe, never wrong.
MASKED_ONLY = {"deepseek-v3", "falcon", "gemma2", "gpt-oss", "stablelm"}
NODES = 14


def random_tree(rng: random.Random, nodes: int) -> TokenTree:
    tree = TokenTree()
    tree.add(ROOT, rng.randrange(3, VOCAB))
    while len(tree) < nodes:
        tree.add(rng.randrange(max(0, len(tree) - 4), len(tree)), rng.randrange(3, VOCAB))
    return tree


def deepest_path(tree: TokenTree) -> list[int]:
    return tree.path(max(range(len(tree)), key=tree.depths.__getitem__))


def plan(tree: TokenTree) -> StepPlan:
    return StepPlan(tree, 0, tuple(range(len(tree))))


def plain_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0, -1]


def largest_error(model: PreTrainedModel, backend: str, plant: Callable[[ModelRunner], None] | None = None) -> float:
    """Three ragged sessions, three steps, one of them with a session left out: the worst logit."""
    rng = random.Random(1)
    runner = ModelRunner(model, backend)
    if plant is not None:
        plant(runner)
    error = 0.0
    texts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (21, 5, 33)]
    stores = [KVStore(runner.spec) for _ in texts]
    with torch.inference_mode():
        for text, store in zip(texts, stores, strict=True):
            runner.forward([(plan(TokenTree.chain(text)), store, None)])
            store.keep(range(len(text)))
        for members in ((0, 1, 2), (0, 2), (0, 1, 2)):
            trees = {i: random_tree(rng, NODES) for i in members}
            logits = runner.forward([(plan(trees[i]), stores[i], None) for i in members])
            for i, found in zip(members, logits, strict=True):
                for node in range(NODES):
                    expected = plain_logits(model, texts[i] + trees[i].path_tokens(node))
                    error = max(error, float((found[node] - expected).abs().max()))
                path = deepest_path(trees[i])
                stores[i].keep(path)
                texts[i] = texts[i] + [trees[i].tokens[node] for node in path]
    return error


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_nodes_logits_are_those_of_its_root_path(name: str, backend: str) -> None:
    # At the default initializer_range: logits of order one, so that 1e-5 is an absolute bound.
    model = tiny(name, initializer_range=0.02)
    if backend == "packed" and name in MASKED_ONLY:
        with pytest.raises(UnsupportedModelError):
            ModelRunner(model, backend)
        assert ModelRunner(model).attention == "masked"
        return
    assert largest_error(model, backend) <= 1e-5


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - MIXTURES - MASKED_ONLY))
def test_in_float64_the_error_vanishes(name: str, backend: str) -> None:
    model = tiny(name, initializer_range=0.02, dtype=torch.float64)
    assert largest_error(model, backend) <= 1e-9
