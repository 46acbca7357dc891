"""The Typer app with all commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fedcontext.cli import leaderboard, report, reproduce, run
from fedcontext.cli import list as listing
from fedcontext.cli.options import Command
from fedcontext.console import err
from fedcontext.errors import FedcontextError
from fedcontext.version import __version__

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
COMMANDS = (
    run.run,
    run.compare,
    leaderboard.tune,
    leaderboard.leaderboard,
    leaderboard.recommend,
    reproduce.reproduce,
    listing.algorithms,
    listing.faults,
    report.report,
    report.export,
)
for command in COMMANDS:
    app.command(cls=Command)(command)
app.add_typer(listing.data_app, name="data")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Federated learning with contextual aggregation."""
    if version:
        typer.echo(f"fedcontext {__version__}")
        raise typer.Exit


def run_app() -> None:
    """Parse the command line and run the command; print an error in one line and exit with 2."""
    try:
        app()
    except (FedcontextError, OSError) as error:
        err.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)
