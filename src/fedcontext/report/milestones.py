"""The cost to reach each accuracy level, and the final metrics of a group of runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.report.downsample import round_values
from fedcontext.report.groups import UNITS, Group
from fedcontext.results.reader import Row
from fedcontext.results.summary import LEVELS, Summary, median_rounds

CANDIDATES = (0.1, 0.2, 0.3, 0.4, *LEVELS, 0.85, 0.9, 0.95, 0.98, 0.99)
MAX_LEVELS = 5
TOLERANCE = 1e-9  # rounding error allowed before the bound counts as violated


def accuracy_levels(groups: Sequence[Group], wanted: Sequence[float] = ()) -> list[float]:
    """Return the accuracies to show: those wanted, unless they are the usual ones and none of them was reached.

    Then they are the highest that more than half of the runs of some group reached.
    """
    best = max((_median_best(group) for group in groups), default=0.0)
    if wanted and (tuple(wanted) != LEVELS or min(wanted) <= best):
        return list(wanted)
    return [level for level in CANDIDATES if level <= best][-MAX_LEVELS:]


def _median_best(group: Group) -> float:
    best = sorted((max((row["accuracy"] or 0.0 for row in run.rows), default=0.0) for run in group.runs), reverse=True)
    return float(best[len(best) // 2])


def milestones(group: Group, levels: Sequence[float]) -> dict[str, list[float | None]]:
    """Return each unit's median cost over seeds of each level; None if half of the runs or more never reached it."""
    accuracies = np.nan_to_num(group.matrix("accuracy"), nan=-1.0)
    return {unit: round_values(_median_costs(accuracies, group.costs(unit), levels)) for unit in UNITS}


def _median_costs(accuracies: FloatArray, costs: FloatArray, levels: Sequence[float]) -> list[float]:
    reached = [accuracies >= level for level in levels]  # (runs, rounds) each
    return [
        median_rounds([cost[run.argmax()] if run.any() else None for run, cost in zip(runs, costs, strict=True)])
        for runs in reached
    ]


def final_metrics(group: Group, summaries: Sequence[Summary]) -> dict[str, float | None]:
    """Return means over seeds of the summaries, and the share of rounds over all seeds in which the bound held."""
    values = {
        name: [getattr(each, name) for each in summaries] for name in ("loss", "accuracy", "swing", "rises", "rounds")
    }
    values["bound_held"] = [held for run in group.runs for row in run.rows if (held := bound_held(row)) is not None]
    known = ([value for value in each if np.isfinite(value)] for each in values.values())
    return dict(zip(values, round_values(float(np.mean(each)) if each else None for each in known), strict=True))


def bound_held(row: Row) -> bool | None:
    """Return whether the loss fell at least as far as the bound promised; None if either is unknown.

    >>> bound_held({"promised_change": -1.0, "measured_change": -1.5})
    True
    """
    if row["promised_change"] is None or row["measured_change"] is None:
        return None
    return bool(row["measured_change"] <= row["promised_change"] + TOLERANCE)
