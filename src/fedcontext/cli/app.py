"""The Typer app with all commands."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedcontext.cli import leaderboard, report, reproduce, run, stress
from fedcontext.cli import list as listing
from fedcontext.cli.options import Command
from fedcontext.console import err, print_line, show_warning
from fedcontext.errors import LONGEST, FedcontextError, shortened
from fedcontext.version import __version__

LONGEST_USAGE = 300  # characters of a usage error, which Typer prints below the usage
UsageError: Any = typer.BadParameter.__base__  # of the Click that Typer imports, or of its own copy in newer versions


class Group(TyperGroup):
    """The program; long usage errors are shortened, as our own are, and suggest a name once."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Return the context of the program's own options."""
        with _short_errors():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        with _short_errors():
            return super().invoke(ctx)


@contextmanager
def _short_errors() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # its message is the whole help
            repeated = getattr(error, "possibilities", None)  # which newer versions of Click add to Typer's message
            message = error.message.partition(" Did you mean")[0] if repeated else error.message
            error.message = shortened(message, LONGEST_USAGE)
        raise


app = typer.Typer(cls=Group, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
COMMANDS = (
    run.run,
    run.compare,
    leaderboard.tune,
    leaderboard.leaderboard,
    leaderboard.recommend,
    stress.stress,
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
    """Parse the command line and run the command; print each warning in one line, and an error too and exit with 2."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            app()
    except (FedcontextError, OSError, MemoryError) as error:
        reason = "not enough memory for these settings and data" if isinstance(error, MemoryError) else str(error)
        print_line(f"error: {shortened(reason, LONGEST)}", err, "red")
        sys.exit(2)
