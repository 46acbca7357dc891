"""The aggregation rules, side by side: each turns a `Geometry` into one weight per device.

Write D for the K x n matrix of updates, g for the estimate of ∇f(w), G = D Dᵀ, b = D g. The step is
Σ αₖ Δₖ (eq. 4) and the smoothness bound on the loss it leads to (eq. 5) is f(w) + b·α + (β/2) αᵀ G α.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.errors import FedcontextError, positive
from fedcontext.geometry import Geometry, is_well_conditioned, shares

Need: TypeAlias = Literal["gradient", "own gradients", "pool", "samples", "vectors"]
State: TypeAlias = Any  # small and easy to save; None for a rule without memory

NULL_SPACE_LIMIT = 10_000  # its memory grows with n², its time with n³
CUT = 1e-13  # eigenvalues of a normalised Gram matrix below this share of the largest count as zero
MILD = 1e6  # condition of a normalised Gram matrix up to which elimination does as well as eigenvalues, sooner


@dataclass(frozen=True)
class Rule:
    """How to weigh the devices of a round: ``weigh(geometry, state) -> (weights, state)``.

    ``needs`` says what the geometry must hold beyond the updates, ``smoothness`` at which β the bound is valued.
    """

    name: str
    weigh: Callable[[Geometry, State], tuple[FloatArray, State]]
    needs: frozenset[Need] = frozenset()
    smoothness: float | None = None
    init: Callable[[], State] = lambda: None


def stateless(
    name: str,
    weigh: Callable[[Geometry], FloatArray],
    needs: tuple[Need, ...] = (),
    smoothness: float | None = None,
) -> Rule:
    """Return a plain function of the geometry as a `Rule`.

    >>> first = stateless("first", lambda geometry: np.eye(len(geometry.gram))[0])
    >>> weights, _ = first.weigh(Geometry(gram=np.eye(3), samples=np.ones(3)), None)
    >>> weights
    array([1., 0., 0.])
    """
    beta = None if smoothness is None else positive("smoothness", smoothness)
    return Rule(name, lambda geometry, state: (weigh(geometry), state), frozenset(needs), beta)


def bound(geometry: Geometry, weights: FloatArray, smoothness: float) -> float:
    """Return the loss change that the bound allows at most, b·α + (β/2) αᵀ G α (eqs. 5 and 6).

    >>> bound(Geometry(np.eye(1), np.ones(1), slopes=np.array([[-2.0]])), np.array([1.0]), smoothness=2.0)
    -1.0
    """
    count = len(weights)  # the cohort's rows; a pool's, behind them, are not applied
    return float(geometry.slope[:count] @ weights + smoothness / 2 * weights @ geometry.gram[:count, :count] @ weights)


def mean(smoothness: float | None = None) -> Rule:
    """Return FedAvg's rule: every device counts the same, αₖ = 1/K (eq. 2)."""
    return stateless("mean", lambda geometry: shares(None, len(geometry.samples)), smoothness=smoothness)


def by_samples(smoothness: float | None = None) -> Rule:
    """Return the averaging of most code: a device counts by its samples, αₖ = nₖ / Σ nⱼ."""
    return stateless("by_samples", lambda g: shares(g.samples, len(g.samples)), ("samples",), smoothness)


def folb(smoothness: float | None = None) -> Rule:
    """Return FOLB's rule: αₖ = <∇F_k, g> / Σ|<∇F_j, g>|, signed; g is the cohort's mean gradient, or the probes'.

    >>> weights, _ = folb().weigh(Geometry(np.eye(2), np.ones(2), alignments=np.array([3.0, -1.0])), None)
    >>> weights
    array([ 0.75, -0.25])
    """

    def weigh(geometry: Geometry) -> FloatArray:
        assert geometry.alignments is not None, "folb needs own gradients"
        total = np.abs(geometry.alignments).sum()
        return geometry.alignments / total if total > 0 else shares(None, len(geometry.samples))

    return stateless("folb", weigh, ("own gradients",), smoothness)


def contextual(smoothness: float, solver: Literal["gram", "null-space"] = "gram") -> Rule:
    """Return the paper's rule (Algorithm 2): the weights with the lowest bound, β G α = -b (eq. 7).

    The step is -(1/β) times the projection of g onto the span of the updates: unique even where the weights
    are not. ``solver="null-space"`` is the paper's own method, kept as the reference for small models.

    >>> weights, _ = contextual(smoothness=2).weigh(Geometry(np.eye(1), np.ones(1), slopes=np.array([[-4.0]])), None)
    >>> weights
    array([2.])
    """
    beta = positive("smoothness", smoothness)
    if solver == "gram":
        return stateless("contextual", lambda g: -solve(g.gram, g.slope) / beta, ("gradient",), beta)
    if solver == "null-space":
        return stateless("contextual (null space)", lambda g: _in_null_space(g, beta), ("gradient", "vectors"), beta)
    raise FedcontextError(f"solver must be 'gram' or 'null-space', got {solver!r}")


def expected_contextual(smoothness: float, form: Literal["exact", "printed"] = "exact") -> Rule:
    """Return the rule of section III-C: the lowest bound in expectation over which K of M devices are selected.

    The M are everyone who trained: all N under full participation, or the cohort and a pool of N' devices beside
    it. The cohort's K weights are applied, the pool only informs them. With ρ = (K-1)/(M-1) the weights solve
    b + β[ρ G + (1-ρ) diag G] α = 0. ``form="printed"`` is the paper's own equation, which has ρ on the diagonal
    too (but a device is paired with itself whenever it is selected, more often than with any other).

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

    return stateless(f"expected contextual ({form})", weigh, ("gradient", "pool"), beta)


def expected_gram(geometry: Geometry, form: str = "exact") -> FloatArray:
    """Return ρ G + (1-ρ) diag G (or ρ G, as printed): M/K times the expected αᵀ G α over uniform K-subsets of M.

    >>> expected_gram(Geometry(gram=np.full((3, 3), 2.0), samples=np.ones(2)))
    array([[2., 1., 1.],
           [1., 2., 1.],
           [1., 1., 2.]])
    """
    selected, everyone = len(geometry.samples), len(geometry.gram)
    pair = (selected - 1) / (everyone - 1) if everyone > 1 else 1.0
    if form == "printed" and pair == 0:
        raise FedcontextError("the printed form divides by K - 1 = 0 when one device is selected: use form='exact'")
    own = pair if form == "printed" else 1.0
    return pair * geometry.gram + (own - pair) * np.diag(np.diag(geometry.gram))


def solve(gram: FloatArray, right: FloatArray) -> FloatArray:
    """Return the x with gram @ x = right, for a positive semi-definite, perhaps singular matrix.

    Rows and columns are normalised first, so that an update's length does not decide whether it counts; where many
    x solve it, the one that is least in the normalised coordinates comes back.

    >>> solve(np.array([[4.0, 0.0], [0.0, 0.0]]), np.array([2.0, 0.0]))
    array([0.5, 0. ])
    """
    scale = np.sqrt(np.diag(gram))
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    normal = inverse[:, None] * gram * inverse
    if is_well_conditioned(normal, MILD):
        return np.asarray(inverse * np.linalg.solve(normal, inverse * right))
    values, vectors = np.linalg.eigh(normal)
    kept = values > CUT * max(values[-1], 0)
    vectors = vectors[:, kept]
    return np.asarray(inverse * (vectors @ ((vectors.T @ (inverse * right)) / values[kept])))


def _in_null_space(geometry: Geometry, smoothness: float) -> FloatArray:
    """Return Algorithm 2's weights as written: a basis e of the updates' null space, then g + β Σ αₖ Δₖ = Σ xᵢ eᵢ."""
    updates, gradient = geometry.updates, geometry.gradient
    assert updates is not None, "the null-space solver needs the vectors"
    assert gradient is not None, "the null-space solver needs the vectors"
    norms = np.linalg.norm(updates, axis=1)
    moved = norms > 0
    directions = updates[moved] / norms[moved, None]
    if not moved.any():
        return np.zeros(len(updates))
    _, singular, rows = np.linalg.svd(directions, full_matrices=True)
    basis = rows[int((singular > CUT**0.5 * singular[0]).sum()) :]
    system = np.hstack([-directions.T, basis.T])  # n equations for the β αₖ ‖Δₖ‖ and the xᵢ
    solution = np.linalg.lstsq(system, gradient, rcond=CUT**0.5)[0]
    weights = np.zeros(len(updates))
    weights[moved] = solution[: moved.sum()] / norms[moved] / smoothness
    return weights
