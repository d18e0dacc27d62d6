"""bf16 weights in the order a CPU's matrix instructions read them.

oneDNN multiplies faster by a weight that it has laid out itself, and one layout serves every width. The packed copy
takes as much memory as the weights; the model keeps its own.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from lookahead_decoding.cache import free_memory

logger = logging.getLogger(__name__)

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
        self._pack()

    def _pack(self) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), 1)
        self._packed_from = self._identity()

    def _identity(self) -> tuple[int, int]:
        return self.weight.data_ptr(), self.weight._version

    def forward(self, input: Tensor) -> Tensor:
        if self._identity() != self._packed_from:
            self._pack()
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")
        return output


def should_pack(model: nn.Module) -> bool:
    """Whether packing pays and fits: some weights can be packed, and there is room for several copies of them."""
    nbytes = sum(linear.weight.nbytes for linear in _packable(model).values())
    free = free_memory(torch.device("cpu"))
    return nbytes > 0 and (free is None or _ROOM * nbytes < free)


def pack_linears(view: nn.Module) -> None:
    """Replace the bf16 linear layers of a model that is ours to change."""
    packable = _packable(view)
    packed = {id(linear): PackedLinear(linear).eval() for linear in packable.values()}
    for name, linear in packable.items():
        view.set_submodule(name, packed[id(linear)])
    nbytes = sum(linear.weight.nbytes for linear in packable.values())
    logger.debug("packed %d linear layers, %.0f MiB", len(packed), nbytes / 2**20)


def _packable(model: nn.Module) -> dict[str, nn.Linear]:
    """Plain bf16 linear layers on the CPU, by name; those with hooks keep what they are."""
    if not torch._C._has_mkldnn or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return {}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.bfloat16
        and not module.weight.is_inference()  # it could change without a trace
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
    }
