"""A second look at a model: the same weights, another attention implementation.

Which attention a Transformers model uses stands in its config, which all its passes share. Setting it for the time
of a pass would change the passes of other threads, so the engine runs a structural copy: every module and config is
a shallow copy, every parameter is the very same. It takes no memory to speak of, and the model itself is not touched.
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def view_of(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """A structural copy of ``model`` whose config names ``attention``.

    Hooks and later in-place changes of the weights are shared. Moving the model to another device or replacing
    modules afterwards is not followed.
    """
    view = _Copier(attention).module(model)
    assert isinstance(view, PreTrainedModel)
    return view


class _Copier:
    """Copies modules and configs once each, so that what was shared stays shared."""

    def __init__(self, attention: str) -> None:
        self._attention = attention
        self._modules: dict[nn.Module, nn.Module] = {}
        self._configs: dict[int, PreTrainedConfig] = {}

    def module(self, original: nn.Module) -> nn.Module:
        if (known := self._modules.get(original)) is not None:
            return known
        duplicate = self._modules[original] = _blank(original)
        own = vars(duplicate)
        own.update(vars(original))
        own["_modules"] = {
            name: None if child is None else self.module(child) for name, child in original._modules.items()
        }
        # Rotary frequencies that follow the pass are kept in buffers, and each view follows its own passes.
        own["_buffers"] = {
            name: buffer.clone() if buffer is not None and name.endswith("inv_freq") else buffer
            for name, buffer in original._buffers.items()
        }
        for name, value in vars(original).items():
            if isinstance(value, PreTrainedConfig):
                own[name] = self._config(value)
            elif (bound := _bound_to(original, duplicate, value)) is not None:
                own[name] = bound
        return duplicate

    def _config(self, original: PreTrainedConfig) -> PreTrainedConfig:
        if (known := self._configs.get(id(original))) is not None:
            return known
        duplicate = self._configs[id(original)] = copy.copy(original)
        for name in original.sub_configs:
            if isinstance(part := getattr(original, name, None), PreTrainedConfig):
                setattr(duplicate, name, self._config(part))
        duplicate._attn_implementation_internal = self._attention
        return duplicate


def _blank(original: nn.Module) -> nn.Module:
    return object.__new__(type(original))


def _bound_to(original: nn.Module, duplicate: nn.Module, value: Any) -> Any:
    """A method or partial that was bound to the original (as accelerate's hooks are), bound to the duplicate."""
    if isinstance(value, types.MethodType) and value.__self__ is original:
        return types.MethodType(value.__func__, duplicate)
    if isinstance(value, functools.partial) and value.args and value.args[0] is original:
        bound = functools.partial(value.func, duplicate, *value.args[1:], **value.keywords)
        return functools.update_wrapper(bound, value.func)
    return None
