"""The plug-in door: params, updates and a rule in; new params out. It needs nothing else of this package."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedcontext.arrays.tree import (
    SCRATCH,
    Array,
    FloatArray,
    Structure,
    all_finite,
    framework,
    kind_of,
    largest_number,
    leaf_name,
    leaves,
    rebuild,
    size_of,
)
from fedcontext.errors import FedcontextError
from fedcontext.geometry import Geometry, Report, measure, shares
from fedcontext.rules import NULL_SPACE_LIMIT, Rule, State, bound
from fedcontext.validation import Structures, blame, choose, take, take_targets


@dataclass(frozen=True)
class Aggregation:
    """What `aggregate` returns: the new params, and how they came about."""

    params: Structure
    weights: FloatArray  # (K,) of the devices, in the order of their updates
    promised_change: float  # the bound on the loss change, as far as measured; NaN without gradient or smoothness
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
    out: Structure | None = None,
    scratch: int = SCRATCH,
) -> Aggregation:
    """Return the params after one aggregation: w + Σ αₖ Δₖ (eq. 4), with the weights that ``rule`` gives.

    Everything is checked first, and nothing that was handed in is changed (but ``out``, at the end). The updates are
    read twice, block by block: once for the inner products, once for the sum. They may be memory-mapped files
    (`fedcontext.open_memmap`), so that together they can be larger than memory.

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
        out: where to write the new params: ``params`` itself, or a structure like it in other memory; fresh arrays if
            None.
        scratch: bytes of a block; the working memory is at most four of them, whatever the size of the model.

    >>> import numpy as np
    >>> import fedcontext as fc
    >>> w, moves, slope = np.zeros(2), [np.array([1.0, 0.0]), np.array([1.0, 1.0])], np.array([-1.0, -3.0])
    >>> result = fc.aggregate(w, moves, gradient=slope, rule=fc.contextual(smoothness=2))
    >>> result.params.round(6), result.weights.round(6), round(result.promised_change, 6)
    (array([0.5, 1.5]), array([-1. ,  1.5]), -2.5)
    """
    if not isinstance(rule, Rule):
        raise FedcontextError(f"rule must be a Rule, such as contextual(smoothness=10), got {rule!r}")
    if "samples" in rule.needs and samples is None:
        raise FedcontextError(f"rule '{rule.name}' needs the number of samples of each device: give samples")
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
    largest = {name: _largest(name, leaf, scratch) for name, leaf in base.items() if kind_of(leaf) == "floating"}
    geometry = measure(report, [name for name in base if name in measured], rule.needs, scratch)
    if not geometry.finite:
        alone: Structures | None = None if gradient is None else {"": gradient}
        blame(
            measured,
            device=updates,
            the_gradient=alone,
            probe=gradients,
            own_gradient_of_device=own_gradients,
            pool_device=pool,
        )
    weights, state = rule.weigh(geometry, rule.init() if state is None else state)
    weights = _checked_weights(rule, weights, len(report.updates))
    even = shares(report.samples, len(report.updates))
    reach = float(np.abs(weights) @ np.sqrt(np.diag(geometry.gram))[: len(weights)])  # no entry moves further
    safe = {name for name in measured if largest[name] + reach <= largest_number(base[name])}
    targets = {} if out is None else take_targets(base, updates, out)
    moved = {
        name: _moved(name, base[name], report, even if name in averaged else weights, scratch)
        for name in base
        if name not in safe
    }
    for name in safe:
        moved[name] = _combined(name, base[name], report, weights, scratch, targets.get(name))
    for name in targets.keys() - safe:
        (targets[name].detach() if hasattr(targets[name], "detach") else targets[name])[...] = moved[name]
    result = {name: targets.get(name, moved[name]) for name in base}
    return Aggregation(rebuild(params, result), weights, _promise(rule, geometry, weights), geometry, state)


def _check_needs(rule: Rule, report: Report, size: int) -> None:
    if size == 0:
        raise FedcontextError("no floating-point leaf enters the geometry: check layers and buffers")
    if "gradient" in rule.needs and not (report.gradients or report.own_gradients):
        raise FedcontextError(f"rule '{rule.name}' needs a gradient: give gradient, gradients or own_gradients")
    if "own gradients" in rule.needs and not report.own_gradients:
        raise FedcontextError(f"rule '{rule.name}' needs the gradient of each update's device: give own_gradients")
    if "vectors" in rule.needs and size > NULL_SPACE_LIMIT:
        raise FedcontextError(f"rule '{rule.name}' is for at most {NULL_SPACE_LIMIT} parameters, got {size}")


def _checked_weights(rule: Rule, weights: FloatArray, count: int) -> FloatArray:
    weights = np.asarray(weights, np.float64)
    if weights.shape != (count,) or not np.isfinite(weights).all():
        raise FedcontextError(f"rule '{rule.name}' must give {count} finite weights, got {weights}")
    return weights


def _largest(name: str, leaf: Array, scratch: int) -> float:
    value = framework(leaf).largest(leaf, scratch)
    if not np.isfinite(value):
        raise FedcontextError(f"params: {leaf_name(name)} has NaN or infinite entries")
    return value


def _moved(name: str, leaf: Array, report: Report, weights: FloatArray, scratch: int) -> Array:
    try:
        result = _combined(name, leaf, report, weights, scratch)
        if kind_of(leaf) != "floating" or all_finite(result, scratch):
            return result
    except OverflowError:  # of integers
        pass
    raise FedcontextError(
        f"the new {leaf_name(name).removeprefix('the ')} overflows {leaf.dtype}: the step is too long"
    )


def _combined(
    name: str, leaf: Array, report: Report, weights: FloatArray, scratch: int, out: Array | None = None
) -> Array:
    return framework(leaf).combine(leaf, [update[name] for update in report.updates], weights, scratch, out)


def _promise(rule: Rule, geometry: Geometry, weights: FloatArray) -> float:
    if rule.smoothness is None or geometry.slopes is None:
        return float("nan")
    return bound(geometry, weights, rule.smoothness)
