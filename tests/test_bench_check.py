"""``lookahead bench check``: it finds planted faults in bfloat16, finds none where there is none, and says so."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from lookahead_decoding import CapacityError, Engine, compare
from lookahead_decoding import check as checking
from lookahead_decoding.check import Check, check_prompt, plain_tokens, summarise
from lookahead_decoding.cli import main, progress
from lookahead_decoding.cli.tune import PROMPTS
from lookahead_decoding.compare import BUG, TIE, Judge, decode_afresh
from model_files import save_chat_model, sentence
from test_exactness import looping
from test_mutations import ALL_FILLED, FAULTS
from zoo import tiny

HALF = torch.bfloat16
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.5, "top_k": 0}
MODES = pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def looper(**options: Any) -> Engine:
    """A model in bfloat16 that repeats itself, so that guesses of several tokens are accepted."""
    return Engine(tiny("llama", initializer_range=0.1, dtype=HALF, eos_token_id=None), **options)


@pytest.fixture
def _no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe would refuse a model with a wrong mask before anything is decoded."""
    monkeypatch.setattr("lookahead_decoding.probe._TOLERANCE", {torch.float32: float("inf")})
    monkeypatch.setattr("lookahead_decoding.probe._TOLERANCE_HALF", float("inf"))


def checks(num_prompts: int = 3) -> Iterator[Check]:
    """Several prompts, ways to guess, and ways to draw."""
    for config in ("paper", ALL_FILLED):
        engine = looper(lookahead=config)
        with Judge(engine) as judge:
            for seed in range(num_prompts):
                for options in (GREEDY, SAMPLED):
                    yield check_prompt(engine, judge, looping(12, seed), seed=seed, max_new_tokens=32, **options)


# Faults


def labels(found: Iterator[Check]) -> Iterator[str]:
    return (check.difference.label for check in found if check.difference is not None)


def test_without_a_fault_no_difference_is_a_bug() -> None:
    found = list(checks())
    assert set(labels(iter(found))) <= {TIE}  # how many ties there are depends on the machine's kernels
    summary = summarise(found)
    assert summary["bugs"] == 0
    assert summary["prompts"] == summary["identical"] + summary["ties"] == len(found)
    assert summary["identical"] > 0
    assert summary["tokens_per_step"] > 1.3
    assert summary["compared_tokens"] > 10 * len(found)


@pytest.mark.usefixtures("_no_probe")
@pytest.mark.parametrize("fault", ["mask", "positions", "cache path", "accept rule", "noise key"])
def test_a_planted_fault_is_a_bug(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert any(label == BUG for label in labels(checks()))


@pytest.mark.usefixtures("_no_probe")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_does_not_reach_what_it_is_judged_by(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the plain tokens, nor the noise bound, nor float32's scores; so it cannot excuse itself."""
    prompt = looping(12)

    def evidence() -> list[Any]:
        engine = looper()
        plain = plain_tokens(engine, prompt, seed=3, max_new_tokens=20, **SAMPLED)
        wrong = [*plain[:15], (plain[15] + 1) % 200]
        sampling = {"do_sample": True, "temperature": 0.5, "top_k": 0, "seed": 3}
        with Judge(engine) as judge:
            return [plain, judge.first_difference(prompt, plain, wrong, sampling)]

    expected = evidence()
    FAULTS[fault](monkeypatch)
    assert evidence() == expected


# Plain decoding by hand, and the judge


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "phi3-longrope", "llama-dynamic-rope"])
@MODES
def test_plain_tokens_are_those_of_the_plain_preset(name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Without the session, and in bfloat16 too, as the passes are the same ones."""
    engine = Engine(tiny(name, dtype=dtype))
    for length in (1, 50):  # the rotary switches are at 64
        prompt = looping(length)
        expected = decode_afresh(engine, prompt, lookahead="plain", max_new_tokens=24, seed=5, **options)
        assert plain_tokens(engine, prompt, seed=5, max_new_tokens=24, **options) == expected.token_ids


def test_long_prompts_are_read_in_the_chunks_of_the_plain_preset() -> None:
    engine = Engine(tiny("llama", dtype=HALF, max_position_embeddings=2048))
    prompt = looping(1100)
    expected = decode_afresh(engine, prompt, lookahead="plain", max_new_tokens=4, temperature=0)
    assert plain_tokens(engine, prompt, seed=0, max_new_tokens=4, **GREEDY) == expected.token_ids


def test_plain_tokens_end_with_the_context() -> None:
    engine = Engine(tiny("llama", max_position_embeddings=32, eos_token_id=None))
    assert len(plain_tokens(engine, looping(20), seed=0, max_new_tokens=99, **GREEDY)) == 12


def difference_at(judge: Judge, prompt: list[int], plain: list[int], index: int) -> compare.Difference:
    other = [*plain[:index], (plain[index] + 1) % 200]
    difference = judge.first_difference(prompt, plain, other, {"do_sample": False})
    assert difference is not None
    return difference


def test_the_weights_are_copied_once_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = looper(), looping(12)
    plain = plain_tokens(engine, prompt, seed=0, max_new_tokens=8, **GREEDY)
    made: list[weakref.ref[Any]] = []
    runner = compare.ModelRunner

    def noted(model: Any, *arguments: Any) -> Any:
        made.append(weakref.ref(model))
        return runner(model, *arguments)

    monkeypatch.setattr(compare, "ModelRunner", noted)
    with Judge(engine) as judge:
        assert judge.first_difference(prompt, plain, plain, {"do_sample": False}) is None
        assert made == []  # nothing to judge
        for index in (0, 3, 7):
            difference_at(judge, prompt, plain, index)
        (model,) = made
        exact = model()
        assert exact is not None
        assert exact.dtype == torch.float32
        del exact
    gc.collect()
    assert model() is None
    assert engine.model.dtype == HALF


def test_too_little_memory_for_float32_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = looper(), looping(12)
    plain = plain_tokens(engine, prompt, seed=0, max_new_tokens=2, **GREEDY)
    monkeypatch.setattr(compare, "free_memory", lambda device: 1000)
    with Judge(engine) as judge, pytest.raises(CapacityError, match="MiB free") as caught:
        difference_at(judge, prompt, plain, 1)
    sentence(caught.value)


def test_the_gap_is_that_of_the_models_own_float32_logits() -> None:
    engine, prompt = looper(), looping(12)
    plain = plain_tokens(engine, prompt, seed=0, max_new_tokens=8, **GREEDY)
    with Judge(engine) as judge:
        difference = difference_at(judge, prompt, plain, 7)
    with torch.no_grad():
        text = torch.tensor([[*prompt, *plain[:7]]])
        exact = tiny("llama", initializer_range=0.1, dtype=HALF, eos_token_id=None).float()(text).logits[0, -1]
        found = engine.model(text).logits[0, -1]
    assert difference.plain_token is not None
    assert difference.lookahead_token is not None
    gap = (exact[difference.plain_token] - exact[difference.lookahead_token]).abs().item()
    assert difference.gap == pytest.approx(gap, abs=1e-4)
    assert difference.bound == pytest.approx(2 * (found - exact).abs().max().item(), rel=0.5)


# The command


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model and its tokenizer, saved."""
    path = tmp_path_factory.mktemp("models") / "tiny-checked"
    save_chat_model(path, context=1024)
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

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Standard output, which is JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Outcome]


@pytest.fixture
def bench_check(capsys: pytest.CaptureFixture[str], folder: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``lookahead bench check`` with the tiny model, in this process."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str, model: str = folder, dtype: str = "float32") -> Outcome:
        code = main(["bench", "check", model, "--dtype", dtype, "--threads", "1", "-n", "16", *arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = ['"Hello"', "", '{"prompt": "abc[b]abc", "id": 3}', '{"turns": ["one", "two"], "question_id": 81}']
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[int]], None]) -> None:
    """Let lookahead's tokens go wrong."""

    def wrong(*arguments: Any, **options: Any) -> Any:
        completion = decode_afresh(*arguments, **options)
        tokens = list(completion.token_ids)
        change(tokens)
        return dataclasses.replace(completion, token_ids=tokens)

    monkeypatch.setattr(checking, "decode_afresh", wrong)


def test_identical_tokens_are_counted_in_a_table(bench_check: Run, prompts: str) -> None:
    outcome = bench_check("--prompts", prompts)
    assert (outcome.code, outcome.err) == (0, "")
    assert [cell.strip() for cell in outcome.out.splitlines()[3].split("│")[1:-1]] == ["3", "3", "0", "0"]
    assert "Tokens compared: 48." in outcome.out
    assert "label" not in outcome.out
    assert "\x1b" not in outcome.out  # no terminal, no colours and no progress bar


def test_json_is_a_line_per_prompt_and_one_of_counts(bench_check: Run, prompts: str) -> None:
    outcome = bench_check("--prompts", prompts, "--json", "--preset", "paper")
    *lines, summary = outcome.lines
    assert (outcome.code, outcome.err) == (0, "")
    assert [line["prompt"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line.keys() == {
            "schema", "prompt", "prompt_tokens", "new_tokens", "compared_tokens", "steps", "nodes_per_step",
            "identical", "first_difference",
        }  # fmt: skip
        assert (line["new_tokens"], line["compared_tokens"], line["identical"]) == (16, 16, True)
    assert summary.keys() == {
        "schema", "prompts", "identical", "ties", "bugs", "new_tokens", "compared_tokens", "tokens_per_step",
        "nodes_per_step", "sampling", "config", "model", "dtype", "device", "threads",
    }  # fmt: skip
    assert (summary["prompts"], summary["identical"], summary["ties"], summary["bugs"]) == (3, 3, 0, 0)
    assert summary["config"]["window"] == 15
    assert (summary["dtype"], summary["threads"]) == ("float32", 1)
    assert summary["sampling"]["do_sample"] is False


def test_a_line_is_printed_before_the_next_prompt_is_decoded(
    bench_check: Run, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[Any] = []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if decoded:
            raise KeyboardInterrupt
        decoded.append(arguments)
        return decode_afresh(*arguments, **options)

    monkeypatch.setattr(checking, "decode_afresh", interrupted)
    outcome = bench_check("--prompts", prompts, "--json")
    assert outcome.code == 130
    assert [line["prompt"] for line in outcome.lines] == [1]


@pytest.mark.parametrize("is_one_terminal", [True, False])
def test_the_bar_stays_out_of_the_lines(
    bench_check: Run, prompts: str, monkeypatch: pytest.MonkeyPatch, is_one_terminal: bool
) -> None:
    bar = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=bar, force_terminal=True, width=80))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_one_terminal)
    outcome = bench_check("--prompts", prompts, "--json")
    assert [line.get("prompt") for line in outcome.lines] == [1, 2, 3, None]
    assert ("3/3" in bar.getvalue()) != is_one_terminal
    assert "schema" not in bar.getvalue()


def test_sampling_draws_from_all_tokens_under_the_seed(bench_check: Run, prompts: str) -> None:
    outcome = bench_check("--prompts", prompts, "--json", "--temperature", "1.5", "--seed", "7")
    *lines, summary = outcome.lines
    assert outcome.code == 0
    assert all(line["identical"] for line in lines)
    expected = {"do_sample": True, "temperature": 1.5, "top_k": 0, "top_p": 1.0, "seed": 7}
    assert summary["sampling"].items() >= expected.items()


def test_the_built_in_prompts_are_those_of_tune_and_a_limit_takes_the_first(bench_check: Run) -> None:
    *lines, summary = bench_check("--json", "--limit", "1", "-n", "2").lines
    assert summary["prompts"] == len(lines) == 1
    assert lines[0]["prompt_tokens"] == len(PROMPTS[0]) + 3  # the chat template's


def test_a_text_file_has_a_prompt_per_line(bench_check: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('Hello\n\n"abc"\n', encoding="utf-8")
    *lines, _ = bench_check("--json", "-n", "2", "--prompts", str(path)).lines
    assert [line["prompt_tokens"] for line in lines] == [len("Hello") + 3, len('"abc"') + 3]


def test_a_bug_is_shown_and_is_exit_code_1(bench_check: Run, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(tokens: list[int]) -> None:
        tokens[5] = (tokens[5] + 1) % 90

    plant(monkeypatch, change)
    outcome = bench_check("--prompts", prompts)
    assert outcome.code == 1
    assert outcome.out.count("bug ") == 3
    assert "Tokens compared: 15 of 48," in outcome.out
    assert "abc[b]abc" in outcome.out
    outcome = bench_check("--prompts", prompts, "--json")
    assert outcome.code == 1
    line, *_, summary = outcome.lines
    assert (summary["bugs"], summary["ties"], summary["identical"]) == (3, 0, 0)
    difference = line["first_difference"]
    assert (difference["index"], difference["label"], line["compared_tokens"]) == (5, BUG, 5)
    assert isinstance(difference["plain_text"], str)
    assert difference["plain_text"] != difference["lookahead_text"]


def test_an_early_end_is_a_bug(bench_check: Run, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda tokens: tokens.pop())
    outcome = bench_check("--prompts", prompts, "--limit", "1")
    assert outcome.code == 1
    assert "the end" in outcome.out


def test_a_tie_in_bfloat16_is_exit_code_0(
    bench_check: Run, folder: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench_check("--prompts", prompts, "--limit", "1", "-n", "1", "--json")
    assert first.code == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = Engine.from_pretrained(folder, dtype=HALF)
    ids = engine.encode([{"role": "user", "content": "Hello"}])
    right = plain_tokens(engine, ids, seed=0, max_new_tokens=1, **GREEDY)[0]
    twin = right + 1 if right + 1 < model.config.vocab_size else right - 1
    with torch.no_grad():  # equal logits, and no third token near them
        model.lm_head.weight[right] *= 2
        model.lm_head.weight[twin] = model.lm_head.weight[right]
    twins = tmp_path / "twins"
    twins.mkdir()
    for file in Path(folder).iterdir():
        (twins / file.name).write_bytes(file.read_bytes())
    model.save_pretrained(twins)

    def change(tokens: list[int]) -> None:
        assert tokens[0] in (right, twin)
        tokens[0] = right + twin - tokens[0]

    plant(monkeypatch, change)
    arguments = ("--prompts", prompts, "--limit", "1")
    outcome = bench_check(*arguments, model=str(twins), dtype="bfloat16")
    assert outcome.code == 0
    assert "tie" in outcome.out
    *_, summary = bench_check(*arguments, "--json", model=str(twins), dtype="bfloat16").lines
    assert (summary["ties"], summary["bugs"]) == (1, 0)
    assert bench_check(*arguments, model=str(twins)).code == 1  # float32 knows no ties


def is_a_sentence(outcome: Outcome, code: int) -> None:
    assert outcome.code == code, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (2, ("--limit", "0")),
        (2, ("-n", "0")),
        (2, ("--temperature", "-1")),
        (2, ("--seed", "-1")),
        (2, ("--dtype", "int8")),
        (2, ("--preset", "defualt")),
        (2, ("--prompts", "/no/such/file.jsonl")),
        (2, ("--prompts", "/")),
        (2, ("--repeats", "3")),
        (2, ("one", "two")),
        (3, ()),
    ],
)
def test_bad_input_is_a_sentence(bench_check: Run, code: int, arguments: tuple[str, ...]) -> None:
    is_a_sentence(bench_check(*arguments, model="/no/such/model"), code)


@pytest.mark.parametrize("content", ["", "\n\n", "not json\n", "3\n", '""\n', '{"turns": []}\n', '{"turns": "x"}\n'])
def test_prompts_that_are_none_are_a_sentence(bench_check: Run, tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content, encoding="utf-8")
    outcome = bench_check("--prompts", str(path))
    is_a_sentence(outcome, 2)
    assert str(path) in outcome.err


def test_a_prompt_that_is_too_long_is_named(bench_check: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"short"\n"{"x" * 2000}"\n', encoding="utf-8")
    outcome = bench_check("--prompts", str(path))
    is_a_sentence(outcome, 1)
    assert "prompt 2: the prompt has 2003 tokens" in outcome.err


def test_the_group_shows_its_commands_and_help_needs_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert "check" in capsys.readouterr().out
    code = (
        "import sys\nfrom lookahead_decoding.cli import main\n"
        "assert main(['bench', 'check', '--help']) == 0\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert "Usage: lookahead bench check" in result.stdout


def test_a_command_of_the_group_that_does_not_exist_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "dance"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
