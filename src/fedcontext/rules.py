"""Aggregation rules, side by side: each turns a `Geometry` into one weight per device.

Write D for the K x n matrix of updates, g for the estimate of ∇f(w), G = D Dᵀ and b = D g. The step is Σ αₖ Δₖ (eq. 4),
and the smoothness bound on the loss after it (eq. 5) is f(w) + b·α + (β/2) αᵀ G α.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from fedcontext.arrays.tree import FloatArray, Structure
from fedcontext.combination import Combination
from fedcontext.errors import FedcontextError, positive
from fedcontext.geometry import Geometry, shares
from fedcontext.sums import Sums

Averaging: TypeAlias = Literal["mean", "samples"]
Need: TypeAlias = Literal[
    "gradient", "differences", "own gradients", "pool", "root", "root gradient", "samples", "steps"
]
State: TypeAlias = Any  # numbers, arrays, and lists, tuples and dicts of them; None for a rule without memory

RESOLUTION = 1e-9  # eigenvalues of a normalised Gram matrix far below this share of the largest count as zero
SHARPNESS = 8  # of the transition there


def _no_state(params: Structure) -> State:
    return None


@dataclass(frozen=True)
class Rule:
    """How the server weighs the devices of a round: ``weigh(geometry, state) -> (weights, state)``.

    ``needs`` names what devices must send beyond their updates, ``init(params)`` gives the state before the first round,
    and ``smoothness`` is the β that the rule itself uses, if any. ``scale_free`` says that the step does not depend on the
    lengths of the updates; the step of other rules is limited to a multiple of them.
    """

    name: str
    weigh: Callable[[Geometry, State], tuple[FloatArray, State]]
    needs: frozenset[Need] = frozenset()
    smoothness: float | None = None
    init: Callable[[Structure], State] = _no_state
    scale_free: bool = False
    gradients: Combination = "mean"  # how the probes' gradients are combined; set by `robust_gradients`

    def __post_init__(self) -> None:
        _check_needs(self.name, self.needs)


@dataclass(frozen=True)
class SumRule:
    """A rule that sees sums over devices alone: ``step(sums, state, population) -> (step, state, info)``.

    The step is a flat float64 vector over the floating-point leaves, ``population`` the total number of devices (None
    where unknown) and ``info`` diagnostics, which do not affect the step. ``last_step(state)`` is the last step, where the
    rule keeps it: the defences look whether a probe's gradient difference fits it.
    """

    name: str
    step: Callable[[Sums, State, int | None], tuple[FloatArray, State, dict[str, Any]]]
    needs: frozenset[Need] = frozenset()
    init: Callable[[Structure], State] = _no_state
    smoothness: None = None
    scale_free: bool = False
    last_step: Callable[[State], FloatArray | None] = _no_state
    gradients: Combination = "mean"  # how the probes' gradients are combined; set by `robust_gradients`

    def __post_init__(self) -> None:
        _check_needs(self.name, self.needs)


@dataclass(frozen=True)
class CoordinateRule:
    """A rule for each entry of the model alone: ``combine(block) -> step``, from (K, n') values of the devices to (n',).

    It is called for one block of entries after another. No set of K weights gives such a step.
    """

    name: str
    combine: Callable[[FloatArray], FloatArray]
    needs: frozenset[Need] = frozenset()
    init: Callable[[Structure], State] = _no_state
    smoothness: None = None


AnyRule: TypeAlias = Rule | SumRule | CoordinateRule


def _check_needs(name: str, needs: frozenset[Need]) -> None:
    if unknown := set(needs) - set(get_args(Need)):
        known = ", ".join(map(repr, get_args(Need)))
        raise FedcontextError(f"rule {name!r}: needs must be among {known}, got {sorted(unknown)}")


def stateless(
    name: str,
    weigh: Callable[[Geometry], FloatArray],
    needs: tuple[Need, ...] = (),
    smoothness: float | None = None,
    scale_free: bool = False,
) -> Rule:
    """Return a plain function of the geometry as a `Rule`.

    >>> first = stateless("first", lambda geometry: np.eye(len(geometry.gram))[0])
    >>> weights, _ = first.weigh(Geometry(gram=np.eye(3), samples=np.ones(3)), None)
    >>> weights
    array([1., 0., 0.])
    """
    beta = None if smoothness is None else positive("smoothness", smoothness)
    return Rule(name, lambda geometry, state: (weigh(geometry), state), frozenset(needs), beta, scale_free=scale_free)


def bound(geometry: Geometry, weights: FloatArray, smoothness: float) -> float:
    """Return the upper bound on the loss change, b·α + (β/2) αᵀ G α (eqs. 5 and 6).

    >>> bound(Geometry(np.eye(1), np.ones(1), slopes=np.array([[-2.0]])), np.array([1.0]), smoothness=2.0)
    -1.0
    """
    count = len(weights)  # rows after the cohort's belong to the pool, which is not applied
    return float(geometry.slope[:count] @ weights + smoothness / 2 * weights @ geometry.gram[:count, :count] @ weights)


def mean() -> Rule:
    """Return FedAvg's rule in the paper: every device counts the same, αₖ = 1/K (eq. 2)."""
    return stateless("mean", lambda geometry: shares(None, len(geometry.samples)))


def by_samples() -> Rule:
    """Return FedAvg's rule in most code: a device counts by its samples, αₖ = nₖ / Σ nⱼ."""
    return stateless("by_samples", lambda geometry: shares(geometry.samples, len(geometry.samples)), ("samples",))


def folb() -> Rule:
    """Return FOLB's rule: αₖ = <∇F_k, g> / Σ|<∇F_j, g>|, signed; g is the mean gradient of the cohort or of the probes.

    >>> weights, _ = folb().weigh(Geometry(np.eye(2), np.ones(2), alignments=np.array([3.0, -1.0])), None)
    >>> weights
    array([ 0.75, -0.25])
    """

    def weigh(geometry: Geometry) -> FloatArray:
        assert geometry.alignments is not None, "folb needs own gradients"
        total = np.abs(geometry.alignments).sum()
        return geometry.alignments / total if total > 0 else shares(None, len(geometry.samples))

    return stateless("folb", weigh, ("own gradients",))


def fednova(averaging: Averaging = "samples") -> Rule:
    """Return FedNova's rule (Wang et al. 2020): a device counts by its update per local step, αₖ = (Σ pⱼ τⱼ) pₖ / τₖ.

    τₖ is the number of local SGD steps, pₖ = nₖ / Σ nⱼ, or 1/K with ``averaging="mean"``.

    >>> weights, _ = fednova("mean").weigh(Geometry(np.eye(2), np.ones(2), steps=np.array([1.0, 3.0])), None)
    >>> weights.round(3)
    array([1.   , 0.333])
    """
    if averaging not in ("mean", "samples"):
        raise FedcontextError(f"averaging must be 'mean' or 'samples', got {averaging!r}")

    def weigh(geometry: Geometry) -> FloatArray:
        assert geometry.steps is not None, "fednova needs steps"
        p = shares(geometry.samples if averaging == "samples" else None, len(geometry.samples))
        return (p @ geometry.steps) * p / geometry.steps

    return stateless("fednova", weigh, ("steps", "samples") if averaging == "samples" else ("steps",))


def fedexp(epsilon: float = 1e-3) -> Rule:
    """Return FedExP's rule (Jhunjhunwala et al. 2023): the mean update d, extrapolated where updates disagree.

    The step is η d with η = max(1, Σ‖Δₖ‖² / (2 K (‖d‖² + ε))).

    >>> weights, _ = fedexp(epsilon=1e-9).weigh(Geometry(np.eye(4), np.ones(4)), None)  # orthogonal updates: η = 2
    >>> weights.round(3)
    array([0.5, 0.5, 0.5, 0.5])
    """
    positive("epsilon", epsilon)

    def weigh(geometry: Geometry) -> FloatArray:
        count = len(geometry.samples)
        gram = geometry.gram[:count, :count]
        rate = max(1.0, float(np.trace(gram)) / (2 * count * (float(gram.mean()) + epsilon)))
        return np.full(count, rate / count)

    return stateless("fedexp", weigh)


def fedmgda(epsilon: float = 1.0) -> Rule:
    """Return FedMGDA+'s rule (Hu et al. 2022): the shortest convex combination of the normalised updates.

    λ minimises ‖Σ λₖ Δₖ/‖Δₖ‖‖² with Σ λₖ = 1, λₖ >= 0 and |λₖ - 1/K| <= ``epsilon``; the step is Σ λₖ Δₖ/‖Δₖ‖. It
    increases no device's loss to first order. ``epsilon=0`` is the mean of the normalised updates; 1 is no limit.
    Updates of zero length get no weight.

    >>> weights, _ = fedmgda().weigh(Geometry(np.diag([1.0, 4.0]), np.ones(2)), None)
    >>> weights
    array([0.5 , 0.25])
    """
    if not 0 <= epsilon <= 1:
        raise FedcontextError(f"epsilon must be from 0 to 1, got {epsilon}")

    def weigh(geometry: Geometry) -> FloatArray:
        lengths = np.sqrt(np.diag(geometry.gram)[: len(geometry.samples)])
        moved, weights = np.flatnonzero(lengths), np.zeros(len(lengths))
        if len(moved):
            cosines = geometry.gram[np.ix_(moved, moved)] / np.outer(lengths[moved], lengths[moved])
            weights[moved] = minimise_on_simplex(cosines, epsilon) / lengths[moved]
        return weights

    return stateless("fedmgda", weigh, scale_free=True)


def contextual(smoothness: float | Literal["implied"]) -> Rule:
    """Return the paper's rule (Algorithm 2): the weights with the lowest bound, β G α = -b (eq. 7).

    The step is -(1/β) times the projection of g onto the span of the updates: unique even where the weights are not.
    ``smoothness="implied"`` takes the β at which FedAvg's own step d is the minimiser along d, β = -<g, d>/‖d‖², from the
    cohort's own gradients: no measurement and no learning rate. Where <g, d> >= 0 the step is d. For convex losses.

    >>> weights, _ = contextual(smoothness=2).weigh(Geometry(np.eye(1), np.ones(1), slopes=np.array([[-4.0]])), None)
    >>> weights
    array([2.])
    """
    if smoothness == "implied":
        return stateless("contextual (implied smoothness)", _implied_weights, ("own gradients",))
    beta = positive("smoothness", smoothness)
    return stateless("contextual", lambda g: -solve(g.gram, g.slope) / beta, ("gradient",), beta, scale_free=True)


def _implied_weights(geometry: Geometry) -> FloatArray:
    mean = shares(None, len(geometry.samples))
    slope, square = float(geometry.slope @ mean), float(mean @ geometry.gram @ mean)
    return solve(geometry.gram, geometry.slope) * square / slope if slope < 0 else mean


def expected_contextual(smoothness: float, form: Literal["exact", "printed"] = "exact") -> Rule:
    """Return the rule of section III-C: the lowest bound in expectation over which K of M devices are selected.

    The M devices are all that trained: all N under full participation, or the cohort and a pool of N' devices outside it.
    Only the cohort's K weights are applied. With ρ = (K-1)/(M-1) the weights solve b + β[ρ G + (1-ρ) diag G] α = 0.
    ``form="printed"`` is the paper's own equation, with ρ on the diagonal too (although a selected device is always
    paired with itself).

    >>> geometry = Geometry(gram=np.eye(2), samples=np.ones(1), slopes=np.array([[-1.0, -1.0]]))  # a pool of one
    >>> weights, _ = expected_contextual(smoothness=1).weigh(geometry, None)
    >>> weights
    array([1.])
    """
    beta = positive("smoothness", smoothness)
    if form not in ("exact", "printed"):
        raise FedcontextError(f"form must be 'exact' or 'printed', got {form!r}")

    def weigh(geometry: Geometry) -> FloatArray:
        weights = -solve(expected_gram(geometry, form), geometry.slope) / beta
        return weights[: len(geometry.samples)]

    return stateless(f"expected contextual ({form})", weigh, ("gradient", "pool"), beta, scale_free=True)


def expected_gram(geometry: Geometry, form: str = "exact") -> FloatArray:
    """Return ρ G + (1-ρ) diag G (or ρ G, as printed): M/K times the expected αᵀ G α over uniform K-subsets of M.

    >>> expected_gram(Geometry(gram=np.full((3, 3), 2.0), samples=np.ones(2)))
    array([[2., 1., 1.],
           [1., 2., 1.],
           [1., 1., 2.]])
    """
    selected, trained = len(geometry.samples), len(geometry.gram)
    pair = (selected - 1) / (trained - 1) if trained > 1 else 1.0
    if form == "printed" and pair == 0:
        raise FedcontextError("the printed form divides by K - 1 = 0 when one device is selected; use form='exact'")
    own = pair if form == "printed" else 1.0
    return pair * geometry.gram + (own - pair) * np.diag(np.diag(geometry.gram))


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


def solve(gram: FloatArray, right: FloatArray) -> FloatArray:
    """Return the x with gram @ x = right, for a positive semi-definite, possibly singular matrix.

    Rows and columns are normalised first, so that an update's length does not decide whether it counts. With eigenvalues
    λ relative to the largest, 1/λ is multiplied by λ⁸ / (λ⁸ + 1e-72). That is 1 to within 1e-8 for λ > 1e-8, and 0 for the
    directions that rounding alone produces: duplicate, zero and parallel updates are harmless. The factor is smooth and
    at most 1, so the order of the rows changes the contextual step by less than 1e-6 of its length, and the step is never
    longer than |g|/β.

    >>> solve(np.array([[4.0, 0.0], [0.0, 0.0]]), np.array([2.0, 0.0]))
    array([0.5, 0. ])
    """
    scale = np.sqrt(np.diag(gram))
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    values, vectors = np.linalg.eigh(inverse[:, None] * gram * inverse)
    relative = (values / values[-1]).clip(0) if values[-1] > 0 else np.zeros_like(values)
    inverted = relative ** (SHARPNESS - 1) / (relative**SHARPNESS + RESOLUTION**SHARPNESS) / max(values[-1], 1e-300)
    return np.asarray(inverse * (vectors @ (inverted * (vectors.T @ (inverse * right)))))
