"""Groups of runs that differ only in their seed: one line in a chart, one row in a table."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from fedcontext.algorithms import ALGORITHMS
from fedcontext.arrays.tree import FloatArray
from fedcontext.results.reader import MAX_TEXT, Run, column

UNITS = ("rounds", "seconds", "bytes")  # of the cost of a run


@dataclass(frozen=True)
class Group:
    """The runs of one algorithm with the same settings, over seeds."""

    label: str
    runs: list[Run]

    @cached_property
    def numbers(self) -> list[int]:
        """Return the rounds that at least one run has."""
        return sorted({row["number"] for run in self.runs for row in run.rows})

    def matrix(self, name: str) -> FloatArray:
        """Return (runs, rounds) values of one field; NaN where a run has none."""
        values = np.full((len(self.runs), len(self.numbers)), np.nan)
        position = {number: index for index, number in enumerate(self.numbers)}
        for line, run in zip(values, self.runs, strict=True):
            line[[position[row["number"]] for row in run.rows]] = np.array(column(run.rows, name), dtype=float)
        return values

    def costs(self, unit: str) -> FloatArray:
        """Return (runs, rounds) cumulative costs at the end of each round."""
        if unit == "rounds":
            return np.tile(np.array(self.numbers, dtype=float), (len(self.runs), 1))
        cost = self.matrix("seconds") if unit == "seconds" else self.matrix("bytes_up") + self.matrix("bytes_down")
        return np.where(np.isnan(cost), np.nan, np.nancumsum(cost, axis=1))


def dataset_of(run: Run) -> str:
    """Return the name of a run's data set."""
    return str(run.settings.get("dataset", "unnamed data"))[:MAX_TEXT]


def algorithm_of(run: Run) -> str:
    """Return the name of a run's algorithm, by default of its file."""
    return str(run.settings.get("algorithm", run.name))[:MAX_TEXT]


def seed_of(run: Run) -> str:
    """Return a run's seed as text."""
    return str(run.settings.get("seed", "unknown"))[:MAX_TEXT]


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Return the runs of one data set in groups, labelled by algorithm and by the settings that differ."""
    by_settings: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_settings[_to_text({**run.settings, "seed": None, "algorithm": algorithm_of(run)})].append(run)
    values = _values_by_setting([members[0] for members in by_settings.values()])
    groups = [Group(_label(members[0], values), _started(members)) for members in by_settings.values()]
    return sorted(groups, key=lambda group: (_rank(algorithm_of(group.runs[0])), _natural_key(group.label)))


def _started(runs: list[Run]) -> list[Run]:
    """Return the runs that have rounds, or all if none has: a run that is still queued has not failed."""
    return [run for run in runs if run.rows] or runs


def _rank(algorithm: str) -> int:
    """Return the position of an algorithm in `ALGORITHMS`; unknown ones come last."""
    return [*ALGORITHMS, algorithm].index(algorithm)


def _natural_key(label: str) -> list[str | float]:
    """Return a sort key that compares numbers inside a label by value.

    >>> sorted(["mu=10", "mu=x", "mu=9"], key=_natural_key)
    ['mu=9', 'mu=10', 'mu=x']
    """
    parts = re.split(r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)", label)
    return [float(part) if index % 2 else part for index, part in enumerate(parts)]


SettingValues: TypeAlias = dict[str, dict[str, set[str]]]  # setting -> algorithm -> its values


def _values_by_setting(runs: Sequence[Run]) -> SettingValues:
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in ("seed", "algorithm"))
    values: SettingValues = {name: defaultdict(set) for name in names}
    for name, by_algorithm in values.items():
        for run in runs:
            by_algorithm[algorithm_of(run)].add(_to_text(run.settings.get(name)))
    return values


def _label(run: Run, values: SettingValues) -> str:
    """Return an algorithm's name with the settings that distinguish its groups, or that differ from another algorithm's."""
    name = algorithm_of(run)
    shown = [f"{key}={_format(run.settings.get(key))}" for key, by in values.items() if _differs(by[name], by)]
    return (f"{name} ({', '.join(shown)})" if shown else name)[:MAX_TEXT]


def _differs(own: set[str], by_algorithm: dict[str, set[str]]) -> bool:
    return len(own) > 1 or any(own.isdisjoint(others) for others in by_algorithm.values())


def _format(value: object) -> str:
    return value if isinstance(value, str) else _to_text(value)


def _to_text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)
