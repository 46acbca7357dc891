"""The command that repeats the paper's experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcontext.callbacks.progress import progress
from fedcontext.cli.options import CORES, REUSED, Jobs, Quiet, interruptible
from fedcontext.console import print_line
from fedcontext.errors import require


def reproduce(
    experiment: Annotated[
        str, typer.Argument(help="variants, weights, comparison, rounds or all; claims evaluates their records.")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="A few rounds of each experiment's first figure: under a minute each.")
    ] = False,
    out_dir: Annotated[Path, typer.Option("--out", help="Directory for records and figures.")] = Path("runs/paper"),
    docs: Annotated[Path, typer.Option(help="Directory for the reproduction.md of claims.")] = Path("docs"),
    jobs: Jobs = CORES,
    quiet: Quiet = False,
) -> None:
    """Repeat the paper's experiments: records, figures (PNG and PDF), and with `claims` a verdict on each claim."""
    from fedcontext.paper import document
    from fedcontext.paper.experiments import STUDIES, experiments_of, get_study
    from fedcontext.paper.reproduce import draw_figures, read_records, run_experiments
    from fedcontext.runner import complete_records

    require("matplotlib", extra="plot")
    if experiment == "claims":
        path = document.write_document(out_dir, docs, quick)
        if not quiet:
            print_line(f"written: {path}")
        return
    studies = list(STUDIES.values()) if experiment == "all" else [get_study(experiment)]
    for study in studies:
        series = study.quick_series() if quick else study.series
        missing = [each for each in experiments_of(series, quick) if complete_records(each, out_dir) is None]
        total = sum(run.rounds for run in missing)
        with interruptible(out_dir, REUSED), progress(study.name, total, quiet) as on_round:
            run_experiments(missing, out_dir, jobs, on_round)
        figure_paths = draw_figures(study, read_records(series, out_dir, quick), out_dir / "figures")
        for path in figure_paths if not quiet else ():
            print_line(f"{study.name}: {path}")
