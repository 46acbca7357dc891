"""The paper's rules: the weights with the lowest smoothness bound on the loss.

Write D for the K x n matrix of updates, g for the estimate of ∇f(w), G = D Dᵀ and b = D g. The step is Σ αₖ Δₖ (eq. 4),
and the smoothness bound on the loss after it (eq. 5) is f(w) + b·α + (β/2) αᵀ G α.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.errors import FedcontextError, positive, unknown_value_error
from fedcontext.measurement.geometry import Geometry, shares
from fedcontext.rules.base import Rule, stateless

RESOLUTION = 1e-9  # eigenvalues of a normalised Gram matrix far below this share of the largest count as zero
SHARPNESS = 8  # of the transition there
CANCELLED = 1e-6  # a mean update of a smaller share of the updates' mean length is rounding error


def bound(geometry: Geometry, weights: FloatArray, smoothness: float) -> float:
    """Return the upper bound on the loss change, b·α + (β/2) αᵀ G α (eqs. 5 and 6).

    >>> bound(Geometry(np.eye(1), np.ones(1), slopes=np.array([[-2.0]])), np.array([1.0]), smoothness=2.0)
    -1.0
    """
    count = len(weights)  # rows after the cohort's belong to the pool, which is not applied
    return float(geometry.slope[:count] @ weights + smoothness / 2 * weights @ geometry.gram[:count, :count] @ weights)


def contextual(smoothness: float | Literal["implied"]) -> Rule:
    """Return the paper's rule (Algorithm 2): the weights with the lowest bound, β G α = -b (eq. 7).

    The step is -(1/β) times the projection of g onto the span of the updates: unique even where the weights are not.
    ``smoothness="implied"`` takes the β at which FedAvg's own step d is the minimiser along d, β = -<g, d>/‖d‖², from
    the cohort's own gradients: no measurement and no learning rate. Where <g, d> >= 0, or where the updates cancel, the
    step is d. For convex losses.

    >>> weights, _ = contextual(smoothness=2).weigh(Geometry(np.eye(1), np.ones(1), slopes=np.array([[-4.0]])), None)
    >>> weights
    array([2.])
    """
    if isinstance(smoothness, str):
        if smoothness not in (words := ["implied"]):
            raise unknown_value_error("smoothness", smoothness, words, accepted="a positive number or implied")
        return stateless("contextual (implied smoothness)", _implied_weights, ("own gradients",))
    beta = positive("smoothness", smoothness)
    return stateless("contextual", lambda g: -solve(g.gram, g.slope) / beta, ("gradient",), beta, scale_free=True)


def _implied_weights(geometry: Geometry) -> FloatArray:
    mean = shares(None, len(geometry.samples))
    slope, square = float(geometry.slope @ mean), float(mean @ geometry.gram @ mean)
    length = float(np.sqrt(np.diag(geometry.gram)) @ mean)
    cancels = square <= (CANCELLED * length) ** 2  # then slope and square are rounding errors
    return solve(geometry.gram, geometry.slope) * square / slope if slope < 0 and not cancels else mean


def expected_contextual(smoothness: float, form: Literal["exact", "printed"] = "exact") -> Rule:
    """Return the rule of section III-C: the lowest bound in expectation over which K of M devices are selected.

    The M devices are all that trained: all N under full participation, or the cohort and a pool of N' devices outside
    it. Only the cohort's K weights are applied. With ρ = (K-1)/(M-1) the weights solve b + β[ρ G + (1-ρ) diag G] α = 0.
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


def solve(gram: FloatArray, right: FloatArray) -> FloatArray:
    """Return the x with gram @ x = right, for a positive semi-definite, possibly singular matrix.

    Rows and columns are normalised first, so that an update's length does not decide whether it counts. With
    eigenvalues λ relative to the largest, 1/λ is multiplied by λ⁸ / (λ⁸ + 1e-72). That is 1 to within 1e-8 for
    λ > 1e-8, and 0 for the directions that rounding alone produces: duplicate, zero and parallel updates are harmless.
    The factor is smooth and at most 1, so the order of the rows changes the contextual step by less than 1e-6 of its
    length, and the step is never longer than |g|/β.

    >>> solve(np.array([[4.0, 0.0], [0.0, 0.0]]), np.array([2.0, 0.0]))
    array([0.5, 0. ])
    """
    scale = np.sqrt(np.diag(gram))
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    values, vectors = np.linalg.eigh(inverse[:, None] * gram * inverse)
    relative = (values / values[-1]).clip(0) if values[-1] > 0 else np.zeros_like(values)
    inverted = relative ** (SHARPNESS - 1) / (relative**SHARPNESS + RESOLUTION**SHARPNESS) / max(values[-1], 1e-300)
    return np.asarray(inverse * (vectors @ (inverted * (vectors.T @ (inverse * right)))))
