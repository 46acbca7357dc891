"""The plug-in door: params, updates and a rule in; new params out. It needs nothing else of this package."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedcontext.arrays import (
    Array,
    FloatArray,
    Structure,
    all_finite,
    framework,
    kind_of,
    leaf_name,
    leaves,
    rebuild,
    size_of,
)
from fedcontext.errors import FedcontextError
from fedcontext.geometry import Geometry, Report, measure, shares
from fedcontext.intake import Structures, choose, take
from fedcontext.rules import NULL_SPACE_LIMIT, Rule, State, bound


@dataclass(frozen=True)
class Aggregation:
    """What `aggregate` returns: the new params, and how they came about."""

    params: Structure
    weights: FloatArray  # (K,) of the devices, in the order of their updates
    promised_change: float  # the bound on the loss change at these weights; NaN without gradient or smoothness
    geometry: Geometry
    state: State  # the rule's memory, for the next round


def aggregate(
    params: Structure,
    updates: Structures,
    *,
    rule: Rule,
    gradient: Structure | None = None,
    gradients: Structures | None = None,
    own_gradients: Structures | None = None,
    samples: Iterable[float] | None = None,
    probe_weights: Iterable[float] | None = None,
    pool: Structures | None = None,
    layers: Iterable[str | int] | None = None,
    buffers: Iterable[str | int] = (),
    state: State = None,
) -> Aggregation:
    """Return the params after one aggregation: w + Σ αₖ Δₖ (eq. 4), with the weights that ``rule`` gives.

    Everything is checked first, and nothing that was handed in is changed.

    Args:
        params: the global model: an array, or a list, tuple or mapping of arrays (a ``state_dict`` as it is).
        updates: the devices' updates Δₖ = wₖ - w, each like ``params``; a mapping gives the devices names.
        rule: how to weigh them, such as ``contextual(smoothness=1 / learning_rate)``.
        gradient: one estimate of the global gradient at ``params``; leaves outside the geometry may be missing.
        gradients: instead of it, the probes' gradients, averaged with ``probe_weights`` (equal where None).
        own_gradients: the gradient of each update's own device, in the same order (FOLB; or K2 = 0).
        samples: the number of training samples of each device.
        probe_weights: how much each probe's gradient counts, such as its number of samples.
        pool: updates of devices outside the cohort; they inform `expected_contextual` and are not applied.
        layers: names (or positions) of the leaves that enter the geometry; the weights apply to all leaves.
        buffers: leaves that are averaged instead of weighted, as are all that do not hold floating point.
        state: the memory that the rule returned last round.

    >>> import numpy as np
    >>> import fedcontext as fc
    >>> w, moves, slope = np.zeros(2), [np.array([1.0, 0.0]), np.array([1.0, 1.0])], np.array([-1.0, -3.0])
    >>> result = fc.aggregate(w, moves, gradient=slope, rule=fc.contextual(smoothness=2))
    >>> result.params.round(6), result.weights.round(6), round(result.promised_change, 6)
    (array([0.5, 1.5]), array([-1. ,  1.5]), -2.5)
    """
    base = leaves(params)
    averaged = {name for name, leaf in base.items() if kind_of(leaf) != "floating"} | choose("buffers", buffers, base)
    measured = (set(base) if layers is None else choose("layers", layers, base)) - averaged
    report = take(
        base,
        updates,
        gradient=gradient,
        gradients=gradients,
        own_gradients=own_gradients,
        samples=samples,
        probe_weights=probe_weights,
        pool=pool if "pool" in rule.needs else None,
        needed=measured,
    )
    _check_needs(rule, report, sum(size_of(base[name]) for name in measured))
    geometry = measure(report, [name for name in base if name in measured], vectors="vectors" in rule.needs)
    weights, state = rule.weigh(geometry, rule.init() if state is None else state)
    even = shares(report.samples, len(report.updates))
    moved = {name: _moved(name, leaf, report, even if name in averaged else weights) for name, leaf in base.items()}
    return Aggregation(rebuild(params, moved), weights, _promise(rule, geometry, weights), geometry, state)


def _check_needs(rule: Rule, report: Report, size: int) -> None:
    if size == 0:
        raise FedcontextError("no floating-point leaf enters the geometry: check layers and buffers")
    if "gradient" in rule.needs and not (report.gradients or report.own_gradients):
        raise FedcontextError(f"rule '{rule.name}' needs a gradient: give gradient, gradients or own_gradients")
    if "own gradients" in rule.needs and not report.own_gradients:
        raise FedcontextError(f"rule '{rule.name}' needs the gradient of each update's device: give own_gradients")
    if "vectors" in rule.needs and size > NULL_SPACE_LIMIT:
        raise FedcontextError(f"rule '{rule.name}' is for at most {NULL_SPACE_LIMIT} parameters, got {size}")


def _moved(name: str, leaf: Array, report: Report, weights: FloatArray) -> Array:
    result = framework(leaf).combine(leaf, [update[name] for update in report.updates], weights)
    if not all_finite(result):
        raise FedcontextError(f"the new {leaf_name(name)} overflows {leaf.dtype}: the step is too long")
    return result


def _promise(rule: Rule, geometry: Geometry, weights: FloatArray) -> float:
    if rule.smoothness is None or geometry.slopes is None:
        return float("nan")
    return bound(geometry, weights, rule.smoothness)
