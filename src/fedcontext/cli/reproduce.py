"""The command that repeats the paper's experiments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fedcontext.cli.options import Jobs, Quiet, interruptible
from fedcontext.cli.tables import progress
from fedcontext.console import out


def reproduce(
    experiment: Annotated[
        str, typer.Argument(help="variants, weights, comparison, rounds or all; claims evaluates their records.")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="A few rounds of each experiment's first figure: under a minute each.")
    ] = False,
    out_dir: Annotated[Path, typer.Option("--out", help="Directory for records and figures.")] = Path("runs/paper"),
    docs: Annotated[Path, typer.Option(help="Directory for the reproduction.md of claims.")] = Path("docs"),
    jobs: Jobs = None,
    quiet: Quiet = False,
) -> None:
    """Repeat the paper's experiments: records, figures (PNG and PDF), and with `claims` a verdict on each claim."""
    from fedcontext.paper import document, figures
    from fedcontext.paper.experiments import STUDIES, study_named
    from fedcontext.paper.reproduce import carry_out, draw, missing_runs, open_book

    figures.check(Path("figure.png"))
    if experiment == "claims":
        path = document.write(out_dir, docs, quick)
        if not quiet:
            out.print(f"written: {path}", soft_wrap=True, highlight=False)
        return
    studies = list(STUDIES.values()) if experiment == "all" else [study_named(experiment)]
    for study in studies:
        lines = study.quick_lines() if quick else study.lines
        missing = missing_runs(lines, out_dir, quick)
        total = sum(run.rounds for run in missing)
        with interruptible(out_dir), progress(study.name, total, quiet) as on_round:
            carry_out(missing, out_dir, jobs or os.cpu_count() or 1, on_round)
        figure_paths = draw(study, open_book(lines, out_dir, quick), out_dir / "figures")
        for path in figure_paths if not quiet else ():
            out.print(f"{study.name}: {path}", soft_wrap=True, highlight=False)
