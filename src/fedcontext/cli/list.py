"""The commands that list what there is: algorithms, and data with their files."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedcontext import algorithms as table_of
from fedcontext.cli.options import AsJson, Command, Quiet
from fedcontext.cli.tables import listing
from fedcontext.console import err, out
from fedcontext.datasets import NAMES, cache, files

data_app = typer.Typer(
    help="The data sets: list them, fetch their files, or see where those are.", no_args_is_help=True
)


def algorithms(as_json: AsJson = False) -> None:
    """List the algorithms, and what each needs from devices beyond their updates."""
    hyperparameters = table_of.Hyperparameters(learning_rate=1, smoothness=1)
    rows = []
    for name, make in table_of.ALGORITHMS.items():
        made = make(hyperparameters)
        local = "proximal SGD" if made.local.mu else "SGD"
        rows.append((name, local, made.rule.name, ", ".join(sorted(made.rule.needs)) or "nothing"))
    if as_json:
        typer.echo(json.dumps([dict(zip(("name", "local", "rule", "needs"), row, strict=True)) for row in rows]))
    else:
        out.print(listing(("algorithm", "devices run", "rule", "needs beyond updates"), rows))


@data_app.command("list", cls=Command)
def data_list() -> None:
    """List the data sets by the names that --dataset takes."""
    rows = [(name, about, _at_hand(name)) for name, about in NAMES.items()]
    out.print(listing(("data set", "what it is", "at hand"), rows))


@data_app.command("fetch", cls=Command)
def data_fetch(name: Annotated[str, typer.Argument(help="mnist or femnist")], quiet: Quiet = False) -> None:
    """Download a data set into the cache, checked against its SHA-256."""

    def tell(done: int, total: int) -> None:
        if not quiet:
            err.print(f"\r{done / 1e6:.0f} of {total / 1e6:.0f} MB", end="")

    out.print(str(files.fetch(name, tell)), soft_wrap=True, highlight=False)


@data_app.command("where", cls=Command)
def data_where(name: Annotated[str | None, typer.Argument(help="mnist or femnist; all if not given")] = None) -> None:
    """Print where data files are, or how to get them."""
    for each in [name] if name else list(files.SOURCES):
        found = files.find(each) if name else files.where(each)
        out.print(f"{each}: {found or 'not here'}", soft_wrap=True, highlight=False)
    if not name:
        out.print(f"prepared arrays: {cache.prepared_folder()}", soft_wrap=True, highlight=False)


def _at_hand(name: str) -> str:
    if name not in files.SOURCES:
        return "always" if name.startswith("synthetic") else ""
    return "yes" if files.where(name) else f"fedcontext data fetch {name}"
