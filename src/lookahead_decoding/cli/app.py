"""The program: its commands, and what becomes of their errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from lookahead_decoding import __version__
from lookahead_decoding.cli.bench import bench
from lookahead_decoding.cli.chat import chat
from lookahead_decoding.cli.demo import demo
from lookahead_decoding.cli.failures import EXIT_USAGE, exits_cleanly, print_error
from lookahead_decoding.cli.generate import generate
from lookahead_decoding.cli.info import info
from lookahead_decoding.cli.options import takes_groups
from lookahead_decoding.cli.tune import tune

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["--help", "-h"]})
for command in (generate, chat, info, demo, tune):
    app.command()(exits_cleanly(takes_groups(command)))
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def lookahead(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Exact parallel decoding of causal language models: the text plain decoding gives, in fewer passes."""
    if version:
        typer.echo(f"lookahead-decoding {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# The base of its usage errors, which Typer itself keeps in different places from version to version.
_UsageError = typer.BadParameter.__mro__[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        arguments: those of the command line; None is the process's own.

    Returns:
        The exit code: 0; 1 failed; 2 usage; 3 no such model; 130 interrupted; 141 nobody reads the output.
    """
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="lookahead", standalone_mode=False)
    except Exception as error:
        if not isinstance(error, _UsageError):
            raise
        print_error(error.format_message())  # type: ignore[attr-defined]
        return EXIT_USAGE
    return code or 0
