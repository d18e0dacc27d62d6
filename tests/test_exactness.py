"""The text is plain decoding's: fp32 tokens against Transformers' own ``generate`` and the plain reference."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lookahead_decoding
from lookahead_decoding import DraftMemory, Engine, LookaheadConfig
from lookahead_decoding.config import BUILTIN_SOURCES
from lookahead_decoding.plan import StepPlan
from lookahead_decoding.recycle import SuccessorTable
from lookahead_decoding.reference import decode_plainly
from lookahead_decoding.request import resolve
from lookahead_decoding.session import Advance
from lookahead_decoding.statistics import DecodingStatistics
from zoo import VOCAB, tiny

ALL = tuple(BUILTIN_SOURCES)
CHAINS = ("prompt_ngrams", "pool")
WINDOWED = [
    LookaheadConfig(window=W, ngram=N, guesses=G, sources=sources, budget=budget, adaptive=adaptive)
    for W, N, G, sources, budget, adaptive in [
        (1, 2, 3, ALL, None, True),
        (1, 3, 3, ALL, 2, False),
        (1, 5, 0, ALL, 64, True),
        (4, 2, 0, ALL, None, False),
        (4, 3, 3, ALL, 8, True),
        (4, 5, 3, ALL, 64, False),
        (7, 2, 3, CHAINS, 8, False),
        (7, 3, 0, ALL, 64, True),
        (7, 5, 3, CHAINS, None, False),
    ]
]
# Every source and both kinds together, with every budget. Without one, the two that name tokens everywhere would go
# on for ever if nothing else stopped them.
WIDTHS = [
    LookaheadConfig(sources=sources, budget=budget, adaptive=adaptive)
    for sources, budget, adaptive in [
        (("suffix",), 2, True),
        (("suffix",), 8, False),
        (("suffix",), 64, False),
        (("suffix",), None, True),
        (("recycled",), 2, False),
        (("recycled",), 8, True),
        (("recycled",), 64, False),
        (("recycled",), None, True),
        (("prompt_ngrams",), None, False),
        (("prompt_ngrams",), 2, True),
        (ALL, 1, True),
        (ALL, 1, False),
        (ALL, 2, False),
        (ALL, 8, True),
        (ALL, 64, False),
        (ALL, None, True),
    ]
]
GRID = [config for pair in itertools.zip_longest(WIDTHS, WINDOWED) for config in pair if config is not None]
PRESETS = ("plain", "default", "paper", "paper-reference", "jacobi")

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "temperature": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "top-k": {"do_sample": True, "top_k": 5},
    "top-p": {"do_sample": True, "top_p": 0.8, "top_k": 0},
    "min-p": {"do_sample": True, "min_p": 0.1},
    "repetition penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "no repeated 3-gram": {"do_sample": False, "no_repeat_ngram_size": 3},
    "min new tokens": {"do_sample": False, "min_new_tokens": 20},
    "sampled to an early end": {"do_sample": True, "temperature": 0.8, "eos_token_id": [2, *range(10, VOCAB, 20)]},
    "penalty and sampling": {"do_sample": True, "repetition_penalty": 1.1, "temperature": 0.5},
    "suppressed": {"do_sample": False, "suppress_tokens": [5, 6, 7, 8, 9]},
}


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    """Sees every position and mask; hardly ever repeats itself."""
    return tiny("llama", initializer_range=0.3)


@pytest.fixture(scope="module")
def looper() -> PreTrainedModel:
    """Falls into loops of a few tokens, so that whole drafts are accepted."""
    return tiny("llama", initializer_range=0.1)


@pytest.fixture(scope="module", params=["llama", "looper"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    found: PreTrainedModel = request.getfixturevalue(request.param)
    return found


def looping(length: int, seed: int = 0) -> list[int]:
    """A prompt that repeats itself, so that drafts are taken."""
    rng = random.Random(seed)
    block = [rng.randrange(3, VOCAB) for _ in range(6)]
    return list(itertools.islice(itertools.cycle(block), length))


def generated_by_transformers(
    model: PreTrainedModel, prompt: list[int], seed: int = 0, **options: Any
) -> tuple[list[int], torch.Tensor]:
    """The new tokens, and the state in which torch's generator is left."""
    torch.manual_seed(seed)
    ids = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    return ids, torch.get_rng_state()


@pytest.mark.parametrize("sampling", SAMPLING)
def test_tokens_and_random_state_equal_those_of_generate(model: PreTrainedModel, sampling: str) -> None:
    options = {"max_new_tokens": 32, **SAMPLING[sampling]}
    for seed in range(2):
        prompt = looping(11 + seed, seed)
        expected, state = generated_by_transformers(model, prompt, seed, **options)
        for config in [*GRID[seed::2], *PRESETS[seed::2]]:
            torch.manual_seed(seed)
            found = lookahead_decoding.generate(model, torch.tensor([prompt]), lookahead=config, **options)
            assert found[0, len(prompt) :].tolist() == expected, config
            assert torch.equal(torch.get_rng_state(), state), config


@pytest.mark.parametrize("sampling", SAMPLING)
def test_tokens_equal_those_of_the_plain_reference(model: PreTrainedModel, sampling: str) -> None:
    engine = Engine(model)
    options = {"max_new_tokens": 40, **SAMPLING[sampling]}
    for seed in range(3):
        prompt = looping(9, seed)
        request = resolve(model, torch.tensor([prompt]), **options)
        expected = decode_plainly(model, request, torch.Generator().manual_seed(seed))
        completion = engine.generate(prompt, seed=seed, **options)
        assert completion.token_ids == expected


@pytest.mark.parametrize("max_new_tokens", range(1, 9))
def test_short_generations_end_where_plain_ones_do(looper: PreTrainedModel, max_new_tokens: int) -> None:
    prompt = looping(12)
    options = {"do_sample": False, "max_new_tokens": max_new_tokens, "eos_token_id": None}
    expected, _ = generated_by_transformers(looper, prompt, **options)
    for config in [*GRID, *PRESETS]:
        found = lookahead_decoding.generate(looper, torch.tensor([prompt]), lookahead=config, **options)
        assert found[0, len(prompt) :].tolist() == expected


def text_with_loops(model: PreTrainedModel, length: int = 60) -> list[int]:
    """A prompt whose greedy continuation repeats itself, and half of that continuation."""
    for seed in range(20):
        prompt = looping(10, seed)
        tokens, _ = generated_by_transformers(model, prompt, do_sample=False, max_new_tokens=length, eos_token_id=None)
        if 3 <= len(set(tokens[-20:])) <= 9:
            return [*prompt, *tokens[: length // 2]]
    raise AssertionError("no prompt made the model loop")


def test_every_source_is_accepted_at_depth_two_and_more(looper: PreTrainedModel) -> None:
    """Without this the equalities above could hold because nothing was ever accepted."""
    engine = Engine(looper)
    total = DecodingStatistics()
    for config in [*({"sources": [name], "adaptive": False} for name in ALL if name != "pool"), "paper", "jacobi"]:
        completion = engine.generate(text_with_loops(looper), lookahead=config, max_new_tokens=60, temperature=0)
        total += completion.statistics
    assert total.tokens_per_step > 1.5
    for source in (*ALL, "window"):
        assert sum(count for (name, depth), count in total.accepted.items() if name == source and depth >= 2) > 0


@pytest.mark.parametrize("sampling", ["greedy", "temperature"])
def test_the_grid_makes_narrow_and_wide_steps(looper: PreTrainedModel, sampling: str) -> None:
    """A budget is made use of, unless that would not pay, and never exceeded."""
    engine = Engine(looper)
    options = {"max_new_tokens": 20, "seed": 1, "eos_token_id": None, **SAMPLING[sampling]}
    for config in GRID:
        widths = engine.generate(text_with_loops(looper), lookahead=config, **options).statistics.widths
        if config.budget is not None:
            assert max(widths) <= config.budget
            if not config.adaptive and config.guesses and "recycled" in config.sources:
                assert max(widths) == config.budget


def recording(advance: Callable[..., Advance], plans: list[StepPlan]) -> Callable[..., Advance]:
    """``advance``, which also appends the plans it is given."""

    def recorded(plan: StepPlan, *rest: Any) -> Advance:
        plans.append(plan)
        return advance(plan, *rest)

    return recorded


def test_generation_ends_at_an_eos_inside_an_accepted_block(
    looper: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = text_with_loops(looper)
    tokens, _ = generated_by_transformers(looper, prompt, do_sample=False, max_new_tokens=60, eos_token_id=None)
    ends_inside = 0
    for eos in set(tokens):
        options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": [eos, 210], "pad_token_id": 0}
        expected, _ = generated_by_transformers(looper, prompt, **options)
        for look in ("default", "paper"):
            engine = Engine(looper, lookahead=look)
            session = engine.open(prompt, resolve(looper, torch.tensor([prompt]), **options))
            plans: list[StepPlan] = []
            monkeypatch.setattr(session, "advance", recording(session.advance, plans))
            advances = [advance for _, advance in engine.run([session])]
            assert session.tokens == expected
            assert session.end == "eos"
            # The walk stood on a node from which it could have gone on.
            node: int | None = plans[-1].start
            for token in advances[-1].tokens:
                node = plans[-1].tree.child(node, token) if node is not None else None
            ends_inside += node is not None and node in plans[-1].sources
    assert ends_inside > 0


def test_generation_past_a_sliding_window() -> None:
    for name in ("mistral", "gemma3", "qwen3-mixed", "llama4"):
        model = tiny(name)
        prompt = looping(13)
        expected, _ = generated_by_transformers(model, prompt, do_sample=False, max_new_tokens=40)
        for config in GRID[::3]:
            found = lookahead_decoding.generate(
                model, torch.tensor([prompt]), lookahead=config, do_sample=False, max_new_tokens=40
            )
            assert found[0, len(prompt) :].tolist() == expected, (name, config)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_generation_to_the_last_entry_of_a_position_table(name: str) -> None:
    sizes = {"n_positions": 40} if name == "gpt2" else {"max_position_embeddings": 40}
    model = tiny(name, **sizes)
    prompt = looping(10)
    options = {"do_sample": False, "max_length": 40, "eos_token_id": None}
    expected, _ = generated_by_transformers(model, prompt, **options)
    assert len(prompt) + len(expected) == 40
    for config in [*GRID, *PRESETS]:
        found = lookahead_decoding.generate(model, torch.tensor([prompt]), lookahead=config, **options)
        assert found[0, len(prompt) :].tolist() == expected, config


@pytest.mark.parametrize("length", [40, 62, 63, 64, 65, 70])
@pytest.mark.parametrize("name", ["phi3-longrope", "llama-dynamic-rope"])
def test_generation_across_a_change_of_rotary_frequencies(name: str, length: int) -> None:
    model = tiny(name)
    prompt = looping(length)
    options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None}
    expected, _ = generated_by_transformers(model, prompt, **options)
    for config in [*GRID[::2], *PRESETS]:
        found = lookahead_decoding.generate(model, torch.tensor([prompt]), lookahead=config, **options)
        assert found[0, len(prompt) :].tolist() == expected, config


def test_scores_and_logits_are_those_of_generate(llama: PreTrainedModel) -> None:
    prompt = torch.tensor([looping(12)])
    options = {
        "do_sample": True, "top_k": 7, "max_new_tokens": 20, "return_dict_in_generate": True,
        "output_scores": True, "output_logits": True,
    }  # fmt: skip
    torch.manual_seed(5)
    expected = llama.generate(prompt, **options)
    torch.manual_seed(5)
    found = lookahead_decoding.generate(llama, prompt, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.scores) == len(expected.scores) == found.sequences.shape[1] - prompt.shape[1]
    for ours, theirs in zip([*found.scores, *found.logits], [*expected.scores, *expected.logits], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_processors_and_criteria_see_the_very_calls_of_generate(looper: PreTrainedModel) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.calls: list[tuple[int, ...]] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
            self.calls.append(tuple(input_ids[0].tolist()))
            return scores

    class RecordingCriterion(Recorder):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            super().__call__(input_ids, scores)
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    prompt = torch.tensor([text_with_loops(looper)])
    calls: dict[str, list[Any]] = {}
    for name in ("transformers", *PRESETS):
        processor, criterion = Recorder(), RecordingCriterion()
        options = {
            "max_new_tokens": 30, "do_sample": False, "logits_processor": [processor], "stopping_criteria": [criterion],
        }  # fmt: skip
        if name == "transformers":
            looper.generate(prompt, **options)
        else:
            lookahead_decoding.generate(looper, prompt, lookahead=name, **options)
        calls[name] = [processor.calls, criterion.calls]
    assert len(calls["transformers"][0]) == 30
    for name in PRESETS:
        assert calls[name] == calls["transformers"], name


def test_a_streamer_gets_every_token_once_in_order(llama: PreTrainedModel) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.put_calls: list[list[int]] = []
            self.ended = 0

        def put(self, value: torch.Tensor) -> None:
            self.put_calls.append(value.flatten().tolist())

        def end(self) -> None:
            self.ended += 1

    prompt = torch.tensor([looping(12)])
    theirs, ours = Recorder(), Recorder()
    llama.generate(prompt, streamer=theirs, max_new_tokens=20, do_sample=False)
    lookahead_decoding.generate(llama, prompt, streamer=ours, max_new_tokens=20, do_sample=False)
    assert ours.put_calls == theirs.put_calls
    assert ours.ended == theirs.ended == 1


def test_chunked_prefill_equals_one_pass(llama: PreTrainedModel) -> None:
    engine = Engine(llama)
    prompt = [random.Random(3).randrange(3, VOCAB) for _ in range(70)]
    whole = engine.generate(prompt, max_new_tokens=20, temperature=0)
    for chunk in (1, 7, 32, 69, 70):
        engine.forget()
        config = LookaheadConfig(prefill_chunk=chunk)
        assert engine.generate(prompt, lookahead=config, max_new_tokens=20, temperature=0).token_ids == whole.token_ids


def test_the_next_turn_prefills_only_what_is_new(llama: PreTrainedModel) -> None:
    engine = Engine(llama)
    first = engine.generate(looping(30), max_new_tokens=20, temperature=0)
    second = [*looping(30), *first.token_ids, 7, 8, 9, 10, 11]
    reused = engine.generate(second, max_new_tokens=20, temperature=0)
    assert first.cached_tokens == 0
    assert reused.cached_tokens == 30 + 20 - 1  # the last token was drawn, never fed
    engine.forget()
    fresh = engine.generate(second, max_new_tokens=20, temperature=0)
    assert fresh.cached_tokens == 0
    assert fresh.token_ids == reused.token_ids
    # A prompt that is the same throughout still computes its last token.
    assert engine.generate(second, max_new_tokens=20, temperature=0).cached_tokens == len(second) - 1


@pytest.mark.parametrize("sampling", ["greedy", "temperature", "penalty and sampling"])
def test_references_change_the_steps_and_not_the_text(llama: PreTrainedModel, sampling: str) -> None:
    prompt = looping(12)
    options = {"max_new_tokens": 40, "seed": 1, **SAMPLING[sampling]}
    engine = Engine(llama, lookahead={"adaptive": False})
    alone = engine.generate(prompt, **options)
    right, wrong = [*prompt, *alone.token_ids], [*prompt, *alone.token_ids[::-1]]
    steps = []
    for references in ([right], [wrong, right], [wrong], [[]], [wrong] * 3):
        found = engine.generate(prompt, references=references, **options)
        assert found.token_ids == alone.token_ids
        assert found.prompt_tokens == len(prompt)
        steps.append(found.statistics.steps)
    assert max(steps[:2]) < alone.statistics.steps / 2
    ids = torch.tensor([prompt])
    torch.manual_seed(1)
    expected = llama.generate(ids, max_new_tokens=40, **SAMPLING[sampling])
    torch.manual_seed(1)
    found = lookahead_decoding.generate(llama, ids, references=[right], max_new_tokens=40, **SAMPLING[sampling])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("sampling", ["greedy", "temperature"])
def test_what_earlier_requests_learned_changes_the_steps_and_not_the_text(
    llama: PreTrainedModel, sampling: str
) -> None:
    options = {"max_new_tokens": 40, "seed": 1, **SAMPLING[sampling]}
    config = {"sources": ["recycled"], "adaptive": False}
    alone = Engine(llama, lookahead=config).generate(looping(12), **options)
    engine = Engine(llama, lookahead=config, memory=DraftMemory("llama", VOCAB, SuccessorTable(2**20)))
    for _ in range(2):
        completion = engine.generate(looping(12), **options)
        assert completion.token_ids == alone.token_ids
    assert completion.statistics.steps < alone.statistics.steps


class ForwardCounter:
    def __init__(self, model: PreTrainedModel) -> None:
        self.calls = 0
        self._handle = model.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1


def test_company_changes_nothing_over_random_schedules(looper: PreTrainedModel) -> None:
    """Sessions of different length, config and sampling join and leave at any step; one pass per step."""
    engine = Engine(looper, retained_bytes=0)
    kinds: list[dict[str, Any]] = [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.6},
        {"do_sample": False, "repetition_penalty": 1.2},
        {"do_sample": True, "top_p": 0.7},
    ]
    configs = [*GRID[::4], "default", "paper", {"prefill_chunk": 5}]

    def open_session(key: tuple[int, int, int]) -> Any:
        kind, config, seed = key
        prompt = looping(5 + 3 * seed, seed)
        request = resolve(looper, torch.tensor([prompt]), max_new_tokens=12 + seed, **kinds[kind])
        generator = torch.Generator().manual_seed(seed) if request.samples else None
        return engine.open(prompt, request, lookahead=configs[config], generator=generator)

    alone: dict[tuple[int, int, int], list[int]] = {}
    rng = random.Random(0)
    counter = ForwardCounter(looper)
    sizes: Counter[int] = Counter()
    for _ in range(120):
        waiting = [
            (rng.randrange(len(kinds)), rng.randrange(len(configs)), rng.randrange(6))
            for _ in range(rng.randrange(1, 6))
        ]
        live: list[tuple[tuple[int, int, int], Any]] = []
        while waiting or live:
            while waiting and (not live or rng.random() < 0.4):
                key = waiting.pop()
                live.append((key, open_session(key)))
            # Any subset may take part in a step.
            part = [entry for entry in live if rng.random() < 0.8] or live
            before = counter.calls
            engine.step([session for _, session in part])
            assert counter.calls == before + 1
            sizes[len(part)] += 1
            for key, session in [entry for entry in live if entry[1].end]:
                if key not in alone:
                    lone = open_session(key)
                    for _ in engine.run([lone]):
                        pass
                    alone[key] = lone.tokens
                assert session.tokens == alone[key]
            live = [entry for entry in live if not entry[1].end]
    assert sizes[1]
    assert max(sizes) >= 4


def test_a_list_of_prompts_gives_what_each_gives_alone(llama: PreTrainedModel) -> None:
    engine = Engine(llama)
    prompts = [looping(7, 1), looping(21, 2), looping(12, 3)]
    together = engine.generate(prompts, max_new_tokens=25, temperature=0.8, seed=3)
    alone = [engine.generate(prompt, max_new_tokens=25, temperature=0.8, seed=3) for prompt in prompts]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in together}) == 3
