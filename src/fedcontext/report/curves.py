"""Groups of runs as curves: the mean over seeds and its band, against rounds, simulated seconds and bytes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.report.downsample import short, thin
from fedcontext.report.groups import UNITS, Group


def curve(group: Group, name: str, points: int) -> dict[str, Any]:
    """Return the mean over seeds of one field with its lowest and highest, and what each round had cost by then."""
    values = group.matrix(name)
    known = np.flatnonzero(np.isfinite(values).any(axis=0))
    middle = over_seeds(np.nanmean, values[:, known])
    drawn = thin(middle, points)
    kept = known[drawn]
    costs = {unit: short(over_seeds(np.nanmean, group.costs(unit)[:, kept])) for unit in UNITS}
    band = {"low": np.nanmin, "high": np.nanmax} if len(group.runs) > 1 else {}
    edges = {key: short(over_seeds(pick, values[:, kept])) for key, pick in band.items()}
    return {"x": costs, "mean": short(middle[drawn]), **edges}


def health(group: Group, points: int) -> dict[str, Any]:
    """Return the condition of the Gram matrix, the smoothness used and the curvature met, medians over seeds."""
    lines = {}
    for name in ("condition", "smoothness", "curvature"):
        values = group.matrix(name)
        known = np.flatnonzero(np.isfinite(values).any(axis=0))
        middle = over_seeds(np.nanmedian, values[:, known])
        drawn = thin(middle, points)
        lines[name] = {"rounds": [group.numbers[position] for position in known[drawn]], "values": short(middle[drawn])}
    return lines


def over_seeds(pick: Any, values: FloatArray) -> FloatArray:
    """Return ``pick`` of each column, NaN where a column has nothing.

    >>> over_seeds(np.nanmean, np.array([[1.0, np.nan], [3.0, np.nan]]))
    array([ 2., nan])
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # an empty column is no surprise here
        return np.asarray(pick(values, axis=0), dtype=float)
