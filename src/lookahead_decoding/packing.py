"""Weights in the order in which a CPU multiplies by them.

oneDNN multiplies faster by a weight that it has laid out itself, and one layout serves every width. Where a CPU has no
bf16 instructions, a bf16 weight is packed as float32, which holds the same numbers: each row of a step would cost as
much as the first otherwise. The packed copies take memory beside the weights, which the model keeps.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.nn import functional

from lookahead_decoding.cache import free_memory

logger = logging.getLogger(__name__)

_ROWS = {torch.bfloat16: 1, torch.float32: 16}
"""For how many rows a weight is laid out: measured to serve the other widths too."""

_ROOM = 3
"""Weights are packed on their own accord only where so many copies of them would fit into the free memory."""


class PackedLinear(nn.Module):
    """A linear layer on a packed copy of another one's weight.

    It follows a weight that is replaced or changed in place; writing into ``weight.data`` leaves no trace to follow.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self._widened = _is_widened(linear.weight)
        self._pack()

    def _pack(self) -> None:
        weight = self.weight.detach().to(torch.float32 if self._widened else self.weight.dtype)
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS[weight.dtype])
        self._packed_from = self._identity()

    def _identity(self) -> tuple[int, int]:
        return self.weight.data_ptr(), self.weight._version

    def forward(self, input: Tensor) -> Tensor:
        if self._identity() != self._packed_from:
            self._pack()
        if not self._widened:
            return self._multiply(input, self.bias)
        if input.numel() == input.shape[-1]:  # one row: reading half the bytes is faster
            return functional.linear(input, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return self._multiply(input.float(), bias).to(self.weight.dtype)

    def _multiply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, bias, "none", [], "")
        return output


def should_pack(model: nn.Module) -> bool:
    """Whether packing pays and fits: some weights can be packed, and there is room for several copies of them."""
    nbytes = _packed_bytes(_packable(model))
    free = free_memory(torch.device("cpu"))
    return nbytes > 0 and (free is None or _ROOM * nbytes < free)


def pack_linears(view: nn.Module) -> None:
    """Replace the linear layers of a model that is ours to change."""
    packable = _packable(view)
    packed = {id(linear): PackedLinear(linear).eval() for linear in packable.values()}
    for name, linear in packable.items():
        view.set_submodule(name, packed[id(linear)])
    logger.debug("packed %d linear layers, %.0f MiB", len(packed), _packed_bytes(packable) / 2**20)


def _packable(model: nn.Module) -> dict[str, nn.Linear]:
    """Plain bf16 and float32 linear layers on the CPU, by name; those with hooks keep what they are."""
    if not torch._C._has_mkldnn:
        return {}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and module.weight.dtype in _ROWS
        and ((_has_bf16() and module.weight.dtype == torch.bfloat16) or _is_x86())
        and not module.weight.is_inference()  # it could change without a trace
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
    }


def _packed_bytes(packable: dict[str, nn.Linear]) -> int:
    return sum((2 if _is_widened(linear.weight) else 1) * linear.weight.nbytes for linear in packable.values())


def _is_widened(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and not _has_bf16()


def _has_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _is_x86() -> bool:
    """With the instructions that oneDNN's float32 layouts are made for."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
