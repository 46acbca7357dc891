"""Entry point for other systems: params, updates and a rule in; new params out.

Nothing else of the package is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fedcontext.aggregation.application import Inputs, apply_step, apply_weights
from fedcontext.aggregation.combine import largest_entries
from fedcontext.aggregation.result import Aggregation
from fedcontext.aggregation.validation import (
    check_defences,
    check_population,
    check_rule,
    check_state,
    output_leaves,
    select_leaves,
    validate,
)
from fedcontext.arrays.tree import SCRATCH, Leaves, Structure, kind_of, leaves, size_of
from fedcontext.errors import FedcontextError, positive
from fedcontext.measurement.defences import OFF, Defences
from fedcontext.measurement.geometry import Report, Structures
from fedcontext.rules.base import AnyRule, Rule, State, SumRule

ARGUMENTS = {  # what to give for each need of a rule
    "samples": "the number of samples of each device: give samples",
    "steps": "the number of local SGD steps of each device: give steps",
    "gradient": "a gradient: give gradient, gradients or own_gradients",
    "own gradients": "the gradient of each update's device: give own_gradients",
    "root": "the update of the server's own data: give it as pool=[update]",
    "root gradient": "the gradient of the server's own data: give root_gradient",
}


def aggregate(
    params: Structure,
    updates: Structures | Report,
    *,
    rule: AnyRule,
    gradient: Structure | None = None,
    gradients: Structures | None = None,
    differences: Structures | None = None,
    own_gradients: Structures | None = None,
    samples: Iterable[float] | None = None,
    probe_weights: Iterable[float] | None = None,
    pool: Structures | None = None,
    population: int | None = None,
    steps: Iterable[float] | None = None,
    remaining_slopes: Iterable[float] | None = None,
    root_gradient: Structure | None = None,
    distortions: tuple[float, float] = Report.distortions,
    layers: Iterable[str | int] | None = None,
    buffers: Iterable[str | int] = (),
    smoothness: float | None = None,
    state: State = None,
    out: Structure | None = None,
    defences: Defences | None = Defences(),  # noqa: B008
    scratch: int = SCRATCH,
) -> Aggregation:
    """Return the params after one aggregation: w + Σ αₖ Δₖ (eq. 4) for a `Rule`, w + its step for others.

    Everything is checked first, and nothing that was passed in is changed, except ``out``, which is written last. A
    `Rule` reads the updates twice, block by block: once for the inner products, once for the sum. They may be
    memory-mapped files, so that together they can be larger than memory.

    Args:
        params: the global model: an array, or a list, tuple or mapping of arrays (a ``state_dict`` as it is).
        updates: the devices' updates Δₖ = wₖ - w, each like ``params``; a mapping gives the devices names. Or a whole
            `Report`, which holds this and the arguments from ``gradient`` to ``distortions``.
        rule: how to weigh them, such as ``contextual(smoothness=1 / learning_rate)``.
        gradient: one estimate of the global gradient at ``params``; leaves outside the geometry may be missing.
            A `SumRule` needs ``gradients`` or ``own_gradients``.
        gradients: instead of it, the probes' gradients, averaged with ``probe_weights`` (equal where None).
        differences: for `contextual_memory`, each probe's gradient minus its gradient at the last round's params.
        own_gradients: the gradient of each update's own device, in the same order.
        samples: the number of training samples of each device.
        probe_weights: how much each probe's gradient counts, such as its number of samples.
        pool: updates of devices outside the cohort; they inform `expected_contextual` and are not applied. For
            `fltrust` the one update of the server's own data.
        population: the total number of devices, where known.
        steps: the number of local SGD steps of each device, for `fednova`.
        remaining_slopes: for the first round of `contextual_memory`, the slope of each device's loss along its update
            after local training, as a share of that before: <∇F_k(w + Δₖ), Δₖ> / <∇F_k(w), Δₖ>. The first step is the
            mean update times the harmonic mean of 1 / (1 - share) over devices, at most 8, if that is above 1.6. What
            is not between 0 and 1 counts as 0, since devices may report anything. Later rounds and other rules do not
            use them.
        root_gradient: the gradient of samples that the server holds itself, for `robust_gradients` with trust.
        distortions: for `contextual_memory`, the shares of gradients and of differences that are noise of the codes in
            which they were sent: `Codec.distortion`.
        layers: names (or positions) of the leaves that enter the geometry; the weights apply to all leaves.
        buffers: leaves that are averaged instead of weighted, as are all that do not hold floating point.
        smoothness: the β at which the bound on the loss change is reported; the rule's own where None. A rule that
            works on sums has no bound.
        state: the state that the rule returned last round; None in the first round, and for rules that keep none.
        out: where to write the new params: ``params`` itself, or a structure like it in other memory; fresh arrays if
            None.
        defences: limits on the influence of one device, see `Defences`. Devices that send NaN or infinity are excluded
            and listed in ``excluded``. With None, non-finite values raise an error.
        scratch: bytes of a block; the working memory of a `Rule` is at most four of them, whatever the size of the
            model. Other rules also hold float64 vectors of the model's size.

    >>> import numpy as np
    >>> import fedcontext as fc
    >>> w, updates, gradient = np.zeros(2), [np.array([1.0, 0.0]), np.array([1.0, 1.0])], np.array([-1.0, -3.0])
    >>> result = fc.aggregate(w, updates, gradient=gradient, rule=fc.contextual(smoothness=2))
    >>> result.params.round(6), result.weights.round(6), round(result.promised_change, 6)
    (array([0.5, 1.5]), array([-1. ,  1.5]), -2.5)
    """
    check_rule(rule)
    report = _report(
        updates,
        samples=samples,
        gradient=gradient,
        gradients=gradients,
        probe_weights=probe_weights,
        own_gradients=own_gradients,
        pool=pool,
        differences=differences,
        population=population,
        steps=steps,
        remaining_slopes=remaining_slopes,
        root_gradient=root_gradient,
        distortions=distortions,
    )
    check_defences(defences)
    check_population(report.population)
    base, defences = leaves(params), OFF if defences is None else defences
    measured, averaged = measured_and_averaged(base, layers if isinstance(rule, Rule) else None, buffers)
    vectors = validate(report, base, set(measured), strict=not defences.outlier)
    check_state(rule, state, differences=bool(vectors.differences))
    if "root" in rule.needs:  # the server's own update is trusted
        vectors = replace(vectors, names=replace(vectors.names, pool=()))
    if not sum(size_of(base[name]) for name in measured):
        raise FedcontextError("no floating-point leaf enters the geometry; check layers and buffers")
    _check_needs(rule, report, state)
    targets = None if out is None else output_leaves(base, vectors, out)
    if layers is not None and not isinstance(rule, Rule):
        raise FedcontextError(f"rule '{rule.name}' does not support layers: it uses all floating-point leaves")
    state = rule.init(params) if state is None else state
    largest = largest_entries(base, scratch)
    inputs = Inputs(params, base, measured, averaged, largest, report, vectors, state, targets, defences, scratch)
    if not isinstance(rule, Rule):
        return apply_step(rule, inputs)
    return apply_weights(rule, inputs, rule.smoothness if smoothness is None else positive("smoothness", smoothness))


def _report(updates: Structures | Report, **given: Any) -> Report:
    """Return the `Report` that was given, or one of the arguments."""
    if not isinstance(updates, Report):
        return Report(updates, **given)
    if both := [name for name, value in given.items() if value is not getattr(Report, name)]:
        raise FedcontextError(f"give a Report or keyword arguments, not both: got a Report and {', '.join(both)}")
    return updates


def measured_and_averaged(
    base: Leaves, layers: Iterable[str | int] | None, buffers: Iterable[str | int]
) -> tuple[list[str], set[str]]:
    """Return the leaves that enter the geometry, in order, and those that are averaged instead of weighted."""
    averaged = {name for name, leaf in base.items() if kind_of(leaf) != "floating"}
    averaged |= select_leaves("buffers", buffers, base)
    chosen = (set(base) if layers is None else select_leaves("layers", layers, base)) - averaged
    return [name for name in base if name in chosen], averaged


def _check_needs(rule: AnyRule, report: Report, state: State) -> None:
    if report.pool and not {"pool", "root"} & rule.needs:
        raise FedcontextError(f"rule '{rule.name}' does not use a pool: leave pool out, or use expected_contextual")
    several = report.gradients is not None or report.own_gradients is not None
    if isinstance(rule, SumRule) and "gradient" in rule.needs and (report.gradient is not None or not several):
        instead = "" if report.gradient is None else " in place of gradient"
        raise FedcontextError(
            f"rule '{rule.name}' needs the gradient of each probe: give gradients or own_gradients{instead}"
        )
    given = {
        "samples": report.samples is not None,
        "steps": report.steps is not None,
        "gradient": several or report.gradient is not None,
        "own gradients": report.own_gradients is not None,
        "root": bool(report.pool),
        "root gradient": report.root_gradient is not None,
    }
    for need, argument in ARGUMENTS.items():
        if need in rule.needs and not given[need]:
            raise FedcontextError(f"rule '{rule.name}' needs {argument}")
    if "differences" in rule.needs and state is not None and report.differences is None:
        raise FedcontextError(
            f"rule '{rule.name}' needs differences from the second round on: each probe's gradient minus its gradient "
            "at the last round's params"
        )
