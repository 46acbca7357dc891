"""The correction of a proposed step, from how the probes' gradients change over it.

The rule with memory proposes a step s from what it knows at w. Probes then report the change of their gradients from w
to w + s; its mean y shows the curvature along s, and m + y estimates the gradient at w + s. The correction minimises a
quadratic model of the loss around w + s over s itself, -(m + y), and -(m + y) preconditioned (where the rule has q).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.measurement.sums import dot
from fedcontext.rules.curvature import along, fitted, gram, norm, with_secant
from fedcontext.rules.memory_state import GRADIENT, Memory, MemorySettings, combined, metric, reliability, shortened
from fedcontext.rules.quadratic import minimise_in_box

STEP = 0  # row of s among the directions


def corrected_step(
    change: FloatArray, error: float, memory: Memory, settings: MemorySettings
) -> tuple[FloatArray, Memory, dict[str, Any]]:
    """Return the step after its correction, the memory for the next round, and the correction's relative length.

    ``error`` is the expected squared error of ``change``; ``memory`` is the memory after the proposed step. Where the
    loss is not convex along the step, the step is returned unchanged. The correction is at most √cos(y, s) as long as
    the step, since y is parallel to s where the curvature is the same in all directions; and at most anchor times that,
    or ``trial`` times that if the anchor is shorter or no curvature was measured yet.
    """
    s, y = memory.step, change
    ys = dot(y, s)
    if not ys > 0:
        return s, replace(memory, second_exchange=True), {"correction": 0.0, "mean": _along_mean(memory)}
    u = metric(memory.square, settings.power)
    scale = 1 / (u + settings.smallest)
    _, _, k = fitted(memory.normal, memory.right, memory.curvature, s, y, u, settings.decay)
    m = memory.gradient + y
    unit = np.stack([s, -m, *([-m * scale] if settings.scaled_gradient else [])])
    lengths = np.array([norm(vector) for vector in unit])
    unit /= lengths[:, None]
    slopes = along(unit, m)
    slopes[STEP + 1 :] *= np.minimum(_reliabilities(memory), max(0.0, 1 - error / lengths[STEP + 1] ** 2))
    h = _hessian(unit, u, scale, k, s, y, settings)
    low = np.where(np.arange(len(unit)) == STEP, -lengths[STEP], 0.0)
    x = minimise_in_box(h, slopes, low, np.full(len(unit), np.inf))
    cosine = ys / (norm(s) * norm(y))
    allowed = max(memory.anchor, settings.trial) if memory.normal.any() else settings.trial
    most = min(settings.correction, allowed) * np.sqrt(cosine) * lengths[STEP]
    correction = shortened(combined(x, unit), most)
    after = replace(memory, step=s + correction, deviation=memory.deviation + correction, second_exchange=True)
    return after.step, after, {"correction": norm(correction) / lengths[STEP], "mean": _along_mean(after)}


def _along_mean(memory: Memory) -> float:
    """Return how many mean updates the step goes along the mean update."""
    d = memory.step - memory.deviation
    return dot(memory.step, d) / norm(d) ** 2


def _reliabilities(memory: Memory) -> FloatArray:
    """Return the reliability (0.05 to 1.5) of the slopes of m along -m and its preconditioned form."""
    return reliability(memory.slopes, memory.gradient, memory.error, memory.hits, memory.squares)[GRADIENT:]


def _hessian(
    unit: FloatArray,
    u: FloatArray,
    scale: FloatArray,
    k: FloatArray,
    s: FloatArray,
    y: FloatArray,
    settings: MemorySettings,
) -> FloatArray:
    """Return the model k₁ I + k₂ diag(u) on the directions, with a damped BFGS update by s and y.

    Along s and the gradient the curvature is at least ‖y‖/‖s‖, the Lipschitz constant of the gradient that was met;
    along the preconditioned gradient the same holds in the variables w / √scale, in which that is the gradient.
    """
    h = k[0] * gram(unit, unit) + k[1] * gram((row * u for row in unit), unit)
    h = with_secant(h, along(unit, y) / norm(s), STEP, settings.damping)
    least = [norm(y) / norm(s)] * 2
    if settings.scaled_gradient:
        q = unit[-1]
        least.append(float(np.sqrt(dot(y * scale, y) / dot(s / scale, s))) * dot(q / scale, q))
    h[np.diag_indices(len(h))] = np.maximum(np.diag(h), least)
    return np.asarray(h + settings.ridge * np.trace(h) / len(h) * np.eye(len(h)))
