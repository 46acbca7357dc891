"""How the probes' gradients become one estimate: the mean, or robust weights, from inner products alone.

All forms are weights of the probes, so they serve rules that see slopes and rules that see sums. The median is the
geometric one, taken of vectors: the median of each slope or entry is no gradient of anything, and breaks the contextual
rules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np

from fedcontext.arrays.tree import SCRATCH, FloatArray
from fedcontext.measurement.geometry import Vectors, inner_products, shares
from fedcontext.measurement.screening import Screened

Combination: TypeAlias = Literal["mean", "median", "median-of-means", "trimmed-mean", "trust"]
COMBINATIONS: dict[str, str] = {
    "mean": "the mean, weighed as `probe_averaging` says",
    "median": "the geometric median of the probes' gradients",
    "median-of-means": "the geometric median of the means of five groups of probes: only sums of groups are needed",
    "trimmed-mean": "the mean without the 30 % of the probes that are farthest from the others",
    "trust": "weighed by the cosine with the gradient of the server's own samples; none where it is negative",
}
GROUPS = 5  # of the median of means
TRIMMED = 0.3  # share of the probes that the trimmed mean leaves out
ITERATIONS = 1000  # of the geometric median, at most


def combined_probes(
    screened: Screened, vectors: Vectors, names: list[str], how: Combination, sums: bool, scratch: int = SCRATCH
) -> Screened:
    """Return what remains of a round with the probes weighed by ``how``.

    Rules that see ``sums`` take the plain mean of the gradients, so the weights are multiplied into the gradients and
    their differences; others get them as probe weights.
    """
    rows = np.flatnonzero(screened.probes)
    if how == "mean" or len(rows) < 2:
        return screened
    factors = screened.gradients[rows]
    products = inner_products([vectors.probes[row] for row in rows], vectors.root_gradient, names, scratch)
    gram = products[:, : len(rows)] * np.outer(factors, factors)
    given = None if sums or screened.probe_weights is None else screened.probe_weights[rows]
    weights = np.zeros(len(screened.probes))
    agreement = products[:, -1] if vectors.root_gradient else None
    weights[rows] = probe_weights(how, gram, shares(given, len(rows)), agreement)
    if not sums:
        return replace(screened, probe_weights=weights)
    multiples = weights * len(rows)
    differences = screened.differences * multiples if len(screened.differences) else screened.differences
    return replace(screened, gradients=screened.gradients * multiples, differences=differences)


def probe_weights(
    how: Combination, gram: FloatArray, given: FloatArray, agreement: FloatArray | None = None
) -> FloatArray:
    """Return (P,) how much each probe counts, in shares, from the inner products of the probes' gradients.

    ``given`` are the shares that each has in the mean, ``agreement`` the inner products with the server's own gradient.

    >>> gram = np.outer([1.0, 1.1, 0.9, -8.0], [1.0, 1.1, 0.9, -8.0])
    >>> probe_weights("trimmed-mean", gram, np.full(4, 0.25)).round(2)
    array([0.33, 0.33, 0.33, 0.  ])
    >>> probe_weights("trust", gram, np.full(4, 0.25), np.array([1.0, 1.1, 0.9, -8.0])).round(2)
    array([0.33, 0.33, 0.33, 0.  ])
    """
    if how == "median":
        return geometric_median_weights(gram)
    if how == "median-of-means":
        groups = np.zeros((min(GROUPS, len(gram)), len(gram)))
        for row, members in enumerate(np.array_split(np.arange(len(gram)), len(groups))):
            groups[row, members] = shares(given[members] if given[members].any() else None, len(members))
        return np.asarray(geometric_median_weights(groups @ gram @ groups.T) @ groups)
    if how == "trimmed-mean":
        kept = np.argsort(krum_scores(distances(gram), TRIMMED), kind="stable")[: len(gram) - int(TRIMMED * len(gram))]
        trimmed = np.zeros(len(gram))
        trimmed[kept] = given[kept]
        return trimmed / trimmed.sum() if trimmed.any() else given
    assert how == "trust"
    assert agreement is not None, "trust needs the root gradient"
    lengths = np.sqrt(np.diag(gram))
    trust = np.divide(agreement, lengths, out=np.zeros(len(gram)), where=lengths > 0).clip(0)
    return trust / trust.sum() if trust.any() else given


def geometric_median_weights(gram: FloatArray, smoothing: float = 1e-6) -> FloatArray:
    """Return the weights of the geometric median of rows with these inner products, by Weiszfeld's iteration.

    ``smoothing`` is the least distance that counts, relative to the median norm.

    >>> geometric_median_weights(np.outer([1.0, 2.0, 9.0], [1.0, 2.0, 9.0])).round(3)
    array([0., 1., 0.])
    """
    weights = np.zeros(len(gram))
    weights[np.argmin(np.sqrt(distances(gram)).sum(axis=1))] = 1
    floor = smoothing * (float(np.median(np.sqrt(np.diag(gram)))) or 1.0)
    for iteration in range(ITERATIONS):
        away = np.sqrt((np.diag(gram) - 2 * gram @ weights + weights @ gram @ weights).clip(0))
        least = floor if iteration else max(floor, float(np.median(away)))  # else the first row would hold it for long
        inverse = 1 / np.maximum(away, least)
        before, weights = weights, inverse / inverse.sum()
        if np.abs(weights - before).max() < 1e-9:
            break
    return weights


def krum_scores(squares: FloatArray, byzantine: float) -> FloatArray:
    """Return (K,) the sum of the K - f - 2 smallest squared distances of each row to the others, f = byzantine K.

    >>> krum_scores(np.array([[0.0, 1.0, 9.0], [1.0, 0.0, 4.0], [9.0, 4.0, 0.0]]), byzantine=0)
    array([1., 1., 4.])
    """
    count = len(squares)
    nearest = max(count - int(byzantine * count) - 2, 1)
    return np.asarray(np.sort(squares, axis=1)[:, 1 : nearest + 1].sum(axis=1))  # the first is the distance to itself


def distances(gram: FloatArray) -> FloatArray:
    """Return (K, K) the squared distances between rows with these inner products.

    >>> distances(np.diag([1.0, 4.0]))
    array([[0., 5.],
           [5., 0.]])
    """
    squares = np.diag(gram)
    return np.asarray((squares[:, None] + squares - 2 * gram).clip(0))
