"""Oracles: the true training loss of all devices, minimised over a few directions. For simulations only.

No federation can run them, because every round passes over all devices' data many times. They measure
how much a rule loses because it does not know the best coefficients, and how much a set of directions can give at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fedcontext.aggregation.result import Aggregation
from fedcontext.arrays.tree import FloatArray, Leaves, Structure, leaves, rebuild
from fedcontext.engines.base import Engine
from fedcontext.measurement.geometry import Report, shares
from fedcontext.measurement.sums import flat, unflat
from fedcontext.plan import IntArray

ITERATIONS = 30  # of BFGS, a few passes over all data each
HALVINGS = 40  # of a step that is too long; the first can be by orders of magnitude
TOLERANCE = 1e-6  # relative decrease of the loss below which to stop; float32 losses resolve about 1e-7
Loss = Callable[[FloatArray], float]
Gradient = Callable[[FloatArray], FloatArray]


def oracle_aggregation(
    result: Aggregation, report: Report, params: Structure, trained: list[str], engine: Engine, samples: IntArray
) -> Aggregation:
    """Return ``result`` with the step in the span of the rule's directions at which the loss of all devices is lowest.

    The directions are those of the rule with memory, or the updates. ``trained`` names the leaves that move,
    ``samples`` are the sample counts of all devices.
    """
    base, devices, weights = leaves(params), np.arange(len(samples)), shares(samples.astype(np.float64), len(samples))
    start = flat(base, trained)

    def at(step: FloatArray) -> Structure:
        return rebuild(params, {**leaves(result.params), **unflat(start + step, base, trained)})

    def gradient(step: FloatArray) -> FloatArray:
        return flat(leaves(engine.gradient(at(step), devices, weights)), trained)

    memory = result.state if isinstance(result.state, dict) else None
    updates = list(report.updates.values() if isinstance(report.updates, dict) else report.updates)
    used = np.flatnonzero(result.screened.factors)
    directions = memory["directions"] if memory else np.stack([flat(leaves(updates[row]), trained) for row in used])
    own = flat(leaves(result.step), trained)
    step = lowest_step(lambda moved: engine.evaluate(at(moved))[0], gradient, directions, own)
    if memory:
        state = {**memory, "step": step, "deviation": step - (memory["step"] - memory["deviation"])}
        coefficients = result.weights
    else:
        state, coefficients = result.state, np.zeros(len(updates))
        coefficients[used] = np.linalg.lstsq(directions.T, step, rcond=None)[0]
    moved: Leaves = unflat(step, base, trained)
    return replace(
        result,
        params=at(step),
        weights=coefficients,
        state=state,
        promised_change=float("nan"),
        motion=replace(result.motion, step_norm=float(np.linalg.norm(step))),
        make_step=lambda: rebuild(params, {**leaves(result.step), **moved}),
    )


def lowest_step(loss: Loss, gradient: Gradient, directions: FloatArray, first: FloatArray) -> FloatArray:
    """Return a step in the span of the directions (M, n) with a low loss, by BFGS from the better of ``first`` and 0.

    The loss is never above that of ``first``, as long as ``first`` is in the span.

    >>> target = np.array([3.0, 1.0, 7.0])
    >>> step = lowest_step(lambda x: ((x - target) ** 2).sum(), lambda x: 2 * (x - target), np.eye(3)[:2], np.zeros(3))
    >>> step.round(3)
    array([3., 1., 0.])
    """
    basis = orthonormal(directions)

    def loss_at(x: FloatArray) -> float:
        return loss(x @ basis)

    x = basis @ first
    scale = float(np.linalg.norm(x)) or 1.0
    value, value_at_zero = loss_at(x), loss_at(0 * x)
    if not value <= value_at_zero:
        x, value = 0 * x, value_at_zero
    slope = basis @ gradient(x @ basis)
    inverse = np.eye(len(x)) * 0.1 * scale / (float(np.linalg.norm(slope)) or 1.0)
    stalled = 0
    for _ in range(ITERATIONS):
        direction = -inverse @ slope
        if not slope @ direction < 0:
            break
        move, lower = _line_search(loss_at, x, direction, value, float(slope @ direction))
        stalled = stalled + 1 if value - lower <= TOLERANCE * abs(lower) else 0
        x, value, before = x + move, lower, slope
        if stalled == 2:  # one short step can be a poor estimate of the curvature
            break
        slope = basis @ gradient(x @ basis)
        inverse = _bfgs(inverse, move, slope - before)
    return np.asarray(x @ basis)


def orthonormal(directions: FloatArray) -> FloatArray:
    """Return (r, n) orthonormal rows that span the directions (M, n); zero and dependent ones are dropped.

    >>> orthonormal(np.array([[2.0, 0.0], [4.0, 0.0], [0.0, 0.0]])).round(6) + 0.0
    array([[1., 0.]])
    """
    lengths = np.linalg.norm(directions, axis=1)
    unit = directions[lengths > 0] / lengths[lengths > 0, None]
    _, values, rows = np.linalg.svd(unit, full_matrices=False)
    rows = rows[values > 1e-6 * values.max(initial=0)]
    return np.asarray(rows * np.sign(rows.sum(axis=1, keepdims=True) + 1e-300))


def _line_search(
    loss: Loss, x: FloatArray, direction: FloatArray, value: float, slope: float
) -> tuple[FloatArray, float]:
    """Return a move along the direction and the loss after it, never above ``value``, the loss at x.

    The direction itself is doubled while that lowers the loss, or halved until the loss is low enough (Armijo).
    """
    size, lowest = 1.0, loss(x + direction)
    if lowest <= value + 1e-4 * slope:
        while size < 2**10 and (further := loss(x + 2 * size * direction)) < lowest:
            size, lowest = 2 * size, further
        return size * direction, lowest
    for _ in range(HALVINGS):
        size /= 2
        if (lowest := loss(x + size * direction)) <= value + 1e-4 * size * slope:
            return size * direction, lowest
    return 0 * direction, value


def _bfgs(inverse: FloatArray, step: FloatArray, change: FloatArray) -> FloatArray:
    """Return the inverse Hessian after a BFGS update; as it was where the loss is not convex along the step."""
    bend = float(step @ change)
    if bend <= 1e-12 * float(np.linalg.norm(step) * np.linalg.norm(change)):
        return inverse
    left = np.eye(len(step)) - np.outer(step, change) / bend
    return np.asarray(left @ inverse @ left.T + np.outer(step, step) / bend)
