"""Fewer points per curve. Only what is drawn is downsampled, never what is computed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.plan import IntArray


def downsample(values: FloatArray, count: int) -> IntArray:
    """Return about ``count`` positions that keep the shape of a curve: the ends, and the extremes of each interval.

    >>> downsample(np.array([0.0, 1.0, 9.0, 1.0, 0.0, -9.0, 0.0, 0.0]), 4)
    array([0, 2, 5, 7])
    """
    if len(values) <= count:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), max(1, (count - 2) // 2) + 1).astype(int)
    kept = {0, len(values) - 1}
    for start, stop in pairwise(edges.tolist()):
        kept |= {start + int(values[start:stop].argmin()), start + int(values[start:stop].argmax())}
    return np.array(sorted(kept))


def round_values(values: Iterable[float | None]) -> list[float | None]:
    """Return numbers with five significant digits, without negative zeros; None for what is not finite.

    >>> round_values([1 / 3, 12.0, -0.0, None, float("nan")])
    [0.33333, 12.0, 0.0, None, None]
    """
    return [None if value is None or not np.isfinite(value) else float(f"{value:z.5g}") for value in values]
