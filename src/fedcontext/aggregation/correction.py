"""A second exchange of a round: the step of `aggregate`, corrected by how the probes' gradients change over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedcontext.aggregation.combine import add_step
from fedcontext.aggregation.decision import checked_step
from fedcontext.aggregation.result import Aggregation, Before
from fedcontext.aggregation.validation import NO_GRADIENT, checked_leaves, named
from fedcontext.arrays.tree import FloatArray, Leaves, leaves, rebuild, to_numpy
from fedcontext.errors import FedcontextError, shown
from fedcontext.measurement.defences import OFF, Defences
from fedcontext.measurement.geometry import Name, Structures
from fedcontext.measurement.screening import screen_changes
from fedcontext.measurement.sums import dot, flat, sum_of_changes, unflat


def correct(result: Aggregation, changes: Structures) -> Aggregation:
    """Return the aggregation with a better step, from how the gradients of probes change over the proposed one.

    It takes a second, short exchange with the probes of the round: send them ``result.params``, and let each return its
    gradient there minus its gradient at the params before. `contextual_memory` then needs a fifth to a third fewer
    rounds. A correction is at most as long as the step itself; a result is corrected once, and not after `aggregate`
    with ``out``. Where no change is usable, the result is returned as it is.

    Rule, population, buffers and defences are those of `aggregate`: changes are clipped like gradients, or relative to
    their own median where that is larger; those that are not finite, or contradict the others along the step, are not
    used. Both are named in ``clipped``.

    Args:
        result: what `aggregate` returned; ``result.probes`` names the probes whose gradients it used. The params that
            it was called with must be unchanged.
        changes: each probe's gradient at ``result.params`` minus that at the params before, like these without the
            buffers: one for each of ``result.probes``, in this order, or a mapping by their names, in which some may be
            missing. They are sent in the code of ``differences``, if in any.

    >>> import numpy as np, fedcontext as fc
    >>> w, curvature, rule = np.array([4.0, 1.0]), np.array([1.0, 3.0]), fc.contextual_memory()
    >>> result = fc.aggregate(w, [np.array([-1.0, -0.1])], gradients=[curvature * w], rule=rule)
    >>> corrected = fc.correct(result, [curvature * (result.params - w)])
    >>> losses = [float(curvature @ model**2) / 2 for model in (w, result.params, corrected.params)]
    >>> [round(loss, 1) for loss in losses]
    [9.5, 5.7, 4.6]
    """
    if not isinstance(result, Aggregation):
        raise FedcontextError(f"result must be what aggregate returned, got {shown(result)}")
    before = result.before
    if before is None:
        raise FedcontextError(
            "this result cannot be corrected: its rule does not correct steps (contextual_memory() does), aggregate was "
            "given out, or it was corrected before (correct each result once)"
        )
    base, measured = leaves(before.params), before.measured
    rows = _checked(changes, result, base, before)
    step = flat(leaves(result.step), measured)
    _check_unchanged(base, leaves(result.params), step, measured)
    if not rows:
        return result
    factors, notes = _screened(rows, measured, step, result.screened.median_gradient, before.defences)
    result = replace(result, screened=result.screened.with_notes(notes))
    if not np.any(factors):
        return result
    sums = sum_of_changes(list(rows.values()), measured, factors, before.distortion)
    if not sums.finite:
        raise FedcontextError("the squares of the changes overflow float64; leave defences on, or scale the loss down")
    error = sums.difference_error(np.inf if before.population is None else before.population)
    rule = before.rule
    assert rule.correct
    returned = rule.correct(sums.mean_difference, error, result.state)
    return _with_step(result, base, before, *checked_step(returned, len(step), f"rule '{rule.name}': correct"))


def _checked(changes: Structures, result: Aggregation, base: Leaves, before: Before) -> dict[Name, Leaves]:
    """Return the leaves of the changes by probe."""
    given, probes = list(named("change", changes).values()), result.probes
    names = list(changes) if isinstance(changes, Mapping) else probes[: len(given)]
    if unknown := [name for name in names if name not in probes]:
        raise FedcontextError(f"changes must be of probes in result.probes, {shown(probes)}, got {shown(unknown)}")
    if given and not isinstance(changes, Mapping) and len(given) != len(probes):
        raise FedcontextError(
            f"changes must be one for each of the {len(probes)} probes in result.probes, got {len(given)}; "
            f"give a mapping by these names where some are missing: {shown(probes)}"
        )
    if absent := [name for name, row in zip(names, given, strict=True) if row is None]:
        raise FedcontextError(
            f"the change of {shown(absent[0])} is None: leave out probes without one from a mapping by name"
        )
    needed = set(before.measured)
    finite = set() if before.defences.outlier else needed
    rows = zip(names, given, strict=True)
    return {name: checked_leaves(f"change of {name}", row, base, needed, finite, NO_GRADIENT) for name, row in rows}


def _check_unchanged(base: Leaves, after: Leaves, step: FloatArray, measured: list[str]) -> None:
    """Raise an error if the params before and the step no longer give the params after: some were changed in place."""
    moved = _moved(base, step, measured)
    if not all(np.array_equal(to_numpy(moved[name]), to_numpy(after[name])) for name in measured):
        raise FedcontextError(
            "the params that aggregate was called with, or result.params, have been changed in place since, so the "
            "corrected step would start elsewhere; call aggregate with a copy of a model that you change in place"
        )


def _screened(
    rows: Mapping[Name, Leaves], measured: list[str], step: FloatArray, median: float, defences: Defences
) -> tuple[FloatArray, dict[Name, str]]:
    """Return (P,) what each change is multiplied with, and what was clipped or left out."""
    if defences == OFF:
        return np.ones(len(rows)), {}
    with np.errstate(over="ignore", invalid="ignore"):
        unit = step / (float(np.linalg.norm(step)) or 1.0)
        along = np.array([dot(flat(row, measured), unit) for row in rows.values()])
    return screen_changes(list(rows), list(rows.values()), measured, along, median, defences)


def _moved(base: Leaves, step: FloatArray, measured: list[str]) -> Leaves:
    """Return the measured leaves after a step."""
    return add_step({name: base[name] for name in measured}, unflat(step, base, measured))


def _with_step(
    result: Aggregation, base: Leaves, before: Before, vector: FloatArray, state: Any, info: dict[str, Any]
) -> Aggregation:
    """Return the corrected aggregation: with another step of the measured leaves."""
    step, mean = unflat(vector, base, before.measured), result.info.get("mean")
    return replace(
        result,
        params=rebuild(before.params, {**leaves(result.params), **_moved(base, vector, before.measured)}),
        weights=result.weights * (info["mean"] / mean) if mean and "mean" in info else result.weights,
        state=state,
        info={**result.info, **info},
        motion=replace(result.motion, step_norm=float(np.sqrt(dot(vector, vector)))),
        make_step=lambda: rebuild(before.params, {**leaves(result.step), **step}),
        before=None,
    )
