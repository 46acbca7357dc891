"""Robust rules from the literature, as baselines, and robust gradients for the contextual rules.

``byzantine`` is the assumed share of Byzantine devices; f is that share of the K devices of a round, rounded down.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.errors import FedcontextError, positive, shown, unknown_value_error
from fedcontext.measurement.combination import (
    COMBINATIONS,
    Combination,
    distances,
    geometric_median_weights,
    krum_scores,
)
from fedcontext.measurement.geometry import Geometry
from fedcontext.rules.base import CoordinateRule, Need, Rule, SumRule, stateless


def krum(byzantine: float = 0.3) -> Rule:
    """Return Krum (Blanchard et al. 2017): the one update with the lowest Σ ‖Δₖ - Δⱼ‖² over its K - f - 2 nearest.

    >>> gram = np.outer([1.0, 1.1, 1.2, 9.0], [1.0, 1.1, 1.2, 9.0])
    >>> krum(byzantine=0.25).weigh(Geometry(gram, np.ones(4)), None)[0]
    array([1., 0., 0., 0.])
    """
    _share(byzantine)
    return stateless("krum", lambda geometry: _lowest(krum_scores(distances(_gram(geometry)), byzantine), 1))


def multi_krum(byzantine: float = 0.3) -> Rule:
    """Return multi-Krum (Blanchard et al. 2017): the mean of the K - f updates with the lowest scores of `krum`.

    >>> gram = np.outer([1.0, 1.1, 1.2, 9.0], [1.0, 1.1, 1.2, 9.0])
    >>> multi_krum(byzantine=0.25).weigh(Geometry(gram, np.ones(4)), None)[0].round(3)
    array([0.333, 0.333, 0.333, 0.   ])
    """
    _share(byzantine)

    def weigh(geometry: Geometry) -> FloatArray:
        squares = distances(_gram(geometry))
        return _lowest(krum_scores(squares, byzantine), len(squares) - int(byzantine * len(squares)))

    return stateless("multi-krum", weigh)


def geometric_median(smoothing: float = 1e-6) -> Rule:
    """Return the geometric median (Pillutla et al. 2022): the step with least Σ ‖step - Δₖ‖, by Weiszfeld's iteration.

    ``smoothing`` is the least distance that counts, relative to the median norm.

    >>> gram = np.outer([1.0, 2.0, 9.0], [1.0, 2.0, 9.0])
    >>> geometric_median().weigh(Geometry(gram, np.ones(3)), None)[0].round(3)
    array([0., 1., 0.])
    """
    least = positive("smoothing", smoothing)
    return stateless("geometric median", lambda geometry: geometric_median_weights(_gram(geometry), least))


def norm_clipping(limit: float | Literal["median"] = "median") -> Rule:
    """Return the mean of updates clipped to a norm of ``limit`` (Sun et al. 2019), by default the median norm.

    >>> norm_clipping(2.0).weigh(Geometry(np.diag([1.0, 16.0]), np.ones(2)), None)[0]
    array([0.5 , 0.25])
    """
    fixed = None if limit == "median" else positive("limit", limit)

    def weigh(geometry: Geometry) -> FloatArray:
        norms = np.sqrt(np.diag(_gram(geometry)))
        most = float(np.median(norms)) if fixed is None else fixed
        return np.minimum(1, np.divide(most, norms, out=np.ones_like(norms), where=norms > 0)) / len(norms)

    return stateless("norm clipping", weigh)


def fltrust() -> Rule:
    """Return FLTrust (Cao et al. 2021): updates scaled to the length of the server's own, weighed by cosine to it.

    The server trains on a small root set of its own; its update Δ₀ is the one row of the pool. With
    cₖ = max(0, cos(Δₖ, Δ₀)) the weights are cₖ / Σ cⱼ · ‖Δ₀‖ / ‖Δₖ‖; all are zero where no update agrees with Δ₀.

    >>> gram = np.array([[4.0, 0.0, 2.0], [0.0, 1.0, -1.0], [2.0, -1.0, 1.0]])  # the last row is the server's
    >>> fltrust().weigh(Geometry(gram, np.ones(2)), None)[0]
    array([0.5, 0. ])
    """

    def weigh(geometry: Geometry) -> FloatArray:
        count = len(geometry.samples)
        norms = np.sqrt(np.diag(geometry.gram))
        own, root = norms[:count], norms[-1]
        cosines = _divided(geometry.gram[:count, -1], own * root).clip(0)
        return _divided(cosines, np.full(count, cosines.sum())) * _divided(np.full(count, root), own)

    return stateless("fltrust", weigh, ("root",))


def coordinate_median() -> CoordinateRule:
    """Return the median of each entry over devices (Yin et al. 2018).

    >>> coordinate_median().combine(np.array([[1.0, 5.0], [2.0, 6.0], [9.0, -9.0]]))
    array([2., 5.])
    """
    return CoordinateRule("coordinate median", lambda block: np.asarray(np.median(block, axis=0)))


def trimmed_mean(byzantine: float = 0.3) -> CoordinateRule:
    """Return the mean of each entry over devices without the f largest and the f smallest (Yin et al. 2018).

    >>> trimmed_mean(byzantine=0.25).combine(np.array([[1.0], [2.0], [4.0], [900.0]]))
    array([3.])
    """
    _share(byzantine)

    def combine(block: FloatArray) -> FloatArray:
        cut = int(byzantine * len(block))
        return np.asarray(np.sort(block, axis=0)[cut : len(block) - cut].mean(axis=0))

    return CoordinateRule("trimmed mean", combine)


def robust_gradients(rule: Rule | SumRule, how: Combination) -> Rule | SumRule:
    """Return a rule whose estimate of the gradient a minority of Byzantine probes cannot lead far.

    ``how`` is "median", "median-of-means", "trimmed-mean" or "trust", which needs ``root_gradient``, the gradient of
    samples that the server holds itself; "mean" is the rule as it is. A rule with memory then has one exchange a round.

    >>> from fedcontext.rules.contextual import contextual
    >>> robust_gradients(contextual(smoothness=10), "median-of-means").name
    'contextual, median-of-means'
    """
    if not rule.needs & {"gradient", "own gradients"}:
        raise FedcontextError(
            f"rule '{rule.name}' uses no gradients to combine; use contextual() or contextual_memory()"
        )
    if how not in COMBINATIONS:
        raise unknown_value_error("gradients", how, COMBINATIONS)
    if how == "mean":
        return rule
    own: frozenset[Need] = frozenset({"root gradient"} if how == "trust" else ())
    name, needs = f"{rule.name}, {how}", rule.needs | own
    if isinstance(rule, SumRule):  # the second exchange takes a plain mean, so it is left out
        return replace(rule, name=name, needs=needs, gradients=how, correct=None)
    return replace(rule, name=name, needs=needs, gradients=how)


def _share(byzantine: float) -> None:
    if not isinstance(byzantine, int | float) or not 0 <= byzantine < 0.5:
        raise FedcontextError(f"byzantine must be a share from 0 to below 0.5, got {shown(byzantine)}")


def _gram(geometry: Geometry) -> FloatArray:
    count = len(geometry.samples)
    return geometry.gram[:count, :count]


def _lowest(scores: FloatArray, count: int) -> FloatArray:
    """Return equal weights for the ``count`` lowest scores, the first ones where several are equal."""
    weights = np.zeros(len(scores))
    weights[np.argsort(scores, kind="stable")[:count]] = 1 / count
    return weights


def _divided(values: FloatArray, by: FloatArray) -> FloatArray:
    return np.divide(values, by, out=np.zeros(len(values)), where=by > 0)
