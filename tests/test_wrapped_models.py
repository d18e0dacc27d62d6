"""Models that something was done to: compiled, dispatched, offloaded, wrapped. The tokens are their own generate's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from transformers import PreTrainedModel

import lookahead_decoding
from lookahead_decoding import ConfigError, Engine, UnsupportedModelError
from zoo import tiny

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


def assert_decoded_as_by_itself(model: Any) -> None:
    expected = model.generate(IDS, **OPTIONS)
    assert torch.equal(lookahead_decoding.generate(model, IDS, **OPTIONS), expected)
    engine = Engine(model)
    assert engine.runner.attention == "packed"
    tokens = engine.generate(IDS[0].tolist(), max_new_tokens=12, temperature=0, eos_token_id=None).token_ids
    assert tokens == expected[0, IDS.shape[1] :].tolist()
    with lookahead_decoding.enable(model) as enabled:
        assert torch.equal(model.generate(IDS, **OPTIONS), expected)
    assert enabled.calls == 1
    lookahead_decoding.disable(model)


def compiled_in_place(model: PreTrainedModel) -> PreTrainedModel:
    model.compile(backend="eager")
    return model


# As `device_map` does it.
WRAPPED: dict[str, Callable[[PreTrainedModel, Path], Any]] = {
    "dispatched": lambda model, _: accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "offloaded to the CPU": lambda model, _: accelerate.cpu_offload(model, execution_device=CPU),
    "offloaded to the disk": lambda model, path: accelerate.disk_offload(model, str(path), execution_device=CPU),
    "torch.compile": lambda model, _: torch.compile(model, backend="eager"),
    "model.compile": lambda model, _: compiled_in_place(model),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_tokens_are_those_of_the_wrapped_model(wrapped: str, tmp_path: Path) -> None:
    assert_decoded_as_by_itself(WRAPPED[wrapped](tiny("llama", initializer_range=0.1), tmp_path))


class Adapter(torch.nn.Module):
    """What adapter libraries wrap a model in."""

    def __init__(self, model: PreTrainedModel, *, prompt: bool) -> None:
        super().__init__()
        self.model = model
        self.active_peft_config = type("PrefixTuningConfig", (), {"is_prompt_learning": prompt})()

    def get_base_model(self) -> PreTrainedModel:
        return self.model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.generate(*args, **kwargs)


def test_an_adapters_wrapper_is_looked_through() -> None:
    model = tiny("llama", initializer_range=0.1)
    assert_decoded_as_by_itself(Adapter(model, prompt=False))
    with pytest.raises(UnsupportedModelError, match="PrefixTuningConfig"):
        lookahead_decoding.generate(Adapter(model, prompt=True), IDS)  # type: ignore[arg-type]


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="got Linear"):
        Engine(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got str"):
        lookahead_decoding.generate("gpt2", IDS)  # type: ignore[arg-type]
