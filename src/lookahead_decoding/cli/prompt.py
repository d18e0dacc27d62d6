"""Where the prompt comes from."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead_decoding.cli.options import System, prompt_option
from lookahead_decoding.errors import ConfigError

if TYPE_CHECKING:
    from lookahead_decoding.engine import Engine

_STDIN = "-"


@dataclass(frozen=True)
class PromptOptions:
    """Exactly one prompt, and what is put around it."""

    argument: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt; - is standard input.", show_default=False),
    ] = None
    prompt: Annotated[str | None, prompt_option("--prompt", "-p", metavar="TEXT", help="The prompt.")] = None
    file: Annotated[Path | None, prompt_option(help="A file that holds the prompt; its last newline is dropped.")] = (
        None
    )
    system: System = None
    raw: Annotated[
        bool, prompt_option("--raw", help="Complete the prompt as it is, without the model's chat template.")
    ] = False

    def resolve(self) -> str | list[dict[str, Any]]:
        """The prompt as the engine takes it: text with ``--raw``, else a chat's messages.

        Raises:
            ConfigError: no prompt, several, an empty one, or one that is not UTF-8 text.
        """
        if self.raw and self.system is not None:
            raise ConfigError("--system goes into the chat template, which --raw leaves out")
        given = {"PROMPT": self.argument, "--prompt": self.prompt, "--file": self.file}
        named = [name for name, value in given.items() if value is not None]
        if len(named) != 1:
            what = f"got {' and '.join(named)}" if named else "got none"
            raise ConfigError(f"give one prompt: PROMPT, --prompt TEXT, --file FILE, or - for stdin; {what}")
        text = self._read()
        if not text:
            raise ConfigError("the prompt is empty; give at least one character")
        return text if self.raw else messages(text, system=self.system)

    def _read(self) -> str:
        if self.file is not None:
            try:
                return _decoded(self.file.read_bytes(), f"the file {self.file}")
            except OSError as error:
                raise ConfigError(f"cannot read the file {self.file}: {error.strerror}") from error
        if self.argument == _STDIN:
            return _decoded(sys.stdin.buffer.read(), "standard input")
        text = self.argument if self.argument is not None else self.prompt
        assert text is not None
        return check_text(text)


def messages(text: str, *, system: str | None = None) -> list[dict[str, Any]]:
    """A chat of one user message, behind the system's if there is one."""
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": check_text(system)}, user]


def has_chat_template(engine: Engine) -> bool:
    """Whether messages can be turned into a prompt."""
    return engine.tokenizer is not None and engine.tokenizer.chat_template is not None


def as_chat(engine: Engine, text: str) -> list[int]:
    """The token ids of a user's message, or of the text as it is where the model has no chat template."""
    return engine.encode(messages(text) if has_chat_template(engine) else text)


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: a line each of ``FILE.txt``; of any other file a JSON value per line.

    A value is a text, ``{"prompt": text}``, or ``{"turns": [text, ...]}``, of which the first counts. Empty lines are
    left out.

    Raises:
        ConfigError: a file that cannot be read, has no prompt, or has a line that is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the prompts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompts {path} are not UTF-8 text (byte {error.start}: {error.reason})") from error
    prompts = [(i, line) for i, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ConfigError(f"the prompts {path} are empty; give at least one")
    if path.suffix.lower() == ".txt":
        return [line for _, line in prompts]
    return [_prompt_of(line, f"line {i} of {path}") for i, line in prompts]


def _prompt_of(line: str, place: str) -> str:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON: {error}; a file with a prompt per line is called FILE.txt") from error
    text = value
    if isinstance(value, dict):
        turns = value.get("turns")
        text = value.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    if not isinstance(text, str) or not text:
        raise ConfigError(
            f'{place} is neither a JSON string nor {{"prompt": "..."}} nor {{"turns": ["...", ...]}} with a text'
        )
    return text


def check_text(text: str) -> str:
    """The text as it is, if the command line's bytes made one.

    Raises:
        ConfigError: bytes that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("the text on the command line is not UTF-8") from error
    return text


def _decoded(data: bytes, origin: str) -> str:
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{origin} is not UTF-8 text (byte {error.start}: {error.reason})") from error
