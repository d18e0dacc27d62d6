"""Stop strings over token borders and inside accepted blocks: ids as in Transformers, text before the string."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

import lookahead_decoding
from lookahead_decoding import Engine
from model_files import save_chat_model
from zoo import tiny

PROMPT = "abcabcabc"
LENGTH = 40
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": LENGTH, "eos_token_id": None}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("chat-model")
    save_chat_model(folder, context=512)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> PreTrainedModel:
    looper = tiny("llama", initializer_range=0.1, vocab_size=len(tokenizer))
    with torch.no_grad():
        looper.lm_head.weight[:6] = 0  # special tokens would have no text
    return looper


def stop_strings(text: str) -> list[str]:
    """Strings of one to three tokens that occur in the text, early and late."""
    return [text[at : at + length] for at in (0, 3, 11, 20, 30) for length in (1, 2, 3)]


def test_ids_are_those_of_generate_and_text_ends_before_the_string(model: PreTrainedModel, tokenizer: Any) -> None:
    engine = Engine(model, tokenizer)
    ids = torch.tensor([engine.encode(PROMPT)])
    text = tokenizer.decode(model.generate(ids, **GREEDY)[0, ids.shape[1] :])
    assert len(text) == LENGTH
    reasons = set()
    inside_a_block = 0
    for stop in stop_strings(text):
        expected = model.generate(ids, stop_strings=[stop], tokenizer=tokenizer, **GREEDY)
        for name in ("default", "paper", "jacobi", "plain"):
            found = lookahead_decoding.generate(
                model, ids, lookahead=name, stop_strings=[stop], tokenizer=tokenizer, **GREEDY
            )
            assert torch.equal(found, expected), (name, stop)
            chunks = list(engine.stream(PROMPT, lookahead=name, stop=stop, **GREEDY))
            completion = chunks[-1].completion
            assert completion is not None
            assert completion.token_ids == expected[0, ids.shape[1] :].tolist()
            assert completion.text == text[: text.index(stop)] == "".join(chunk.text for chunk in chunks)
            assert sum(len(piece) for chunk in chunks for piece in chunk.pieces) == len(completion.text)
            reasons.add(completion.finish_reason)
            inside_a_block += len(chunks[-1].token_ids) > 1
    assert reasons == {"stop"}
    assert inside_a_block > 0


def test_the_first_of_several_strings_ends_the_text(model: PreTrainedModel, tokenizer: Any) -> None:
    engine = Engine(model, tokenizer)
    text = engine.generate(PROMPT, **GREEDY).text
    completion = engine.generate(PROMPT, stop=[text[20:23], text[5:7], "no such text"], **GREEDY)
    assert completion.text == text[: min(text.index(text[20:23]), text.index(text[5:7]))]


def test_stop_strings_need_a_tokenizer(model: PreTrainedModel) -> None:
    with pytest.raises(lookahead_decoding.ConfigError, match="stop_strings need tokenizer="):
        lookahead_decoding.generate(model, torch.tensor([[7, 8, 9]]), stop_strings=["a"], max_new_tokens=3)
