"""The command line: its output, its errors and its exit codes, on a tiny model that speaks ASCII."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging

import lookahead_decoding
from lookahead_decoding import LookaheadConfig, compare
from lookahead_decoding.cli import main
from lookahead_decoding.cli.screen import Screen
from lookahead_decoding.completion import Chunk
from lookahead_decoding.config import MAX_NEW_TOKENS, PRESETS
from model_files import save_chat_model, write_gguf

CONTEXT = 100_000  # positions; a test that interrupts needs an answer that would take long
JSON_KEYS = {
    "schema", "text", "token_ids", "prompt_tokens", "new_tokens", "steps", "tokens_per_step",
    "nodes_per_step", "accepted_by_source", "seconds", "tokens_per_second", "finish_reason", "sampling",
    "config", "model", "dtype", "device", "threads",
}  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model and its tokenizer, saved."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_chat_model(path, context=CONTEXT)
    return str(path)


@pytest.fixture
def altered(folder: str, tmp_path: Path) -> Callable[..., str]:
    """A copy of the model's folder with some fields of a JSON file changed."""

    def alter(file: str, **fields: Any) -> str:
        copy = tmp_path / "altered"
        shutil.copytree(folder, copy)
        values = json.loads((copy / file).read_text())
        (copy / file).write_text(json.dumps(values | fields))
        return str(copy)

    return alter


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


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Standard output, which is one JSON object."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    def is_one_sentence(self) -> bool:
        return self.out == "" and self.err.startswith("error: ") and self.err.count("\n") == 1


Run = Callable[..., Outcome]


@pytest.fixture
def lookahead(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The program, in this process."""

    def run(*arguments: str, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        code = main(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def generate(lookahead: Run, folder: str) -> Run:
    """``lookahead generate`` with the tiny model, in float32."""

    def run(*arguments: str, model: str = folder, stdin: bytes = b"") -> Outcome:
        base = ("generate", "--model", model, "--dtype", "float32", "--threads", "1", "-n", "24")
        return lookahead(*base, *arguments, stdin=stdin)

    return run


@pytest.fixture
def chat(lookahead: Run, folder: str) -> Run:
    """``lookahead chat`` with these lines typed."""

    def run(*lines: str, options: tuple[str, ...] = ()) -> Outcome:
        base = ("chat", folder, "--dtype", "float32", "--threads", "1", "-n", "8", *options)
        return lookahead(*base, stdin="".join(f"{line}\n" for line in lines).encode())

    return run


# The program


def test_the_version_is_the_packages(lookahead: Run) -> None:
    assert lookahead("--version") == Outcome(0, f"lookahead-decoding {lookahead_decoding.__version__}\n", "")


def test_python_m_is_the_same_program_and_help_needs_no_torch() -> None:
    code = (
        "import runpy, sys; sys.argv[1:] = ['generate', '--help']\n"
        "try: runpy.run_module('lookahead_decoding', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert "Usage: lookahead generate" in result.stdout


def test_no_command_shows_the_help(lookahead: Run) -> None:
    outcome = lookahead()
    assert outcome.code == 0
    for command in ("generate", "chat", "info", "demo"):
        assert command in outcome.out


def test_help_shows_the_defaults_that_apply(lookahead: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = lookahead("generate", "--help").out
    assert f"default: {MAX_NEW_TOKENS}" in shown
    assert f"{LookaheadConfig().window} in default" in shown
    assert all(name in shown for name in PRESETS)


# generate


def test_json_is_one_object_with_all_keys(generate: Run) -> None:
    outcome = generate("--json", "Hello")
    assert outcome.code == 0
    assert outcome.json.keys() >= JSON_KEYS
    assert outcome.json["new_tokens"] == len(outcome.json["token_ids"]) == 24
    assert outcome.json["steps"] < 24  # or the guesses were never right
    assert outcome.json["threads"] == 1
    assert outcome.json["dtype"] == "float32"


def test_text_goes_to_stdout_and_the_summary_to_stderr(generate: Run) -> None:
    outcome = generate("Hello")
    assert outcome.code == 0
    assert outcome.out.removesuffix("\n") == generate("--json", "Hello").json["text"].removesuffix("\n")
    assert "\x1b" not in outcome.out
    assert outcome.err.startswith("24 tokens in ")
    assert outcome.err.endswith("ended by length\n")
    assert outcome.err.count("\n") == 1


def test_verbose_adds_statistics_memory_and_config(generate: Run) -> None:
    err = generate("--verbose", "Hello").err
    for word in ("depth 1", "suffix", "recycled", "nodes per step", "KV ", "draft sources", "budget=64"):
        assert word in err
    assert "window" in generate("--verbose", "--preset", "paper", "Hello").err


def test_a_prompt_is_the_same_wherever_it_comes_from(generate: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("two\nlines\n")
    expected = generate("--json", "two\nlines").json["token_ids"]
    assert generate("--json", "-p", "two\nlines").json["token_ids"] == expected
    assert generate("--json", "--file", str(file)).json["token_ids"] == expected
    assert generate("--json", "-", stdin=b"two\nlines\n").json["token_ids"] == expected


def test_the_chat_template_and_the_system_message_are_applied_unless_raw(generate: Run) -> None:
    assert generate("--json", "--raw", "Hello").json["prompt_tokens"] == len("Hello")
    assert generate("--json", "Hello").json["prompt_tokens"] == len("Hello") + 3
    assert generate("--json", "--system", "Hi", "Hello").json["prompt_tokens"] == len("Hello") + len("Hi") + 5


def test_a_stop_text_ends_the_text_before_it(generate: Run) -> None:
    whole = generate("--json", "Hello").json["text"]
    first, second = whole[12:14], whole[8:10]
    outcome = generate("--json", "--stop", first, "--stop", second, "Hello").json
    assert outcome["text"] == whole[: min(whole.index(first), whole.index(second))]
    assert outcome["finish_reason"] == "stop"


def test_the_same_seed_gives_the_same_text(generate: Run) -> None:
    sampled = ("--temperature", "1.5", "--top-k", "0")
    first = generate(*sampled, "--seed", "7", "Hello")
    assert first.out == generate(*sampled, "--seed", "7", "Hello").out
    assert first.out != generate(*sampled, "--seed", "8", "Hello").out
    assert "temperature=1.5" in first.err
    assert "seed=7" in first.err


def test_a_seed_that_has_no_use_is_mentioned(generate: Run) -> None:
    assert "seed" in generate("--seed", "7", "Hello").err


def test_a_budget_bounds_the_steps_and_without_adapting_they_fill_it(generate: Run) -> None:
    fixed = generate("--json", "--budget", "6", "--no-adaptive", "Hello").json
    assert fixed["config"]["budget"] == 6
    assert fixed["config"]["adaptive"] is False
    assert 4 < fixed["nodes_per_step"] <= 6
    adaptive = generate("--json", "--budget", "6", "--adaptive", "Hello").json
    assert adaptive["nodes_per_step"] <= 6
    assert adaptive["token_ids"] == fixed["token_ids"]


def test_a_reference_and_a_memory_save_steps_and_change_no_token(generate: Run, tmp_path: Path) -> None:
    steady = ("--json", "--budget", "4", "--no-adaptive", "--raw", "Hello")
    cold = generate(*steady).json
    reference, memory = tmp_path / "reference.txt", tmp_path / "memory"
    reference.write_text("Hello" + cold["text"])
    assert generate("--memory", str(memory), *steady).json["steps"] == cold["steps"]
    for options in (("--reference", str(reference)), ("--memory", str(memory))):
        informed = generate(*options, *steady).json
        assert informed["token_ids"] == cold["token_ids"]
        assert informed["steps"] < cold["steps"]


@pytest.mark.parametrize("option", ["--reference", "--memory"])
def test_files_that_cannot_be_read_are_named(generate: Run, tmp_path: Path, option: str) -> None:
    for path in (tmp_path, tmp_path / "none" / "file"):
        outcome = generate(option, str(path), "Hello")
        assert outcome.code == 2
        assert outcome.is_one_sentence()
        assert str(path) in outcome.err


def test_options_win_over_the_file_and_the_file_over_the_preset(generate: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"preset": "jacobi", "window": 6, "ngram": 3}))

    def config(*arguments: str) -> dict[str, Any]:
        return dict(generate("--json", *arguments, "Hello").json["config"])

    jacobi, paper = PRESETS["jacobi"], PRESETS["paper"]
    assert config() == LookaheadConfig().to_dict()
    assert config("--preset", "paper") == paper.to_dict()
    assert config("--config", str(file)) == jacobi.replace(window=6, ngram=3).to_dict()
    assert config("--config", str(file), "--preset", "paper") == paper.replace(window=6, ngram=3).to_dict()
    everything = ("--config", str(file), "--preset", "paper", "-W", "4", "-G", "2")
    assert config(*everything) == paper.replace(window=4, ngram=3, guesses=2).to_dict()


@pytest.mark.parametrize("sampled", [(), ("--temp", "0.9")], ids=["greedy", "sampled"])
def test_compare_adds_plain_decoding_to_the_json(generate: Run, sampled: tuple[str, ...]) -> None:
    found = generate("--compare", "--json", *sampled, "Hello").json
    assert found.keys() >= JSON_KEYS | {"plain", "speedup", "identical", "first_difference"}
    assert found["identical"] is True
    assert found["first_difference"] is None
    assert found["plain"].keys() >= JSON_KEYS
    assert found["plain"]["tokens_per_step"] == 1
    assert found["plain"]["token_ids"] == found["token_ids"]
    assert found["plain"]["sampling"] == found["sampling"]
    assert found["cached_tokens"] == found["plain"]["cached_tokens"] == 0


def test_compare_shows_an_identical_text_once(generate: Run) -> None:
    outcome = generate("--compare", "Hello")
    assert outcome.out == generate("Hello").out
    assert "over plain decoding" in outcome.err
    assert "identical tokens" in outcome.err


@pytest.fixture
def _plain_decoding_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = compare.decode_afresh

    def wrong(*arguments: Any, **options: Any) -> Any:
        completion = right(*arguments, **options)
        if options["lookahead"] != "plain":
            return completion
        tokens = list(completion.token_ids)
        tokens[5] = (tokens[5] + 1) % 90
        return dataclasses.replace(completion, token_ids=tokens, text="something else")

    monkeypatch.setattr(compare, "decode_afresh", wrong)


@pytest.mark.usefixtures("_plain_decoding_goes_wrong")
def test_compare_shows_both_texts_and_fails_on_a_bug(generate: Run) -> None:
    outcome = generate("--compare", "Hello")
    assert outcome.code == 1
    assert outcome.out.endswith("something else\n")
    assert "first difference at token 5" in outcome.err
    assert "bug" in outcome.err
    found = generate("--compare", "--json", "Hello")
    assert found.code == 1
    assert found.json["identical"] is False
    difference = found.json["first_difference"]
    assert difference.keys() == {"index", "plain_token", "lookahead_token", "label", "gap", "bound"}
    assert (difference["index"], difference["label"]) == (5, "bug")


# What goes wrong


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (2, ()),
        (2, ("",)),
        (2, ("-",)),
        (2, ("one", "--prompt", "two")),
        (2, ("--prompt", "\udcff")),
        (2, ("--file", "/no/such/file", "--prompt", "two")),
        (2, ("--file", "/no/such/file")),
        (2, ("--file", "/")),
        (2, ("--file", sys.executable)),
        (2, ("--raw", "--system", "be kind", "Hello")),
        (2, ("--preset", "defualt", "Hello")),
        (2, ("--config", "/no/such/file", "Hello")),
        (2, ("--config", sys.executable, "Hello")),
        (2, ("--window", "-1", "Hello")),
        (2, ("--window", "many", "Hello")),
        (2, ("--no-such-option", "Hello")),
        (2, ("--dtype", "int8", "Hello")),
        (2, ("--device", "abacus", "Hello")),
        (2, ("--threads", "0", "Hello")),
        (2, ("-n", "0", "Hello")),
        (2, ("--temperature", "-1", "Hello")),
        (2, ("--top-p", "7", "Hello")),
        (2, ("--repetition-penalty", "-1", "Hello")),
        (2, ("--stop", "", "Hello")),
        (2, ("--revision", "main", "Hello")),
        (3, ("--model", "/no/such/model", "Hello")),
        (3, ("--model", "", "Hello")),
    ],
)
def test_bad_input_gets_one_sentence_and_its_exit_code(generate: Run, code: int, arguments: tuple[str, ...]) -> None:
    outcome = generate(*arguments)
    assert outcome.code == code, outcome
    assert outcome.is_one_sentence(), outcome


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_a_gpu_is_a_usage_error(generate: Run) -> None:
    outcome = generate("--device", "cuda", "Hello")
    assert outcome.code == 2
    assert outcome.is_one_sentence()


def test_stdin_that_is_not_utf8_is_a_usage_error(generate: Run, lookahead: Run, folder: str) -> None:
    for outcome in (
        generate("-", stdin=b"\xff"),
        lookahead("chat", folder, "--threads", "1", stdin=b"\xff\n"),
    ):
        assert outcome.code == 2
        assert outcome.is_one_sentence()
        assert "UTF-8" in outcome.err


def test_a_prompt_longer_than_the_context_fails(generate: Run, altered: Callable[..., str]) -> None:
    model = altered("config.json", max_position_embeddings=64)
    assert generate("--raw", "x" * 63, model=model).out.count("\n") <= 2
    outcome = generate("--raw", "x" * 64, model=model)
    assert outcome.code == 1
    assert outcome.is_one_sentence()
    assert "64" in outcome.err


def test_a_model_without_a_chat_template_is_sent_to_raw(lookahead: Run, folder: str, tmp_path: Path) -> None:
    copy = tmp_path / "untaught"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("chat_template.jinja"))
    for arguments in (("generate", "--model", str(copy), "Hello"), ("chat", str(copy))):
        outcome = lookahead(*arguments, "--threads", "1")
        assert outcome.code == 2
        assert outcome.is_one_sentence()
        assert "--raw" in outcome.err


def test_logits_that_are_no_numbers_fail(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from lookahead_decoding.model import ModelRunner

    def forward(self: ModelRunner, steps: Any) -> list[torch.Tensor]:
        return [torch.full((len(plan.reads), self.vocab_size), torch.nan) for plan, *_ in steps]

    monkeypatch.setattr(ModelRunner, "forward", forward)
    outcome = generate("Hello")
    assert outcome.code == 1
    assert outcome.is_one_sentence()
    assert "NaN" in outcome.err


def test_an_unexpected_error_is_one_line_and_its_traceback_is_for_verbose(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("lookahead_decoding.cli.generate.open_engine", fail)
    assert generate("Hello") == Outcome(1, "", "error: RuntimeError: first line second line\n")
    assert "Traceback" in generate("Hello", "--verbose").err


def test_generating_from_a_local_model_opens_no_socket(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert generate("Hello").code == 0


# The screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def chunk(text: str, source: str) -> Chunk:
    return Chunk(text, [0], [source], [text])


@pytest.mark.parametrize(
    ("environment", "no_color", "is_terminal", "is_shaded"),
    [
        ({}, False, True, True),
        ({}, True, True, False),
        ({"NO_COLOR": "1"}, False, True, False),
        ({"TERM": "dumb"}, False, True, False),
        ({}, False, False, False),
    ],
    ids=["terminal", "--no-color", "NO_COLOR", "dumb terminal", "pipe"],
)
def test_tokens_are_shaded_on_a_colour_terminal_alone(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    no_color: bool,
    is_terminal: bool,
    is_shaded: bool,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stdout, stderr = (Terminal() if is_terminal else io.StringIO() for _ in range(2))
    sources = ("suffix", "recycled", "prompt_ngrams", "pool")
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        screen = Screen(LookaheadConfig(window=2, sources=sources), no_color=no_color)
        screen.legend()
        with pytest.raises(AssertionError):  # no chunk had the completion
            screen.stream(iter([*(chunk("a", name) for name in sources), chunk("b", "window"), chunk("c", "")]))
    assert screen.text == "aaaabc"
    assert ("\x1b" in stdout.getvalue()) == is_shaded
    assert stdout.getvalue().endswith("c\n")  # the model's own token is never shaded
    legend = stderr.getvalue()
    assert bool(legend) == is_shaded
    assert all(name in legend for name in (*sources, "window") if is_shaded)


def test_the_legend_names_the_sources_that_there_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    stdout, stderr = Terminal(), Terminal()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        Screen(LookaheadConfig(sources=("suffix", "recycled"))).legend()
    assert "suffix" in stderr.getvalue()
    assert "recycled" in stderr.getvalue()
    assert "window" not in stderr.getvalue()


# chat


def prompt_sizes(err: str) -> list[int]:
    """The prompt lengths that the summaries of a chat tell, where some of the prompt was reused."""
    return [int(line.split(" prompt tokens reused")[0].split()[-1]) for line in err.splitlines() if "reused" in line]


def test_a_chat_answers_every_line_and_ends_with_its_input(chat: Run, generate: Run) -> None:
    outcome = chat("Hello", "", "and then?")
    assert outcome.code == 0
    assert outcome.err.count("tokens in ") == 2
    first = generate("--json", "-n", "8", "Hello").json["text"]
    assert outcome.out.startswith(first)
    # <user>, the text, <eos>, <assistant>, the answer, <eos>, and so on
    assert prompt_sizes(outcome.err) == [len("Hello") + len(first) + len("and then?") + 7]


def test_a_chat_computes_only_what_is_new(chat: Run) -> None:
    reused = next(line for line in chat("Hello", "Hello").err.splitlines() if "reused" in line)
    assert int(reused.split(" of ")[0].split()[-1]) >= len("Hello") + 3


def test_reset_undo_and_system_change_what_the_model_sees(chat: Run) -> None:
    once = chat("Hello").out
    assert chat("Hello", "/undo", "Hello").out == once * 2
    assert chat("Hello", "/reset", "Hello").out == once * 2
    assert chat("Hello", "Hello").out != once * 2
    by_option = chat("Hello", options=("--system", "Shout!")).out
    assert chat("/system Shout!", "Hello").out == by_option != once
    assert chat("/system Shout!", "/system", "Hello").out == once
    nothing = chat("/undo", "Hello")
    assert nothing.out == once
    assert "error: there is nothing to take back" in nothing.err


def test_a_preset_changes_the_steps_and_not_the_text(chat: Run) -> None:
    outcome = chat("/preset plain", "Hello", "/stats")
    assert outcome.out == chat("Hello").out
    assert "8 tokens in 8 steps" in outcome.err
    assert "answers: 1" in outcome.err


def test_bad_commands_get_one_sentence_and_the_chat_goes_on(chat: Run) -> None:
    outcome = chat("/dance", "/preset dance", "/stats", "Hello")
    assert outcome.code == 0
    assert outcome.out == chat("Hello").out
    assert sum(line.startswith("error: ") for line in outcome.err.splitlines()) == 2


def test_exit_ends_and_help_lists_every_command(chat: Run) -> None:
    outcome = chat("/help", "/exit", "Hello")
    assert (outcome.code, outcome.out) == (0, "")
    listed = {line.split()[0] for line in outcome.err.splitlines()}
    assert listed == {"/help", "/reset", "/system", "/stats", "/preset", "/undo", "/exit"}


# info and demo


def test_info_describes_the_machine_and_with_a_model_the_model(lookahead: Run, folder: str) -> None:
    facts = lookahead("info", "--json").json
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["presets"].keys() == PRESETS.keys()
    assert "model" not in facts
    found = lookahead("info", folder, "--dtype", "float32", "--json").json
    assert found["threads"]["chosen"] <= found["threads"]["available"]
    model = found["model"]
    assert model["architecture"] == "LlamaForCausalLM"
    assert model["layers"] == {"full_attention": 2}
    assert model["attention"] == "packed"
    assert model["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, head_dim, float32
    assert model["context"] == CONTEXT
    assert model["rope_switch"] is None


def test_info_for_people_says_the_same(lookahead: Run, folder: str) -> None:
    shown = lookahead("info", folder, "--dtype", "float32", "--threads", "1").out
    for word in ("LlamaForCausalLM", "512 bytes per token", "packed", "1 chosen", *PRESETS):
        assert word in shown


def test_a_gguf_file_is_said_to_be_dequantised_and_how_much_memory_that_takes(
    lookahead: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate", reason="the extra gguf is not installed")
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    converting, loading = lookahead("info", str(file), "--dtype", "bfloat16", "--threads", "1").err.splitlines()
    assert "dequantised to float32, take 0.1 MiB of disk" in converting
    assert loading == f"loading {file}: GGUF weights are dequantised, to bfloat16, and take 0.0 MiB of memory"
    assert lookahead("info", str(file), "--dtype", "bfloat16", "--threads", "1").err.splitlines() == [loading]
    assert loading in lookahead("generate", "a", "--model", str(file), "-n", "1", "--dtype", "bfloat16").err


def test_info_of_a_model_that_is_not_there_is_an_error(lookahead: Run) -> None:
    outcome = lookahead("info", "/no/such/model")
    assert outcome.code == 3
    assert outcome.is_one_sentence()


def test_the_cache_folder_and_its_size_are_told(
    lookahead: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(1234))
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    assert lookahead("info", "--json").json["cache"] == {"folder": str(tmp_path), "bytes": 1234}


DEMO = ("--threads", "1", "-n", "8", "--repeats", "2")


def test_the_demo_shows_texts_a_check_and_a_table(lookahead: Run, folder: str) -> None:
    outcome = lookahead("demo", "--model", folder, *DEMO)
    assert outcome.out.count("identical tokens") == 2
    assert "speed-up over Transformers' generate" in outcome.out
    assert outcome.code == (1 if "bug" in outcome.out else 0)


@pytest.mark.usefixtures("_plain_decoding_goes_wrong")
def test_the_demo_fails_when_the_tokens_differ(lookahead: Run, folder: str) -> None:
    outcome = lookahead("demo", "--model", folder, *DEMO)
    assert outcome.code == 1
    assert "DIFFERENT TOKENS" in outcome.out


# Signals and pipes, which need a process

PROGRAM = (
    "import signal, sys; from lookahead_decoding.cli import main\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's shell has it ignored\n"
    "sys.exit(main())"
)


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        *arguments,
        "--dtype",
        "float32",
        "--threads",
        "1",
        "-n",
        "90000",
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as child:
        try:
            yield child
        finally:
            child.kill()


def test_ctrl_c_stops_generating_with_exit_code_130(folder: str) -> None:
    with process("generate", "--model", folder, "Hello") as child:
        assert child.stdout is not None
        first = child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        rest, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert (first + rest).endswith("\n")
    assert err == ""


def test_a_closed_pipe_ends_quietly(folder: str) -> None:
    with process("generate", "--model", folder, "Hello") as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(1)
        child.stdout.close()
        assert child.wait(timeout=60) == 141
        assert child.stderr.read() == ""


def test_ctrl_c_stops_an_answer_and_then_the_chat(folder: str) -> None:
    with process("chat", folder) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdin.write("Hello\n")
        child.stdin.flush()
        assert child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        assert child.stderr.readline() == "(stopped)\n"
        child.stdin.write("/stats\n")
        child.stdin.flush()
        assert "no finished answer" in child.stderr.readline()
        child.send_signal(signal.SIGINT)
        child.stdin.flush()
        _, err = child.communicate(timeout=60)
    assert child.returncode == 0
    assert err.strip() == ""
