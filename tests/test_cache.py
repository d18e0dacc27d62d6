"""The KV store: a path of a tree is kept, the rest is gone, and memory is refused before it is taken."""

from __future__ import annotations

import random

import pytest
import torch

import lookahead_decoding
from lookahead_decoding import CapacityError, Engine, cache
from lookahead_decoding.cache import CacheSpec, KVStore, StateShape
from zoo import tiny

CPU = torch.device("cpu")


def spec(*, mixed: bool = False) -> CacheSpec:
    """Three layers, the middle one without keys and values of its own."""
    keys = StateShape(2, 4, torch.float32, CPU)
    values = StateShape(2, 6 if mixed else 4, torch.float32, CPU)
    return CacheSpec(((keys, values), None, (keys, values)))


@pytest.mark.parametrize("mixed", [False, True])
def test_a_store_holds_what_was_kept_and_nothing_else(mixed: bool) -> None:
    rng = random.Random(0)
    store = KVStore(spec(mixed=mixed))
    kept: dict[int, list[torch.Tensor]] = {0: [], 2: []}
    for _ in range(60):
        nodes = rng.randrange(1, 40)
        path = sorted(rng.sample(range(nodes), rng.randrange(1, nodes + 1)))
        store.reserve(store.length + nodes)
        for layer, states in kept.items():
            keys, values = torch.randn(2, nodes, 4), torch.randn(2, nodes, 6 if mixed else 4)
            store.write(layer, keys, values)
            states.append(torch.cat([keys, values], dim=2)[:, path])
        store.keep(path)
    for layer, states in kept.items():
        expected = torch.cat(states, dim=1)
        assert store.length == expected.shape[1]
        assert torch.equal(torch.cat(store.read(layer, store.length), dim=3)[0], expected)
    with pytest.raises(IndexError, match="layer 1 keeps no keys"):
        store.read(1, 1)


def test_growing_keeps_the_text_and_stays_within_half_of_what_is_needed() -> None:
    store = KVStore(spec())
    store.reserve(1)
    store.write(0, torch.ones(2, 1, 4), torch.ones(2, 1, 4))
    store.keep([0])
    for length in range(2, 5000, 37):
        store.reserve(length)
        assert length <= store.capacity <= max(256, 1.5 * length + 512)
    assert bool((store.read(0, 1)[0] == 1).all())
    assert store.nbytes == store.capacity * store.spec.bytes_per_token


def test_unwritten_room_is_zero_so_that_a_masked_nan_cannot_appear() -> None:
    store = KVStore(spec())
    store.reserve(300)
    assert not store.read(2, 300)[0].any()


def test_a_store_is_truncated_but_never_extended() -> None:
    store = KVStore(spec())
    store.reserve(4)
    store.keep(range(4))
    store.truncate(2)
    assert store.length == 2
    with pytest.raises(ValueError, match="cannot truncate 2 tokens to 3"):
        store.truncate(3)


def test_a_cache_that_does_not_fit_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    engine = Engine(model)
    needed = engine.runner.spec.bytes_per_token * 110
    monkeypatch.setattr(cache, "free_memory", lambda _: needed - 1)
    monkeypatch.setattr(KVStore, "reserve", lambda *_: pytest.fail("allocated"))
    with pytest.raises(CapacityError, match=r"a KV cache for 110 tokens takes .* MiB and cpu has .* MiB free"):
        engine.generate(list(range(3, 13)), max_new_tokens=100)


def test_free_memory_of_this_machine_is_known() -> None:
    free = cache.free_memory(CPU)
    assert free is not None
    assert 2**20 < free < 2**50


def test_finished_caches_are_kept_within_their_bound() -> None:
    engine = Engine(tiny("llama"))
    one = engine.generate(list(range(3, 40)), max_new_tokens=4, temperature=0).kv_bytes
    engine = Engine(tiny("llama"), retained_bytes=2 * one)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 200) for _ in range(37)] for _ in range(5)]
    for prompt in prompts:
        engine.generate(prompt, max_new_tokens=4, temperature=0)
    # The two most recent are there, the older ones are not.
    assert engine.generate(prompts[0], max_new_tokens=4, temperature=0).cached_tokens <= 1
    assert engine.generate(prompts[4], max_new_tokens=4, temperature=0).cached_tokens == 36


def test_models_with_keys_and_values_of_different_width_decode_exactly() -> None:
    model = tiny("deepseek-v3")
    prompt = torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
    expected = model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(lookahead_decoding.generate(model, prompt, max_new_tokens=20, do_sample=False), expected)
