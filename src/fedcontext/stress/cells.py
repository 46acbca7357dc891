"""Runs the stress test and reads its cells: one method under one condition on one task, over seeds."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from fedcontext.errors import FedcontextError
from fedcontext.files.storage import write_text
from fedcontext.leaderboard.board import Progress, no_progress, run_with_progress
from fedcontext.leaderboard.entries import Settings, Task
from fedcontext.leaderboard.provenance import made_at
from fedcontext.leaderboard.tuning import Records, records_of
from fedcontext.results.summary import summarise
from fedcontext.stress.cases import (
    CONDITIONS,
    HONEST,
    LEVEL,
    METHODS,
    SEEDS,
    TASKS,
    Condition,
    experiment,
    last_disturbed,
)

T = TypeVar("T")
CLOSE = 0.02  # a run has recovered when its accuracy is this close to that of the run without faults


@dataclass(frozen=True)
class Cell:
    """What one method reached under one condition, by seed."""

    task: str
    method: str
    condition: str
    kind: str
    share: float
    accuracy: list[float]  # after the last round with faults or attacks; 0 for a run that ended before it
    rounds: list[int | None]  # to the accuracy level, None if it was not reached
    lost: list[int]  # rounds without enough usable replies
    recovery: list[int | None]  # rounds after the last fault to within 2 points of the run without faults
    ended: int  # runs that ended with an error
    backdoor: list[float | None]  # share of test samples with the trigger that get its label, for backdoors
    made: str  # when and where

    @property
    def key(self) -> tuple[str, str, str, float]:
        """Which cell it is: the task, the method, the condition and its share."""
        return self.task, self.method, self.condition, self.share


@dataclass(frozen=True)
class Results:
    """All cells, and the settings and commands that made them."""

    cells: list[Cell]
    seeds: list[int]
    rounds: dict[str, list[int]]  # by task: all rounds, and those with faults or attacks
    level: float = LEVEL
    settings: dict[str, dict[str, object]] = field(default_factory=dict)  # by task
    commands: dict[str, list[str]] = field(default_factory=dict)  # by task: the commands that ran it


def stress(
    out: Path,
    jobs: int = 1,
    *,
    tasks: Sequence[Task] = TASKS,
    methods: Sequence[str] = tuple(METHODS),
    conditions: Sequence[Condition] = CONDITIONS,
    seeds: Sequence[int] = SEEDS,
    progress: Progress = no_progress,
    command: str = "fedcontext stress",
) -> Results:
    """Run the methods under every condition on every task, and return the results.

    Records go to ``out``; finished ones are reused when this is called again. The page says that ``command`` made them.
    """
    for task in tasks:
        runs = [experiment(task, method, each, seed) for method in methods for each in conditions for seed in seeds]
        run_with_progress(task.name, runs, out, jobs, progress)
    cells = [_cell(task, method, each, seeds, out) for task in tasks for method in methods for each in conditions]
    return Results(
        cells=cells,
        seeds=list(seeds),
        rounds={task.name: [task.rounds, last_disturbed(task)] for task in tasks},
        settings={task.name: _plain(task.settings) for task in tasks},
        commands={task.name: [command] for task in tasks},
    )


def _plain(settings: Settings) -> dict[str, object]:
    """Return the settings of a task as a JSON file returns them, without the compute device."""
    plain: dict[str, object] = json.loads(json.dumps({**settings}))
    return {name: value for name, value in plain.items() if name != "device"}


def _cell(task: Task, method: str, condition: Condition, seeds: Sequence[int], out: Path) -> Cell:
    experiments = [experiment(task, method, condition, seed) for seed in seeds]
    runs = [records_of(each, out) for each in experiments]
    honest = [records_of(experiment(task, method, HONEST, seed), out) for seed in seeds]
    until = last_disturbed(task)
    summaries = [summarise(records, [LEVEL]) for records in runs]
    return Cell(
        task=task.name,
        method=method,
        condition=condition.name,
        kind=condition.kind,
        share=condition.share,
        accuracy=[accuracy_after(records, until) for records in runs],
        rounds=[summary.rounds_to[LEVEL] for summary in summaries],
        lost=[summary.lost for summary in summaries],
        recovery=[recovery(run, accuracy_after(good, until), until) for run, good in zip(runs, honest, strict=True)],
        ended=sum(len(records) < task.rounds for records in runs),
        backdoor=[records[until - 1].backdoor if len(records) >= until else None for records in runs],
        made=made_at(experiments, out, str(task.settings.get("device", "cpu"))),
    )


def accuracy_after(records: Records, number: int) -> float:
    """Return the accuracy after a round, 0 if the run ended before it.

    >>> from fedcontext.records import RoundRecord
    >>> accuracy_after([RoundRecord(1, accuracy=0.5)], 1), accuracy_after([], 1)
    (0.5, 0.0)
    """
    accuracy = records[number - 1].accuracy if len(records) >= number else None
    return 0.0 if accuracy is None or not np.isfinite(accuracy) else float(accuracy)


def recovery(records: Records, reference: float, until: int) -> int | None:
    """Return how many rounds after round ``until`` the accuracy is at most 2 points below a reference.

    >>> from fedcontext.records import RoundRecord
    >>> recovery([RoundRecord(1, accuracy=0.1), RoundRecord(2, accuracy=0.4), RoundRecord(3, accuracy=0.79)], 0.8, 1)
    2
    """
    after = ((record.number - until, record.accuracy) for record in records[until - 1 :])
    return next((count for count, accuracy in after if accuracy is not None and accuracy >= reference - CLOSE), None)


def write_results(results: Results, path: Path) -> None:
    """Write results as JSON, one line a cell."""
    values = asdict(results)
    cells = ",\n  ".join(json.dumps(cell) for cell in values.pop("cells"))
    head = json.dumps(values, indent=1)[2:]
    write_text(path, f'{{\n "cells": [\n  {cells}\n ],\n{head}\n')


def read_results(path: Path) -> Results:
    """Return the results in a JSON file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Results(**{**content, "cells": [Cell(**cell) for cell in content["cells"]]})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FedcontextError(
            f"{path}: no results of a stress test, or of another version ({error!s:.200}); move the file away, then run "
            "`fedcontext stress`, which reuses finished runs"
        ) from None


def merge(before: Results | None, after: Results) -> Results:
    """Return the results with the cells of ``after`` in place of the same ones in ``before``, in the order of the page.

    No cell of ``before`` is kept whose task has other settings now, or whose task, method or condition is gone; none at
    all if the seeds differ.
    """
    if before is None or before.seeds != after.seeds:
        return after
    changed = {
        task
        for task in after.rounds
        if (before.rounds.get(task), before.settings.get(task)) != (after.rounds[task], after.settings.get(task))
    }
    known = {(task.name, name, each.name, each.share) for task in TASKS for name in METHODS for each in CONDITIONS}
    old = known - {cell.key for cell in after.cells}
    kept = [cell for cell in before.cells if cell.task not in changed and cell.key in old]
    tasks, methods, names = [task.name for task in TASKS], list(METHODS), [(c.name, c.share) for c in CONDITIONS]

    def position(cell: Cell) -> tuple[int, int, int]:
        return tasks.index(cell.task), methods.index(cell.method), names.index((cell.condition, cell.share))

    stays = {cell.task for cell in kept}
    commands = {**_of(stays, before.commands), **after.commands}
    for task in stays & after.commands.keys():
        commands[task] = list(dict.fromkeys([*before.commands.get(task, []), *after.commands[task]]))
    return replace(
        after,
        cells=sorted([*kept, *after.cells], key=position),
        rounds={**_of(stays, before.rounds), **after.rounds},
        settings={**_of(stays, before.settings), **after.settings},
        commands=commands,
    )


def _of(tasks: Collection[str], values: Mapping[str, T]) -> dict[str, T]:
    return {task: value for task, value in values.items() if task in tasks}
