"""Tuning: every candidate of a grid is run on tuning seeds, and the one that reaches the levels first is chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedcontext.errors import FedcontextError
from fedcontext.experiment import Experiment
from fedcontext.leaderboard.entries import FEDAVG, Entrant, Task
from fedcontext.records import RoundRecord, read_run
from fedcontext.results.summary import summarise
from fedcontext.runner import OnRound, complete_records, error_path, missing_experiments, run_all, run_until_error

Records: TypeAlias = Sequence[RoundRecord]
PENALTY = 1.5  # a level that was not reached counts as so many times the number of rounds


def rounds_or_penalty(records: Records, levels: Sequence[float], rounds: int) -> list[float]:
    """Return the round in which each accuracy level was reached, 1.5 times ``rounds`` if it was not.

    >>> run = [RoundRecord(1, loss=2.0, accuracy=0.5), RoundRecord(2, loss=1.0, accuracy=0.8)]
    >>> rounds_or_penalty(run, (0.5, 0.7, 0.9), rounds=2)
    [1.0, 2.0, 3.0]
    """
    reached = summarise(records, levels).rounds_to
    return [float(PENALTY * rounds if (count := reached[level]) is None else count) for level in levels]


def score(runs: Sequence[Records], levels: Sequence[float], rounds: int) -> tuple[float, float]:
    """Return what a candidate is chosen by, the lower the better: mean rounds to the levels, then final loss."""
    counts = [count for records in runs for count in rounds_or_penalty(records, levels, rounds)]
    return float(np.mean(counts)), float(np.mean([final_loss(records, rounds) for records in runs]))


def final_loss(records: Records, rounds: int) -> float:
    """Return the loss after the last round, infinite if the run diverged."""
    last = records[-1] if len(records) == rounds else None
    return float("inf") if last is None or last.loss is None else last.loss


def levels_of(task: Task, seeds: Sequence[int], out: Path) -> tuple[float, ...]:
    """Return the accuracy levels of a task; relative ones follow FedAvg's mean final accuracy on these seeds."""
    if not task.relative:
        return task.levels
    finals = [summarise(records_of(task.experiment(FEDAVG, seed), out)).accuracy for seed in seeds]
    return tuple(round(share * float(np.mean(finals)), 4) for share in task.levels)


def tune(task: Task, entrant: Entrant, seeds: Sequence[int], out: Path) -> dict[str, Any]:
    """Return the settings of an entrant's best candidate on ``seeds``; runs that are complete in ``out`` are reused."""
    run_missing(tuning_experiments(task, entrant, seeds), out, jobs=1)
    candidates = entrant.candidates()
    if len(candidates) == 1:
        return candidates[0]
    scores = candidate_scores(task, entrant, seeds, out)
    return min(zip(scores, range(len(scores)), candidates, strict=True))[2]


def candidate_scores(task: Task, entrant: Entrant, seeds: Sequence[int], out: Path) -> list[tuple[float, float]]:
    """Return the score of every candidate from the records in ``out``."""
    levels = levels_of(task, seeds, out)
    return [
        score([records_of(task.experiment(settings, seed), out) for seed in seeds], levels, task.rounds)
        for settings in entrant.candidates()
    ]


def tuning_experiments(task: Task, entrant: Entrant, seeds: Sequence[int]) -> list[Experiment]:
    """Return the runs that tuning needs; none for an entrant without a choice."""
    candidates = entrant.candidates()
    if len(candidates) == 1:
        return []
    reference = [FEDAVG] if task.relative else []
    return [task.experiment(settings, seed) for settings in (*reference, *candidates) for seed in seeds]


def run_missing(
    experiments: Iterable[Experiment],
    out: Path,
    jobs: int,
    on_round: OnRound = lambda experiment, record: None,
) -> None:
    """Run the experiments that have no finished records in ``out``, those of one data set together."""
    missing = missing_experiments(experiments, out)
    run_all(sorted(missing, key=lambda each: each.dataset), out, jobs, on_round, run=run_until_error)


def records_of(experiment: Experiment, out: Path) -> list[RoundRecord]:
    """Return the records of a finished run; a run that diverged has fewer than its rounds."""
    if (records := complete_records(experiment, out)) is not None:
        return records
    if not error_path(experiment, out).exists():
        raise FedcontextError(f"{out}: no finished run {experiment.name}")
    path = out / f"{experiment.name}.jsonl"
    return read_run(path)[1] if path.exists() else []
