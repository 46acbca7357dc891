"""Results of tasks: the best baseline, ratios to it, and a JSON file of all numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedcontext.errors import FedcontextError, shortened, shown
from fedcontext.files.storage import write_text
from fedcontext.leaderboard.rows import Row
from fedcontext.records import fits

Made = TypeVar("Made", "TaskResult", Row)
PUBLISHED = Path(__file__).with_name("results.json")  # what `fedcontext recommend` answers from


@dataclass(frozen=True)
class TaskResult:
    """A task's rows, and the commands that made them."""

    task: str
    group: str
    rounds: int
    levels: Sequence[float]
    seeds: Sequence[int]
    tuning_seeds: Sequence[int]
    rows: Mapping[str, Row] = field(default_factory=dict)
    commands: Sequence[str] = ()  # that made the rows

    def best_baseline(self, measure: str = "mean_rounds") -> Row:
        """Return the tuned baseline with the lowest value: not ours, not an oracle, not one with more devices."""
        baselines = [row for row in self.rows.values() if row.kind == "baseline"]
        if not baselines:
            raise FedcontextError(f"task {self.task} has no baseline to compare with; add one to the entrants")
        return min(baselines, key=lambda row: float(getattr(row, measure)))


@dataclass(frozen=True)
class Ratio:
    """An entrant of a group of tasks relative to the best tuned baseline of each task."""

    entrant: str
    kind: str
    by_task: Mapping[str, float]  # mean rounds to the levels / those of the best baseline
    uplink: float  # to the top level / the lowest of all baselines, geometric mean
    worst_uplink: float
    uplink_round: float  # bytes sent in a round / those of FedAvg with 10 devices, mean

    @property
    def mean(self) -> float:
        """Return the geometric mean over tasks."""
        return geometric_mean(self.by_task.values())

    @property
    def worst(self) -> float:
        """Return the largest ratio."""
        return max(self.by_task.values())


def ratios(results: Sequence[TaskResult]) -> list[Ratio]:
    """Return the ratios of every entrant over the tasks in which it has a row, lowest mean first."""
    rows = {name: row.kind for result in results for name, row in result.rows.items()}
    return sorted((_ratio(name, kind, results) for name, kind in rows.items()), key=lambda ratio: ratio.mean)


def _ratio(name: str, kind: str, results: Sequence[TaskResult]) -> Ratio:
    own = [(result, result.rows[name]) for result in results if name in result.rows]
    uplinks = [_quotient(row.mean_megabytes, each.best_baseline("mean_megabytes").mean_megabytes) for each, row in own]
    fedavg = [(row, each.rows["fedavg"]) for each, row in own if "fedavg" in each.rows]
    rounds = {each.task: _quotient(row.mean_rounds, each.best_baseline().mean_rounds) for each, row in own}
    relative = [_quotient(row.megabytes_round, other.megabytes_round) for row, other in fedavg]
    return Ratio(
        name, kind, rounds, geometric_mean(uplinks), max(uplinks), float(np.mean(relative)) if relative else math.inf
    )


def _quotient(value: float, best: float) -> float:
    return value / best if value < math.inf and best else math.inf


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean.

    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    return float(np.exp(np.mean(np.log(list(values)))))


def oracle_gap(result: TaskResult, row: Row, oracle: str) -> float | None:
    """Return the median over seeds of the final loss minus that of an oracle; None if the oracle was not run."""
    if oracle not in result.rows:
        return None
    pairs = zip(row.losses, result.rows[oracle].losses, strict=False)  # an oracle is run on the first seeds alone
    return float(np.median([own - lowest for own, lowest in pairs]))


def merge(before: Iterable[TaskResult], after: Iterable[TaskResult]) -> list[TaskResult]:
    """Return the results with rows of ``after`` in place of those of the same task and entrant in ``before``."""
    merged = {result.task: result for result in before}
    for result in after:
        old = merged.get(result.task)
        if old and (old.levels, old.rounds, old.seeds) == (result.levels, result.rounds, result.seeds):
            earlier = old.commands if old.rows.keys() - result.rows.keys() else ()
            commands = list(dict.fromkeys((*earlier, *result.commands)))
            result = replace(result, rows={**old.rows, **result.rows}, commands=commands)
        merged[result.task] = result
    return list(merged.values())


def commands_of(results: Iterable[TaskResult]) -> str:
    """Return the commands that made the results, each once, as code in a line of Markdown without the outer quotes."""
    return "` and `".join(dict.fromkeys(command for result in results for command in result.commands))


def write_results(results: Sequence[TaskResult], path: Path) -> None:
    """Write results as JSON, with infinite numbers as null."""
    write_text(path, json.dumps(_plain([asdict(each) for each in results]), indent=1) + "\n")


def read_results(path: Path) -> list[TaskResult]:
    """Return the results in a JSON file."""
    try:
        return [_task_result(each) for each in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = shortened(f"{type(error).__name__}: {error}", 200)
        raise FedcontextError(f"{path}: no leaderboard results ({reason}); run `fedcontext leaderboard`") from None


def _task_result(content: dict[str, Any]) -> TaskResult:
    rows = {name: _checked(Row(**_restored(row))) for name, row in content["rows"].items()}
    return _checked(TaskResult(**{**content, "rows": rows}))


def _checked(made: Made) -> Made:
    """Return a row or result from a file if its numbers and names are what they should be."""
    for each in fields(made):
        value = getattr(made, each.name)
        if each.type in ("str", "int", "float") and not fits(value, each.type):
            raise TypeError(f"{each.name} must be {each.type}, got {shown(value)}")
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    return (round(value, 6) if math.isfinite(value) else None) if isinstance(value, float) else value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _restored(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_restored(child) for child in value]
    return math.inf if value is None else value
