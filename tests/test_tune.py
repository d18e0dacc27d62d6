"""``lookahead tune``: what it measures, what it chooses, what it leaves behind; on a tiny model, from end to end."""

from __future__ import annotations

import importlib.util
import json
import logging
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from lookahead_decoding import Engine, LookaheadConfig, profile
from lookahead_decoding import tune as tuning
from lookahead_decoding.budget import CostCurve
from lookahead_decoding.cli import main
from lookahead_decoding.cli.tune import PROMPTS
from lookahead_decoding.config import PRESETS
from lookahead_decoding.errors import CapacityError, ConfigError
from lookahead_decoding.model import ModelRunner
from lookahead_decoding.profile import TUNED_FIELDS, Profile, StepTimes, find
from lookahead_decoding.tune import BUDGETS, Trial, attempt, candidates, flops_per_step, measure, tune
from model_files import save_chat_model, sentence
from zoo import tiny

REAL_FOLDER = profile.folder  # which conftest.py replaces
FLAT = StepTimes((1, 128), (0,), ((1.0, 1.0),))
"""Width costs nothing."""
STEEP = StepTimes((1, 2), (0,), ((1.0, 100.0),))
"""Width never pays."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setattr(profile, "folder", REAL_FOLDER)
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def engine() -> Engine:
    return Engine(tiny("llama", initializer_range=0.1), name="tiny")


PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]


# Step times


def quiet(what: str, done: int, total: int) -> None:
    pass


def test_every_width_is_timed_over_every_context_in_turn(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    forward = ModelRunner.forward

    def noted(runner: ModelRunner, steps: Any) -> Any:
        ((plan, store, _),) = steps
        seen.append((store.length, len(plan.tree)))
        assert plan.reads == tuple(range(len(plan.tree)))
        assert len(plan.tree) < 4 or not plan.tree.is_chain
        return forward(runner, steps)

    monkeypatch.setattr(ModelRunner, "forward", noted)
    done: list[tuple[str, int, int]] = []
    times = measure(engine.runner, (1, 2, 4, 16), (10, 300), repeats=3, progress=lambda *state: done.append(state))
    assert (times.nodes, times.contexts) == ((1, 2, 4, 16), (10, 300))
    one_round = {(context, width) for context in (10, 300) for width in (1, 2, 4, 16)}
    assert len(seen) == 4 * len(one_round)
    for begin in range(0, len(seen), len(one_round)):
        assert set(seen[begin : begin + len(one_round)]) == one_round
    assert done == [("timing steps", i + 1, len(seen)) for i in range(len(seen))]


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "llama4", "deepseek-v3", "llama-dynamic-rope", "phi3-longrope"])
def test_any_architecture_can_be_timed(name: str) -> None:
    runner = ModelRunner(tiny(name))
    times = measure(runner, (1, 2, 8), (20,), repeats=1, progress=quiet)
    assert all(seconds > 0 for seconds in times.seconds[0])
    assert flops_per_step(runner)(1, 0) > 0


def test_flops_per_step_are_the_formulas() -> None:
    model = tiny("llama", tie_word_embeddings=False)
    runner = ModelRunner(model)
    flops = flops_per_step(runner)
    parameters = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    assert flops(1, 0) == 2 * parameters
    layers, heads, size = 4, 4, 16
    assert flops(1, 100) == 2 * parameters + layers * 4 * 100 * heads * size
    assert flops(7, 100) == 7 * flops(1, 100)
    shared = tiny("llama", tie_word_embeddings=True)
    assert flops_per_step(ModelRunner(shared))(1, 0) == 2 * sum(p.numel() for p in shared.parameters())


# Ways to guess


def test_what_is_tried_is_no_window_and_those_that_fit() -> None:
    tried = candidates(128)
    assert [(c.window, c.ngram, c.guesses) for c in tried] == [(0, 4, 7), (2, 3, 4), (4, 4, 7), (7, 4, 7)]
    assert all("pool" in config.sources for config in tried[1:])
    assert all(config.budget == 128 for config in tried)
    assert [config.window for config in candidates(8)] == [0, 2]
    assert [config.window for config in candidates(2)] == [0]


def test_a_trials_steps_and_prices_add_up(engine: Engine) -> None:
    times = StepTimes((1, 2, 128), (0, 500), ((1.0, 1.1, 3.0), (2.0, 2.2, 6.0)))
    config = LookaheadConfig(budget=32)
    trial = attempt(engine, [PROMPT, PROMPT[:5]], config, times, max_new_tokens=40)
    tokens = 0
    for prompt in (PROMPT, PROMPT[:5]):
        completion = engine.generate(prompt, lookahead="plain", max_new_tokens=40, temperature=0)
        tokens += len(completion.token_ids)
    assert tokens - 2 * 8 < trial.tokens <= tokens - 2  # without what the prompts' passes decided
    assert trial.steps < trial.tokens  # or the guesses were never right
    assert trial.nodes > trial.steps
    assert trial.tokens_per_step == trial.tokens / trial.steps
    assert trial.flops_per_step == pytest.approx(trial.nodes_per_step, rel=0.1)
    assert trial.seconds >= trial.steps
    assert trial.tokens * 1.0 < trial.plain_seconds < trial.tokens * 1.2  # contexts of up to 52 tokens
    assert trial.speedup == pytest.approx(trial.tokens_per_second / trial.plain_tokens_per_second)


def test_a_trial_is_the_same_again_whatever_the_machine_does(engine: Engine) -> None:
    times = StepTimes((1, 128), (0,), ((1.0, 10.0),))
    config = LookaheadConfig(window=2, ngram=3, guesses=4, budget=64)
    own = engine.costs
    first, second = (attempt(engine, [PROMPT], config, times, max_new_tokens=40) for _ in range(2))
    assert first == second
    assert engine.costs is own


def test_every_way_to_guess_is_tried_on_the_same_answers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "measure", lambda *_, **__: FLAT)
    trials = tune(engine, [PROMPT, PROMPT[:5]], max_new_tokens=32).trials
    expected = [engine.generate(prompt, max_new_tokens=32, temperature=0).token_ids for prompt in (PROMPT, PROMPT[:5])]
    assert all(trial.texts == expected for trial in trials)
    other = [[7, 8, 9] * 10, [3] * 30]
    forced = attempt(engine, [PROMPT, PROMPT[:5]], LookaheadConfig(), FLAT, texts=other, max_new_tokens=30)
    assert forced.texts == other
    assert forced.tokens_per_step > 1.5


def test_a_trial_goes_by_the_measured_times(engine: Engine) -> None:
    flat, steep = (attempt(engine, [PROMPT], LookaheadConfig(), times, max_new_tokens=40) for times in (FLAT, STEEP))
    assert steep.nodes_per_step == 1
    assert steep.speedup == pytest.approx(1)
    assert flat.nodes_per_step > 4
    assert flat.speedup == pytest.approx(flat.tokens_per_step) != 1
    assert steep.config.budget == BUDGETS[0] < flat.config.budget  # type: ignore[operator]


@pytest.mark.parametrize(
    ("widths", "least", "budget"),
    [
        ([1] * 100, 0, 8),
        ([8] * 100, 0, 8),
        ([9] * 100, 0, 16),
        ([8] * 98 + [60] * 2, 0, 8),
        ([8] * 97 + [60] * 3, 0, 64),
        ([8] * 100, 21, 32),
        ([200] * 100, 0, 128),
    ],
)
def test_a_budget_is_hardly_ever_exceeded_and_holds_the_window(widths: list[int], least: int, budget: int) -> None:
    assert tuning._budget(widths, least=least) == budget


@pytest.mark.parametrize(
    ("seconds", "best"), [([3.0, 1.0, 2.0, 1.5], 1), ([1.0, 1.0, 1.0, 1.0], 0), ([1.01, 1.2, 1.0, 1.3], 0)]
)
def test_the_fastest_is_chosen_or_a_simpler_one_that_is_as_fast(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, seconds: list[float], best: int
) -> None:
    def measured(*_: Any, **__: Any) -> StepTimes:
        return FLAT

    def tried(engine: Engine, prompts: Any, config: LookaheadConfig, *_: Any, **__: Any) -> Trial:
        i = next(i for i, (window, *_) in enumerate([(0,), *tuning.WINDOWS]) if window == config.window)
        return Trial(config, [], 10, 20, 40, seconds[i], 4.0, 4.0)

    monkeypatch.setattr(tuning, "measure", measured)
    monkeypatch.setattr(tuning, "attempt", tried)
    found = tune(engine, [PROMPT])
    assert found.best is found.trials[best]
    assert found.profile.config == found.best.config
    assert found.profile.times is FLAT
    assert found.profile.key == engine.profile_key
    assert found.profile.figures.tokens_per_second == pytest.approx(20 / seconds[best], abs=0.01)
    assert find(engine.profile_key) is None  # storing is for the caller


def test_what_is_measured_is_cut_to_the_models_positions() -> None:
    engine = Engine(tiny("gpt2", n_positions=100, initializer_range=0.1))
    seen: list[tuple[str, int, int]] = []
    found = tune(engine, [PROMPT, [3] * 95], repeats=1, max_new_tokens=500, progress=lambda *state: seen.append(state))
    times = found.profile.times
    assert times.nodes == (1, 2, 4, 8, 16, 24, 32, 48)
    assert times.contexts == (52,)
    assert seen[-1] == ("trying ways to guess", 4, 4)  # the prompt that fills the context is left out
    with pytest.raises(CapacityError, match="no prompt leaves room for an answer in the model's context of 100"):
        tune(engine, [[3] * 95])


def test_too_few_positions_to_measure_is_a_sentence() -> None:
    engine = Engine(tiny("llama"))
    with pytest.raises(ConfigError) as caught:
        tune(engine, [PROMPT], max_nodes=1)
    assert "width of 2" in sentence(caught.value)


def test_answers_of_one_token_are_a_sentence(engine: Engine) -> None:
    with pytest.raises(CapacityError) as caught:
        attempt(engine, [PROMPT], LookaheadConfig(), FLAT, max_new_tokens=1)
    assert "longer answers" in sentence(caught.value)


# The command


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model and its tokenizer, saved."""
    path = tmp_path_factory.mktemp("models") / "tiny-tuned"
    save_chat_model(path, context=2048)
    return str(path)


@pytest.fixture(autouse=True)
def _process_stays_as_it_was() -> Iterator[None]:
    """The program sets these for its whole process, which here is the tests'."""
    hub = logging.getLogger("huggingface_hub")
    before = transformers_logging.get_verbosity(), hub.level, torch.get_num_threads()
    yield
    transformers_logging.set_verbosity(before[0])
    hub.setLevel(before[1])
    torch.set_num_threads(before[2])
    transformers_logging.enable_progress_bar()


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]
MODEL = ("--dtype", "float32", "--threads", "1")
QUICK = (*MODEL, "--contexts", "16,64", "--max-nodes", "8", "--repeats", "1", "-n", "12")


@pytest.fixture
def lookahead(capsys: pytest.CaptureFixture[str]) -> Run:
    """The program, in this process."""

    def run(*arguments: str) -> Outcome:
        code = main(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"Hello"\n\n{"prompt": "abcabcabc", "id": 3}\n', encoding="utf-8")
    return str(path)


def files(cache: Path) -> list[Path]:
    return sorted(file for file in cache.rglob("*") if file.is_file())


def test_tuning_prints_tables_and_stores_a_profile(lookahead: Run, folder: str, prompts: str, cache: Path) -> None:
    outcome = lookahead("tune", folder, *QUICK, "--prompts", prompts)
    assert outcome.code == 0, outcome
    (stored,) = files(cache)
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    for word in ("nodes", "16", "64", "1.00x", "plain", "no window", "W=2 N=3 G=4", " *", "FLOPs/step"):
        assert word in outcome.out
    *_, where, fields = outcome.out.splitlines()
    assert where == f"stored in {stored}"
    found = Profile.from_dict(json.loads(stored.read_text()))
    assert fields == "W={window} N={ngram} G={guesses} budget={budget}".format(**found.fields)
    assert found.key.model == "tiny-tuned"
    assert found.times.contexts == (16, 64)
    assert found.times.nodes == (1, 2, 4, 8)
    assert "\x1b" not in outcome.out + outcome.err  # no terminal, no progress bar


def test_the_built_in_prompts_are_four(lookahead: Run, folder: str, cache: Path) -> None:
    assert len(PROMPTS) == 4
    outcome = lookahead("tune", folder, *QUICK)
    assert outcome.code == 0, outcome
    assert len(files(cache)) == 1


def test_json_is_the_profile_alone(lookahead: Run, folder: str, prompts: str, cache: Path) -> None:
    outcome = lookahead("tune", folder, *QUICK, "--prompts", prompts, "--json")
    (stored,) = files(cache)
    assert json.loads(outcome.out) == json.loads(stored.read_text())
    found = json.loads(outcome.out)
    assert found["schema"] == 1
    assert found.keys() == {
        "schema", "model", "parameters", "dtype", "device", "versions", "curve", "config", "measured",
    }  # fmt: skip
    assert list(found["config"]) == list(TUNED_FIELDS)
    assert found["versions"].keys() == {"torch", "transformers", "lookahead_decoding"}


def test_a_dry_run_stores_nothing(lookahead: Run, folder: str, prompts: str, cache: Path) -> None:
    outcome = lookahead("tune", folder, *QUICK, "--prompts", prompts, "--dry-run")
    assert outcome.code == 0
    assert "nothing is stored" in outcome.out
    assert files(cache) == []


def test_a_plot_is_a_picture(lookahead: Run, folder: str, prompts: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "curve.png"
    outcome = lookahead("tune", folder, *QUICK, "--prompts", prompts, "--dry-run", "--plot", str(plot))
    assert outcome.code == 0, outcome
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_plot_without_matplotlib_is_a_sentence_before_anything_is_measured(
    lookahead: Run, folder: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "matplotlib" else find_spec(name, *args)
    )
    outcome = lookahead("tune", folder, *QUICK, "--plot", "curve.png")
    assert outcome == (
        2,
        "",
        "error: --plot needs the package matplotlib; run `pip install 'lookahead-decoding[plot]'`\n",
    )
    assert files(cache) == []


@pytest.mark.parametrize("content", ["", "\n\n", "not json\n", "3\n", '""\n', '{"text": "x"}\n', b"\xff\n", None])
def test_prompts_that_are_none_are_a_sentence(
    lookahead: Run, folder: str, tmp_path: Path, content: str | bytes | None
) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    outcome = lookahead("tune", folder, *QUICK, "--prompts", str(path))
    is_a_sentence(outcome, 2)
    assert str(path) in outcome.err


def is_a_sentence(outcome: Outcome, code: int) -> None:
    assert outcome.code == code, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (2, ("--contexts", "")),
        (2, ("--contexts", "0")),
        (2, ("--contexts", "128,many")),
        (2, ("--contexts", "-5")),
        (2, ("--contexts", "1,,2")),
        (2, ("--contexts", "9" * 30)),
        (2, ("--max-nodes", "1")),
        (2, ("--max-nodes", "129")),
        (2, ("--repeats", "0")),
        (2, ("-n", "1")),
        (2, ("--plot", "curve.pdf")),
        (2, ("--plot", "/no/such/folder/curve.png")),
        (2, ("--dtype", "int8")),
        (2, ("--window", "3")),
        (2, ("one", "two")),
    ],
)
def test_bad_options_are_a_sentence(lookahead: Run, cache: Path, code: int, arguments: tuple[str, ...]) -> None:
    is_a_sentence(lookahead("tune", "/no/such/model", *arguments), code)
    assert files(cache) == []


def test_a_model_that_is_not_there_is_a_sentence(lookahead: Run) -> None:
    is_a_sentence(lookahead("tune", "/no/such/model"), 3)


def test_a_cache_folder_that_cannot_be_written_is_told(lookahead: Run, folder: str, prompts: str, cache: Path) -> None:
    cache.write_text("a file")
    outcome = lookahead("tune", folder, *QUICK, "--prompts", prompts)
    assert outcome.code == 2
    assert "set LOOKAHEAD_CACHE to a folder that can be written" in outcome.err


@pytest.mark.parametrize("where", ["measure", "attempt"])
def test_an_interrupt_stores_nothing(
    lookahead: Run, folder: str, prompts: str, cache: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, where, interrupt)
    outcome = lookahead("tune", folder, *QUICK, "--prompts", prompts)
    assert (outcome.code, outcome.out) == (130, "")
    assert files(cache) == []


# What goes by it afterwards


@pytest.fixture
def tuned(lookahead: Run, folder: str, prompts: str) -> dict[str, Any]:
    """A profile that was just stored; its fields are made to be recognisable."""
    outcome = lookahead("tune", folder, *QUICK, "--prompts", prompts, "--json")
    assert outcome.code == 0, outcome
    found = Profile.from_dict(json.loads(outcome.out))
    chosen = found.config.replace(window=2, ngram=3, guesses=5, budget=16)
    stored = profile.save(Profile(found.key, found.versions, found.times, chosen, found.figures))
    return {"fields": chosen.to_dict(), "file": stored}


def generated_config(lookahead: Run, folder: str, *arguments: str) -> dict[str, Any]:
    outcome = lookahead("generate", "--model", folder, *MODEL, "-n", "4", "--json", *arguments, "Hello")
    assert outcome.code == 0, outcome
    return dict(json.loads(outcome.out)["config"])


def test_generate_goes_by_the_profile_unless_told_otherwise(
    lookahead: Run, folder: str, tuned: dict[str, Any], tmp_path: Path
) -> None:
    fields = tuned["fields"]
    file = tmp_path / "config.json"
    file.write_text('{"guesses": 3}')
    assert generated_config(lookahead, folder) == fields
    assert generated_config(lookahead, folder, "--config", str(file)) == fields | {"guesses": 3}
    assert generated_config(lookahead, folder, "--config", str(file), "-G", "2") == fields | {"guesses": 2}
    assert generated_config(lookahead, folder, "--preset", "paper") == PRESETS["paper"].to_dict()


def test_every_front_door_goes_by_it(lookahead: Run, folder: str, tuned: dict[str, Any]) -> None:
    engine = Engine.from_pretrained(folder, dtype="float32")
    assert engine.config.to_dict() == tuned["fields"]
    assert Engine.from_pretrained(folder, dtype="float32", tuned=False).config == LookaheadConfig()
    facts = json.loads(lookahead("info", folder, *MODEL, "--json").out)["model"]["tuned"]
    assert facts["file"] == str(tuned["file"])
    assert facts["config"]["guesses"] == 5
    said = f"W=2 N=3 G=5 budget=16 ({tuned['file']})"
    assert said in lookahead("info", folder, *MODEL).out
    run = ("generate", "--model", folder, *MODEL, "-n", "4", "--verbose", "Hello")
    assert f"tuned: {said}" in lookahead(*run).err
    assert "tuned: step times only" in lookahead(*run, "--preset", "plain").err


def test_without_a_profile_they_say_so(lookahead: Run, folder: str) -> None:
    facts = json.loads(lookahead("info", folder, *MODEL, "--json").out)["model"]["tuned"]
    assert (facts["file"], facts["config"]) == (None, None)
    shown = lookahead("generate", "--model", folder, *MODEL, "-n", "4", "--verbose", "Hello").err
    assert "tuned: no profile for this model" in shown


def test_the_number_of_threads_belongs_to_it(lookahead: Run, folder: str, tuned: dict[str, Any]) -> None:
    def config(threads: str) -> LookaheadConfig:
        asked = ("--dtype", "float32", "--threads", threads, "-n", "2", "--json", "Hello")
        outcome = lookahead("generate", "--model", folder, *asked)
        return LookaheadConfig.from_dict(json.loads(outcome.out)["config"])

    assert config("1").to_dict() == tuned["fields"]
    assert config("2") == LookaheadConfig()


def test_a_stale_profile_is_told_once_and_the_command_goes_on(
    lookahead: Run, folder: str, tuned: dict[str, Any]
) -> None:
    file = tuned["file"]
    values = json.loads(file.read_text())
    values["versions"]["torch"] = "1.0"
    file.write_text(json.dumps(values))
    outcome = lookahead("generate", "--model", folder, *MODEL, "-n", "4", "Hello")
    assert outcome.code == 0
    assert outcome.err.count("is not used: it was measured with torch 1.0") == 1


def test_tuning_itself_starts_from_nothing(
    lookahead: Run, folder: str, prompts: str, tuned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    priors: list[Any] = []
    init = CostCurve.__init__

    def noted(curve: CostCurve, prior: Any) -> None:
        priors.append(prior)
        init(curve, prior)

    monkeypatch.setattr(CostCurve, "__init__", noted)
    outcome = lookahead("tune", folder, *QUICK, "--prompts", prompts)
    assert outcome.code == 0
    assert not any(isinstance(getattr(prior, "__self__", None), Profile) for prior in priors)


def test_models_without_a_chat_template_get_the_prompts_as_they_are(
    lookahead: Run, folder: str, prompts: str, tmp_path: Path
) -> None:
    copy = tmp_path / "untaught"
    copy.mkdir()
    for file in Path(folder).iterdir():
        if file.name != "chat_template.jinja":
            (copy / file.name).write_bytes(file.read_bytes())
    outcome = lookahead("tune", str(copy), *QUICK, "--prompts", prompts, "--dry-run")
    assert outcome.code == 0, outcome


def test_the_models_used_here_are_tiny(engine: Engine) -> None:
    assert isinstance(engine.model, PreTrainedModel)
    assert engine.profile_key.parameters < 1_000_000
