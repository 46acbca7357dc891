"""What it took to reach each accuracy, how a run ended, and whether the bound's promises were kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.report.downsample import short
from fedcontext.report.groups import UNITS, Group
from fedcontext.results.reader import Row
from fedcontext.results.summary import LEVELS, TAIL, median_rounds

CANDIDATES = (0.1, 0.2, 0.3, 0.4, *LEVELS, 0.85, 0.9, 0.95, 0.98, 0.99)
SHOWN = 5  # levels at most
SLACK = 1e-9  # a promise is broken only beyond rounding


def levels_of(groups: Sequence[Group]) -> list[float]:
    """Return the accuracies worth a column: the highest that more than half of some group's runs reached."""
    best = max((_typical_best(group) for group in groups), default=0.0)
    return [level for level in CANDIDATES if level <= best][-SHOWN:]


def _typical_best(group: Group) -> float:
    bests = sorted((max((row["accuracy"] or 0.0 for row in run.rows), default=0.0) for run in group.runs), reverse=True)
    return float(bests[len(bests) // 2])


def reach(group: Group, levels: Sequence[float]) -> dict[str, list[float | None]]:
    """Return for each unit the median cost over seeds at each level; None where half of the runs never got there."""
    accuracies = np.nan_to_num(group.matrix("accuracy"), nan=-1.0)
    costs = {unit: group.costs(unit) for unit in UNITS}
    return {
        unit: short(median_rounds([_first(a, c, level) for a, c in zip(accuracies, costs[unit], strict=True)]) for level in levels)
        for unit in UNITS
    }  # fmt: skip


def _first(accuracies: FloatArray, costs: FloatArray, level: float) -> Any:
    there = accuracies >= level
    return costs[int(there.argmax())] if there.any() else None


def ending(group: Group) -> dict[str, float | None]:
    """Return the means over seeds of the last loss and accuracy, of the swing, and the shares of rises and kept promises."""
    loss, accuracy = _known(group, "loss"), _known(group, "accuracy")
    changes = np.concatenate(_known(group, "measured_change") or [np.zeros(0)])
    kept = [verdict for run in group.runs for row in run.rows if (verdict := promise_kept(row)) is not None]
    found = {
        "loss": [values[-1] for values in loss],
        "accuracy": [values[-1] for values in accuracy],
        "swing": [values[-TAIL:].std() for values in accuracy],
        "rises": [(changes > 0).mean()] if changes.size else [],
        "kept": kept,
        "rounds": [len(run.rows) for run in group.runs],
    }
    return dict(zip(found, short(float(np.mean(v)) if len(v) else None for v in found.values()), strict=True))


def promise_kept(row: Row) -> bool | None:
    """Return whether the loss fell at least as far as the bound said; None where either is unknown.

    >>> promise_kept({"promised_change": -1.0, "measured_change": -1.5})
    True
    """
    if row["promised_change"] is None or row["measured_change"] is None:
        return None
    return bool(row["measured_change"] <= row["promised_change"] + SLACK)


def _known(group: Group, name: str) -> list[FloatArray]:
    """Return each run's values of a field that are known, without the runs that know none."""
    lines = (line[np.isfinite(line)] for line in group.matrix(name))
    return [line for line in lines if line.size]
