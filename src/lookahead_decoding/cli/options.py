"""The options, declared once: groups of them are dataclasses that commands take as parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from lookahead_decoding.config import (
    DEFAULT_DTYPE,
    DEFAULT_MODEL,
    MAX_NEW_TOKENS,
    PRESETS,
    LookaheadConfig,
    read_config_file,
)
from lookahead_decoding.errors import ConfigError

prompt_option = functools.partial(typer.Option, rich_help_panel="Prompt")
_model = functools.partial(typer.Option, rich_help_panel="Model")
_guessing = functools.partial(typer.Option, rich_help_panel="Guessing (changes the speed, not the text)")
_generation = functools.partial(typer.Option, rich_help_panel="Generation")
_sampling = functools.partial(
    typer.Option, rich_help_panel="Sampling (what is left out, the model's generation config decides)"
)
output_option = functools.partial(typer.Option, rich_help_panel="Output")

_MODEL_HELP = "A Hub id, a folder, a FILE.gguf or REPO:FILE.gguf."

Model = Annotated[str | None, _model("--model", "-m", help=_MODEL_HELP, show_default=DEFAULT_MODEL)]
ModelArgument = Annotated[str | None, typer.Argument(help=_MODEL_HELP, show_default=DEFAULT_MODEL)]
NamedModel = Annotated[str | None, typer.Argument(help=_MODEL_HELP, show_default="none is loaded")]
Threads = Annotated[int | None, _model(min=1, help="CPU threads.", show_default="the fastest of a short probe")]
NoColor = Annotated[
    bool, output_option("--no-color", help="Do not shade the tokens by who guessed them; like NO_COLOR.")
]
Verbose = Annotated[
    bool,
    output_option("--verbose", "-v", help="Say more on standard error: statistics, warnings, tracebacks."),
]
Memory = Annotated[
    Path | None,
    _guessing("--memory", metavar="FILE", help="Guess from what earlier runs left in this file, and add to it."),
]
AsJson = Annotated[bool, output_option("--json", help="Print one JSON object, and nothing else, on standard output.")]
Prompts = Annotated[
    Path | None,
    prompt_option(
        "--prompts",
        metavar="FILE",
        help='Prompts like yours, a line each: FILE.txt, or JSON: a string, {"prompt": ...} or {"turns": [...]}.',
        show_default="four built-in ones",
    ),
]
System = Annotated[
    str | None,
    prompt_option("--system", metavar="TEXT", help="The system message.", show_default="the template's"),
]


def _of_preset(name: str) -> str:
    """What the help shows as the default of a config's field."""
    return f"the preset's; {getattr(LookaheadConfig, name)} in default"


@dataclass(frozen=True)
class ModelOptions:
    """How to load a model."""

    revision: Annotated[str | None, _model(help="Branch, tag or commit of a Hub repository.")] = None
    trust_remote_code: Annotated[bool, _model("--trust-remote-code", help="Run the code that the model brings.")] = (
        False
    )
    dtype: Annotated[str, _model(help="bfloat16, float16, float32 or float64.")] = DEFAULT_DTYPE
    device: Annotated[str | None, _model(help="cpu, cuda, cuda:1, ...", show_default="cuda where there is one")] = None
    threads: Threads = None


@dataclass(frozen=True)
class GuessingOptions:
    """How to guess: the fields of a :class:`LookaheadConfig`."""

    preset: Annotated[str | None, _guessing(help=f"One of {', '.join(PRESETS)}.", show_default="default")] = None
    window: Annotated[
        int | None,
        _guessing("--window", "-W", help="Columns of the Jacobi window.", show_default=_of_preset("window")),
    ] = None
    ngram: Annotated[
        int | None, _guessing("--ngram", "-N", help="Tokens per n-gram.", show_default=_of_preset("ngram"))
    ] = None
    guesses: Annotated[
        int | None,
        _guessing("--guesses", "-G", help="N-grams kept and tried per token.", show_default=_of_preset("guesses")),
    ] = None
    budget: Annotated[
        int | None,
        _guessing(min=1, help="Nodes per step at most.", show_default=_of_preset("budget")),
    ] = None
    adaptive: Annotated[
        bool | None,
        _guessing(
            "--adaptive/--no-adaptive",
            help="Grow each step as far as it pays, or always to the budget.",
            show_default=_of_preset("adaptive"),
        ),
    ] = None
    config: Annotated[
        Path | None,
        _guessing(metavar="FILE.json", help="Config fields; they win over the preset, options over them."),
    ] = None

    def resolve(self) -> dict[str, Any]:
        """The config's fields: options win over the file, the file over what was tuned, that over the preset.

        Raises:
            ConfigError: a file that cannot be read, an unknown field or preset, an impossible value.
        """
        fields = read_config_file(self.config) if self.config is not None else {}
        given = {name: value for name, value in vars(self).items() if name != "config" and value is not None}
        LookaheadConfig.from_dict(fields | given)  # before a model is loaded
        return fields | given


@dataclass(frozen=True)
class GenerationOptions:
    """What to generate: arguments of ``Engine.stream``, by the same names."""

    max_new_tokens: Annotated[
        int, _generation("--max-new-tokens", "--max-tokens", "-n", min=1, help="The most tokens to generate.")
    ] = MAX_NEW_TOKENS
    stop: Annotated[
        list[str], _generation(metavar="TEXT", help="End before this text; may be given several times.")
    ] = field(default_factory=list)
    temperature: Annotated[float | None, _sampling("--temperature", "--temp", min=0, help="0 is greedy.")] = None
    top_k: Annotated[int | None, _sampling(min=0, help="Draw from so many tokens; 0 from all.")] = None
    top_p: Annotated[float | None, _sampling(min=0, max=1, help="Draw from the likeliest tokens of this total.")] = None
    min_p: Annotated[float | None, _sampling(min=0, max=1, help="Draw from tokens this likely, next to the first.")] = (
        None
    )
    repetition_penalty: Annotated[float | None, _sampling(help="Above 1: shun tokens that occurred.")] = None
    reference: Annotated[
        list[Path],
        _generation(metavar="FILE", help="Text you expect to see again, not part of the prompt; may be repeated."),
    ] = field(default_factory=list)
    seed: Annotated[
        int | None,
        _sampling(metavar="INT", min=0, max=2**63 - 1, help="Of the draws.", show_default="random"),
    ] = None

    def to_dict(self) -> dict[str, Any]:
        """As keyword arguments.

        Raises:
            ConfigError: a reference that cannot be read.
        """
        options = dict(vars(self))
        return options | {"references": [_read_text(path) for path in options.pop("reference")]}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the reference {path}: {error}") from error


def takes_groups(command: Callable[..., int]) -> Callable[..., int]:
    """Show Typer the fields of a command's option groups as parameters of their own."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if dataclasses.is_dataclass(hint):
            groups[parameter.name] = hint
            parameters += _parameters_of(hint)
        else:
            parameters.append(parameter.replace(annotation=hint, kind=parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def call(**values: Any) -> int:
        grouped = {
            name: group(**{each.name: values.pop(each.name) for each in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        return command(**grouped, **values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _parameters_of(group: Any) -> list[inspect.Parameter]:
    hints, defaults = get_type_hints(group, include_extras=True), group()
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[each.name],
            default=getattr(defaults, each.name),
        )
        for each in dataclasses.fields(group)
    ]
