"""The commands that read records: `report` writes an HTML page, `export` a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcontext.console import print_line, warn

Runs = Annotated[list[Path], typer.Argument(help="Files of runs (.jsonl), or directories that contain them.")]


def report(
    runs: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page about runs: curves, costs, weights, bounds and settings. It needs no network."""
    from fedcontext.report import write_report

    for problem in write_report(runs, output):
        warn(problem)
    print_line(f"report: {output}")


def export(
    runs: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="Table to write: .parquet or .csv.")],
) -> None:
    """Write all rounds of runs as one tidy table, one row per round."""
    from fedcontext.results.export import export as write_table

    count, problems = write_table(runs, output)
    for problem in problems:
        warn(problem)
    print_line(f"table: {output}, {count} rounds")
