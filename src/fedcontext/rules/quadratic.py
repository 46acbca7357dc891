"""Quadratic functions of a few variables, minimised within limits."""

from __future__ import annotations

import itertools

import numpy as np

from fedcontext.arrays.tree import FloatArray


def minimise_in_box(h: FloatArray, b: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    """Return the x with low <= x <= high that minimises b·x + xᵀhx/2, by trying every face of the box.

    >>> minimise_in_box(np.eye(2), np.array([-1.0, -3.0]), np.zeros(2), np.array([np.inf, 2.0]))
    array([1., 2.])
    """
    best, lowest = low, np.inf
    for face in itertools.product(*[(0, 1, 2) if np.isfinite(top) else (0, 1) for top in high]):
        position = np.array(face)
        x, free = np.where(position == 1, low, np.where(position == 2, high, 0.0)), position == 0
        if free.any():
            x[free] = -np.linalg.solve(h[np.ix_(free, free)], b[free] + h[np.ix_(free, ~free)] @ x[~free])
        value, slack = float(b @ x + 0.5 * x @ h @ x), 1e-12 * np.abs(x)
        if value < lowest and (x >= low - slack).all() and (x <= high + slack).all():
            best, lowest = x, value
    return best


def minimise_on_simplex(matrix: FloatArray, epsilon: float = 1.0) -> FloatArray:
    """Return the x that minimises xᵀMx with Σ x = 1, x >= 0 and |xₖ - 1/K| <= ``epsilon``, by an active-set method.

    A ridge of 1e-9 of the mean diagonal makes x unique where M is singular.

    >>> minimise_on_simplex(np.diag([1.0, 3.0])).round(6)
    array([0.75, 0.25])
    """
    count = len(matrix)
    h = matrix + 1e-9 * np.trace(matrix) / count * np.eye(count)
    low, high = max(0.0, 1 / count - epsilon), 1 / count + epsilon
    x, free = np.full(count, 1 / count), np.ones(count, bool)
    for _ in range(50 * count if epsilon else 0):
        inner, outer = np.linalg.solve(
            h[np.ix_(free, free)], np.stack([np.ones(free.sum()), h[free] @ (x * ~free)], 1)
        ).T
        level = (1 - x[~free].sum() + outer.sum()) / inner.sum()  # the common entry of Hx where x is free
        move = np.zeros(count)
        move[free] = level * inner - outer - x[free]
        slack = np.where(move < -1e-14, low - x, np.where(move > 1e-14, high - x, np.inf))
        shares_left = np.divide(slack, move, out=np.full(count, np.inf), where=np.isfinite(slack))
        blocking = int(np.argmin(shares_left))
        x = x + min(1.0, shares_left[blocking]) * move
        if shares_left[blocking] < 1:
            x[blocking], free[blocking] = (low if move[blocking] < 0 else high), False
            continue
        excess = np.where(
            free, 0.0, np.where(x <= low, level - h @ x, h @ x - level)
        )  # > 0: a bound that does not bind
        if excess.max() <= 1e-12:
            break
        free[int(np.argmax(excess))] = True
    return x
