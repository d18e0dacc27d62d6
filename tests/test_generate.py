"""``lookahead_decoding.generate`` against ``model.generate``: every option, batches, caches, streamers, front doors."""

from __future__ import annotations

import copy
import inspect
import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
    TextIteratorStreamer,
    TextStreamer,
    dynamic_module_utils,
    pipeline,
)

import lookahead_decoding
from lookahead_decoding import (
    ConfigError,
    DecodingStatistics,
    Engine,
    LookaheadConfig,
    UnsupportedModelError,
    UnsupportedOptionError,
    enabling,
)
from model_files import save_tokenizer
from zoo import VOCAB, tiny

ROOT = Path(__file__).parent.parent
EOS = [2, *range(10, VOCAB, 12)]
"""Many, so that the rows of a batch end at different times."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Falls into loops of a few tokens, so that whole drafts are accepted."""
    return tiny("llama", initializer_range=0.1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def padded(rows: list[list[int]], pad: int = 0) -> dict[str, Tensor]:
    """Left-padded ids and their mask."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    blocks = [[rng.randrange(3, VOCAB) for _ in range(5)] for _ in lengths]
    return [list(itertools.islice(itertools.cycle(block), n)) for block, n in zip(blocks, lengths, strict=True)]


def both(
    model: PreTrainedModel, *args: Any, seed: int = 0, lookahead: Any = "default", **options: Any
) -> tuple[Any, Any]:
    """What ``model.generate`` and lookahead give, after checking that both leave the same random state."""
    torch.manual_seed(seed)
    expected = model.generate(*args, **copy.deepcopy(options))
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    found = lookahead_decoding.generate(model, *args, lookahead=lookahead, **copy.deepcopy(options))
    assert torch.equal(torch.get_rng_state(), state)
    return expected, found


def assert_same(expected: Any, found: Any) -> None:
    """Tensors, or output objects with all that plain decoding puts into them."""
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
        return
    assert type(found) is type(expected)
    assert found.keys() == expected.keys()
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        if getattr(expected, name) is None:
            assert getattr(found, name) is None
            continue
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert len(ours) == len(theirs)
        for mine, his in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, his, rtol=1e-4, atol=1e-4)


class AddToSome(LogitsProcessor):
    """A processor nobody knows, which looks at the whole batch."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        shift = input_ids[:, -1].sum() % 7
        return scores + torch.roll(torch.linspace(0, 2, scores.shape[1]), int(shift))[None] * (
            1 + torch.arange(len(input_ids))[:, None]
        )


class Draws(LogitsProcessor):
    """A processor that takes numbers from the generator that sampling uses."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.rand_like(scores)


class EndsRows(StoppingCriteria):
    """Ends a row at tokens of its own."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids[:, -1] % 9 == 0


class LooksAtScores(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return scores[-1].max(dim=-1).values > 3.5 if scores else torch.zeros(len(input_ids), dtype=torch.bool)


SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 0.6}
GREEDY: dict[str, Any] = {"do_sample": False}
ALL_KEPT: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "the default top-k of sampling": {"do_sample": True},
    "max_new_tokens=1": {**SAMPLED, "max_new_tokens": 1},
    "max_length": {**GREEDY, "max_new_tokens": None, "max_length": 30},
    "eos list": {**SAMPLED, "eos_token_id": EOS, "pad_token_id": 0},
    "another pad token": {**SAMPLED, "eos_token_id": EOS, "pad_token_id": 7},
    "no eos": {**GREEDY, "eos_token_id": None},
    "min_new_tokens": {**SAMPLED, "eos_token_id": EOS, "pad_token_id": 0, "min_new_tokens": 12},
    "min_length": {**SAMPLED, "eos_token_id": EOS, "pad_token_id": 0, "min_length": 25},
    "max_time": {**GREEDY, "max_time": 1000.0},
    "top_k": {"do_sample": True, "top_k": 5},
    "top_p": {"do_sample": True, "top_k": 0, "top_p": 0.7},
    "min_p": {"do_sample": True, "top_k": 0, "min_p": 0.1},
    "typical_p": {"do_sample": True, "top_k": 0, "typical_p": 0.8},
    "epsilon_cutoff": {"do_sample": True, "top_k": 0, "epsilon_cutoff": 0.01},
    "eta_cutoff": {"do_sample": True, "top_k": 0, "eta_cutoff": 0.01},
    "repetition_penalty": {**SAMPLED, "repetition_penalty": 1.3},
    "encoder_repetition_penalty": {**GREEDY, "encoder_repetition_penalty": 1.2},
    "no_repeat_ngram_size": {**GREEDY, "no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {**GREEDY, "encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {**SAMPLED, "bad_words_ids": [[5], [9, 11]]},
    "sequence_bias": {**SAMPLED, "sequence_bias": [[[5], 2.0], [[6, 7], -3.0]]},
    "suppress_tokens": {**SAMPLED, "suppress_tokens": list(range(3, 40))},
    "begin_suppress_tokens": {**SAMPLED, "begin_suppress_tokens": list(range(3, 90))},
    "forced_bos_token_id": {**GREEDY, "forced_bos_token_id": 5},
    "forced_eos_token_id": {**GREEDY, "forced_eos_token_id": 2},
    "exponential_decay_length_penalty": {
        **SAMPLED, "eos_token_id": 2, "pad_token_id": 0, "exponential_decay_length_penalty": (4, 1.3)
    },
    "renormalize_logits": {**SAMPLED, "renormalize_logits": True},
    "remove_invalid_values": {**SAMPLED, "remove_invalid_values": True},
    "prefix_allowed_tokens_fn": {
        **SAMPLED,
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(3 + 20 * row + int(ids[-1]) % 3, 90)),
    },
    "logits_processor": {**SAMPLED, "logits_processor": [AddToSome()]},
    "logits_processor that draws": {**SAMPLED, "logits_processor": [Draws()]},
    "stopping_criteria": {**SAMPLED, "stopping_criteria": [EndsRows()], "eos_token_id": 2, "pad_token_id": 0},
    "stopping_criteria without eos": {**SAMPLED, "stopping_criteria": [EndsRows()], "eos_token_id": None},
    "stopping_criteria on scores": {
        **SAMPLED, **ALL_KEPT, "stopping_criteria": [LooksAtScores()], "eos_token_id": 2, "pad_token_id": 0
    },
    "watermarking_config": {**GREEDY, "watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"}},
    "output_scores and output_logits": {**SAMPLED, **ALL_KEPT, "eos_token_id": EOS, "pad_token_id": 0},
    "return_dict_in_generate": {**SAMPLED, "return_dict_in_generate": True, "eos_token_id": EOS, "pad_token_id": 0},
    "num_return_sequences": {**SAMPLED, "num_return_sequences": 3, "eos_token_id": EOS, "pad_token_id": 0},
    "generation_config": {"generation_config": GenerationConfig(do_sample=True, top_k=3, pad_token_id=0)},
    "guidance_scale=1": {**GREEDY, "guidance_scale": 1.0},
    "disable_compile": {**GREEDY, "disable_compile": True},
}  # fmt: skip


TRIED_APART = {
    "attention_mask", "cache", "inputs_embeds", "past_key_values", "position_ids", "stop_strings", "streamer",
    "tokenizer",
}  # fmt: skip
"""Further options, each with tests of its own below."""


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_gives_what_generate_gives(model: PreTrainedModel, option: str) -> None:
    """One row, and three of different lengths that end at different times."""
    options = {"max_new_tokens": 24, **OPTIONS[option]}
    options = {name: value for name, value in options.items() if value is not None or name == "eos_token_id"}
    for seed, lengths in enumerate([[11], [12, 4, 7]]):
        expected, found = both(model, seed=seed, **padded(prompts(lengths, seed)), **options)
        assert_same(expected, found)


@pytest.mark.parametrize("lookahead", ["plain", "default", "paper", "jacobi", {"budget": 12, "adaptive": False}])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_batches_of_every_kind(model: PreTrainedModel, options: dict[str, Any], lookahead: Any) -> None:
    for seed, lengths in enumerate([[9, 9], [3, 12, 1, 20, 5], [1], [30, 2]]):
        for eos in (None, EOS):
            expected, found = both(
                model, seed=seed, lookahead=lookahead, **padded(prompts(lengths, seed)), **options,
                max_new_tokens=30, eos_token_id=eos, pad_token_id=0,
            )  # fmt: skip
            assert_same(expected, found)


def test_rows_end_at_different_times_and_drafts_are_accepted(model: PreTrainedModel) -> None:
    """Without this the equalities above could hold because nothing ever happened."""
    statistics = DecodingStatistics()
    inputs = padded(prompts([12, 4, 7, 15]))
    found = lookahead_decoding.generate(
        model, **inputs, **SAMPLED, max_new_tokens=40, eos_token_id=EOS, pad_token_id=0, statistics=statistics
    )
    new = found[:, inputs["input_ids"].shape[1] :]
    assert len({int((row != 0).sum()) for row in new}) > 1
    greedy = DecodingStatistics()
    lookahead_decoding.generate(
        model, **inputs, **GREEDY, max_new_tokens=60, eos_token_id=None, lookahead={"adaptive": False},
        statistics=greedy,
    )  # fmt: skip
    assert greedy.new_tokens == 4 * 60
    assert greedy.tokens_per_step > 1.5


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt2", "opt", "falcon", "qwen3", "mixtral"])
def test_left_padded_batches_of_other_architectures(name: str) -> None:
    other = tiny(name)
    for options in (GREEDY, SAMPLED):
        expected, found = both(
            other, **padded(prompts([14, 3, 9])), **options, max_new_tokens=20, eos_token_id=EOS, pad_token_id=0
        )
        assert_same(expected, found)


def test_a_mask_may_hide_tokens_inside_a_text(model: PreTrainedModel) -> None:
    inputs = padded(prompts([12, 8]))
    inputs["attention_mask"][0, 3:6] = 0
    inputs["attention_mask"][1, -3] = 0
    expected, found = both(model, **inputs, **GREEDY, max_new_tokens=20)
    assert_same(expected, found)
    with pytest.raises(UnsupportedOptionError, match="inside a text"):
        lookahead_decoding.generate(tiny("mistral"), **inputs, max_new_tokens=2)
    inputs["attention_mask"][0, -1] = 0
    with pytest.raises(UnsupportedOptionError, match="pad on the left"):
        lookahead_decoding.generate(model, **inputs, max_new_tokens=2)


def test_padding_is_found_as_generate_finds_it(model: PreTrainedModel) -> None:
    """Without a mask, Transformers takes tokens that look like padding for padding."""
    ids = padded(prompts([10, 6]))["input_ids"]
    expected, found = both(model, ids, **GREEDY, max_new_tokens=15, pad_token_id=0)
    assert_same(expected, found)


def embedded(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach() + 0.01
    return {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]}


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_prompts_given_as_embeddings(name: str, options: dict[str, Any]) -> None:
    other = tiny(name, initializer_range=0.1)
    for lengths in ([9], [12, 5]):
        inputs = padded(prompts(lengths))
        options = {"max_new_tokens": 20, "eos_token_id": EOS, "pad_token_id": 0, **options}
        expected, found = both(other, **embedded(other, inputs), **options)
        assert_same(expected, found)
        expected, found = both(other, inputs["input_ids"], **embedded(other, inputs), **options)
        assert_same(expected, found)
        # A long prompt in chunks.
        expected, found = both(other, **embedded(other, inputs), **options, lookahead={"prefill_chunk": 4})
        assert_same(expected, found)
    with pytest.raises(ConfigError, match="wide"):
        lookahead_decoding.generate(other, inputs_embeds=torch.zeros(1, 3, 5), max_new_tokens=2)


def states(cache: Any) -> list[Tensor]:
    return [states for layer in cache.layers for states in (layer.keys, layer.values)]


@pytest.mark.parametrize("lengths", [[11], [12, 5, 9]], ids=["one row", "a batch"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_caches_go_from_one_to_the_other(name: str, lengths: list[int]) -> None:
    other = tiny(name, initializer_range=0.1)
    inputs = padded(prompts(lengths))
    options: dict[str, Any] = {
        "return_dict_in_generate": True, "max_new_tokens": 13, "eos_token_id": EOS, "pad_token_id": 0, **SAMPLED
    }  # fmt: skip
    turns: dict[tuple[bool, bool], Tensor] = {}
    for ours_first, ours_second in itertools.product((False, True), repeat=2):
        first: Callable[..., Any] = lookahead_decoding.generate if ours_first else type(other).generate
        second: Callable[..., Any] = lookahead_decoding.generate if ours_second else type(other).generate
        torch.manual_seed(1)
        output = first(other, **inputs, **options)
        cache = output["cache" if "cache" in output else "past_key_values"]
        cached = output.sequences.shape[1] - 1
        assert cache.get_seq_length() == cached
        ids = torch.cat([output.sequences, torch.tensor(prompts([4] * len(lengths), seed=9))], dim=1)
        mask = torch.ones_like(ids)
        mask[:, : inputs["input_ids"].shape[1]] = inputs["attention_mask"]
        name_of_cache = "cache" if "cache" in output else "past_key_values"
        again = second(other, ids, attention_mask=mask, **{name_of_cache: cache}, **options)
        assert again[name_of_cache] is cache
        assert cache.get_seq_length() == again.sequences.shape[1] - 1
        turns[ours_first, ours_second] = again.sequences
    for turn in turns.values():
        assert torch.equal(turn, turns[False, False])


def test_a_returned_cache_has_the_states_of_plain_decoding(model: PreTrainedModel) -> None:
    ids = torch.tensor(prompts([11]))
    expected, found = both(model, ids, **GREEDY, max_new_tokens=15, return_dict_in_generate=True)
    name = "cache" if "cache" in expected else "past_key_values"
    for mine, theirs in zip(states(found[name]), states(expected[name]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_cache_of_the_user_is_filled_in_place(model: PreTrainedModel) -> None:
    ids = torch.tensor(prompts([11]))
    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    found = lookahead_decoding.generate(model, ids, **{name: cache}, **GREEDY, max_new_tokens=15)
    assert cache.get_seq_length() == found.shape[1] - 1
    # Only the new tokens, with a mask over all of them.
    new = torch.tensor([[int(found[0, -1]), 5, 6]])
    mask = torch.ones(1, cache.get_seq_length() + 3, dtype=torch.long)
    theirs = copy.deepcopy(cache)
    expected = model.generate(new, attention_mask=mask, **{name: theirs}, **GREEDY, max_new_tokens=9)
    continued = lookahead_decoding.generate(
        model, new, attention_mask=mask, **{name: cache}, **GREEDY, max_new_tokens=9
    )
    assert torch.equal(continued, expected)
    with pytest.raises(UnsupportedOptionError, match="at least one token more"):
        lookahead_decoding.generate(
            model, found[:, :3], attention_mask=torch.ones(1, 3), **{name: cache}, max_new_tokens=3
        )
    static = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(UnsupportedOptionError, match="use a DynamicCache"):
        lookahead_decoding.generate(model, ids, **{name: static}, max_new_tokens=3)


class Recorder:
    """A streamer that takes anything."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("lengths", [[11], [12, 5, 9]], ids=["one row", "a batch"])
def test_streamers_hear_what_they_hear_from_generate(model: PreTrainedModel, lengths: list[int]) -> None:
    for options in (GREEDY, SAMPLED):
        theirs, ours = Recorder(), Recorder()
        options = {**padded(prompts(lengths)), **options, "max_new_tokens": 25, "eos_token_id": EOS, "pad_token_id": 0}
        torch.manual_seed(0)
        model.generate(**options, streamer=theirs)
        torch.manual_seed(0)
        lookahead_decoding.generate(model, **options, streamer=ours)
        assert ours.calls == theirs.calls
        through = Recorder()
        torch.manual_seed(0)
        model.generate(**options, custom_generate=lookahead_decoding.custom_generate, streamer=through)
        assert through.calls == theirs.calls


def test_text_streamers(model: PreTrainedModel, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.tensor(prompts([6]))
    model.generate(ids, **GREEDY, max_new_tokens=12, streamer=TextStreamer(tokenizer))
    expected = capsys.readouterr().out
    lookahead_decoding.generate(model, ids, **GREEDY, max_new_tokens=12, streamer=TextStreamer(tokenizer))
    assert capsys.readouterr().out == expected != ""
    streamer = TextIteratorStreamer(tokenizer)
    lookahead_decoding.generate(model, ids, **GREEDY, max_new_tokens=12, streamer=streamer)
    assert "".join(streamer) == expected.removesuffix("\n")
    with pytest.raises(ValueError, match="batch size 1"):
        lookahead_decoding.generate(
            model, **padded(prompts([5, 6])), max_new_tokens=2, streamer=TextStreamer(tokenizer)
        )


def test_stop_strings_end_rows_where_generate_ends_them(model: PreTrainedModel, tokenizer: Any) -> None:
    inputs = padded(prompts([8, 5]))
    plain = model.generate(**inputs, **GREEDY, max_new_tokens=20, eos_token_id=None)
    stop = tokenizer.decode(plain[0, 14:15])
    for eos in (None, 2):
        options = {"stop_strings": [stop], "tokenizer": tokenizer, "eos_token_id": eos, "pad_token_id": 0}
        expected, found = both(model, **inputs, **GREEDY, max_new_tokens=20, **options)
        assert_same(expected, found)
    assert found.shape[1] <= plain.shape[1]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "num_beams": ({"num_beams": 2}, "beam search"),
    "beam sampling": ({"num_beams": 2, "do_sample": True}, "beam sample"),
    "penalty_alpha": ({"penalty_alpha": 0.6, "top_k": 4, "do_sample": False}, "contrastive search"),
    "assistant_early_exit": ({"assistant_early_exit": 1}, "assisted generation"),
    "dola_layers": ({"dola_layers": "low"}, "dola"),
    "prompt_lookup_num_tokens": ({"prompt_lookup_num_tokens": 4}, "assisted generation"),
    "use_cache": ({"use_cache": False}, "use_cache"),
    "output_attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "output_hidden_states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "guidance_scale": ({"guidance_scale": 1.5}, "guidance_scale"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation"),
    "paged cache": ({"cache_implementation": "paged"}, "cache_implementation"),
    "position_ids": ({"position_ids": torch.tensor([[3, 4, 5]])}, "position_ids"),
    "synced_gpus": ({"synced_gpus": True}, "synced_gpus"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", REFUSED)
def test_what_is_not_decoded_is_refused_in_one_sentence(model: PreTrainedModel, option: str) -> None:
    options, match = REFUSED[option]
    with pytest.raises((UnsupportedOptionError, ConfigError), match=match) as raised:
        lookahead_decoding.generate(model, torch.tensor([[5, 6, 7]]), max_new_tokens=3, **options)
    assert "\n" not in str(raised.value)


def test_another_model_as_assistant_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedOptionError, match="assistant_model"):
        lookahead_decoding.generate(model, torch.tensor([[5, 6, 7]]), assistant_model=model)


def test_a_batch_that_would_cross_a_change_of_rotary_frequencies_is_refused() -> None:
    other = tiny("phi3-longrope")
    inputs = padded(prompts([40, 30]))
    expected, found = both(other, **inputs, **GREEDY, max_new_tokens=20)
    assert_same(expected, found)
    with pytest.raises(UnsupportedOptionError, match="position 64"):
        lookahead_decoding.generate(other, **inputs, **GREEDY, max_new_tokens=30)


def test_unsupported_things_may_be_decoded_plainly(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    ids = torch.tensor(prompts([9]))
    expected = model.generate(ids, num_beams=2, max_new_tokens=9, do_sample=False)
    found = lookahead_decoding.generate(
        model, ids, num_beams=2, max_new_tokens=9, do_sample=False, on_unsupported="plain"
    )
    assert torch.equal(found, expected)
    assert "decoding plainly: beam search" in caplog.text
    recorder = Recorder()
    lookahead_decoding.generate(
        model, ids, guidance_scale=1.5, do_sample=False, max_new_tokens=4, streamer=recorder, on_unsupported="plain"
    )
    assert recorder.calls[0] == ids.tolist()  # once
    assert recorder.calls[-1] == "end"
    assert len(recorder.calls) == 6
    with pytest.raises(ConfigError, match="on_unsupported"):
        lookahead_decoding.generate(model, ids, on_unsupported="ignore")


def test_custom_generate_is_a_decoding_method_of_transformers(model: PreTrainedModel) -> None:
    inputs = padded(prompts([12, 5]))
    options = {"max_new_tokens": 20, "eos_token_id": EOS, "pad_token_id": 0, **ALL_KEPT, **SAMPLED}
    torch.manual_seed(3)
    expected = model.generate(**inputs, **options)
    statistics = DecodingStatistics()
    torch.manual_seed(3)
    found = model.generate(
        **inputs,
        **options,
        custom_generate=lookahead_decoding.custom_generate,
        lookahead="paper",
        statistics=statistics,
    )
    assert_same(expected, found)
    assert statistics.steps > 0
    with pytest.raises(UnsupportedOptionError, match="beam search"):
        model.generate(**inputs, max_new_tokens=2, num_beams=2, custom_generate=lookahead_decoding.custom_generate)
    with pytest.raises(ConfigError, match="windw"):
        model.generate(
            **inputs, max_new_tokens=2, custom_generate=lookahead_decoding.custom_generate, lookahead={"windw": 3}
        )


def test_enable_as_a_statement_and_as_a_block(model: PreTrainedModel) -> None:
    inputs = padded(prompts([12, 5]))
    expected = model.generate(**inputs, **GREEDY, max_new_tokens=20)
    before = dict(vars(GenerationMixin)), dict(vars(type(model)))
    enabled = lookahead_decoding.enable(model)
    assert torch.equal(model.generate(**inputs, **GREEDY, max_new_tokens=20), expected)
    assert enabled.calls == 1
    assert enabled.statistics.new_tokens > enabled.statistics.steps > 0
    lookahead_decoding.disable(model)
    lookahead_decoding.disable(model)  # nothing happens
    assert "generate" not in vars(model)
    with lookahead_decoding.enable(model, "paper") as outer:
        assert (dict(vars(GenerationMixin)), dict(vars(type(model)))) == before
        with lookahead_decoding.enable(model, "jacobi") as inner:
            model.generate(**inputs, **GREEDY, max_new_tokens=5)
        assert (outer.calls, inner.calls) == (0, 1)
        model.generate(**inputs, **GREEDY, max_new_tokens=5)
        assert (outer.calls, inner.calls) == (1, 1)
    assert "generate" not in vars(model)
    assert model.generate.__func__ is type(model).generate


def test_enable_survives_exceptions_and_any_order_of_ends(model: PreTrainedModel) -> None:
    with pytest.raises(RuntimeError), lookahead_decoding.enable(model):
        raise RuntimeError
    assert "generate" not in vars(model)
    first, second = lookahead_decoding.enable(model), lookahead_decoding.enable(model)
    first.disable()
    model.generate(torch.tensor([[5, 6]]), max_new_tokens=2)
    assert (first.calls, second.calls) == (0, 1)
    second.disable()
    second.disable()
    assert "generate" not in vars(model)
    lookahead_decoding.enable(model)
    with lookahead_decoding.enable(model):
        lookahead_decoding.disable(model)
    assert "generate" not in vars(model)


def test_a_generate_that_was_put_on_the_model_before_comes_back(model: PreTrainedModel) -> None:
    own = copy.copy(model)
    own.generate = lambda *_, **__: "mine"
    with lookahead_decoding.enable(own):
        assert isinstance(own.generate(torch.tensor([[5, 6]]), max_new_tokens=2), Tensor)
    assert own.generate() == "mine"


def test_a_copy_of_an_enabled_model_decodes_itself(model: PreTrainedModel) -> None:
    with lookahead_decoding.enable(model):
        duplicate = copy.deepcopy(model)
        with torch.no_grad():
            duplicate.lm_head.weight.neg_()
        ids = torch.tensor(prompts([9]))
        found = duplicate.generate(ids, **GREEDY, max_new_tokens=9)
        assert torch.equal(found, type(duplicate).generate(duplicate, ids, **GREEDY, max_new_tokens=9))
        assert not torch.equal(found, model.generate(ids, **GREEDY, max_new_tokens=9))


def test_enable_refuses_at_once_what_it_cannot_decode(model: PreTrainedModel) -> None:
    other = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4))
    with pytest.raises(UnsupportedModelError, match=r"mamba|linear"):
        lookahead_decoding.enable(other)
    assert "generate" not in vars(other)
    with pytest.raises(ConfigError):
        lookahead_decoding.enable(model, "papr")
    lookahead_decoding.enable(other, on_unsupported="plain")
    assert other.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False).shape == (1, 4)


def test_enable_keeps_its_engine_until_the_model_changes(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Engine] = []
    engine_for = enabling.engine_for

    def counted(*args: Any, **kwargs: Any) -> Engine:
        made.append(engine_for(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(enabling, "engine_for", counted)
    changing = copy.deepcopy(model)
    ids = torch.tensor(prompts([9]))
    options = {**GREEDY, "max_new_tokens": 9, "eos_token_id": None}

    def is_plain() -> bool:
        return torch.equal(changing.generate(ids, **options), type(changing).generate(changing, ids, **options))

    class Negated(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner, self.sign = inner, 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.sign * self.inner(x)

    with lookahead_decoding.enable(changing):
        for _ in range(3):
            assert is_plain()
        changing.train()
        assert is_plain()
        changing.eval()
        with torch.no_grad():
            changing.lm_head.weight.neg_()  # in place
        assert is_plain()
        assert len(made) == 1
        changing.lm_head = Negated(changing.lm_head)  # a module
        assert is_plain()
        assert len(made) == 2
        changing.lm_head.sign = -1.0  # an attribute, as adapters are switched
        assert is_plain()
        assert len(made) == 3
        changing.lm_head.merged = []
        assert is_plain()
        with torch.no_grad():
            changing.lm_head.inner.weight.data *= -1  # leaves no trace, but adapters note what they merged
        changing.lm_head.merged.append("adapter")
        assert is_plain()
        assert len(made) == 5
        changing.lm_head.inner.weight = torch.nn.Parameter(-changing.lm_head.inner.weight)  # a weight
        assert is_plain()
        assert len(made) == 6
        changing.double()
        assert is_plain()
        assert len(made) == 7


def test_training_mode_is_left_as_it_was(model: PreTrainedModel) -> None:
    model.train()
    try:
        expected = lookahead_decoding.generate(model, torch.tensor([[5, 6]]), max_new_tokens=3)
        assert model.training
        with pytest.raises(UnsupportedOptionError):
            lookahead_decoding.generate(model, torch.tensor([[5, 6]]), num_beams=2, max_new_tokens=2)
        assert model.training
    finally:
        model.eval()
    assert expected.shape == (1, 5)


def test_a_failing_processor_ends_the_call_and_leaves_the_random_state_in_order(model: PreTrainedModel) -> None:
    class Fails(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] > 16:
                raise RuntimeError("no more")
            return scores

    for lengths in ([10], [10, 4]):
        inputs = padded(prompts(lengths))
        torch.manual_seed(0)
        with pytest.raises(RuntimeError, match="no more"):
            model.generate(**inputs, **SAMPLED, max_new_tokens=30, logits_processor=[Fails()])
        state = torch.get_rng_state()
        torch.manual_seed(0)
        with pytest.raises(RuntimeError, match="no more"):
            lookahead_decoding.generate(model, **inputs, **SAMPLED, max_new_tokens=30, logits_processor=[Fails()])
        assert torch.equal(torch.get_rng_state(), state)


def test_noise_of_rows_ahead_stays_bounded(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from lookahead_decoding import sampling

    monkeypatch.setattr(sampling, "_NOISE_BYTES", 1)
    held: list[int] = []
    ahead = sampling.NoiseStream.ahead

    def watched(self: sampling.NoiseStream, position: int) -> Tensor:
        noise = ahead(self, position)
        held.append(len(self._drawn))
        return noise

    monkeypatch.setattr(sampling.NoiseStream, "ahead", watched)
    options = {"do_sample": True, "temperature": 0.05, "max_new_tokens": 60, "eos_token_id": None}
    expected, found = both(
        model, **padded(prompts([30, 4, 17])), **options, lookahead=LookaheadConfig(adaptive=False, budget=64)
    )
    assert_same(expected, found)
    assert max(held) <= 2 * sampling._LEAST_AHEAD


def test_the_hub_folder_is_a_generation_method(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(ROOT / "custom_generate", tmp_path / "repository" / "custom_generate")
    inputs = padded(prompts([12, 5]))
    options = {"max_new_tokens": 20, "eos_token_id": EOS, "pad_token_id": 0, **SAMPLED}
    method = {"custom_generate": str(tmp_path / "repository"), "trust_remote_code": True}
    options["eos_token_id"] = None
    torch.manual_seed(3)
    expected = model.generate(**inputs, **options)
    torch.manual_seed(3)
    statistics, recorder = DecodingStatistics(), Recorder()
    found = model.generate(**inputs, **options, **method, lookahead="paper", statistics=statistics, streamer=recorder)
    assert torch.equal(found, expected)
    assert statistics.steps > 0
    assert recorder.calls[-1] == "end"
    with pytest.raises(UnsupportedOptionError, match="beam search"):
        model.generate(**inputs, **method, num_beams=2, max_new_tokens=2)


def test_a_pipeline_says_the_same_with_lookahead(model: PreTrainedModel, tokenizer: Any) -> None:
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = ["abcabcabc", "xyz"]
    options = {"max_new_tokens": 20, "do_sample": False, "batch_size": 2}
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    expected = generator(texts, **options)
    with lookahead_decoding.enable(model) as enabled:
        assert generator(texts, **options) == expected
    assert enabled.calls == 1
    assert generator(texts, **options) == expected
