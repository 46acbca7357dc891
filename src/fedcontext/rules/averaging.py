"""Baselines that weigh the updates: FedAvg, FOLB, FedNova, FedExP and FedMGDA+."""

from __future__ import annotations

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.errors import FedcontextError, positive
from fedcontext.measurement.geometry import Geometry, shares
from fedcontext.rules.base import Averaging, Rule, stateless
from fedcontext.rules.quadratic import minimise_on_simplex


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
