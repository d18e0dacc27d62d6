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

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lookahead_decoding.errors import ConfigError, UnsupportedModelError


def unwrapped(model: Any) -> PreTrainedModel:
    """The Transformers model inside what ``torch.compile`` or an adapter library made of it.

    Raises:
        UnsupportedModelError: the adapter computes tokens of its own in front of the prompt.
        ConfigError: there is no Transformers model inside.
    """
    inner = getattr(model, "_orig_mod", model)
    if callable(base := getattr(inner, "get_base_model", None)):
        adapter = getattr(inner, "active_peft_config", None)
        if getattr(adapter, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"{type(adapter).__name__} puts learned states before the prompt, which is not decoded with lookahead; "
                "use the model's own generate()"
            )
        inner = base()
    if not isinstance(inner, PreTrainedModel):
        raise ConfigError(f"lookahead decodes a Transformers causal LM; got {type(model).__name__}")
    return inner


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids go in; for weights that accelerate offloads, where it brings them for the pass."""
    embeddings = model.get_input_embeddings()
    device = embeddings.weight.device
    if device.type == "meta":
        hook = getattr(embeddings, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            device = torch.device(getattr(each, "execution_device", None) or device)
    assert isinstance(device, torch.device)
    return device


def view_of(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """A structural copy of ``model`` whose config names ``attention``.

    Hooks and later in-place changes of the weights are shared. Moving the model to another device or replacing
    modules afterwards is not followed.
    """
    view = _Copier(attention).module(model)
    assert isinstance(view, PreTrainedModel)
    return view


class Snapshot:
    """What a model consisted of at a time, to tell whether a view made then still is a view of it.

    It notices modules, parameters, buffers and attributes that were replaced, and lists that changed: adapters added,
    removed, switched or merged, weights moved or tied anew. What else is changed in place is shared with the view.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._placed = _placed(model)
        self._parts = [(module, _parts(module)) for module in model.modules()]

    def is_current(self, model: PreTrainedModel) -> bool:
        """Whether ``model`` is what it was."""
        modules = list(model.modules())
        return (
            self._placed == _placed(model)
            and len(modules) == len(self._parts)
            and all(
                now is then and _same(_parts(now), parts)
                for now, (then, parts) in zip(modules, self._parts, strict=True)
            )
        )


_PASSING = {"generate", "training", "_modules", "_parameters", "_buffers"}
"""Attributes that a view does not go by, and those whose entries are looked at one by one."""


def _placed(model: PreTrainedModel) -> tuple[torch.dtype, torch.device]:
    return model.get_input_embeddings().weight.dtype, input_device(model)


def _parts(module: nn.Module) -> list[dict[str, Any]]:
    own = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(module).items()
        if name not in _PASSING
    }
    return [own, dict(module._modules), dict(module._parameters), dict(module._buffers)]


def _same(now: list[dict[str, Any]], then: list[dict[str, Any]]) -> bool:
    return all(
        a.keys() == b.keys() and all(value is b[name] or _same_list(value, b[name]) for name, value in a.items())
        for a, b in zip(now, then, strict=True)
    )


def _same_list(now: Any, then: Any) -> bool:
    both_are = isinstance(now, tuple) and isinstance(then, tuple) and len(now) == len(then)
    return both_are and all(a is b for a, b in zip(now, then, strict=True))


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
        own["_compiled_call_impl"] = None  # of model.compile(): it would run the original
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
