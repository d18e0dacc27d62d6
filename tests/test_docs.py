"""The documentation: its examples run, its commands parse, its links lead somewhere, its tables are complete.

A fenced block may have an HTML comment right above it: ``<!-- no test: reason -->`` leaves it out, and
``<!-- file: NAME -->`` writes it into the folder in which the page's examples run.
"""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from transformers import PreTrainedModel

import lookahead_decoding
from lookahead_decoding import Engine, LookaheadConfig, engine
from lookahead_decoding.cli.app import app
from lookahead_decoding.cli.options import GuessingOptions
from lookahead_decoding.compare import Comparison
from lookahead_decoding.completion import Completion
from lookahead_decoding.config import PRESETS
from model_files import save_chat_model
from test_generate import OPTIONS, REFUSED, TRIED_APART
from zoo import tiny

ROOT = Path(__file__).parents[1]
PAGES = sorted(page for folder in (".", "docs", "benchmarks") for page in (ROOT / folder).glob("*.md"))
SHELLS = ("sh", "bash", "shell", "console")

_BLOCK = re.compile(r"^(?: *<!-- ([^\n]*) -->\n\n?)? *```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        line: of its fence.
        note: what the comment above it says.
    """

    page: Path
    line: int
    note: str
    language: str
    code: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The name of the file that the block is."""
        return self.note.removeprefix("file: ") if self.note.startswith("file: ") else None

    @property
    def is_tested(self) -> bool:
        return not self.note.startswith("no test: ")


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        note, language, code = match.groups()
        line = text.count("\n", 0, match.start(3))
        found.append(Block(page, line, note or "", language, textwrap.dedent(code)))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


# Examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model and its tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_chat_model(path, context=8192)
    return str(path)


@pytest.fixture
def _every_model_is_the_tiny_one(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = engine.load

    def load_tiny(name: str | None = None, *, revision: str | None = None, **options: Any) -> Any:
        return load(folder, **options)

    monkeypatch.setattr(engine, "load", load_tiny)
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):

        def from_pretrained(_: str, *, original: Callable[..., Any] = kind.from_pretrained, **options: Any) -> Any:
            return original(folder, **options)

        monkeypatch.setattr(kind, "from_pretrained", from_pretrained)


@pytest.fixture
def _in_a_folder_of_the_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, from which modules are imported too, holds the page's files."""
    for block in blocks_of(page):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for file in tmp_path.glob("*.py"):
        monkeypatch.delitem(sys.modules, file.stem, raising=False)


@pytest.mark.usefixtures("_every_model_is_the_tiny_one", "_in_a_folder_of_the_page")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_python_examples_run(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.language in ("python", "py") and block.is_tested and block.file is None:
            source = "\n" * block.line + block.code  # so that a traceback names the page's line
            exec(compile(source, name_of(page), "exec"), names)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "json"], ids=str)
def test_json_is_json(block: Block) -> None:
    json.loads(block.code)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_fence_belongs_to_a_block(page: Path) -> None:
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks_of(page))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_has_a_language_and_its_comment_a_meaning(block: Block) -> None:
    assert block.language in ("", "text", "python", "py", "json", *SHELLS)
    assert re.fullmatch(r"(no test|file): .+", block.note) or not block.note


# Commands


def commands_in(block: Block) -> Iterator[list[str]]:
    """The words of each command of a shell block, without those that set variables or redirect."""
    lines = block.code.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in lines:
        reader = shlex.shlex(line, posix=True, punctuation_chars=True)
        reader.whitespace_split = True
        words: list[str] = []
        for word in [*reader, ";"]:
            if word in ("|", "||", "&&", "&", ";"):
                if "<" in words or ">" in words:
                    del words[min(words.index(sign) for sign in "<>" if sign in words) :]
                while words and re.match(r"\w+=", words[0]):
                    del words[0]
                if words:
                    yield words
                words = []
            else:
                words.append(word)


COMMANDS = [
    pytest.param(block.page, words, id=f"{block}: {' '.join(words)}")
    for block in BLOCKS
    if block.language in SHELLS and block.is_tested
    for words in commands_in(block)
]


def parse(words: list[str]) -> dict[str, Any]:
    """The options of a ``lookahead`` command, without running it."""
    command, rest = typer.main.get_command(app), list(words)
    while rest and not rest[0].startswith("-") and (commands := getattr(command, "commands", None)):
        command = commands[rest.pop(0)]
    return dict(command.make_context("lookahead", rest).params)


@pytest.mark.usefixtures("_in_a_folder_of_the_page")
@pytest.mark.parametrize(("page", "words"), COMMANDS)
def test_a_shell_command_exists_and_takes_its_options(page: Path, words: list[str]) -> None:
    match words:
        case ["lookahead", *rest] | ["python", "-m", "lookahead_decoding", *rest]:
            options = parse(rest)
            given = {each.name: options.get(each.name) for each in dataclasses.fields(GuessingOptions)}
            GuessingOptions(**given).resolve()
        case ["python", script, *_] if script.endswith(".py"):
            assert (ROOT / script).is_file()
        case ["make", *targets]:
            known = re.findall(r"^(\w+):", read("Makefile"), re.MULTILINE)
            assert {target for target in targets if "=" not in target} <= set(known)


@pytest.mark.parametrize(
    "line",
    [
        "lookahead generate --no-such-option x",
        "lookahead dance",
        "lookahead bench dance",
        "lookahead bench check --no-such-option",
        "lookahead generate -W many x",
        "lookahead chat -G -1",
    ],
)
def test_a_command_that_does_not_exist_is_noticed(line: str) -> None:
    (words,) = commands_in(Block(ROOT / "README.md", 1, "", "sh", line))
    with pytest.raises(Exception, match=r"option|dance|valid|guesses"):
        test_a_shell_command_exists_and_takes_its_options(ROOT, words)


def test_words_that_are_no_options_are_left_out() -> None:
    block = Block(
        ROOT / "README.md", 1, "", "console", "$ A=1 lookahead demo -n 8 > out | make  # why\nlookahead nothing"
    )
    assert list(commands_in(block)) == [["lookahead", "demo", "-n", "8"], ["make"]]


# Links


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ +(.+)$", prose, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


def links() -> Iterator[Any]:
    for page in PAGES:
        prose = _BLOCK.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(<?([^)\s>]+)>?(?: [^)]*)?\)", prose) + re.findall(
            r'(?:src|href)="([^"]+)"', prose
        ):
            if not re.match(r"[a-z]+:", target):
                yield pytest.param(page, target, id=f"{name_of(page)}: {target}")


@pytest.mark.parametrize(("page", "target"), list(links()))
def test_a_relative_link_leads_somewhere(page: Path, target: str) -> None:
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    assert file.exists()
    assert file.is_relative_to(ROOT)
    if anchor:
        assert anchor in anchors(file)


# Tables


def table(page: str, heading: str) -> dict[str, list[str]]:
    """The rows of the tables under a heading, by the name in code type that begins each."""
    _, found, rest = read(page).partition(f"\n{heading}\n")
    assert found, f"{page} has no heading {heading!r}"
    level = len(heading.split()[0])
    section = re.split(rf"^#{{1,{level}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    rows = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for name in re.findall(r"`([^`]+)`", cells[0]) if cells else ():
            assert name not in rows
            rows[name] = cells[1:]
    return rows


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("llama", initializer_range=0.1)


PROMPT = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]])


def test_the_json_tables_name_every_key(model: PreTrainedModel) -> None:
    completion = Engine(model).generate(PROMPT[0].tolist(), max_new_tokens=2, temperature=0)
    assert isinstance(completion, Completion)
    keys = completion.to_dict().keys()
    assert set(table("docs/command-line.md", "### The JSON object")) == keys
    more = Comparison(completion, completion, None).to_dict().keys() - keys
    assert set(table("docs/command-line.md", "### More keys with `--compare`")) == more


def test_the_option_tables_name_every_option() -> None:
    def leaves(command: Any) -> Iterator[Any]:
        for each in command.commands.values():
            yield from leaves(each) if hasattr(each, "commands") else [each]

    commands = leaves(typer.main.get_command(app))
    options = (each for command in commands for each in command.params if each.param_type_name == "option")
    expected = {name for option in options for name in option.opts} - {"--help", "-h"}
    assert table("docs/command-line.md", "## Options").keys() == expected | {"PROMPT"}


def test_the_preset_table_has_the_presets() -> None:
    rows = table("docs/tuning.md", "## Presets")
    assert rows.keys() == PRESETS.keys()
    for name, config in PRESETS.items():
        budget = "none" if config.budget is None else str(config.budget)
        numbers = [str(config.window), str(config.ngram), str(config.guesses), budget]
        sources = ", ".join(f"`{source}`" for source in config.sources) or "none"
        assert rows[name][:6] == [*numbers, "yes" if config.adaptive else "no", sources]


def test_the_field_table_has_the_configs_fields_and_defaults() -> None:
    rows = table("docs/tuning.md", "## All fields")
    defaults = LookaheadConfig().to_dict()
    assert rows.keys() == defaults.keys()
    for name, default in defaults.items():
        assert json.loads(rows[name][0].strip("`")) == default


def test_every_public_name_is_in_the_documentation() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in lookahead_decoding.__all__ if not re.search(rf"`[^`\n]*\b{name}\b", pages)] == []


def test_the_option_tables_of_integration_list_what_is_tested() -> None:
    tried = {name for options in OPTIONS.values() for name in options} | TRIED_APART
    assert table("docs/integration.md", "### Options that work").keys() == tried
    refused = {row.partition("=")[0] for row in table("docs/integration.md", "### Options that are refused")}
    assert refused == {name for options, _ in REFUSED.values() for name in options} - tried | {"assistant_model"}


def test_the_picture_of_a_step_is_what_the_code_plans() -> None:
    folder = ROOT / "docs"
    script = runpy.run_path(str(folder / "draw_step.py"))
    assert script["draw"](script["example"]()) == (folder / "assets" / "step.svg").read_text(encoding="utf-8")
