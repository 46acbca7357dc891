"""Contextual aggregation with memory: a second-order step in five directions that the server holds.

In every round Q probes send their gradient at the present params, and its difference to that at the last round's
params. From sums over devices alone the server keeps an estimate m of the global gradient (as SARAH does, corrected by
fresh gradients), an estimate of the curvature, and chooses the step in the span of

    d  the mean update (FedAvg's step)          p  d preconditioned: divided, entry by entry, by u + 0.01
    -m the negative gradient estimate           q  -m preconditioned
    s  the previous step

as the minimiser of a quadratic model of the loss. The length of the deviation from d is limited by how well earlier
deviations lowered the loss (the anchor). The first step is d, or longer where devices report that local training
stopped far from the minimum along their updates. `correction` improves the step by a second exchange with the probes.

Notation: ȳ mean gradient difference, ḡ mean fresh gradient, u a power of the root mean square of past gradients, scaled
to a root mean square of 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.errors import FedcontextError, shown
from fedcontext.measurement.sums import Sums, dot
from fedcontext.rules.base import Need, State, SumRule
from fedcontext.rules.correction import corrected_step
from fedcontext.rules.curvature import TINY, along, fitted, gram, norm, with_secant
from fedcontext.rules.memory_state import (
    GRADIENT,
    MEAN,
    PREVIOUS,
    SCALED_GRADIENT,
    Memory,
    MemorySettings,
    combined,
    count_directions,
    memory_of,
    metric,
    reliability,
    shortened,
)
from fedcontext.rules.quadratic import minimise_in_box
from fedcontext.rules.trust import limits_of

ROUNDING = 1e-12  # deviations from d below this share of its length count as none


def contextual_memory(settings: MemorySettings | None = None) -> SumRule:
    """Return contextual aggregation with memory, as a rule for `aggregate`, simulations and Flower.

    It needs each probe's gradient and its difference to the gradient at the last round's params. In the first round it
    uses the ``remaining_slopes`` of `aggregate` where they are given. Its step can be corrected in a second exchange
    with the probes: see `correct`.

    >>> contextual_memory().name
    'contextual memory'
    """
    chosen = MemorySettings() if settings is None else settings
    if not isinstance(chosen, MemorySettings):
        raise FedcontextError(f"settings must be fc.MemorySettings(...) or None, got {shown(settings)}")

    def step(sums: Sums, state: State, population: int | None) -> tuple[FloatArray, State, dict[str, Any]]:
        memory = None if state is None else memory_of(state, sums.size, chosen)
        vector, after, info = memory_step(sums, memory, chosen, np.inf if population is None else population)
        return vector, vars(after), info

    def last_step(state: State) -> FloatArray | None:
        return None if state is None else state["step"]

    def correct(change: FloatArray, error: float, state: State) -> tuple[FloatArray, State, dict[str, Any]]:
        vector, after, info = corrected_step(change, error, memory_of(state, change.size, chosen), chosen)
        return vector, vars(after), info

    needs: frozenset[Need] = frozenset({"gradient", "differences", "remaining slopes"})
    return SumRule(
        "contextual memory", step, needs, last_step=last_step, correct=correct if chosen.correction else None
    )


def memory_step(
    sums: Sums, memory: Memory | None, settings: MemorySettings, population: float = np.inf
) -> tuple[FloatArray, Memory, dict[str, Any]]:
    """Return the step of one round, the memory for the next one, and the numbers behind the step.

    >>> sums = Sums(size=2)
    >>> sums.add_update(np.array([1.0, 0.0])); sums.add_probe(np.array([-1.0, 0.5]))
    >>> memory_step(sums, None, MemorySettings())[0]  # the first step is FedAvg's
    array([1., 0.])
    """
    if memory is None:
        return _first_step(sums, settings, population)
    g, y = sums.mean_gradient, sums.mean_difference
    d = _no_surge(sums.mean_update, memory.length, settings.surge)
    m, error = _gradient_estimate(sums, memory.gradient + y, memory, population, settings)
    v = settings.decay * memory.square + sums.square / sums.probes
    u = metric(v, settings.power)
    scale = 1 / (u + settings.smallest)
    unit = np.stack([d, d * scale, memory.step, -m, *([-m * scale] if settings.scaled_gradient else [])])
    lengths = np.array([norm(vector) for vector in unit])
    unit /= lengths[:, None]

    slopes = along(unit, m)
    hits, squares, factors = _calibration(slopes, g - y, m, error, memory, settings)
    ys = dot(y, memory.step)
    fit = memory.normal, memory.right, memory.curvature
    if ys > 0:  # the loss was convex along the last step
        fit = fitted(*fit, memory.step, y, u, settings.decay)
        hessian = _hessian(unit, u, scale, fit[2], y, ys, lengths[PREVIOUS], settings)
        momentum = settings.momentum / 2 if memory.second_exchange else settings.momentum
        x = _model_minimum(hessian, slopes * factors, lengths, momentum, settings)
    else:
        x = lengths * (np.arange(len(unit)) == MEAN)  # no convex model: FedAvg's step

    limits = limits_of(g, y, lengths[MEAN], lengths[PREVIOUS], memory, settings)
    deviation = shortened(shortened(combined(x, unit), limits.step) - d, limits.deviation)
    if norm(deviation) <= ROUNDING * limits.reference:
        deviation = np.zeros_like(d)  # rounding errors are no evidence for the anchor
    after = Memory(
        gradient=m,
        error=error,
        square=v,
        step=d + deviation,
        deviation=deviation,
        second_exchange=False,
        directions=unit,
        slopes=slopes,
        hits=hits,
        squares=squares,
        normal=fit[0],
        right=fit[1],
        curvature=fit[2],
        length=limits.length,
        trust=limits.trust,
        anchor=limits.anchor,
        contradicting=memory.contradicting + sums.contradicting,
        evidence=limits.evidence,
    )
    mean = dot(after.step, unit[MEAN]) / lengths[MEAN]
    return after.step, after, {"trust": limits.trust, "anchor": limits.anchor, "mean": mean, "convex": ys > 0}


def _first_step(sums: Sums, settings: MemorySettings, population: float) -> tuple[FloatArray, Memory, dict[str, Any]]:
    """Return FedAvg's step d, or a multiple of it, and the curvature at which d would be the minimiser: -<g, d>/‖d‖².

    It is longer where devices stopped far from the minimum along their updates, further than the anchor's first limit.
    """
    d, g = sums.mean_update, sums.mean_gradient
    ahead = sums.distance_to_minimum - 1
    ahead = ahead if ahead > settings.anchor > 0 else 0.0
    directions = count_directions(settings)
    length, unit, slopes = norm(d), np.zeros((directions, len(d))), np.zeros(directions)
    unit[MEAN] = d / length
    slopes[MEAN] = dot(g, unit[MEAN])
    implied = max(-dot(g, d), 1e-12 * length * norm(g)) / length**2
    memory = Memory(
        gradient=g,
        error=sums.gradient_error(population),
        square=sums.square / sums.probes,
        step=d + ahead * d,
        deviation=ahead * d,
        second_exchange=False,
        directions=unit,
        slopes=slopes,
        hits=np.zeros(directions),
        squares=np.zeros(directions),
        normal=np.zeros((2, 2)),
        right=np.zeros(2),
        curvature=np.array([implied, 0.0]),
        length=length,
        trust=1 + ahead,
        anchor=max(settings.anchor, ahead),
        contradicting=sums.contradicting,
        evidence=np.zeros((2, 2)),
    )
    return memory.step, memory, {"trust": memory.trust, "anchor": memory.anchor, "mean": 1 + ahead, "convex": True}


def _gradient_estimate(
    sums: Sums, prior: FloatArray, memory: Memory, population: float, settings: MemorySettings
) -> tuple[FloatArray, float]:
    """Return m = (m' + ȳ) + a (ḡ - m' - ȳ), and its expected squared error.

    The prior m' + ȳ errs by P' + Var(ȳ), the fresh mean ḡ by Var(ḡ); the gain a weighs the two as a Kalman filter does.
    When probes are first left out because they contradict the others along the last step, the prior is dropped: the
    first round has no step before it, so their gradients may be in it.
    """
    drift, noise = memory.error + sums.difference_error(population), sums.gradient_error(population)
    if sums.contradicting and not memory.contradicting:
        return sums.mean_gradient, noise
    gain = float(np.clip(drift / (drift + noise + TINY), settings.floor, 1))
    m = prior + gain * (sums.mean_gradient - prior)
    return m, (1 - gain) ** 2 * drift + gain**2 * noise


def _hessian(
    unit: FloatArray,
    u: FloatArray,
    scale: FloatArray,
    k: FloatArray,
    y: FloatArray,
    ys: float,
    length: float,
    settings: MemorySettings,
) -> FloatArray:
    """Return (D, D) the model k₁ I + k₂ diag(u) on the directions, with a damped BFGS update by the last step.

    The curvature along -m is at least ‖y‖²/<y, s>, for it is usually larger along the gradient than along the step.
    Along q the same limit holds in the variables w / √scale, in which q is the negative gradient.
    """
    h = k[0] * gram(unit, unit) + k[1] * gram((row * u for row in unit), unit)
    h = with_secant(h, along(unit, y) / length, PREVIOUS, settings.damping)
    h[GRADIENT, GRADIENT] = max(h[GRADIENT, GRADIENT], dot(y, y) / ys)
    if len(unit) > SCALED_GRADIENT:
        q = unit[SCALED_GRADIENT]
        least = dot(y * scale, y) / ys * dot(q / scale, q)
        h[SCALED_GRADIENT, SCALED_GRADIENT] = max(h[SCALED_GRADIENT, SCALED_GRADIENT], least)
    return np.asarray(h)


def _calibration(
    slopes: FloatArray, fresh: FloatArray, m: FloatArray, error: float, memory: Memory, settings: MemorySettings
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the running evidence on the last directions' slopes, and the factors by which to trust the present ones.

    ``fresh`` = ḡ - ȳ is an unbiased estimate of the gradient at the last params: its slope along each of the last
    directions, over the slope of the earlier m, shows how reliable m is there.
    """
    before = dot(memory.gradient, memory.gradient) + TINY
    hits = settings.decay * memory.hits + memory.slopes * along(memory.directions, fresh) / before
    squares = settings.decay * memory.squares + memory.slopes**2 / before
    return hits, squares, reliability(slopes, m, error, hits, squares)


def _model_minimum(
    h: FloatArray, slopes: FloatArray, lengths: FloatArray, momentum: float, settings: MemorySettings
) -> FloatArray:
    """Return the x that minimises slopes·x + xᵀHx/2 with x_d >= 0.2 ‖d‖, -‖s‖ <= x_s <= momentum ‖s‖, others >= 0."""
    low, high = np.zeros(len(h)), np.full(len(h), np.inf)
    low[MEAN] = 2 * settings.floor * lengths[MEAN]
    low[PREVIOUS], high[PREVIOUS] = -lengths[PREVIOUS], momentum * lengths[PREVIOUS]
    return minimise_in_box(h + settings.ridge * np.trace(h) / len(h) * np.eye(len(h)), slopes, low, high)


def _no_surge(d: FloatArray, mean: float, surge: float) -> FloatArray:
    """Return d, shortened to ``surge`` times the running mean of its length, in case most of a cohort is Byzantine.

    In honest runs it stays below twice that mean.
    """
    known = mean > 2 * TINY  # not where every update was zero so far
    return shortened(d, surge * mean) if known else d
