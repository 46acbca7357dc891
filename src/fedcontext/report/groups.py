"""Groups of runs that differ only in their seed and their rounds: one line in a chart, one row in a table."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from fedcontext.algorithms import ALGORITHMS, unused_settings
from fedcontext.arrays.tree import FloatArray
from fedcontext.results.reader import MAX_TEXT, Run, column

UNITS = ("rounds", "seconds", "bytes")  # of the cost of a run
MAX_SETTINGS = 3  # in a label, unless more are needed to tell two lines apart
Settings: TypeAlias = dict[str, str]


@dataclass(frozen=True)
class Group:
    """The runs of one algorithm with the same settings, over seeds."""

    label: str
    full_label: str  # with all settings that differ
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


def group_runs(runs: Sequence[Run], order: Sequence[str] = ()) -> list[Group]:
    """Return the runs of one data set in groups, labelled by algorithm and by the settings that differ.

    Runs that differ in their rounds alone are one group: of the same seed the longest counts. The groups are in the
    ``order`` of their algorithms, by default that of `ALGORITHMS`; unknown ones come last.
    """
    by_settings: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_settings[_to_text([algorithm_of(run), _compared(run)])].append(run)
    firsts = [(algorithm_of(members[0]), _compared(members[0])) for members in by_settings.values()]
    groups = [
        Group(*_labels(*first, firsts), _longest(_started(members)))
        for first, members in zip(firsts, by_settings.values(), strict=True)
    ]
    return sorted(groups, key=lambda group: (_rank(algorithm_of(group.runs[0]), order), _natural_key(group.label)))


def _compared(run: Run) -> dict[str, str]:
    """Return, as text, the settings that can distinguish a run from others: those that its algorithm uses."""
    unused = {"seed", "algorithm", "rounds", *unused_settings(algorithm_of(run))}
    known = {name: value for name, value in run.settings.items() if name not in unused and value is not None}
    return {name: value if isinstance(value, str) else _to_text(value) for name, value in known.items()}


def _started(runs: list[Run]) -> list[Run]:
    """Return the runs that have rounds, or all if none has: a run that is still queued has not failed."""
    return [run for run in runs if run.rows] or runs


def _longest(runs: list[Run]) -> list[Run]:
    """Return each seed's longest run, and the runs that repeat it with the same settings."""
    longest = {seed_of(run): run.settings for run in sorted(runs, key=lambda run: len(run.rows))}
    return [run for run in runs if run.settings == longest[seed_of(run)]]


def _rank(algorithm: str, order: Sequence[str]) -> int:
    return [*(order or ALGORITHMS), algorithm].index(algorithm)


def _natural_key(label: str) -> list[str | float]:
    """Return a sort key that compares numbers inside a label by value.

    >>> sorted(["mu=10", "mu=x", "mu=9"], key=_natural_key)
    ['mu=9', 'mu=10', 'mu=x']
    """
    parts = re.split(r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)", label)
    return [float(part) if index % 2 else part for index, part in enumerate(parts)]


def _labels(algorithm: str, own: Settings, groups: Sequence[tuple[str, Settings]]) -> tuple[str, str]:
    """Return an algorithm's name with a few differing settings, enough to tell it apart, and with all of them."""
    settings: dict[str, list[Settings]] = defaultdict(list)
    for name, other in groups:
        settings[name].append(other)
    same = settings[algorithm]
    names = dict.fromkeys(name for other in same for name in other)
    differing = [name for name in names if _differs(name, same, settings.values())]
    needed = _distinguishing(own, same, differing)
    short = sorted(dict.fromkeys((*needed, *differing)), key=needed.__contains__, reverse=True)
    short = short[: max(MAX_SETTINGS, len(needed))]
    more = [f"{len(differing) - len(short)} more"] * (len(differing) > len(short))
    texts = {name: f"{name}={own.get(name, 'none')}" for name in differing}
    few = [texts[name] for name in differing if name in short] + more
    return _with_settings(algorithm, few), _with_settings(algorithm, list(texts.values()))


def _differs(name: str, same: Sequence[Settings], by_algorithm: Iterable[Sequence[Settings]]) -> bool:
    """Return whether a setting has several values for one algorithm, or none in common with another that has it."""
    own = {each.get(name) for each in same}
    others = ({each[name] for each in group if name in each} for group in by_algorithm)
    return len(own) > 1 or any(values and own.isdisjoint(values) for values in others)


def _with_settings(algorithm: str, settings: Sequence[str]) -> str:
    return (f"{algorithm} ({', '.join(settings)})" if settings else algorithm)[:MAX_TEXT]


def _distinguishing(own: Settings, others: Sequence[Settings], names: Sequence[str]) -> list[str]:
    """Return a few of the names in which ``own`` differs from all others."""
    chosen: list[str] = []
    while others := [each for each in others if each != own and all(each.get(n) == own.get(n) for n in chosen)]:
        chosen.append(max(names, key=lambda name: sum(each.get(name) != own.get(name) for each in others)))
    return chosen


def _to_text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)
