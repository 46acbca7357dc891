"""The second exchange of a round: the step of a rule with memory, corrected by how the probes' gradients change over it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedcontext.aggregation.aggregate import measured_and_averaged
from fedcontext.aggregation.combine import add_step
from fedcontext.aggregation.decision import correction_of
from fedcontext.aggregation.result import Aggregation
from fedcontext.aggregation.validation import (
    NO_GRADIENT,
    check_defences,
    check_population,
    checked_leaves,
    named,
)
from fedcontext.arrays.tree import FloatArray, Leaves, Structure, leaves, rebuild
from fedcontext.errors import FedcontextError, shown
from fedcontext.measurement.defences import OFF, Defences
from fedcontext.measurement.geometry import Name, Structures
from fedcontext.measurement.screening import screen_changes
from fedcontext.measurement.sums import Sums, dot, flat, unflat
from fedcontext.rules.base import AnyRule, SumRule


def correct(
    params: Structure,
    result: Aggregation,
    changes: Structures,
    *,
    rule: AnyRule,
    population: int | None = None,
    distortion: float = 0.0,
    buffers: Iterable[str | int] = (),
    defences: Defences | None = Defences(),  # noqa: B008
) -> Aggregation:
    """Return the aggregation with a better step, from how the gradients of probes change over the proposed one.

    It takes a second, short exchange with the probes of the round: send them ``result.params``, and let each return its
    gradient there minus its gradient at ``params``. `contextual_memory` then needs over a quarter fewer rounds. A correction
    is at most as long as the step itself; a result is corrected once. Where no change is usable, the result is returned as it is.

    Args:
        params: the model before the round, as `aggregate` got it; ``out`` must not have been ``params`` there.
        result: what `aggregate` returned; ``result.probes`` names the probes whose gradients it used.
        changes: each probe's gradient at ``result.params`` minus that at ``params``, like ``params`` without its buffers: one
            for each of ``result.probes``, in this order, or a mapping by their names, in which some may be missing.
        rule: the rule of `aggregate`.
        population: the total number of devices, where known.
        distortion: the share of the changes that is noise of the code in which they were sent: `Codec.distortion`.
        buffers: as in `aggregate`.
        defences: as in `aggregate`. Changes are clipped like gradients; those that are not finite, or contradict the others
            along the step, are not used. Both are named in ``clipped``.

    >>> import numpy as np, fedcontext as fc
    >>> w, curvature, rule = np.array([4.0, 1.0]), np.array([1.0, 3.0]), fc.contextual_memory()
    >>> result = fc.aggregate(w, [np.array([-1.0, -0.1])], gradients=[curvature * w], rule=rule)
    >>> corrected = fc.correct(w, result, [curvature * (result.params - w)], rule=rule)
    >>> losses = [float(curvature @ model**2) / 2 for model in (w, result.params, corrected.params)]
    >>> [round(loss, 1) for loss in losses]
    [9.5, 5.7, 4.6]
    """
    if not isinstance(rule, SumRule) or rule.correct is None:
        raise FedcontextError(
            f"rule '{getattr(rule, 'name', rule)}' does not correct its steps; contextual_memory() does"
        )
    check_defences(defences)
    check_population(population)
    base, limits = leaves(params), OFF if defences is None else defences
    measured, _ = measured_and_averaged(base, None, buffers)
    owners = named("change of probe", changes)
    if params is result.params:
        raise FedcontextError("params must be the model before the round, got result.params, which the step led to")
    if "correction" in result.info:
        raise FedcontextError("the step of this result is corrected already: correct each result of aggregate once")
    if not (isinstance(distortion, int | float) and 0 <= distortion <= 1):
        raise FedcontextError(f"distortion must be a share from 0 to 1, got {shown(distortion)}")
    names = list(changes) if isinstance(changes, Mapping) else result.probes
    if owners and len(names) != len(owners):
        raise FedcontextError(
            f"changes must be one for each of the {len(names)} probes in result.probes, got {len(owners)}; "
            "give a mapping by name where some are missing"
        )
    if not owners:
        return result
    rows = [checked_leaves(owner, each, base, set(measured), set(), NO_GRADIENT) for owner, each in owners.items()]
    own = flat(leaves(result.step), measured)
    median = result.screened.median_gradient
    vectors, notes = _usable(names, rows, measured, own, median, limits)
    clipped = {**result.clipped}
    for name, note in notes.items():
        clipped[name] = "; ".join(filter(None, (clipped.get(name, ""), note)))
    screened = replace(result.screened, clipped=clipped)
    if not vectors:
        return replace(result, screened=screened)
    sums = Sums(len(own), distortions=(0.0, distortion))
    for vector in vectors:
        sums.add_change(vector)
    error = sums.difference_error(np.inf if population is None else population)
    step, state, info = correction_of(rule, sums.mean_difference, error, result.state)
    return _with_step(replace(result, screened=screened), params, base, measured, step, state, info)


def _usable(
    names: list[Name], rows: list[Leaves], measured: list[str], step: FloatArray, median: float, defences: Defences
) -> tuple[list[FloatArray], dict[Name, str]]:
    """Return the changes that are used, as flat vectors, and what was clipped or left out."""
    vectors = [flat(row, measured) for row in rows]
    for name, vector in zip(names, vectors, strict=True) if not defences.outlier else ():
        if not np.isfinite(vector).all():
            raise FedcontextError(f"change of {name}: it has NaN or infinite entries")
    if defences == OFF:
        return vectors, {}
    with np.errstate(over="ignore", invalid="ignore"):
        unit = step / (float(np.linalg.norm(step)) or 1.0)
        along = np.array([dot(vector, unit) for vector in vectors])
    factors, notes = screen_changes(names, rows, measured, along, median, defences)
    used = np.flatnonzero(factors).tolist()
    return [vectors[row] if factors[row] == 1 else factors[row] * vectors[row] for row in used], notes


def _with_step(
    result: Aggregation,
    params: Structure,
    base: Leaves,
    measured: list[str],
    vector: FloatArray,
    state: Any,
    info: dict[str, Any],
) -> Aggregation:
    """Return an aggregation with another step of the measured leaves."""
    step, mean = unflat(vector, base, measured), result.info.get("mean")
    moved = add_step({name: base[name] for name in measured}, step)
    return replace(
        result,
        params=rebuild(params, {**leaves(result.params), **moved}),
        weights=result.weights * (info["mean"] / mean) if mean and "mean" in info else result.weights,
        state=state,
        info={**result.info, **info},
        motion=replace(result.motion, step_norm=float(np.sqrt(dot(vector, vector)))),
        make_step=lambda: rebuild(params, {**leaves(result.step), **step}),
    )
