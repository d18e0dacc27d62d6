"""The engine's contract beyond exactness: errors in one sentence, and nothing left half done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lookahead_decoding
from lookahead_decoding import (
    PRESETS,
    CapacityError,
    ChainSource,
    ConfigError,
    DraftMemory,
    DraftSource,
    Engine,
    LookaheadConfig,
    ModelOutputError,
    UnsupportedOptionError,
)
from lookahead_decoding.draft import Observation
from lookahead_decoding.engine import MAX_SESSIONS
from lookahead_decoding.request import resolve
from zoo import tiny

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("llama", initializer_range=0.1)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "sentence"),
    [
        ([], {}, ConfigError, "the prompt is empty"),
        ([1, 211], {}, ConfigError, "a token id is a whole number below 211; got 211"),
        (["a"], {}, ConfigError, "no tokenizer"),
        ("a", {}, ConfigError, "no tokenizer"),
        ([{"role": "user", "content": "a"}], {}, ConfigError, "no tokenizer"),
        ([7] * 512, {}, CapacityError, "the prompt has 512 tokens and the model's context is 512"),
        (PROMPT, {"max_new_tokens": 0}, ConfigError, "max_new_tokens"),
        (PROMPT, {"tempreature": 1.0}, ConfigError, "tempreature"),
        (PROMPT, {"temperature": -1.0}, ConfigError, "temperature"),
        (PROMPT, {"top_p": 7.0}, ConfigError, "top_p"),
        (PROMPT, {"stop": ""}, ConfigError, "stop takes strings that are not empty"),
        (PROMPT, {"stop": "x"}, ConfigError, "stop strings need a tokenizer"),
        (PROMPT, {"lookahead": "fast"}, ConfigError, "unknown preset 'fast'"),
        (PROMPT, {"lookahead": 3}, ConfigError, "lookahead is a preset's name"),
        (PROMPT, {"lookahead": {"window": 30}}, ConfigError, "a window of 30 columns and ngram 4 takes 90 nodes"),
        (PROMPT, {"references": "a"}, ConfigError, "put it into a list"),
        (PROMPT, {"num_beams": 2}, UnsupportedOptionError, "beam search"),
        (PROMPT, {"streamer": object()}, UnsupportedOptionError, "stream()"),
        (PROMPT, {"num_return_sequences": 2}, UnsupportedOptionError, "list of prompts"),
        (PROMPT, {"max_length": 20}, UnsupportedOptionError, "max_new_tokens"),
        (
            PROMPT,
            {"attention_mask": torch.tensor([[0] + [1] * 7])},
            UnsupportedOptionError,
            "the prompt is text, messages or token ids",
        ),
        (PROMPT, {"inputs_embeds": torch.zeros(1, 8, 64)}, UnsupportedOptionError, "inputs_embeds"),
        ({"input_ids": [PROMPT]}, {}, ConfigError, "give its input_ids"),
        (PROMPT, {"cache_implementation": "paged"}, UnsupportedOptionError, "brings its own KV cache"),
        (PROMPT, {"guidance_scale": 1.5}, UnsupportedOptionError, "guidance_scale"),
        (PROMPT, {"use_cache": False}, UnsupportedOptionError, "use_cache"),
        (PROMPT, {"cache_implementation": "static"}, UnsupportedOptionError, "brings its own KV cache"),
        (PROMPT, {"prompt_lookup_num_tokens": 3}, UnsupportedOptionError, "greedy search and sampling"),
        (PROMPT, {"output_attentions": True, "return_dict_in_generate": True}, UnsupportedOptionError, ""),
    ],
)
def test_bad_input_gets_one_sentence(
    model: PreTrainedModel, prompt: Any, options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    engine = Engine(model)
    with pytest.raises(error) as caught:
        engine.generate(prompt, **options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"num_beams": 3}, "num_beams"),
        ({"cache_implementation": "paged"}, "cache_implementation"),
        ({"assistant_model": object()}, "assistant_model"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"position_ids": torch.tensor([[1, 2, 3]])}, "position_ids"),
        ({"output_router_logits": True}, "output_router_logits"),
    ],
)
def test_generate_names_the_option_it_refuses(model: PreTrainedModel, options: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedOptionError) as caught:
        lookahead_decoding.generate(model, torch.tensor([[5, 6, 7]]), max_new_tokens=3, **options)
    assert caught.value.param == param


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True}])
@pytest.mark.parametrize("vocab_size", [7, 20])
def test_a_vocabulary_may_be_smaller_than_what_sources_want_to_see_of_it(
    vocab_size: int, options: dict[str, Any]
) -> None:
    small = tiny("llama", vocab_size=vocab_size)
    ids = torch.tensor([[3, 4, 5, 6, 3, 4]])
    torch.manual_seed(1)
    expected = small.generate(ids, max_new_tokens=20, **options)
    torch.manual_seed(1)
    assert torch.equal(lookahead_decoding.generate(small, ids, max_new_tokens=20, **options), expected)


def test_generate_leaves_training_mode_as_it_was() -> None:
    model = tiny("llama")
    lookahead_decoding.generate(model.train(), torch.tensor([[5, 6, 7]]), max_new_tokens=3)
    assert model.training
    lookahead_decoding.generate(model.eval(), torch.tensor([[5, 6, 7]]), max_new_tokens=3)
    assert not model.training


def test_generation_ends_at_the_models_context(model: PreTrainedModel) -> None:
    completion = Engine(model).generate([7] * 500, max_new_tokens=100, temperature=0, eos_token_id=None)
    assert len(completion.token_ids) == 12
    assert completion.finish_reason == "length"


def test_nan_logits_are_an_error_and_not_a_token() -> None:
    broken = tiny("llama")
    engine = Engine(broken)
    with torch.no_grad():
        broken.lm_head.weight[17] = float("nan")
    for options in ({"temperature": 0}, {"temperature": 1.0}):
        with pytest.raises(ModelOutputError, match="not numbers"):
            engine.generate(PROMPT, **options)


def test_the_cache_of_a_failed_session_is_not_handed_on() -> None:
    model = tiny("llama")
    engine = Engine(model)
    expected = engine.generate(PROMPT, max_new_tokens=5, temperature=0).token_ids
    engine.forget()
    weight = model.model.layers[0].self_attn.v_proj.weight
    sound = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(ModelOutputError):  # after a first chunk went into the cache
        engine.generate(PROMPT, lookahead={"prefill_chunk": 4}, max_new_tokens=5, temperature=0)
    with torch.no_grad():
        weight.copy_(sound)
    again = engine.generate(PROMPT, max_new_tokens=5, temperature=0)
    assert again.cached_tokens == 0
    assert again.token_ids == expected


def test_a_session_that_fails_does_not_take_others_with_it(model: PreTrainedModel) -> None:
    engine = Engine(model)

    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == len(PROMPT) + 5:
            raise ZeroDivisionError("a processor's own mistake")
        return scores

    def open_session(**options: Any) -> Any:
        return engine.open(
            PROMPT, resolve(model, torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, **options)
        )

    good, bad = open_session(), open_session(logits_processor=[broken])
    with pytest.raises(ZeroDivisionError):
        for _ in engine.run([bad, good]):
            pass
    assert bad.end == "error"
    while good.end is None:
        engine.step([good])
    assert good.tokens == engine.generate(PROMPT, max_new_tokens=20, temperature=0).token_ids


class Same(DraftSource):
    """Guesses anywhere that the last token comes again."""

    weights = (9.0,)

    def __init__(self, config: LookaheadConfig) -> None:
        super().__init__(config)
        self.last = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self.last = tokens[-1]

    def start(self) -> Any:
        return 0

    def follow(self, place: Any, token: int) -> Any:
        return place + 1

    def guesses(self, place: Any) -> Sequence[tuple[int, int]]:
        return [(self.last, 0)]


class BrokenAtStart(Same):
    def start(self) -> Any:
        raise ZeroDivisionError


class BrokenInFollow(Same):
    def follow(self, place: Any, token: int) -> Any:
        raise ZeroDivisionError


class BrokenInGuesses(Same):
    def guesses(self, place: Any) -> Sequence[tuple[int, int]]:
        return super().guesses(place) if place < 2 else 1 // 0  # type: ignore[return-value]


class BrokenInKind(Same):
    def guesses(self, place: Any) -> Sequence[tuple[int, int]]:
        return [(self.last, 0 if place < 2 else 1)]


class BrokenInTokens(Same):
    def guesses(self, place: Any) -> Sequence[tuple[int, int]]:
        return [(10**6, 0)]


class BrokenInObserve(Same):
    successors = 2

    def observe(self, seen: Observation) -> None:
        raise ZeroDivisionError


class BrokenInExtend(Same):
    def extend(self, tokens: Sequence[int]) -> None:
        if len(tokens) < len(PROMPT):
            raise ZeroDivisionError


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize(
    "broken",
    [BrokenAtStart, BrokenInFollow, BrokenInGuesses, BrokenInKind, BrokenInTokens, BrokenInObserve, BrokenInExtend],
)
def test_a_draft_source_that_fails_ends_its_session_alone(
    model: PreTrainedModel, broken: type[DraftSource], adaptive: bool
) -> None:
    engine = Engine(model)
    request = resolve(model, torch.tensor([PROMPT]), max_new_tokens=50, do_sample=False)
    config = {"sources": [f"{__name__}:{broken.__name__}"], "adaptive": adaptive, "budget": 6}
    bad = engine.open(PROMPT, request, lookahead=config)
    good = engine.open(PROMPT, request)
    with pytest.raises((ZeroDivisionError, IndexError, ValueError)):
        engine.step([bad, good])
    assert bad.end == "error"
    assert len(good.tokens) >= 1
    assert good.end is None


def test_prompts_may_be_tensors(model: PreTrainedModel) -> None:
    engine = Engine(model)
    row = torch.tensor(PROMPT)
    expected = engine.generate(PROMPT, max_new_tokens=5, temperature=0).token_ids
    assert engine.generate(row, max_new_tokens=5, temperature=0).token_ids == expected
    assert [c.token_ids for c in engine.generate(row[None], max_new_tokens=5, temperature=0)] == [expected]


def test_inputs_may_be_named_as_a_tokenizer_names_them(model: PreTrainedModel) -> None:
    inputs = {"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, len(PROMPT), dtype=torch.long)}
    expected = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    assert torch.equal(lookahead_decoding.generate(model, **inputs, max_new_tokens=5, do_sample=False), expected)


def test_closing_a_stream_cancels_and_keeps_the_cache(model: PreTrainedModel) -> None:
    engine = Engine(model)
    stream = engine.stream(PROMPT, max_new_tokens=50, temperature=0, eos_token_id=None)
    got = list(next(stream).token_ids) + list(next(stream).token_ids)
    stream.close()
    again = engine.generate(PROMPT, max_new_tokens=50, temperature=0, eos_token_id=None)
    assert again.token_ids[: len(got)] == got
    assert again.cached_tokens == len(PROMPT) - 1


def test_stream_ends_with_the_completion_and_chunks_add_up(model: PreTrainedModel) -> None:
    chunks = list(Engine(model).stream(PROMPT, max_new_tokens=30, temperature=0))
    completion = chunks[-1].completion
    assert completion is not None
    assert all(chunk.completion is None for chunk in chunks[:-1])
    assert [token for chunk in chunks for token in chunk.token_ids] == completion.token_ids
    assert len(chunks) == completion.statistics.steps
    credited = [source for chunk in chunks for source in chunk.sources if source]
    assert len(credited) == sum(completion.statistics.accepted_by_source.values())


def test_a_seed_is_chosen_and_told_when_none_is_given(model: PreTrainedModel) -> None:
    engine = Engine(model)
    first = engine.generate(PROMPT, temperature=1.5, top_k=0, max_new_tokens=20)
    again = engine.generate(PROMPT, temperature=1.5, top_k=0, max_new_tokens=20, seed=first.sampling["seed"])
    assert again.token_ids == first.token_ids
    assert engine.generate(PROMPT, temperature=1.5, top_k=0, max_new_tokens=20).token_ids != first.token_ids


def test_the_models_generation_config_holds_unless_told_otherwise() -> None:
    model = tiny("llama")
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.25
    engine = Engine(model)
    assert engine.generate(PROMPT, max_new_tokens=2).sampling["temperature"] == 0.25
    assert engine.generate(PROMPT, max_new_tokens=2, temperature=0.5).sampling["temperature"] == 0.5
    assert engine.generate(PROMPT, max_new_tokens=2, temperature=0).sampling["do_sample"] is False


def test_engine_generation_leaves_the_global_random_state_alone(model: PreTrainedModel) -> None:
    engine = Engine(model)
    state = torch.get_rng_state()
    engine.generate(PROMPT, temperature=1.0, seed=1, max_new_tokens=10)
    assert torch.equal(torch.get_rng_state(), state)


class Repeat(ChainSource):
    """Proposes that the last token comes again, five times."""

    def __init__(self, config: LookaheadConfig) -> None:
        super().__init__(config)
        self.last = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self.last = tokens[-1]

    def propose(self) -> Iterable[Sequence[int]]:
        yield [self.last] * 5


@pytest.mark.parametrize("source", [Repeat, Same])
def test_a_users_own_source_is_asked_and_credited(source: type[DraftSource]) -> None:
    model = tiny("llama", initializer_range=0.05)
    name = f"{__name__}:{source.__name__}"
    engine = Engine(model)
    plain = engine.generate(PROMPT, lookahead="plain", max_new_tokens=40, temperature=0)
    own = {"sources": [name], "adaptive": False, "budget": 6}
    completion = engine.generate(PROMPT, lookahead=own, max_new_tokens=40, temperature=0)
    assert completion.token_ids == plain.token_ids
    assert completion.statistics.accepted_by_source[name] > 5
    assert completion.statistics.steps < plain.statistics.steps


def test_wide_configs_use_no_more_nodes_than_they_may(model: PreTrainedModel) -> None:
    most = {"plain": 1, "paper": 1 + 15 * 4 + 15 * 4, "jacobi": 8, "default": 64}
    assert most.keys() <= PRESETS.keys()
    for name, width in most.items():
        widths = Engine(model).generate(PROMPT, lookahead=name, max_new_tokens=40, temperature=0).statistics.widths
        assert max(widths) <= width
        assert (set(widths) == {1}) == (name == "plain")


@pytest.mark.parametrize("budget", [1, 2, 5, 30])
@pytest.mark.parametrize("adaptive", [True, False])
def test_a_budget_bounds_every_step_and_is_filled_unless_adaptive(
    model: PreTrainedModel, budget: int, adaptive: bool
) -> None:
    config = {"budget": budget, "adaptive": adaptive}
    completion = Engine(model).generate(PROMPT, lookahead=config, max_new_tokens=40, temperature=0, eos_token_id=None)
    widths = completion.statistics.widths
    assert max(widths) <= budget
    if not adaptive:
        # But for the first tokens, before anything is known, and the last ones, which need no guesses.
        assert set(widths[3:-3]) == {budget}


@pytest.mark.parametrize(("window", "ngram", "budget"), [(3, 3, 6), (2, 4, 6), (3, 3, None), (1, 4, 4), (2, 5, 9)])
def test_a_window_that_fits_the_budget_is_taken_along(
    model: PreTrainedModel, window: int, ngram: int, budget: int | None
) -> None:
    config = {"window": window, "ngram": ngram, "budget": budget, "sources": ["pool"], "adaptive": False}
    completion = Engine(model).generate(PROMPT, lookahead=config, max_new_tokens=40, temperature=0, eos_token_id=None)
    # Every step but those at the end, where it would reach too deep.
    assert completion.statistics.proposed["window", 1] >= len(completion.statistics.widths) - 5


@pytest.mark.parametrize("verify_during_warmup", [True, False])
def test_drafts_wait_for_a_warm_window_when_asked_to(model: PreTrainedModel, verify_during_warmup: bool) -> None:
    config = {"window": 2, "ngram": 6, "adaptive": False, "verify_during_warmup": verify_during_warmup}
    engine = Engine(model)
    request = resolve(model, torch.tensor([PROMPT]), max_new_tokens=30, do_sample=False, eos_token_id=None)
    session = engine.open(PROMPT, request, lookahead=config)
    sources = []
    for _ in range(8):
        before = session.statistics.proposed.copy()
        engine.step([session])
        sources.append({name for name, _ in session.statistics.proposed - before})
    assert all("window" in names for names in sources)
    drafted = [len(names) > 1 for names in sources]
    assert drafted[5:] == [True] * 3
    assert drafted[:4] == [verify_during_warmup] * 4


def test_without_a_window_there_is_no_warmup_to_wait_for(model: PreTrainedModel) -> None:
    config = {"verify_during_warmup": False, "adaptive": False}
    statistics = Engine(model).generate(PROMPT, lookahead=config, max_new_tokens=3, temperature=0).statistics
    assert statistics.widths[0] > 1


def test_without_guesses_the_window_is_all_there_is(model: PreTrainedModel) -> None:
    config = {"window": 3, "guesses": 0, "adaptive": False}
    statistics = Engine(model).generate(PROMPT, lookahead=config, max_new_tokens=20, temperature=0).statistics
    assert {name for name, _ in statistics.proposed} == {"window"}


def test_a_step_refuses_ended_and_repeated_sessions(model: PreTrainedModel) -> None:
    engine = Engine(model)

    def open_session() -> Any:
        return engine.open(PROMPT, resolve(model, torch.tensor([PROMPT]), max_new_tokens=3, do_sample=False))

    session = open_session()
    with pytest.raises(ValueError, match="takes part in a step once"):
        engine.step([session, session])
    with pytest.raises(ValueError, match="has not ended"):
        engine.completion(session)
    for _ in engine.run([session]):
        pass
    with pytest.raises(ValueError, match="not after its end"):
        engine.step([open_session(), session])


def test_a_long_list_is_decoded_a_few_at_a_time_and_in_order(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model)
    prompts = [[5 + i % 7, 6, 7 + i] for i in range(25)]
    alone = [engine.generate(prompt, max_new_tokens=4 + i % 3, temperature=0) for i, prompt in enumerate(prompts[:3])]
    sizes = []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda sessions: sizes.append(len(sessions)) or step(sessions))
    together = engine.generate(prompts, max_new_tokens=6, temperature=0)
    assert max(sizes) == MAX_SESSIONS < len(prompts)
    assert [completion.prompt_tokens for completion in together] == [3] * 25
    for lone, completion in zip(alone, together, strict=False):
        assert completion.token_ids[: len(lone.token_ids)] == lone.token_ids


def test_nothing_is_decoded_when_one_prompt_of_a_list_is_wrong(model: PreTrainedModel) -> None:
    broken = tiny("llama")
    engine = Engine(broken)
    broken.register_forward_hook(lambda *_: pytest.fail("decoded"))
    with pytest.raises(ConfigError, match="got 211"):
        engine.generate([PROMPT, [211]])


@pytest.mark.parametrize("reference", [[5, 6, -7], [5, 10**6], 5, "text"])
def test_a_reference_that_is_none_of_the_models_text_is_refused(model: PreTrainedModel, reference: Any) -> None:
    with pytest.raises(ConfigError, match=r"token id|tokenizer"):
        Engine(model).generate(PROMPT, references=[reference], max_new_tokens=4)
    with pytest.raises(ConfigError, match=r"token id|tokenizer"):
        lookahead_decoding.generate(model, torch.tensor([PROMPT]), references=[reference], max_new_tokens=4)


def test_a_memory_of_another_vocabulary_is_refused(model: PreTrainedModel) -> None:
    engine = Engine(model, memory=DraftMemory.empty("other", 10**6))
    with pytest.raises(ConfigError, match="vocabulary has 1000000 tokens"):
        engine.generate(PROMPT, max_new_tokens=4)


def test_a_window_that_is_left_out_does_not_silence_the_drafts(model: PreTrainedModel) -> None:
    config = {"window": 15, "ngram": 5, "budget": 128, "verify_during_warmup": False}
    engine = Engine(model)
    engine.costs.hoped = lambda _: lambda nodes: 1 + 0.05 * nodes  # type: ignore[method-assign]
    completion = engine.generate(PROMPT * 4, lookahead=config, max_new_tokens=60, temperature=0, eos_token_id=None)
    assert completion.statistics.accepted_by_source["suffix"] > 0


def test_plain_decoding_is_never_said_to_be_faster_than_itself_in_company(model: PreTrainedModel) -> None:
    engine = Engine(model, lookahead="plain")
    completions = engine.generate(
        [PROMPT, PROMPT * 50], max_new_tokens=20, lookahead={"preset": "plain", "prefill_chunk": 16}
    )
    for completion in completions:
        assert completion.statistics.estimated_speedup == pytest.approx(1.0)
