"""Packed bf16 weights: the same numbers, followed when they change, and the user's model untouched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lookahead_decoding import Engine
from lookahead_decoding.model import ModelRunner
from lookahead_decoding.packing import PackedLinear, pack_linears, should_pack
from zoo import tiny

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this CPU or this build of torch has no bf16 matrix instructions",
)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_packed_layer_computes_what_the_layer_computes(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 40, bias=bias, dtype=torch.bfloat16)
    packed = PackedLinear(linear)
    input = torch.randn(1, rows, 96).bfloat16()
    with torch.inference_mode():
        exact = input.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
        assert packed(input).dtype == torch.bfloat16
        torch.testing.assert_close(packed(input).double(), exact, rtol=1e-2, atol=1e-2)
        wrong = packed(input.roll(1, dims=-1)).double()
        assert (wrong - exact).abs().max() > 0.1


def test_a_changed_weight_is_packed_again() -> None:
    linear = nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)
    packed = PackedLinear(linear)
    input = torch.ones(1, 3, 32, dtype=torch.bfloat16)
    with torch.inference_mode():
        before = packed(input).clone()
    with torch.no_grad():
        linear.weight.mul_(2)
    with torch.inference_mode():
        assert torch.equal(packed(input), before * 2)
    linear.weight.data = linear.weight.data * 2
    with torch.inference_mode():
        assert torch.equal(packed(input), before * 4)


def test_an_engine_packs_bf16_weights_and_leaves_the_model_as_it_was() -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    kinds = [type(module) for module in model.modules()]
    engine = Engine(model)
    assert engine.runner.packs_weights
    assert [type(module) for module in model.modules()] == kinds
    view = engine.runner._view.model
    assert sum(isinstance(module, PackedLinear) for module in view.modules()) == kinds.count(nn.Linear)
    for name in ("default", "paper"):
        found = engine.generate([5, 6, 7, 8], lookahead=name, max_new_tokens=20, temperature=0)
        assert len(found.token_ids) <= 20
    assert not Engine(model, pack_weights=False).runner.packs_weights


def test_packed_logits_are_as_near_to_fp32_as_unpacked_ones() -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    exact = tiny("llama")
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    prompt = torch.randint(3, 200, (1, 40))
    view = ModelRunner(model).view("masked").model
    unpacked = (view(prompt).logits - exact(prompt).logits).abs().max()
    pack_linears(view)
    packed = (view(prompt).logits - exact(prompt).logits).abs().max()
    assert packed <= 1.5 * unpacked


def test_other_dtypes_and_layers_with_hooks_are_left_alone() -> None:
    assert not should_pack(tiny("llama"))
    model = tiny("llama", dtype=torch.bfloat16)
    model.lm_head.register_forward_hook(lambda *_: None)
    view = Engine(model).runner._view.model
    assert isinstance(view.lm_head, nn.Linear)


def test_weights_are_not_packed_where_there_is_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    assert should_pack(model)
    monkeypatch.setattr("lookahead_decoding.packing.free_memory", lambda _: 1000)
    assert not should_pack(model)
