"""Runs that differ in nothing but their seed, together: one line in a picture, one row in a table."""

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

UNITS = ("rounds", "seconds", "bytes")  # what a run costs, in three ways


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
        place = {number: position for position, number in enumerate(self.numbers)}
        for line, run in zip(values, self.runs, strict=True):
            line[[place[row["number"]] for row in run.rows]] = np.array(column(run.rows, name), dtype=float)
        return values

    def costs(self, unit: str) -> FloatArray:
        """Return (runs, rounds) what each run had spent by the end of a round."""
        if unit == "rounds":
            return np.tile(np.array(self.numbers, dtype=float), (len(self.runs), 1))
        spent = self.matrix("seconds") if unit == "seconds" else self.matrix("bytes_up") + self.matrix("bytes_down")
        return np.where(np.isnan(spent), np.nan, np.nancumsum(spent, axis=1))


def dataset_of(run: Run) -> str:
    """Return the name of a run's data."""
    return str(run.settings.get("dataset", "unnamed data"))[:MAX_TEXT]


def algorithm_of(run: Run) -> str:
    """Return the name of a run's algorithm, or of its file."""
    return str(run.settings.get("algorithm", run.name))[:MAX_TEXT]


def seed_of(run: Run) -> str:
    """Return a run's seed as text."""
    return str(run.settings.get("seed", "unknown"))[:MAX_TEXT]


def group(runs: Sequence[Run]) -> list[Group]:
    """Return the runs of one data set in groups, named by their algorithm and by the settings in which they differ."""
    together: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        together[_text({**run.settings, "seed": None, "algorithm": algorithm_of(run)})].append(run)
    values = _values([members[0] for members in together.values()])
    groups = [Group(_label(members[0], values), _begun(members)) for members in together.values()]
    return sorted(groups, key=lambda each: (_order(algorithm_of(each.runs[0])), _parts(each.label)))


def _begun(runs: list[Run]) -> list[Run]:
    """Return the runs that have rounds, or all where none has: one that waits for its turn has not failed."""
    return [run for run in runs if run.rows] or runs


def _order(algorithm: str) -> int:
    """Return the place of an algorithm in the table of all, the unknown behind them."""
    return [*ALGORITHMS, algorithm].index(algorithm)


def _parts(label: str) -> list[str | float]:
    """Return a label's texts and numbers by turns, so that sorting puts 10 behind 9, and on every data set alike.

    >>> sorted(["k2=10", "k2=N", "k2=9"], key=_parts)
    ['k2=9', 'k2=10', 'k2=N']
    """
    parts = re.split(r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)", label)
    return [float(part) if at % 2 else part for at, part in enumerate(parts)]


Values: TypeAlias = dict[str, dict[str, set[str]]]  # of every setting, by algorithm


def _values(runs: Sequence[Run]) -> Values:
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in ("seed", "algorithm"))
    found: Values = {name: defaultdict(set) for name in names}
    for name, by_algorithm in found.items():
        for run in runs:
            by_algorithm[algorithm_of(run)].add(_text(run.settings.get(name)))
    return found


def _label(run: Run, values: Values) -> str:
    """Return an algorithm's name, with the settings that tell its lines apart or make it unlike all of another's."""
    name = algorithm_of(run)
    told = [f"{key}={_value(run.settings.get(key))}" for key, by in values.items() if _tells(by[name], by)]
    return (f"{name} ({', '.join(told)})" if told else name)[:MAX_TEXT]


def _tells(own: set[str], by_algorithm: dict[str, set[str]]) -> bool:
    return len(own) > 1 or any(own.isdisjoint(theirs) for theirs in by_algorithm.values())


def _value(value: object) -> str:
    return value if isinstance(value, str) else _text(value)


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)
