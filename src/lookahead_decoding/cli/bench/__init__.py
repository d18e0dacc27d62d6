"""``lookahead bench``: what decoding is worth on prompts of yours, and whether it is right there."""

from __future__ import annotations

import typer

from lookahead_decoding.cli.bench.check import check
from lookahead_decoding.cli.failures import exits_cleanly
from lookahead_decoding.cli.options import takes_groups

bench = typer.Typer(context_settings={"help_option_names": ["--help", "-h"]})
for command in (check,):
    bench.command()(exits_cleanly(takes_groups(command)))


@bench.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    """Try decoding on many prompts."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
