"""``lookahead chat``."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from lookahead_decoding.cli.failures import print_error
from lookahead_decoding.cli.options import (
    GenerationOptions,
    GuessingOptions,
    Memory,
    ModelArgument,
    ModelOptions,
    NoColor,
    System,
    Verbose,
)
from lookahead_decoding.cli.prompt import check_text, has_chat_template
from lookahead_decoding.cli.report import details, note, print_statistics, speed, summary, tuning
from lookahead_decoding.cli.screen import Screen
from lookahead_decoding.cli.setup import open_engine, remembering
from lookahead_decoding.config import LookaheadConfig
from lookahead_decoding.errors import ConfigError, LookaheadError

if TYPE_CHECKING:
    from lookahead_decoding.engine import Engine
    from lookahead_decoding.statistics import DecodingStatistics

_PROMPT = "> "


def chat(
    *,
    model: ModelArgument = None,
    load: ModelOptions,
    guessing: GuessingOptions,
    generation: GenerationOptions,
    memory: Memory = None,
    system: System = None,
    no_color: NoColor = False,
    verbose: Verbose = False,
) -> int:
    """Talk with a model; /help lists the commands."""
    lookahead = guessing.resolve()
    options = generation.to_dict()
    if system is not None:
        check_text(system)
    engine, _ = open_engine(model, load, lookahead, verbose=verbose)
    if not has_chat_template(engine):
        raise ConfigError(f"{engine.name} has no chat template; use `lookahead generate --raw` with it")
    conversation = Conversation(engine, options, engine.config, system=system, no_color=no_color, verbose=verbose)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        note(f"{engine.name}. /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends.")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its line editing
    conversation.screen().legend()
    try:
        with remembering(engine, memory):
            while not conversation.ended and (line := _read_line(is_terminal)) is not None:
                try:
                    conversation.take(line)
                except LookaheadError as error:
                    if not is_terminal:
                        raise
                    print_error(error)
    except KeyboardInterrupt:
        note("")
    return 0


def _read_line(is_terminal: bool) -> str | None:
    """The next line of standard input; None at its end."""
    try:
        line = input(_PROMPT) + "\n" if is_terminal else sys.stdin.readline()
    except EOFError:
        note("")
        return None
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text ({error.reason})") from error
    return line.removesuffix("\n") if line else None


class Conversation:
    """What was said so far, and how to go on.

    Attributes:
        ended: the user wants to leave.
    """

    def __init__(
        self,
        engine: Engine,
        options: dict[str, Any],
        config: LookaheadConfig,
        *,
        system: str | None,
        no_color: bool,
        verbose: bool,
    ) -> None:
        self.ended = False
        self._engine = engine
        self._options = options
        self._config = config
        self._system = system
        self._no_color = no_color
        self._verbose = verbose
        self._turns: list[tuple[str, str]] = []  # what the user said, what the model answered
        self._statistics: list[DecodingStatistics] = []
        self._commands = {
            "/help": self._help,
            "/reset": self._reset,
            "/system": self._set_system,
            "/stats": self._stats,
            "/preset": self._set_preset,
            "/undo": self._undo,
            "/exit": self._exit,
        }

    def screen(self) -> Screen:
        """A screen for the next answer."""
        return Screen(self._config, no_color=self._no_color)

    def take(self, line: str) -> None:
        """Answer a message, or carry out a command."""
        if line.startswith("/"):
            name, _, argument = line.partition(" ")
            command = self._commands.get(name)
            if command is None:
                print_error(f"unknown command {name!r}; /help lists the known ones")
            else:
                command(argument.strip())
        elif line.strip():
            self._answer(line)

    def _answer(self, text: str) -> None:
        """Stream the answer. Interrupted, it counts as far as it came."""
        screen = self.screen()
        try:
            chunks = self._engine.stream(self._messages(text), lookahead=self._config, **self._options)
            completion = screen.stream(chunks)
        except KeyboardInterrupt:
            note("(stopped)")
        else:
            self._statistics.append(completion.statistics)
            note(summary(completion))
            if self._verbose:
                details(completion)
                note(f"tuned: {tuning(self._engine)}")
        self._turns.append((text, screen.text))

    def _messages(self, text: str) -> list[dict[str, Any]]:
        """The chat up to the message ``text``."""
        said = [] if self._system is None else [("system", self._system)]
        for question, answer in self._turns:
            said += [("user", question), ("assistant", answer)]
        return [{"role": role, "content": content} for role, content in [*said, ("user", text)]]

    # The commands; what /help says about each is its docstring.

    def _help(self, _: str) -> None:
        """list the commands"""
        for name, command in self._commands.items():
            note(f"{name:8} {command.__doc__}")

    def _reset(self, _: str) -> None:
        """forget what was said; the system message stays"""
        self._turns.clear()

    def _set_system(self, text: str) -> None:
        """TEXT: set the system message; without TEXT, go back to the template's"""
        self._system = text or None

    def _stats(self, _: str) -> None:
        """what the answers so far cost, and what the guesses were worth"""
        if not self._statistics:
            note("no finished answer so far")
            return
        first, *others = self._statistics
        total = sum(others, start=first)
        note(f"answers: {len(self._statistics)}, {speed(total)}")
        print_statistics(total)

    def _set_preset(self, name: str) -> None:
        """NAME: guess in another way from now on"""
        try:
            self._config = self._engine.configured(name)
        except ConfigError as error:
            print_error(error)
        else:
            self.screen().legend()

    def _undo(self, _: str) -> None:
        """take the last message and its answer back"""
        if not self._turns:
            print_error("there is nothing to take back")
            return
        self._turns.pop()

    def _exit(self, _: str) -> None:
        """leave; so does Ctrl-D"""
        self.ended = True
