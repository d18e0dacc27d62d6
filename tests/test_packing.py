"""Packed weights: the same numbers, followed when they change, and the user's model untouched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lookahead_decoding import Engine
from lookahead_decoding.model import ModelRunner
from lookahead_decoding.packing import PackedLinear, pack_linears, should_pack
from zoo import tiny

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="this CPU or this build of torch has no layout of its own",
)
BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
NATIVE = pytest.mark.parametrize(
    "native",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bf16 instructions"
            ),
        ),
    ],
)


@NATIVE
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@BOTH
def test_a_packed_layer_computes_what_the_layer_computes(
    dtype: torch.dtype, rows: int, bias: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lookahead_decoding.packing._has_bf16", lambda: native)
    torch.manual_seed(0)
    linear = nn.Linear(96, 40, bias=bias, dtype=dtype)
    packed = PackedLinear(linear)
    input = torch.randn(1, rows, 96).to(dtype)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    with torch.inference_mode():
        exact = input.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
        assert packed(input).dtype == dtype
        torch.testing.assert_close(packed(input).double(), exact, rtol=tolerance, atol=tolerance)
        wrong = packed(input.roll(1, dims=-1)).double()
        assert (wrong - exact).abs().max() > 0.1


def test_a_bf16_weight_packed_as_float32_rounds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookahead_decoding.packing._has_bf16", lambda: False)
    torch.manual_seed(0)
    linear = nn.Linear(96, 40, dtype=torch.bfloat16)
    input = torch.randn(5, 96).bfloat16()
    with torch.inference_mode():
        exact = input.double() @ linear.weight.double().T + linear.bias.double()
        assert (PackedLinear(linear)(input) == exact.bfloat16()).float().mean() > 0.98


@BOTH
def test_a_changed_weight_is_packed_again(dtype: torch.dtype) -> None:
    linear = nn.Linear(32, 16, bias=False, dtype=dtype)
    packed = PackedLinear(linear)
    input = torch.ones(1, 3, 32, dtype=dtype)
    with torch.inference_mode():
        before = packed(input).clone()
    with torch.no_grad():
        linear.weight.mul_(2)
    with torch.inference_mode():
        assert torch.equal(packed(input), before * 2)
    linear.weight.data = linear.weight.data * 2
    with torch.inference_mode():
        assert torch.equal(packed(input), before * 4)


@BOTH
def test_an_engine_packs_weights_and_leaves_the_model_as_it_was(dtype: torch.dtype) -> None:
    model = tiny("llama", dtype=dtype)
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
    assert not should_pack(tiny("llama", dtype=torch.float64))
    model = tiny("llama", dtype=torch.bfloat16)
    model.lm_head.register_forward_hook(lambda *_: None)
    view = Engine(model).runner._view.model
    assert isinstance(view.lm_head, nn.Linear)


def test_weights_are_not_packed_where_there_is_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    assert should_pack(model)
    monkeypatch.setattr("lookahead_decoding.packing.free_memory", lambda _: 1000)
    assert not should_pack(model)


def test_room_is_for_what_the_packed_copies_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookahead_decoding.packing._has_bf16", lambda: False)
    model = tiny("llama", dtype=torch.bfloat16)
    linears = {id(layer.weight): layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)}
    floats = sum(weight.numel() for weight in linears.values())
    for room, packs in ((13 * floats, True), (11 * floats, False)):  # three copies of four bytes each
        monkeypatch.setattr("lookahead_decoding.packing.free_memory", lambda _, room=room: room)
        assert should_pack(model) == packs
