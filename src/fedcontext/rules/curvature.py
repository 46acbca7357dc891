"""Curvature of the loss from gradient differences: a diagonal model fitted over rounds, and a damped BFGS update."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.measurement.sums import dot

TINY = 1e-30  # keeps divisions defined


def fitted(
    normal: FloatArray,
    right: FloatArray,
    curvature: FloatArray,
    step: FloatArray,
    y: FloatArray,
    u: FloatArray,
    decay: float,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the normal equations of y ≈ k₁ s + k₂ u∘s over past rounds, and their solution with k >= 0.

    Where that is zero k stays as it was, ``curvature``.

    >>> none = np.zeros((2, 2)), np.zeros(2), np.zeros(2)
    >>> fitted(*none, np.array([1.0, 1.0]), np.array([2.0, 3.0]), np.array([0.0, 1.0]), 0.9)[2].round(6)
    array([2., 1.])
    """
    length = norm(step)
    z = [step / length, u * step / length]
    normal = decay * normal + gram(z, z)
    right = decay * right + along(z, y) / length
    k = np.linalg.solve(normal + 1e-9 * np.trace(normal) * np.eye(2), right)
    if k.min() < 0:
        single = [np.array([max(right[0], 0) / normal[0, 0], 0]), np.array([0, max(right[1], 0) / normal[1, 1]])]
        k = min(single, key=lambda x: float(0.5 * x @ normal @ x - right @ x))
    return normal, right, k if k.sum() > 0 else curvature


def with_secant(h: FloatArray, secant: FloatArray, at: int, damping: float) -> FloatArray:
    """Return a Hessian after a BFGS update by its measured column ``at``, at least ``damping`` of its curvature kept.

    >>> with_secant(np.eye(2), np.array([4.0, 0.0]), 0, 0.3)
    array([[4., 0.],
           [0., 1.]])
    >>> with_secant(np.eye(2), np.zeros(2), 0, 0.3).round(6)
    array([[0.3, 0. ],
           [0. , 1. ]])
    """
    image, own = h[:, at], h[at, at]
    if secant[at] < damping * own:
        share = (1 - damping) * own / (own - secant[at])
        secant = share * secant + (1 - share) * image
    return np.asarray(h - np.outer(image, image) / own + np.outer(secant, secant) / secant[at])


def along(rows: Iterable[FloatArray], vector: FloatArray) -> FloatArray:
    """Return the inner products of the rows with a vector.

    >>> along([np.array([1.0, 2.0]), np.array([0.0, 1.0])], np.array([3.0, 4.0]))
    array([11.,  4.])
    """
    return np.array([dot(row, vector) for row in rows])


def gram(left: Iterable[FloatArray], right: Iterable[FloatArray]) -> FloatArray:
    """Return the inner products of all rows on the left with all on the right.

    >>> gram([np.array([1.0, 2.0])], [np.array([3.0, 4.0]), np.array([0.0, 1.0])])
    array([[11.,  2.]])
    """
    return np.array([[dot(row, other) for other in right] for row in left])


def norm(vector: FloatArray) -> float:
    """Return the length of a vector, never zero.

    >>> norm(np.array([3.0, 4.0]))
    5.0
    """
    return float(np.sqrt(dot(vector, vector))) + TINY
