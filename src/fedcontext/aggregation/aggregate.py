"""Entry point for other systems: params, updates and a rule in; new params out. Nothing else of the package is needed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedcontext.aggregation.combine import add_step, add_weighted, largest_entry, with_integers, written, zeros_like
from fedcontext.aggregation.result import Aggregation, Motion, motion_of_sums, motion_of_weights
from fedcontext.aggregation.validation import output_leaves, raise_not_finite, select_leaves, validate
from fedcontext.arrays.tree import (
    SCRATCH,
    BoolArray,
    FloatArray,
    Leaves,
    Structure,
    kind_of,
    largest_number,
    leaves,
    rebuild,
    size_of,
)
from fedcontext.errors import FedcontextError, positive
from fedcontext.measurement.combination import combined_probes
from fedcontext.measurement.defences import OFF, Defences, Screened, lower_median, screen
from fedcontext.measurement.geometry import Geometry, Report, Structures, Vectors, measure, norms_of, shares
from fedcontext.measurement.sums import by_coordinate, dot, flat, sums_of, unflat
from fedcontext.rules.base import AnyRule, CoordinateRule, Rule, State, SumRule
from fedcontext.rules.contextual import bound


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
    root_gradient: Structure | None = None,
    distortions: tuple[float, float] = (0.0, 0.0),
    layers: Iterable[str | int] | None = None,
    buffers: Iterable[str | int] = (),
    smoothness: float | None = None,
    state: State = None,
    out: Structure | None = None,
    defences: Defences | None = Defences(),  # noqa: B008
    scratch: int = SCRATCH,
) -> Aggregation:
    """Return the params after one aggregation: w + Σ αₖ Δₖ (eq. 4) with the weights of a `Rule`, or w + the step of another rule.

    Everything is checked first, and nothing that was passed in is changed, except ``out``, which is written last. A `Rule`
    reads the updates twice, block by block: once for the inner products, once for the sum. They may be memory-mapped
    files, so that together they can be larger than memory.

    Args:
        params: the global model: an array, or a list, tuple or mapping of arrays (a ``state_dict`` as it is).
        updates: the devices' updates Δₖ = wₖ - w, each like ``params``; a mapping gives the devices names. Or a whole
            `Report`, which holds this and the arguments from ``gradient`` to ``distortions``.
        rule: how to weigh them, such as ``contextual(smoothness=1 / learning_rate)``.
        gradient: one estimate of the global gradient at ``params``; leaves outside the geometry may be missing.
        gradients: instead of it, the probes' gradients, averaged with ``probe_weights`` (equal where None).
        differences: for `contextual_memory`, each probe's gradient minus its gradient at the last round's params.
        own_gradients: the gradient of each update's own device, in the same order.
        samples: the number of training samples of each device.
        probe_weights: how much each probe's gradient counts, such as its number of samples.
        pool: updates of devices outside the cohort; they inform `expected_contextual` and are not applied. For `fltrust`
            the one update of the server's own data.
        population: the total number of devices, where known.
        steps: the number of local SGD steps of each device, for `fednova`.
        root_gradient: the gradient of samples that the server holds itself, for `robust_gradients` with trust.
        distortions: for `contextual_memory`, the shares of gradients and of differences that are noise of the codes in
            which they were sent: `Codec.distortion`.
        layers: names (or positions) of the leaves that enter the geometry; the weights apply to all leaves.
        buffers: leaves that are averaged instead of weighted, as are all that do not hold floating point.
        smoothness: the β at which the bound on the loss change is reported; the rule's own where None. A rule that works
            on sums has no bound.
        state: the state that the rule returned last round.
        out: where to write the new params: ``params`` itself, or a structure like it in other memory; fresh arrays if
            None.
        defences: how far one device can go, in multiples of the round's median. What is not finite is left out and named
            in ``excluded``. None turns them off, and what is not finite is an error.
        scratch: bytes of a block; the working memory is at most four of them, whatever the size of the model.

    >>> import numpy as np
    >>> import fedcontext as fc
    >>> w, updates, gradient = np.zeros(2), [np.array([1.0, 0.0]), np.array([1.0, 1.0])], np.array([-1.0, -3.0])
    >>> result = fc.aggregate(w, updates, gradient=gradient, rule=fc.contextual(smoothness=2))
    >>> result.params.round(6), result.weights.round(6), round(result.promised_change, 6)
    (array([0.5, 1.5]), array([-1. ,  1.5]), -2.5)
    """
    if not isinstance(rule, AnyRule):
        raise FedcontextError(f"rule must be a rule such as contextual(smoothness=10), got {rule!r}")
    if isinstance(updates, Report):
        report = updates
    else:
        report = Report(
            updates,
            samples,
            gradient,
            gradients,
            probe_weights,
            own_gradients,
            pool,
            differences,
            population,
            steps,
            root_gradient,
            distortions,
        )
    model = _Model.of(params, layers if isinstance(rule, Rule) else None, buffers)
    defences = OFF if defences is None else defences
    vectors = validate(report, model.leaves, model.measured, strict=not defences.outlier)
    if "root" in rule.needs:  # the server's own update is trusted
        vectors = replace(vectors, names=replace(vectors.names, pool=()))
    _check_needs(rule, report, model)
    if out is not None:
        out = output_leaves(model.leaves, report.updates, out)
    if "differences" in rule.needs and state is not None and report.differences is None:
        raise FedcontextError(
            f"rule '{rule.name}' needs differences from the second round on: each probe's gradient minus its gradient "
            "at the last round's params"
        )
    state = rule.init(params) if state is None else state
    if not isinstance(rule, Rule):
        if layers is not None:
            raise FedcontextError(f"rule '{rule.name}' does not support layers: it uses all floating-point leaves")
        return _apply_sums(rule, model, report, vectors, state, out, defences, scratch)
    beta = rule.smoothness if smoothness is None else positive("smoothness", smoothness)
    return _apply_weights(rule, model, report, vectors, state, beta, out, defences, scratch)


@dataclass(frozen=True)
class _Model:
    """The params by leaf: which leaves enter the geometry, and which are averaged instead of weighted."""

    params: Structure
    leaves: Leaves
    measured: set[str]
    averaged: set[str]

    @classmethod
    def of(cls, params: Structure, layers: Iterable[str | int] | None, buffers: Iterable[str | int]) -> _Model:
        base = leaves(params)
        averaged = {name for name, leaf in base.items() if kind_of(leaf) != "floating"}
        averaged |= select_leaves("buffers", buffers, base)
        measured = (set(base) if layers is None else select_leaves("layers", layers, base)) - averaged
        return cls(params, base, measured, averaged)

    @property
    def order(self) -> list[str]:
        """The measured leaves in the order of the params."""
        return [name for name in self.leaves if name in self.measured]

    @property
    def rest(self) -> list[str]:
        """The other leaves."""
        return [name for name in self.leaves if name not in self.measured]


def _apply_weights(
    rule: Rule,
    model: _Model,
    report: Report,
    vectors: Vectors,
    state: State,
    smoothness: float | None,
    out: Leaves | None,
    defences: Defences,
    scratch: int,
) -> Aggregation:
    largest = {
        name: largest_entry(name, leaf, scratch) for name, leaf in model.leaves.items() if kind_of(leaf) == "floating"
    }
    products = measure(vectors, model.order, "own gradients" in rule.needs, scratch)
    norms = np.sqrt(np.diag(products.gram))
    screened = screen(
        vectors,
        norms,
        model.order,
        model.rest,
        defences,
        scale_free=rule.scale_free,
        weighs="samples" in rule.needs or bool(model.averaged),
        scratch=scratch,
    )
    screened = combined_probes(screened, vectors, model.order, rule.gradients, sums=False, scratch=scratch)
    geometry, kept = screened.geometry(products, vectors.steps), screened.devices
    if not geometry.finite:
        raise_not_finite(report, model.measured)
    seen = geometry.rows(screened.kept, screened.updates)
    weights, state = rule.weigh(seen, state)
    weights = _checked_weights(rule, weights, kept.sum())
    count = len(kept)
    weights, info = _limited(weights, seen, 0 if rule.scale_free else defences.max_step)
    applied = _spread(weights * screened.updates[:count][kept], kept)
    reach = float(np.abs(applied[kept]) @ norms[:count][kept])  # no entry moves further
    safe = {name for name in model.measured if largest[name] + reach <= largest_number(model.leaves[name])}
    averages = shares(screened.samples[kept], kept.sum()) * screened.rest[kept]
    outside = weights * _outside_factors(weights, screened, defences.max_step)
    by_leaf = {
        name: applied[kept] if name in model.measured else averages if name in model.averaged else outside
        for name in model.leaves
    }
    updates = [update for update, use in zip(vectors.updates, kept, strict=True) if use]

    def combined(base: Leaves, out: Leaves | None) -> Structure:
        return rebuild(model.params, add_weighted(base, updates, by_leaf, safe, out, scratch))

    promised = bound(geometry, applied, smoothness) if smoothness and geometry.slopes is not None else float("nan")
    new = combined(model.leaves, out)

    def step() -> Structure:
        if out is not None:
            raise FedcontextError("step is not available where out was given; aggregate without out")
        return with_integers(combined(zeros_like(model.leaves), None), new, model.leaves, scratch)

    return Aggregation(
        new, applied, promised, geometry, state, screened, info, motion_of_weights(seen, weights), make_step=step
    )


def _apply_sums(
    rule: SumRule | CoordinateRule,
    model: _Model,
    report: Report,
    vectors: Vectors,
    state: State,
    out: Leaves | None,
    defences: Defences,
    scratch: int,
) -> Aggregation:
    for name, leaf in model.leaves.items():
        if kind_of(leaf) == "floating":
            largest_entry(name, leaf, scratch)  # refuses params that are not finite
    norms = norms_of(vectors.updates, model.order, scratch)
    vectors = replace(vectors, probe_weights=None)  # sums count every probe alike
    screened = screen(
        vectors,
        norms,
        model.order,
        model.rest,
        defences,
        weighs=bool(model.averaged),
        bends=_bends(rule, model, vectors, state) if defences.max_concavity else None,
        scratch=scratch,
    )
    kept, info, motion = screened.devices, dict[str, Any](), Motion()
    if isinstance(rule, CoordinateRule):
        vector = by_coordinate(rule.combine, vectors.updates, model.order, screened.factors, scratch)
        finite = bool(np.isfinite(vector).all())
    else:
        screened = combined_probes(screened, vectors, model.order, rule.gradients, sums=True, scratch=scratch)
        sums = sums_of(vectors, model.order, screened)
        sums.distortions = report.distortions
        finite = sums.finite
    if not finite:
        raise_not_finite(report, model.measured)
    if isinstance(rule, SumRule):
        vector, state, info = rule.step(sums, state, report.population)
        motion = motion_of_sums(sums, vector)
    moved = unflat(vector, model.leaves, model.order)
    averages = shares(screened.samples[kept], kept.sum()) * screened.rest[kept]
    updates = [update for update, use in zip(vectors.updates, kept, strict=True) if use]

    def combined(base: Leaves, out: Leaves | None) -> Structure:
        means = {name: base[name] for name in model.averaged}
        new = add_weighted(means, updates, dict.fromkeys(means, averages), set(), None, scratch)  # may overflow
        moving = {name: base[name] for name in moved}
        new |= add_step(moving, moved, out, scratch)
        new |= {name: written(new[name], None if out is None else out[name]) for name in means}
        return rebuild(model.params, {name: new[name] for name in base})

    weights = info.get("mean", 1.0) / kept.sum() * screened.factors
    new, nan = combined(model.leaves, out), float("nan")

    def step() -> Structure:
        return with_integers(combined(zeros_like(model.leaves), None), new, model.leaves, scratch)

    return Aggregation(new, weights, nan, None, state, screened, info, motion, make_step=step)


def _bends(rule: SumRule | CoordinateRule, model: _Model, vectors: Vectors, state: State) -> FloatArray | None:
    """Return (P,) <y, s> of each probe's gradient difference and the last step, or None where the rule has none."""
    last = rule.last_step(state) if isinstance(rule, SumRule) else None
    size = sum(size_of(model.leaves[name]) for name in model.order)
    if last is None or len(last) != size or not vectors.differences:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array([dot(flat(each, model.order), last) for each in vectors.differences])


def _limited(weights: FloatArray, geometry: Geometry, most: float) -> tuple[FloatArray, dict[str, Any]]:
    """Return the weights of a step of at most ``most`` median updates (0: of any length), and a note if it was longer."""
    gram = geometry.gram[: len(weights), : len(weights)]
    length, limit = math.sqrt(max(float(weights @ gram @ weights), 0)), most * lower_median(np.sqrt(np.diag(gram)))
    return (weights * limit / length, {"step_clipped": limit / length}) if 0 < limit < length else (weights, {})


def _outside_factors(weights: FloatArray, screened: Screened, most: float) -> FloatArray:
    """Return (K',) factors of the leaves outside the geometry: no device moves them by more than ``most`` medians."""
    kept = screened.devices
    lengths = np.abs(weights) * (screened.rest * screened.rest_norms)[kept]
    limit = most * lower_median(screened.rest_norms)
    clipped = np.divide(limit, lengths, out=np.ones(len(lengths)), where=lengths > limit)
    return screened.rest[kept] * (clipped if most else 1)


def _spread(values: FloatArray, kept: BoolArray) -> FloatArray:
    """Return (K,) the values of the devices that are kept, and zeros."""
    spread = np.zeros(len(kept))
    spread[kept] = values
    return spread


def _check_needs(rule: AnyRule, report: Report, model: _Model) -> None:
    if not sum(size_of(model.leaves[name]) for name in model.measured):
        raise FedcontextError("no floating-point leaf enters the geometry; check layers and buffers")
    if report.pool and not {"pool", "root"} & rule.needs:
        raise FedcontextError(f"rule '{rule.name}' does not use a pool: leave pool out, or use expected_contextual")
    given = {
        "samples": report.samples is not None,
        "steps": report.steps is not None,
        "gradient": any(x is not None for x in (report.gradient, report.gradients, report.own_gradients)),
        "own gradients": report.own_gradients is not None,
        "root": bool(report.pool),
        "root gradient": report.root_gradient is not None,
    }
    arguments = {
        "samples": "the number of samples of each device: give samples",
        "steps": "the number of local SGD steps of each device: give steps",
        "gradient": "a gradient: give gradient, gradients or own_gradients",
        "own gradients": "the gradient of each update's device: give own_gradients",
        "root": "the update of the server's own data: give it as pool=[update]",
        "root gradient": "the gradient of the server's own data: give root_gradient",
    }
    for need, present in given.items():
        if need in rule.needs and not present:
            raise FedcontextError(f"rule '{rule.name}' needs {arguments[need]}")


def _checked_weights(rule: Rule, weights: FloatArray, count: int) -> FloatArray:
    weights = np.asarray(weights, np.float64)
    if weights.shape != (count,) or not np.isfinite(weights).all():
        raise FedcontextError(f"rule '{rule.name}' must give {count} finite weights, got {weights}")
    return weights
