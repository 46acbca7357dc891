"""The second exchange of a round: the step of a rule with memory, corrected by how the probes' gradients change over it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from fedcontext.arrays.tree import FloatArray, Leaves, Structure, all_finite, leaves, rebuild
from fedcontext.errors import FedcontextError, shown
from fedcontext.measurement.defences import OFF, Defences
from fedcontext.measurement.geometry import Name, Structures
from fedcontext.measurement.screening import screen_changes
from fedcontext.measurement.sums import dot, flat, sum_of_changes, unflat
from fedcontext.rules.base import AnyRule, corrects


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
        params: the model before the round, as `aggregate` got it; it must have been called without ``out``.
        result: what `aggregate` returned; ``result.probes`` names the probes whose gradients it used.
        changes: each probe's gradient at ``result.params`` minus that at ``params``, like ``params`` without its buffers: one
            for each of ``result.probes``, in this order, or a mapping by their names, in which some may be missing.
        rule: the rule of `aggregate`.
        population: the total number of devices, where known.
        distortion: the share of the changes that is noise of the code in which they were sent: `Codec.distortion`.
        buffers: as in `aggregate`.
        defences: as in `aggregate`. Changes are clipped like gradients, or relative to their own median where that is larger;
            those that are not finite, or contradict the others along the step, are not used. Both are named in ``clipped``.

    >>> import numpy as np, fedcontext as fc
    >>> w, curvature, rule = np.array([4.0, 1.0]), np.array([1.0, 3.0]), fc.contextual_memory()
    >>> result = fc.aggregate(w, [np.array([-1.0, -0.1])], gradients=[curvature * w], rule=rule)
    >>> corrected = fc.correct(w, result, [curvature * (result.params - w)], rule=rule)
    >>> losses = [float(curvature @ model**2) / 2 for model in (w, result.params, corrected.params)]
    >>> [round(loss, 1) for loss in losses]
    [9.5, 5.7, 4.6]
    """
    if not corrects(rule):
        raise FedcontextError(
            f"rule '{getattr(rule, 'name', rule)}' does not correct its steps; contextual_memory() does"
        )
    check_defences(defences)
    check_population(population)
    if not isinstance(result, Aggregation):
        raise FedcontextError(f"result must be what aggregate returned, got {shown(result)}")
    if "correction" in result.info:
        raise FedcontextError("the step of this result is corrected already: correct each result of aggregate once")
    if not (isinstance(distortion, int | float | np.floating) and 0 <= distortion <= 1):
        raise FedcontextError(f"distortion must be a share from 0 to 1, got {shown(distortion)}")
    base, limits = leaves(params), OFF if defences is None else defences
    measured, _ = measured_and_averaged(base, None, buffers)
    rows = _checked(changes, result.probes, base, measured)
    step = flat(leaves(result.step), measured)
    _check_before(base, leaves(result.params), step, measured)
    if not rows:
        return result
    factors, notes = _screened(rows, measured, step, result.screened.median_gradient, limits)
    result = replace(result, screened=result.screened.with_notes(notes))
    if not np.any(factors):
        return result
    sums = sum_of_changes(list(rows.values()), measured, factors, distortion)
    if not sums.finite:
        raise FedcontextError("the squares of the changes overflow float64; leave defences on, or scale the loss down")
    error = sums.difference_error(np.inf if population is None else population)
    step, state, info = correction_of(rule, sums.mean_difference, error, result.state)
    return _with_step(result, params, base, measured, step, state, info)


def _checked(changes: Structures, probes: Sequence[Name], base: Leaves, measured: list[str]) -> dict[Name, Leaves]:
    """Return the leaves of the changes by probe."""
    given = named("change of probe", changes)
    names = list(changes) if isinstance(changes, Mapping) else probes
    if given and len(names) != len(given):
        raise FedcontextError(
            f"changes must be one for each of the {len(names)} probes in result.probes, got {len(given)}; "
            "give a mapping by name where some are missing"
        )
    if unknown := [name for name in names if name not in probes]:
        raise FedcontextError(f"changes must be of probes in result.probes, got {shown(unknown)}")
    rows = (checked_leaves(owner, each, base, set(measured), set(), NO_GRADIENT) for owner, each in given.items())
    return dict(zip(names, rows, strict=False))


def _check_before(base: Leaves, after: Leaves, step: FloatArray, measured: list[str]) -> None:
    """Raise an error if the params are those that the step led to: the step would be applied twice."""

    def equal(one: Leaves, other: Leaves) -> bool:
        return np.array_equal(flat(one, measured), flat(other, measured))

    if equal(base, after) and not equal(_moved(base, step, measured), base):
        raise FedcontextError("params must be the model before the round, got result.params, which the step led to")


def _screened(
    rows: Mapping[Name, Leaves], measured: list[str], step: FloatArray, median: float, defences: Defences
) -> tuple[FloatArray, dict[Name, str]]:
    """Return (P,) what each change is multiplied with, and what was clipped or left out."""
    for name, row in rows.items() if not defences.outlier else ():
        if not all(all_finite(row[leaf]) for leaf in measured):
            raise FedcontextError(f"change of {name}: it has NaN or infinite entries")
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
    return replace(
        result,
        params=rebuild(params, {**leaves(result.params), **_moved(base, vector, measured)}),
        weights=result.weights * (info["mean"] / mean) if mean and "mean" in info else result.weights,
        state=state,
        info={**result.info, **info},
        motion=replace(result.motion, step_norm=float(np.sqrt(dot(vector, vector)))),
        make_step=lambda: rebuild(params, {**leaves(result.step), **step}),
    )
