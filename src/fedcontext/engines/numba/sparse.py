"""Samples that are mostly background: xᵢ = b + sᵢ, and only the few entries of sᵢ are stored.

An image is background nearly everywhere, also after every pixel was standardised: then the background is another
number in each column, and still the same for all samples.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcontext.engines.numba.vectors import TOGETHER
from fedcontext.jit import compiled
from fedcontext.plan import IntArray

Matrix = npt.NDArray[Any]
SAMPLED = 1000  # samples that are searched for the background
WORTHWHILE = 0.35  # share of entries that differ from it, up to which storing only those pays
COLUMN = np.dtype(np.uint16)


class Sparse(NamedTuple):
    """The entries of samples that differ from the background, row after row, each padded with zeros.

    After the n samples comes one row more: the background itself. All is empty where storing entries would not pay.
    """

    background: Matrix  # (d,)
    starts: IntArray  # (n + 2,) where the entries of each row begin
    columns: Matrix  # (m,)
    values: Matrix  # (m,)
    leans: Matrix  # (n + 1,) <row, b>


def sparse(features: Matrix) -> Sparse:
    """Return the samples as a background and what differs from it; empty where that would not pay.

    >>> found = sparse(np.array([[1.0, 0, 0, 2, 0], [1, 0, 0, 2, 5], [1, 3, 0, 2, 0]]))
    >>> found.background, found.values[found.values > 0]
    (array([1., 0., 0., 2., 0.]), array([5., 3., 1., 2.]))
    """
    background, counts = np.zeros(features.shape[1], features.dtype), np.zeros(len(features) + 1, np.int64)
    if len(features) and features.shape[1] <= np.iinfo(COLUMN).max + 1:
        background = _background(features)
        if np.isfinite(background).all():
            _count(features, background, counts)
    if not 0 < counts[:-1].sum() <= WORTHWHILE * features.size:
        counts = counts[:0]
    starts = np.concatenate([[0], np.cumsum(-(-counts // TOGETHER) * TOGETHER)])
    columns, values = np.zeros(starts[-1], COLUMN), np.zeros(starts[-1], features.dtype)
    found = Sparse(background, starts, columns, values, np.zeros(len(counts), features.dtype))
    _store(features, found)
    return found


def _background(features: Matrix) -> Matrix:
    """Return the value that is most common in each column, among samples spread over all."""
    rows = np.sort(features[:: -(-len(features) // SAMPLED)], axis=0)
    length, longest = np.ones(rows.shape[1], np.int64), np.ones(rows.shape[1], np.int64)  # of a stretch of equal values
    background: Matrix = rows[0].copy()
    for before, row in itertools.pairwise(rows):
        length = length * (row == before) + 1
        background[length > longest] = row[length > longest]
        longest = np.maximum(longest, length)
    return background


@compiled
def _count(features: Matrix, background: Matrix, counts: IntArray) -> None:
    for i in range(counts.size):
        total = 0
        for j in range(background.size):
            total += features[i, j] != background[j] if i < features.shape[0] else background[j] != 0
        counts[i] = total


@compiled
def _store(features: Matrix, found: Sparse) -> None:
    for i in range(found.leans.size):
        position, lean = found.starts[i], 0.0
        for j in range(found.background.size):
            own = found.background[j]
            value = features[i, j] - own if i < features.shape[0] else own
            if value != 0:
                found.columns[position], found.values[position] = j, value
                lean += value * own
                position += 1
        found.leans[i] = lean
