"""Run the leaderboard: tune every entrant on some seeds and test it on others."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeAlias

from fedcontext.errors import FedcontextError
from fedcontext.experiment import Experiment
from fedcontext.leaderboard.entries import FEDAVG, ORACLE_SEEDS, TEST_SEEDS, TUNING_SEEDS, Entrant, Task
from fedcontext.leaderboard.provenance import made_at
from fedcontext.leaderboard.results import TaskResult
from fedcontext.leaderboard.rows import make_row
from fedcontext.leaderboard.tuning import levels_of, records_of, run_missing, tune, tuning_experiments
from fedcontext.runner import OnRound, missing_experiments

Progress: TypeAlias = Callable[[str, int], AbstractContextManager[OnRound]]


def all_tuning_experiments(
    tasks: Sequence[Task], entrants: Sequence[Entrant], seeds: Sequence[int]
) -> list[Experiment]:
    """Return the runs of all candidates on the tuning seeds."""
    return [
        experiment
        for task in tasks
        for entrant in entrants_of(task, entrants)
        for experiment in tuning_experiments(task, entrant, seeds)
    ]


def all_test_experiments(
    tasks: Sequence[Task],
    entrants: Sequence[Entrant],
    tuning: Sequence[int],
    seeds: Sequence[int],
    out: Path,
    known: Container[str] = (),
) -> list[Experiment]:
    """Return the runs of the chosen candidates on the test seeds, from the records of tuning in ``out``.

    FedAvg's runs, which relative levels follow, are not needed for tasks whose levels are ``known``.
    """
    relative = [task for task in tasks if task.relative and task.name not in known]
    reference = [task.experiment(FEDAVG, seed) for task in relative for seed in seeds]
    return reference + [
        task.experiment(tune(task, entrant, tuning, out), seed)
        for task in tasks
        for entrant in entrants_of(task, entrants)
        for seed in seeds_of(entrant, seeds)
    ]


def entrants_of(task: Task, entrants: Sequence[Entrant]) -> list[Entrant]:
    """Return the entrants of a task: on deep models an oracle would take hours."""
    return [entrant for entrant in entrants if entrant.kind != "oracle" or task.group == "convex"]


def seeds_of(entrant: Entrant, seeds: Sequence[int]) -> Sequence[int]:
    """Return the test seeds of an entrant."""
    return seeds[:ORACLE_SEEDS] if entrant.kind == "oracle" else seeds


@contextmanager
def no_progress(title: str, rounds: int) -> Iterator[OnRound]:
    """Yield a callback that does nothing."""
    yield lambda experiment, record: None


def run_with_progress(
    title: str, experiments: Sequence[Experiment], out: Path, jobs: int = 1, progress: Progress = no_progress
) -> None:
    """Run the experiments that are not finished in ``out``."""
    missing = missing_experiments(experiments, out)
    with progress(title, sum(each.rounds for each in missing)) as on_round:
        run_missing(missing, out, jobs, on_round)


def compete(
    tasks: Sequence[Task],
    entrants: Sequence[Entrant],
    out: Path,
    jobs: int = 1,
    *,
    tuning: Sequence[int] = TUNING_SEEDS,
    seeds: Sequence[int] = TEST_SEEDS,
    progress: Progress = no_progress,
    earlier: Sequence[TaskResult] = (),
) -> list[TaskResult]:
    """Return the results of every task: entrants tuned on the tuning seeds, then run on the test seeds.

    Records go to ``out``; finished ones are reused when this is called again. ``progress`` is called with a title and
    the number of rounds to run, and yields the callback of every round. Tasks keep the accuracy levels that they have
    in ``earlier`` results: those relative to FedAvg's accuracy differ slightly between machines, and rows must be
    comparable.
    """
    if shared := set(tuning) & set(seeds):
        raise FedcontextError(f"tuning seeds and test seeds must differ, both contain {sorted(shared)}")
    run_with_progress("tuning", all_tuning_experiments(tasks, entrants, tuning), out, jobs, progress)
    rounds = {task.name: task.rounds for task in tasks}
    same = [each for each in earlier if each.rounds == rounds.get(each.task) and list(each.seeds) == list(seeds)]
    kept = {each.task: each.levels for each in same}
    run_with_progress("test", all_test_experiments(tasks, entrants, tuning, seeds, out, kept), out, jobs, progress)
    levels = [kept.get(task.name) or levels_of(task, seeds, out) for task in tasks]
    return [_task_result(*pair, entrants, out, tuning, seeds) for pair in zip(tasks, levels, strict=True)]


def _task_result(
    task: Task,
    levels: Sequence[float],
    entrants: Sequence[Entrant],
    out: Path,
    tuning: Sequence[int],
    seeds: Sequence[int],
) -> TaskResult:
    rows = {}
    for entrant in entrants_of(task, entrants):
        settings = tune(task, entrant, tuning, out)
        experiments = [task.experiment(settings, seed) for seed in seeds_of(entrant, seeds)]
        runs = [records_of(each, out) for each in experiments]
        made = made_at(experiments, out, task.settings.get("device", "cpu"))
        rows[entrant.name] = make_row(entrant, settings, runs, levels, task.rounds, made)
    return TaskResult(task.name, task.group, task.rounds, list(levels), list(seeds), list(tuning), rows)
