"""Curves of a group of runs: statistics over seeds against rounds, simulated seconds and bytes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.plan import IntArray
from fedcontext.report.downsample import downsample, round_values
from fedcontext.report.groups import UNITS, Group


def curve(group: Group, name: str, points: int) -> dict[str, Any]:
    """Return the mean over seeds of one metric, its range over seeds, and the cost in every unit at each point."""
    values = group.matrix(name)
    columns, mean = _drawn(values, np.nanmean, points)
    x = {unit: round_values(over_seeds(np.nanmean, group.costs(unit)[:, columns])) for unit in UNITS}
    band = {"low": np.nanmin, "high": np.nanmax} if len(group.runs) > 1 else {}
    edges = {key: round_values(over_seeds(statistic, values[:, columns])) for key, statistic in band.items()}
    return {"x": x, "mean": round_values(mean), **edges}


def diagnostics(group: Group, points: int) -> dict[str, Any]:
    """Return medians over seeds of the condition of the Gram matrix, the smoothness and the measured curvature."""
    lines = {}
    for name in ("condition", "smoothness", "curvature"):
        columns, median = _drawn(group.matrix(name), np.nanmedian, points)
        lines[name] = {"rounds": [group.numbers[column] for column in columns], "values": round_values(median)}
    return lines


def over_seeds(statistic: Any, values: FloatArray) -> FloatArray:
    """Return ``statistic`` of each column, NaN for a column without values.

    >>> over_seeds(np.nanmean, np.array([[1.0, np.nan], [3.0, np.nan]]))
    array([ 2., nan])
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns about empty columns
        return np.asarray(statistic(values, axis=0), dtype=float)


def _drawn(values: FloatArray, statistic: Any, points: int) -> tuple[IntArray, FloatArray]:
    """Return the columns to draw, and the statistic over seeds there."""
    known = np.flatnonzero(np.isfinite(values).any(axis=0))
    centre = over_seeds(statistic, values[:, known])
    kept = downsample(centre, points)
    return known[kept], centre[kept]
