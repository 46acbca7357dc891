"""The commands that list algorithms, faults and data sets, and download the latter."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedcontext.algorithms import ALGORITHMS, Algorithm, Hyperparameters
from fedcontext.cli.options import AsJson, Command, Quiet
from fedcontext.cli.tables import plain_table
from fedcontext.console import err, out, print_line
from fedcontext.datasets import NAMES, cache, files
from fedcontext.faults.attacks import ATTACKS
from fedcontext.faults.faults import FAULTS

data_app = typer.Typer(help="List data sets, download their files, or show where those are.", no_args_is_help=True)


def algorithms(as_json: AsJson = False) -> None:
    """List the algorithms: what devices run, send in addition to their updates and keep, and what the server does."""
    hyperparameters = Hyperparameters(learning_rate=1, smoothness=1)
    rows = [_described(name, make(hyperparameters)) for name, make in ALGORITHMS.items()]
    if as_json:
        typer.echo(json.dumps(rows))
    else:
        titles = ("algorithm", "local training", "server", "devices also send", "devices keep")
        out.print(plain_table(titles, [(r["name"], r["local"], _server(r), r["needs"], r["keeps"]) for r in rows]))


def faults() -> None:
    """List the faults for --faults and the attacks for --attack."""
    out.print(plain_table(("--faults", "the device"), list(FAULTS.items())))
    out.print(plain_table(("--attack", "Byzantine devices"), [(name, attack.help) for name, attack in ATTACKS.items()]))


def _described(name: str, algorithm: Algorithm) -> dict[str, str]:
    local = "proximal SGD" if algorithm.local.mu else "SGD"
    return {
        "name": name,
        "local": f"{local}, corrected" if algorithm.variates else local,
        "rule": algorithm.rule.name,
        "oracle": "looks at all data" if algorithm.oracle else "",
        "server": algorithm.server.name if algorithm.server else "",
        "needs": ", ".join(sorted(algorithm.rule.needs)) or "nothing",
        "keeps": "one model" if algorithm.variates else "nothing",
    }


def _server(row: dict[str, str]) -> str:
    return ", ".join(part for part in (row["rule"], row["server"], row["oracle"]) if part)


@data_app.command("list", cls=Command)
def data_list() -> None:
    """List the data sets by the names that --dataset accepts."""
    rows = [(name, about, _availability(name)) for name, about in NAMES.items()]
    out.print(plain_table(("data set", "description", "available"), rows))


@data_app.command("fetch", cls=Command)
def data_fetch(name: Annotated[str, typer.Argument(help=" or ".join(files.SOURCES))], quiet: Quiet = False) -> None:
    """Download a data set into the cache and check its SHA-256."""

    def show(done: int, total: int) -> None:
        if not quiet:
            err.print(f"\r{done / 1e6:.0f} of {total / 1e6:.0f} MB", end="")

    path = files.fetch(name, show)
    if not quiet:
        print_line(str(path))


@data_app.command("where", cls=Command)
def data_where(
    name: Annotated[str | None, typer.Argument(help=f"{' or '.join(files.SOURCES)}; all if omitted")] = None,
) -> None:
    """Print the paths of data files, or how to get them."""
    for each in [name] if name else list(files.SOURCES):
        path = files.find(each) if name else files.where(each)
        print_line(f"{each}: {path or 'not downloaded'}")
    if not name:
        print_line(f"prepared arrays: {cache.prepared_folder()}")


def _availability(name: str) -> str:
    if name not in files.SOURCES:
        return "always" if name.startswith("synthetic") else ""
    return "yes" if files.where(name) else f"fedcontext data fetch {name}"
