"""The paper's experiments, carried out: runs that are missing are made, figures are drawn from the records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedcontext.engines.base import ENGINES
from fedcontext.errors import FedcontextError
from fedcontext.experiment import Experiment
from fedcontext.paper.experiments import SEEDS, Line, Study, runs_of
from fedcontext.paper.figures import Book, draw_sheet
from fedcontext.records import RoundRecord, read_run
from fedcontext.runner import OnRound, run_all


def missing_runs(lines: Sequence[Line], out: Path, quick: bool = False) -> list[Experiment]:
    """Return the runs behind ``lines`` that have no complete records in ``out`` yet."""
    return [experiment for experiment in runs_of(lines, quick) if _complete(experiment, out) is None]


def carry_out(experiments: Sequence[Experiment], out: Path, jobs: int, on_round: OnRound) -> None:
    """Run experiments into ``out``, those on the same data one after another so that it is loaded once."""
    run_all(sorted(experiments, key=lambda experiment: experiment.dataset), out, jobs, on_round)


def open_book(lines: Sequence[Line], out: Path, quick: bool = False) -> Book:
    """Return the records of every line and seed, from the files in ``out``."""
    return {line: [_records(line.experiment(seed, quick), out) for seed in SEEDS] for line in lines}


def draw(study: Study, book: Book, folder: Path) -> list[Path]:
    """Draw every picture of ``study`` that the book has the runs for."""
    sheets = dict.fromkeys(line.sheet for line in study.lines if line in book)
    return [draw_sheet(study, sheet, book, folder) for sheet in sheets]


def _records(experiment: Experiment, out: Path) -> list[RoundRecord]:
    records = _complete(experiment, out)
    if records is None:
        raise FedcontextError(f"{out}: no complete run {experiment.name}; run `fedcontext reproduce all --out {out}`")
    return records


def _complete(experiment: Experiment, out: Path) -> list[RoundRecord] | None:
    """Return the records of a complete run: the engine's that was asked for, or another's, which does the same work."""
    for engine in dict.fromkeys((experiment.engine, *ENGINES)):
        path = out / f"{replace(experiment, engine=engine).name}.jsonl"
        if path.is_file() and len(records := read_run(path)[1]) == experiment.rounds:
            return records
    return None
