"""The commands that read records: `report` writes an HTML page, `export` a table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from fedcontext.console import err, out

Runs = Annotated[list[Path], typer.Argument(help="Files of runs (.jsonl), or directories that contain them.")]


def report(
    runs: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page about runs: curves, costs, weights, bounds and settings. It needs no network."""
    from fedcontext.report import write_report

    _warn(write_report(runs, output))
    out.print(f"report: {output}", soft_wrap=True, highlight=False, markup=False)


def export(
    runs: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="Table to write: .parquet or .csv.")],
) -> None:
    """Write all rounds of runs as one tidy table, one row per round."""
    from fedcontext.results.export import export as write_table

    count, problems = write_table(runs, output)
    _warn(problems)
    out.print(f"table: {output}, {count} rounds", soft_wrap=True, highlight=False, markup=False)


def _warn(problems: Iterable[str]) -> None:
    for problem in problems:
        err.print(problem, style="yellow", highlight=False, markup=False, soft_wrap=True)
