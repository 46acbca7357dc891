"""Run the paper's experiments that have no records yet, and draw figures from the records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedcontext.errors import FedcontextError
from fedcontext.experiment import Experiment
from fedcontext.paper.experiments import SEEDS, Series, Study
from fedcontext.paper.figures import RecordIndex, draw_figure
from fedcontext.records import RoundRecord
from fedcontext.runner import OnRound, complete_records, run_all


def run_experiments(experiments: Sequence[Experiment], out: Path, jobs: int, on_round: OnRound) -> None:
    """Run experiments into ``out``, ordered by data set so that each is loaded once."""
    run_all(sorted(experiments, key=lambda experiment: experiment.dataset), out, jobs, on_round)


def read_records(series: Sequence[Series], out: Path, quick: bool = False) -> RecordIndex:
    """Return the records of every series and seed from the files in ``out``."""
    return {each: [_records(each.experiment(seed, quick), out) for seed in SEEDS] for each in series}


def draw_figures(study: Study, index: RecordIndex, folder: Path) -> list[Path]:
    """Draw every figure of ``study`` whose records are in ``index``; return the paths."""
    names = dict.fromkeys(series.figure for series in study.series if series in index)
    return [draw_figure(study, name, index, folder) for name in names]


def _records(experiment: Experiment, out: Path) -> list[RoundRecord]:
    records = complete_records(experiment, out)
    if records is None:
        raise FedcontextError(f"{out}: no complete run {experiment.name}; run `fedcontext reproduce all --out {out}`")
    return records
