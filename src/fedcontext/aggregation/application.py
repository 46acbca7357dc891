"""From what devices sent to new params: by the weights of a `Rule`, or by the step of another rule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fedcontext.aggregation.combine import Rows, add_weighted, step_of_integers
from fedcontext.aggregation.decision import checked_step, combination_of, weights_of
from fedcontext.aggregation.result import Aggregation, Before, Motion, motion_of_sums, motion_of_weights
from fedcontext.aggregation.validation import raise_not_finite
from fedcontext.arrays.tree import (
    BoolArray,
    FloatArray,
    Leaves,
    Structure,
    largest_number,
    rebuild,
    size_of,
    zeros_like,
)
from fedcontext.errors import FedcontextError
from fedcontext.measurement.combination import combined_probes
from fedcontext.measurement.defences import OFF, Defences, lower_median
from fedcontext.measurement.geometry import Geometry, Name, Report, Vectors, measure, norms_of
from fedcontext.measurement.last_step import AlongLastStep
from fedcontext.measurement.own_gradient import uphill
from fedcontext.measurement.screening import Screened, screen
from fedcontext.measurement.sums import Sums, by_coordinate, dot, flat, sums_of, unflat
from fedcontext.rules.base import CoordinateRule, Rule, State, SumRule, corrects
from fedcontext.rules.contextual import bound


@dataclass(frozen=True)
class Inputs:
    """All that an aggregation needs, checked."""

    params: Structure
    leaves: Leaves  # of params
    measured: list[str]  # the leaves that enter the geometry
    averaged: set[str]  # the leaves that are averaged instead of weighted
    largest: Mapping[str, float]  # entry of each floating-point leaf
    report: Report
    vectors: Vectors  # of the report
    state: State
    out: Leaves | None
    defences: Defences
    scratch: int

    def screened(self, vectors: Vectors, norms: FloatArray, **options: Any) -> Screened:
        """Return what the defences leave of the vectors; ``norms`` are those of the updates."""
        measured = set(self.measured)
        rest = [name for name in self.leaves if name not in measured]
        return screen(vectors, norms, self.measured, rest, self.defences, scratch=self.scratch, **options)

    def check_finite(self, finite: bool) -> None:
        """Raise an error that names what is not finite, if anything is."""
        if not finite:
            raise_not_finite(self.report, set(self.measured))

    def aggregation(
        self, rows: Rows, factors: Mapping[str, FloatArray], safe: set[str], **diagnostics: Any
    ) -> Aggregation:
        """Return the aggregation with params + Σ factors · rows, leaf by leaf; leaves in ``safe`` cannot overflow."""
        new = add_weighted(self.leaves, rows, factors, safe, self.out, self.scratch)

        def step() -> Structure:
            if self.out is not None:
                raise FedcontextError("step is not available where out was given; aggregate without out")
            floating = add_weighted(zeros_like(self.leaves), rows, factors, safe, None, self.scratch)
            return rebuild(self.params, {**floating, **step_of_integers(new, self.leaves, self.scratch)})

        return Aggregation(rebuild(self.params, new), make_step=step, **diagnostics)


def apply_weights(rule: Rule, inputs: Inputs, smoothness: float | None) -> Aggregation:
    """Return the params after the step Σ αₖ Δₖ with the weights of a rule."""
    vectors, measured = inputs.vectors, inputs.measured
    products = measure(vectors, measured, "own gradients" in rule.needs, inputs.scratch)
    norms = np.sqrt(np.diag(products.gram))
    weighs = "samples" in rule.needs or bool(inputs.averaged)
    screened = inputs.screened(vectors, norms, scale_free=rule.scale_free, weighs=weighs)
    screened = combined_probes(screened, vectors, measured, rule.gradients, sums=False, scratch=inputs.scratch)
    geometry = screened.geometry(products, vectors.steps)
    inputs.check_finite(geometry.finite)
    seen, kept = geometry.rows(screened.kept, screened.updates), screened.devices
    weights, state = weights_of(rule, seen, inputs.state)
    most = inputs.defences.max_step
    weights, info = _limited(weights, seen, 0 if rule.scale_free else most)
    applied = np.zeros(len(kept))
    applied[kept] = weights * screened.factors[kept]
    reach = float(np.abs(applied[kept]) @ norms[: len(kept)][kept])  # no entry moves further
    safe = {name for name in measured if inputs.largest[name] + reach <= largest_number(inputs.leaves[name])}
    by_leaf = {
        **dict.fromkeys(inputs.leaves, weights * _outside_factors(weights, screened, most)),
        **dict.fromkeys(inputs.averaged, screened.averages),
        **dict.fromkeys(measured, applied[kept]),
    }
    promised = bound(geometry, applied, smoothness) if smoothness and geometry.slopes is not None else math.nan
    return inputs.aggregation(
        _rows(inputs.leaves, vectors.updates, kept),
        by_leaf,
        safe,
        weights=applied,
        promised_change=promised,
        geometry=geometry,
        state=state,
        screened=screened,
        info=info,
        motion=motion_of_weights(seen, weights),
    )


def apply_step(rule: SumRule | CoordinateRule, inputs: Inputs) -> Aggregation:
    """Return the params after the step of a rule that sees sums over devices, or one entry at a time."""
    measured, state = inputs.measured, inputs.state
    vectors = replace(inputs.vectors, probe_weights=None)  # sums count every probe alike
    norms = norms_of(vectors.updates, measured, inputs.scratch)
    checks = {"along": _along_last_step(rule, inputs), "uphill": _uphill(rule, inputs)}
    screened = inputs.screened(vectors, norms, weighs=bool(inputs.averaged), **checks)
    info, motion = dict[str, Any](), Motion()
    if isinstance(rule, CoordinateRule):
        combine = partial(combination_of, rule)
        vector = by_coordinate(combine, vectors.updates, measured, screened.factors, inputs.scratch)
        inputs.check_finite(bool(np.isfinite(vector).all()))
    else:
        screened = combined_probes(screened, vectors, measured, rule.gradients, sums=True, scratch=inputs.scratch)
        sums = sums_of(vectors, measured, screened, inputs.report.distortions)
        inputs.check_finite(sums.finite)
        _warn_without_change(rule, state, sums, bool(vectors.differences))
        returned = rule.step(sums, state, inputs.report.population)
        vector, state, info = checked_step(returned, sums.size, f"rule '{rule.name}': step")
        motion = motion_of_sums(sums, vector)
    step = {name: [leaf] for name, leaf in unflat(vector, inputs.leaves, measured).items()}
    by_leaf = {**dict.fromkeys(measured, np.ones(1)), **dict.fromkeys(inputs.averaged, screened.averages)}
    return inputs.aggregation(
        {**step, **_rows(inputs.averaged, vectors.updates, screened.devices)},
        by_leaf,
        set(),
        weights=info.get("mean", 1.0) / screened.devices.sum() * screened.factors,
        promised_change=math.nan,
        geometry=None,
        state=state,
        screened=screened,
        info=info,
        motion=motion,
        before=_before(rule, inputs) if corrects(rule) and inputs.out is None else None,
    )


def _warn_without_change(rule: SumRule, state: State, sums: Sums, differences: bool) -> None:
    """Warn where no gradient changed at all over the last step, which is usually a mistake of the caller."""
    last = rule.last_step(state) if rule.last_step and differences else None
    if last is not None and last.any() and sums.gradient_norms and not sums.difference_norms:
        warnings.warn(
            "all gradient differences are zero although the model moved in the last round: compute them with a copy of "
            "the last round's params (the state_dict of a live model changes with the model)",
            stacklevel=4,
        )


def _before(rule: SumRule, inputs: Inputs) -> Before:
    """Return what a correction of the step needs."""
    report = inputs.report
    return Before(rule, inputs.params, inputs.measured, inputs.defences, report.population, report.distortions[1])


def _rows(names: Iterable[str], updates: Sequence[Leaves], kept: BoolArray) -> Rows:
    """Return the leaves of the updates that are kept, by name."""
    used = [update for update, use in zip(updates, kept, strict=True) if use]
    return {name: [update[name] for update in used] for name in names}


def _along_last_step(rule: SumRule | CoordinateRule, inputs: Inputs) -> AlongLastStep | None:
    """Return what the probes say along the last step, or None where the rule has none."""
    last_step, vectors = rule.last_step if isinstance(rule, SumRule) else None, inputs.vectors
    last = last_step(inputs.state) if last_step else None
    size = sum(size_of(inputs.leaves[name]) for name in inputs.measured)
    if last is None or len(last) != size or not vectors.differences or inputs.defences == OFF:
        return None
    unit = last / (float(np.linalg.norm(last)) or 1.0)

    def along(rows: Sequence[Leaves]) -> FloatArray:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.array([dot(flat(row, inputs.measured), unit) for row in rows])

    return AlongLastStep(along(vectors.probes), along(vectors.differences))


def _uphill(rule: SumRule | CoordinateRule, inputs: Inputs) -> dict[Name, str]:
    """Return whose update contradicts the gradient of the same device, and why, for the rule with memory."""
    if not (isinstance(rule, SumRule) and "differences" in rule.needs):
        return {}
    return uphill(inputs.vectors, inputs.measured, inputs.defences.max_uphill, inputs.scratch)


def _limited(weights: FloatArray, geometry: Geometry, most: float) -> tuple[FloatArray, dict[str, Any]]:
    """Return the weights of a step of at most ``most`` median updates (0: any length), and a note if it was longer."""
    gram = geometry.gram[: len(weights), : len(weights)]
    largest = float(np.abs(weights).max(initial=0)) or 1.0  # its square may overflow
    length = largest * math.sqrt(max(float(weights / largest @ gram @ weights / largest), 0))
    limit = most * lower_median(np.sqrt(np.diag(gram)))
    return (weights * limit / length, {"step_clipped": limit / length}) if 0 < limit < length else (weights, {})


def _outside_factors(weights: FloatArray, screened: Screened, most: float) -> FloatArray:
    """Return (K',) factors of the leaves outside the geometry: no device moves them by more than ``most`` medians."""
    kept = screened.devices
    lengths = np.abs(weights) * (screened.rest * screened.rest_norms)[kept]
    limit = most * lower_median(screened.rest_norms)
    clipped = np.divide(limit, lengths, out=np.ones(len(lengths)), where=lengths > limit)
    return screened.rest[kept] * (clipped if most else 1)
