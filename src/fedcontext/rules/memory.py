"""Contextual aggregation with memory: a second-order step in five directions that the server holds.

In every round Q probes send their gradient at the present params, and that minus their gradient at the last round's.
From sums over devices alone the server keeps an estimate m of the global gradient (as SARAH does, corrected by fresh
gradients), an estimate of the curvature, and chooses the step in the span of

    d  the mean update (FedAvg's step)          p  d preconditioned: divided, entry by entry, by u + 0.01
    -m the negative gradient estimate           q  -m preconditioned
    s  the previous step

as the minimiser of a quadratic model of the loss. The length of the deviation from d is limited by how well earlier
deviations lowered the loss (the anchor). The first step is d, or longer where devices report that local training stopped
far from the minimum along their updates. Notation: ȳ mean gradient difference, ḡ mean fresh gradient, u a power of the
root mean square of the gradients so far, relative to its mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.errors import FedcontextError, shown
from fedcontext.measurement.sums import Sums, dot
from fedcontext.rules.base import Need, State, SumRule
from fedcontext.rules.curvature import TINY, along, fitted, gram, norm, with_secant
from fedcontext.rules.quadratic import minimise_in_box

MEAN, SCALED, PREVIOUS, GRADIENT, SCALED_GRADIENT = range(5)  # rows of the directions d, p, s, -m, q
SHARES = "decay", "evidence_decay", "damping"  # settings between 0 and 1
ROUNDING = 1e-12  # deviations from d below this share of its length count as none


@dataclass(frozen=True)
class MemorySettings:
    """The constants of the rule: the same for all data sets and models."""

    decay: float = 0.9  # share of every running quantity that a round keeps
    floor: float = (
        0.1  # least gain of the gradient estimate; the least share of d is twice, the least anchor half of it
    )
    least_trust: float = 0.2  # lower limit of the trust, the factor of the longest step
    reach: float = 3.0  # the model's minimiser is cut to reach x trust x R, R the larger of ‖d‖ and its running mean
    momentum: float = 0.8  # largest multiple of the previous step
    restart: float = 2.0  # momentum is multiplied by min(1, restart x (1 - e)), e the evidence on the last step alone
    anchor: float = 0.6  # first limit of ‖step - d‖ / ‖d‖, or / R
    near: float = 1.0  # largest anchor that is relative to ‖d‖; larger ones are relative to R
    growth: float = 16.0  # largest factor by which evidence can change that limit in one round; it scales `trial` too
    trust_growth: float = 4.0  # the same for trust
    evidence_decay: float = 0.3  # share of the past rounds' evidence that a round keeps: a single round's is noisy
    stretch: float = 4.0  # upper limit of ‖step‖ / ‖s‖, unless d is longer
    power: float = 1.25  # of the root mean square of past gradients that divides d and shapes the curvature
    damping: float = 0.3  # share of a direction's curvature that a secant update keeps at least
    smallest: float = 0.01  # added to the root mean square that divides d and m
    ridge: float = 1e-4  # relative ridge of the quadratic model
    largest: float = 100.0  # upper limit of trust and anchor
    surge: float = 3.0  # d counts as at most so many times as long as its running mean
    trial: float = 0.3  # first limit of ‖step - d‖ / ‖d‖, where s was d: trial x growth^-e, e the evidence on steps
    secant: float = 1.0  # or, if larger, secant x cos(y, s) x the steps to the minimum that the slopes along s show
    scaled_gradient: bool = True  # whether q is a direction

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (isinstance(value, int | float) and value >= 0):
                raise FedcontextError(f"{name} must be a number that is not negative, got {shown(value)}")
            if name in SHARES and value > 1:
                raise FedcontextError(f"{name} is a share and must be at most 1, got {shown(value)}")


@dataclass(frozen=True)
class Memory:
    """What the server carries from round to round."""

    gradient: FloatArray  # (n,) m, the estimate of ∇f(w_t)
    error: float  # P, the expected ‖m - ∇f‖²
    square: FloatArray  # (n,) v, decayed sum of the probes' mean gᵢ²
    step: FloatArray  # (n,) s, the last step
    deviation: FloatArray  # (n,) δ = s - d of the last round
    directions: FloatArray  # (D, n) the last round's unit directions, D = 5, or 4 without q
    slopes: FloatArray  # (D,) m along them
    hits: FloatArray  # (D,) running Σ slope x fresh slope, relative to ‖m‖²
    squares: FloatArray  # (D,) running Σ slope², relative to ‖m‖²
    normal: FloatArray  # (2, 2) normal equations of the curvature fit
    right: FloatArray  # (2,)
    curvature: FloatArray  # (2,) k: the Hessian is modelled as k₁ I + k₂ diag(u)
    length: float  # running mean of ‖d‖
    trust: float  # ρ
    anchor: float  # τ
    contradicting: int  # probes left out so far for what they said along the last step
    evidence: FloatArray  # (2, 2) on steps and on deviations: decayed sum, and sum of its weights


def contextual_memory(settings: MemorySettings | None = None) -> SumRule:
    """Return contextual aggregation with memory, as a rule for `aggregate`, simulations and Flower.

    It needs each probe's gradient and its difference to the gradient at the last round's params. In the first round it uses
    the ``remaining_slopes`` of `aggregate` where they are given.

    >>> contextual_memory().name
    'contextual memory'
    """
    chosen = MemorySettings() if settings is None else settings
    if not isinstance(chosen, MemorySettings):
        raise FedcontextError(f"settings must be fc.MemorySettings(...) or None, got {shown(settings)}")

    def step(sums: Sums, state: State, population: int | None) -> tuple[FloatArray, State, dict[str, Any]]:
        memory = None if state is None else _memory_of(state, sums.size, chosen)
        vector, after, info = memory_step(sums, memory, chosen, np.inf if population is None else population)
        return vector, vars(after), info

    def last_step(state: State) -> FloatArray | None:
        return None if state is None else state["step"]

    needs: frozenset[Need] = frozenset({"gradient", "differences", "remaining slopes"})
    return SumRule("contextual memory", step, needs, last_step=last_step)


def _memory_of(state: State, size: int, settings: MemorySettings) -> Memory:
    """Return the memory that a state holds, after checking that it is of this model and of these settings."""
    try:
        memory = Memory(**state)
    except TypeError:
        raise FedcontextError(
            "state must be that of the last result of rule 'contextual memory'; this is of another rule or of an earlier "
            "version: start anew"
        ) from None
    if memory.step.size != size:
        raise FedcontextError(
            f"the state of rule 'contextual memory' is of a model with {memory.step.size} parameters, got {size}"
        )
    if len(memory.directions) != _count(settings):
        raise FedcontextError(
            f"the state of rule 'contextual memory' has {len(memory.directions)} directions, expected {_count(settings)}: "
            "it is of other settings or of an earlier version; start anew"
        )
    return memory


def _count(settings: MemorySettings) -> int:
    """Return the number of directions."""
    return SCALED_GRADIENT + bool(settings.scaled_gradient)


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
    u = _metric(v, settings.power)
    scale = 1 / (u + settings.smallest)
    unit = np.stack([d, d * scale, memory.step, -m, *([-m * scale] if settings.scaled_gradient else [])])
    lengths = np.array([norm(vector) for vector in unit])
    unit /= lengths[:, None]

    fresh = np.stack([_evidence(g, y, memory.step), _evidence(g, y, memory.deviation)])
    moved = fresh[:, 1] > 0
    evidence = np.where(moved[:, None], settings.evidence_decay * memory.evidence + fresh, memory.evidence)
    on_steps, on_deviations = np.divide(evidence[:, 0], evidence[:, 1], out=np.zeros(2), where=moved).tolist()
    trust = memory.trust * settings.trust_growth**-on_steps
    trust = float(np.clip(trust, settings.least_trust, settings.largest))
    bend = dot(y, memory.step)  # <y, s>: positive where the loss was convex along the last step
    fit = memory.normal, memory.right, memory.curvature
    fit = fitted(*fit, memory.step, y, u, settings.decay) if bend > 0 else fit
    slopes = along(unit, m)
    hits, squares, factors = _calibration(slopes, g - y, m, error, memory, settings)
    if bend > 0:
        hessian = _hessian(unit, u, scale, fit[2], y, bend, lengths[PREVIOUS], settings)
        momentum = settings.momentum * min(1.0, settings.restart * (1 - float(fresh[0, 0])))
        x = _model_minimum(hessian, slopes * factors, lengths, momentum, settings)
    else:
        x = lengths * (np.arange(len(unit)) == MEAN)  # no convex model: FedAvg's step
    length = settings.decay * memory.length + (1 - settings.decay) * lengths[MEAN]
    reference = max(lengths[MEAN], length)
    limit = min(settings.reach * trust * reference, max(settings.stretch * lengths[PREVIOUS], lengths[MEAN]))
    anchor, most = memory.anchor, np.inf
    if moved[1]:
        anchor = float(np.clip(anchor * settings.growth**-on_deviations, settings.floor / 2, settings.largest))
    elif anchor:  # nothing is known of deviations yet
        believed = settings.secant * max(0.0, bend) / (norm(y) * lengths[PREVIOUS])  # 1 where y is along s: a parabola
        ahead = min(believed * _steps_ahead(on_steps), settings.stretch)
        most, anchor = max(settings.trial * settings.growth**-on_steps, ahead) * lengths[MEAN], max(anchor, ahead)
    most = min(most, anchor * (reference if anchor > settings.near else lengths[MEAN]))
    deviation = _shortened(_shortened(_combined(x, unit), limit) - d, most)
    if norm(deviation) <= ROUNDING * reference:
        deviation = np.zeros_like(d)  # rounding errors are no evidence for the anchor
    contradicting = memory.contradicting + sums.contradicting
    model = (unit, slopes, hits, squares, *fit)
    after = Memory(m, error, v, d + deviation, deviation, *model, length, trust, anchor, contradicting, evidence)
    info = {"trust": trust, "anchor": anchor, "mean": dot(after.step, unit[MEAN]) / lengths[MEAN], "convex": bend > 0}
    return after.step, after, info


def _first_step(sums: Sums, settings: MemorySettings, population: float) -> tuple[FloatArray, Memory, dict[str, Any]]:
    """Return FedAvg's step d, or a multiple of it, and the curvature at which d would be the minimiser: -<g, d>/‖d‖².

    It is longer where devices stopped far from the minimum along their updates, further than the anchor's first limit.
    """
    d, g = sums.mean_update, sums.mean_gradient
    ahead = sums.distance_to_minimum - 1
    ahead = ahead if ahead > settings.anchor > 0 else 0.0
    directions = _count(settings)
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


def _metric(v: FloatArray, power: float) -> FloatArray:
    """Return u = v^(power/2), scaled to a root mean square of 1."""
    u = (v / (v.mean() + 1e-300)) ** (power / 2)
    return np.asarray(u / np.sqrt((u * u).mean() + 1e-300))


def _gradient_estimate(
    sums: Sums, prior: FloatArray, memory: Memory, population: float, settings: MemorySettings
) -> tuple[FloatArray, float]:
    """Return m = (m' + ȳ) + a (ḡ - m' - ȳ), and its expected squared error.

    The prior m' + ȳ errs by P' + Var(ȳ), the fresh mean ḡ by Var(ḡ); the gain a weighs the two as a Kalman filter does.
    When probes are first left out for what they say along the last step the prior is dropped: the first round has no step
    before it, so their gradients may be in it.
    """
    drift, noise = memory.error + sums.difference_error(population), sums.gradient_error(population)
    if sums.contradicting and not memory.contradicting:
        return sums.mean_gradient, noise
    gain = float(np.clip(drift / (drift + noise + TINY), settings.floor, 1))
    m = prior + gain * (sums.mean_gradient - prior)
    return m, (1 - gain) ** 2 * drift + gain**2 * noise


def _evidence(g: FloatArray, y: FloatArray, move: FloatArray) -> FloatArray:
    """Return (2,) the evidence of fresh gradients on the last ``move``, and its weight: 1, or 0 for a move of zero.

    With slopes σ₁ = <ḡ, move> after the move and σ₀ = σ₁ - <ȳ, move> before it, it is e = σ₁ / (|σ₁| + |σ₀|): negative where
    the loss still falls along the move, positive where the move went too far, above 1/2 where the loss rose.
    """
    if not move.any():
        return np.zeros(2)
    after = dot(g, move)
    before = after - dot(y, move)
    return np.array([after / (abs(after) + abs(before) + TINY), 1.0])


def _steps_ahead(evidence: float) -> float:
    """Return how many lengths of a move ahead the slopes at its ends say the minimum is: σ₁ / (σ₀ - σ₁) = -e / (1 + 2e).

    Zero where the move went too far, and where the slope is as steep as before or steeper: then there is no minimum ahead.
    """
    return -evidence / (1 + 2 * evidence) if -0.5 < evidence < 0 else 0.0


def _hessian(
    unit: FloatArray,
    u: FloatArray,
    scale: FloatArray,
    k: FloatArray,
    y: FloatArray,
    bend: float,
    length: float,
    settings: MemorySettings,
) -> FloatArray:
    """Return (D, D) the model k₁ I + k₂ diag(u) on the directions, with a damped BFGS update by the last step.

    The curvature along -m is at least ‖y‖²/<y, s>, for it is usually larger along the gradient than along the step.
    Along q the same limit holds in the variables w / √scale, in which q is the negative gradient.
    """
    h = k[0] * gram(unit, unit) + k[1] * gram((row * u for row in unit), unit)
    h = with_secant(h, along(unit, y) / length, PREVIOUS, settings.damping)
    h[GRADIENT, GRADIENT] = max(h[GRADIENT, GRADIENT], dot(y, y) / bend)
    if len(unit) > SCALED_GRADIENT:
        q = unit[SCALED_GRADIENT]
        least = dot(y * scale, y) / bend * dot(q / scale, q)
        h[SCALED_GRADIENT, SCALED_GRADIENT] = max(h[SCALED_GRADIENT, SCALED_GRADIENT], least)
    return np.asarray(h)


def _calibration(
    slopes: FloatArray, fresh: FloatArray, m: FloatArray, error: float, memory: Memory, settings: MemorySettings
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the running evidence on the last directions' slopes, and the factors by which to trust the present ones.

    ``fresh`` = ḡ - ȳ is an unbiased estimate of the gradient at the last params: its slope along each of the last
    directions, over the slope that m had claimed, says how far m can be believed there.
    """
    before, now = dot(memory.gradient, memory.gradient) + TINY, dot(m, m) + TINY
    hits = settings.decay * memory.hits + memory.slopes * along(memory.directions, fresh) / before
    squares = settings.decay * memory.squares + memory.slopes**2 / before
    prior = np.ones(len(slopes))
    prior[GRADIENT:] = max(0.0, 1 - error / now)
    weight = slopes**2 / (2 * now) + TINY
    return hits, squares, np.clip((hits + weight * prior) / (squares + weight), 0.05, 1.5)


def _model_minimum(
    h: FloatArray, slopes: FloatArray, lengths: FloatArray, momentum: float, settings: MemorySettings
) -> FloatArray:
    """Return the x that minimises slopes·x + xᵀHx/2 with x_d >= 0.2 ‖d‖, -‖s‖ <= x_s <= momentum ‖s‖, and the others >= 0."""
    low, high = np.zeros(len(h)), np.full(len(h), np.inf)
    low[MEAN] = 2 * settings.floor * lengths[MEAN]
    low[PREVIOUS], high[PREVIOUS] = -lengths[PREVIOUS], momentum * lengths[PREVIOUS]
    return minimise_in_box(h + settings.ridge * np.trace(h) / len(h) * np.eye(len(h)), slopes, low, high)


def _combined(coefficients: FloatArray, rows: FloatArray) -> FloatArray:
    total = coefficients[0] * rows[0]
    for coefficient, row in zip(coefficients[1:], rows[1:], strict=True):
        total += coefficient * row
    return np.asarray(total)


def _no_surge(d: FloatArray, mean: float, surge: float) -> FloatArray:
    """Return d, cut to ``surge`` running mean lengths in case most of a cohort lies: honest runs stay below two."""
    known = mean > 2 * TINY  # not where every update was zero so far
    return _shortened(d, surge * mean) if known else d


def _shortened(vector: FloatArray, limit: float) -> FloatArray:
    return vector * min(1.0, limit / norm(vector))
