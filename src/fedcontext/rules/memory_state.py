"""What the rule with memory keeps between rounds, and its constants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.errors import FedcontextError, shown
from fedcontext.rules.base import State
from fedcontext.rules.curvature import TINY, norm

MEAN, SCALED, PREVIOUS, GRADIENT, SCALED_GRADIENT = range(5)  # rows of the directions d, p, s, -m, q
SHARES = "decay", "evidence_decay", "damping"  # settings between 0 and 1


@dataclass(frozen=True)
class MemorySettings:
    """The constants of the rule: the same for all data sets and models."""

    decay: float = 0.9  # share of every running quantity that a round keeps
    floor: float = 0.1  # least gain of the gradient estimate; twice it bounds x_d, half of it the anchor
    least_trust: float = 0.05  # lower limit of the trust, the factor of the longest step
    reach: float = 3.0  # the model's minimiser is cut to reach x trust x R, R the larger of ‖d‖ and its running mean
    momentum: float = 0.8  # largest multiple of the previous step; half of it after a second exchange
    anchor: float = 0.6  # first limit of ‖step - d‖ / ‖d‖, or / R
    near: float = 1.0  # largest anchor that is relative to ‖d‖; larger ones are relative to R
    growth: float = 16.0  # largest factor by which evidence can change that limit in one round; it scales `trial` too
    trust_growth: float = 4.0  # the same for trust
    widening: float = 4.0  # upper limit of ‖step - d‖ / the last one's, unless it is below trial x ‖d‖
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
    correction: float = 1.0  # longest correction / (√cos(y, s) x ‖s‖), if trial or anchor allow it; 0: no corrections

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
    second_exchange: bool  # whether probes reported changes over s
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
    contradicting: int  # probes left out so far because they contradicted the others along a step
    evidence: FloatArray  # (2, 2) on steps and on deviations: decayed sum, and sum of its weights


def memory_of(state: State, size: int, settings: MemorySettings) -> Memory:
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
    if len(memory.directions) != count_directions(settings):
        raise FedcontextError(
            f"the state of rule 'contextual memory' has {len(memory.directions)} directions, expected "
            f"{count_directions(settings)}: it is of other settings or of an earlier version; start anew"
        )
    return memory


def count_directions(settings: MemorySettings) -> int:
    """Return the number of directions."""
    return SCALED_GRADIENT + bool(settings.scaled_gradient)


def metric(v: FloatArray, power: float) -> FloatArray:
    """Return u = v^(power/2), scaled to a root mean square of 1."""
    u = (v / (v.mean() + 1e-300)) ** (power / 2)
    return np.asarray(u / np.sqrt((u * u).mean() + 1e-300))


def reliability(slopes: FloatArray, m: FloatArray, error: float, hits: FloatArray, squares: FloatArray) -> FloatArray:
    """Return (D,) the reliability of the slopes of m along the directions: factors from 0.05 to 1.5.

    ``hits`` and ``squares`` are the running evidence on earlier slopes. Before there is any, the factor is 1 - P / ‖m‖²
    (at least 0.05) along -m and q, with P the expected squared error of m, and 1 along the other directions.
    """
    now = float((m * m).sum()) + TINY
    prior = np.ones(len(slopes))
    prior[GRADIENT:] = max(0.0, 1 - error / now)
    weight = slopes**2 / (2 * now) + TINY
    return np.asarray(np.clip((hits + weight * prior) / (squares + weight), 0.05, 1.5))


def combined(coefficients: FloatArray, rows: FloatArray) -> FloatArray:
    """Return Σ coefficients · rows."""
    total = coefficients[0] * rows[0]
    for coefficient, row in zip(coefficients[1:], rows[1:], strict=True):
        total += coefficient * row
    return np.asarray(total)


def shortened(vector: FloatArray, limit: float) -> FloatArray:
    """Return the vector, scaled to the length ``limit`` if it is longer."""
    return vector * min(1.0, limit / norm(vector))
