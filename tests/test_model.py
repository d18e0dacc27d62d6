"""Which models are taken, which are refused, and that none is left changed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import pytest
import torch
import transformers as hf

import lookahead_decoding
from lookahead_decoding import ConfigError, Engine, UnsupportedModelError, generation
from lookahead_decoding.model import ModelRunner
from lookahead_decoding.view import view_of
from zoo import CONFIGS, VOCAB, tiny

PROMPT = torch.tensor([[5, 6, 7, 8]])


def test_recurrent_layers_are_refused_by_their_type() -> None:
    config = hf.Qwen3NextConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCAB, head_dim=16, layer_types=["linear_attention", "full_attention"], num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        lookahead_decoding.generate(model, PROMPT)


def test_a_model_with_silently_wrong_logits_is_refused_by_the_probe() -> None:
    # GPT-Neo builds its causal mask from the order of the tokens in the pass.
    config = hf.GPTNeoConfig(
        hidden_size=64, num_layers=2, num_heads=4, vocab_size=VOCAB, max_position_embeddings=128,
        attention_types=[[["global", "local"], 1]], window_size=8, intermediate_size=96, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match=r"cannot be decoded in parallel .* standard deviations"):
        ModelRunner(model)


def test_an_encoder_decoder_is_refused() -> None:
    config = hf.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=VOCAB)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        ModelRunner(hf.T5ForConditionalGeneration(config))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention is auto, packed or masked; got 'flash'"):
        Engine(tiny("llama"), attention="flash")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_models_own_attention_is_restored(implementation: str) -> None:
    model = tiny("llama")
    model.set_attn_implementation(implementation)
    expected = model(PROMPT).logits
    lookahead_decoding.generate(model, PROMPT, max_new_tokens=5)
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(PROMPT).logits, expected)


def test_attention_is_restored_when_a_pass_fails() -> None:
    model = tiny("llama")
    engine = Engine(model)
    before = model.config._attn_implementation

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    handle = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.generate([5, 6, 7])
    handle.remove()
    assert model.config._attn_implementation == before
    assert engine.generate([5, 6, 7], max_new_tokens=3, temperature=0).token_ids


def test_a_training_model_is_probed_in_evaluation_mode_and_put_back() -> None:
    model = tiny("gpt2", attn_pdrop=0.5, resid_pdrop=0.5).train()
    ModelRunner(model)
    assert model.training


def test_the_probe_runs_once_per_model() -> None:
    model = tiny("llama")
    ModelRunner(model)
    model.register_forward_hook(lambda *_: pytest.fail("probed again"))
    ModelRunner(model)


def test_passes_in_other_threads_are_not_disturbed() -> None:
    model = tiny("llama")
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    expected = model.generate(PROMPT, **options)
    found: list[torch.Tensor] = []

    def run(generate: Callable[..., torch.Tensor]) -> None:
        for _ in range(3):
            found.append(generate(PROMPT, **options))

    ours = functools.partial(lookahead_decoding.generate, model)
    threads = [threading.Thread(target=run, args=(generate,)) for generate in (ours, model.generate) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert all(torch.equal(ids, expected) for ids in found)


def test_a_view_shares_weights_and_hooks_and_leaves_the_model_alone() -> None:
    model = tiny("gemma3")
    view = view_of(model, "eager")
    own, shared = dict(view.named_parameters()), dict(model.named_parameters())
    assert own.keys() == shared.keys()
    assert all(own[name] is shared[name] for name in own)
    assert not set(view.modules()) & set(model.modules())
    assert {m.config._attn_implementation for m in view.modules() if hasattr(m, "config")} == {"eager"}
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"sdpa"}
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    torch.testing.assert_close(view(PROMPT).logits, model(PROMPT).logits)
    calls: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    view(PROMPT)
    assert calls == [1]


def test_modules_with_hooks_of_accelerate_run_in_the_view() -> None:
    hooks = pytest.importorskip("accelerate.hooks", reason="the extra gguf is not installed")
    model = tiny("llama")
    expected = model.generate(PROMPT, max_new_tokens=10, do_sample=False)
    hooks.add_hook_to_module(model.model.layers[1].self_attn, hooks.ModelHook())
    hooks.add_hook_to_module(model.model.layers[0], hooks.ModelHook())
    assert ModelRunner(model, "packed").attention == "packed"
    assert torch.equal(lookahead_decoding.generate(model, PROMPT, max_new_tokens=10, do_sample=False), expected)


def test_dynamic_frequencies_of_the_model_are_not_moved() -> None:
    model = tiny("llama-dynamic-rope")
    expected = model(PROMPT).logits
    Engine(model).generate(list(range(3, 90)), max_new_tokens=10, temperature=0)
    assert torch.equal(model(PROMPT).logits, expected)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_lookahead_gives_the_tokens_of_generate(name: str) -> None:
    if "rope" in name.partition("-")[2]:
        pytest.skip("their switches have a test of their own")
    model = tiny(name)
    prompt = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]])
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
        torch.manual_seed(0)
        expected = model.generate(prompt, max_new_tokens=24, **options)
        torch.manual_seed(0)
        found = lookahead_decoding.generate(model, prompt, max_new_tokens=24, **options)
        assert torch.equal(found, expected)


def test_step_times_are_kept_for_the_dtype_and_the_threads_they_were_measured_with() -> None:
    model = tiny("llama")
    prompt = torch.tensor([[5, 6, 7, 8]])
    lookahead_decoding.generate(model, prompt, max_new_tokens=8)
    (first,) = generation._costs[model].values()
    lookahead_decoding.generate(model, prompt, max_new_tokens=8)
    assert list(generation._costs[model].values()) == [first]
    lookahead_decoding.generate(model.double(), prompt, max_new_tokens=8)
    assert len(generation._costs[model]) == 2
