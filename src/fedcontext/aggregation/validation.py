"""Input validation for `aggregate`: errors name the device and the leaf, and are raised before any work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from fedcontext.arrays.overlap import check_no_overlap
from fedcontext.arrays.tree import (
    Array,
    FloatArray,
    Leaves,
    Structure,
    all_finite,
    framework,
    kind_of,
    leaf_name,
    leaves,
)
from fedcontext.errors import FedcontextError, shown
from fedcontext.measurement.defences import Defences
from fedcontext.measurement.geometry import Name, Names, Report, Structures, Vectors
from fedcontext.rules.base import AnyRule, CoordinateRule, Rule, State, SumRule, shown_rule

NO_GRADIENT = "; leaves without a gradient, such as BatchNorm's running statistics, belong in buffers"


def validate(report: Report, base: Leaves, measured: set[str], strict: bool = True) -> Vectors:
    """Return the leaves of a report, each structure checked against the leaves ``base`` of the params.

    Updates must have all leaves of ``base``, gradients at least the ``measured`` ones. Leaves that are not measured are
    searched for entries that are not finite; the inner products show that for the others. Unless ``strict``, neither
    these nor counts that are not numbers are errors: the defences deal with them.

    >>> validate(Report([{"w": np.zeros(3)}]), {"w": np.zeros(2)}, {"w"})
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: device 0: leaf 'w' must have shape (2,), got (3,)
    """
    if report.gradient is not None and report.gradients is not None:
        raise FedcontextError("give gradient or gradients, not both")
    updates = named("device", report.updates)
    if not updates:
        raise FedcontextError("there are no updates to aggregate")
    gradients = {"the gradient": report.gradient} if report.gradient is not None else named("probe", report.gradients)
    if report.gradients is not None and not gradients:
        raise FedcontextError("gradients is empty; leave it out, or give at least one probe's gradient")
    devices = names_of(report.updates)
    own_gradients = named("own gradient of device", in_order("own_gradients", report.own_gradients, devices))
    if own_gradients and len(own_gradients) != len(updates):
        raise FedcontextError(f"own_gradients must be one for each of {len(updates)} updates, got {len(own_gradients)}")
    probes = names_of(report.gradients, "probe ") or (devices if own_gradients and report.gradient is None else [])
    differences = named("difference of probe", in_order("differences", report.differences, probes))
    if differences and len(differences) != len(gradients or own_gradients):
        raise FedcontextError(
            f"differences must be one for each of {len(gradients or own_gradients)} gradients, got {len(differences)}"
        )
    for name, leaf in base.items():
        if kind_of(leaf) == "other":
            raise FedcontextError(f"params: {leaf_name(name)} must be real floating point or integer, got {leaf.dtype}")

    if base and all(kind_of(leaf) == "integer" for leaf in base.values()):
        raise FedcontextError(
            f"params must be floating point, got {next(iter(base.values())).dtype} alone: convert them to float32 or float64"
        )

    def checked(structures: Mapping[str, Structure], needed: set[str], advice: str = "") -> list[Leaves]:
        searched = set(base) - measured if strict else set()
        return [checked_leaves(owner, each, base, needed, searched, advice) for owner, each in structures.items()]

    invalid = None if strict else dict[Name, str]()
    samples, root = _numbers("samples", report.samples, devices, invalid), report.root_gradient
    slopes = report.remaining_slopes  # none can do harm, so they are not checked
    weighed = ["the gradient"] if report.gradient is not None else probes
    return Vectors(
        updates=checked(updates, set(base)),
        samples=np.ones(len(updates)) if samples is None else samples,
        gradients=checked(gradients, measured, NO_GRADIENT),
        own_gradients=checked(own_gradients, measured, NO_GRADIENT),
        probe_weights=_numbers("probe_weights", report.probe_weights, weighed, invalid),
        pool=checked(named("pool device", report.pool), measured),
        differences=checked(differences, measured, NO_GRADIENT),
        steps=_numbers("steps", report.steps, devices, invalid, positive=True),
        names=Names(devices, probes, names_of(report.pool, "pool device "), invalid or {}),
        remaining_slopes=() if slopes is None else _values_of("remaining_slopes", slopes, devices),
        root_gradient=checked({} if root is None else {"the root gradient": root}, measured, NO_GRADIENT),
    )


def check_rule(rule: object) -> None:
    """Raise an error for what is no rule.

    >>> from fedcontext.rules.memory import contextual_memory
    >>> check_rule(contextual_memory)
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: rule must be a rule such as contextual(smoothness=10), got a function; call it: contextual_memory()
    """  # noqa: W505
    if not isinstance(rule, AnyRule):
        raise FedcontextError(f"rule must be a rule such as contextual(smoothness=10), got {shown_rule(rule)}")


def check_population(population: object) -> None:
    """Raise an error for anything but a positive integer or None.

    >>> check_population(0)
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: population must be the number of devices in all, a positive integer, got 0
    """
    if population is None:
        return
    if isinstance(population, bool) or not isinstance(population, int | np.integer) or population < 1:
        raise FedcontextError(
            f"population must be the number of devices in all, a positive integer, got {shown(population)}"
        )


def check_defences(defences: object) -> None:
    """Raise an error for anything but `Defences` or None.

    >>> check_defences({})
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: defences must be fc.Defences(...) or None, got {}
    """
    if not isinstance(defences, Defences | None):
        raise FedcontextError(f"defences must be fc.Defences(...) or None, got {shown(defences)}")


def check_state(rule: AnyRule, state: State, differences: bool) -> None:
    """Raise an error for a state that is not the rule's own, or is missing where devices sent ``differences``.

    >>> from fedcontext.rules.memory import contextual_memory
    >>> check_state(contextual_memory(), [1, 2], differences=True)
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: state must be that of the last result of rule 'contextual memory', or None in the first round, got [1, 2]
    """  # noqa: W505
    if state is not None and (isinstance(rule, CoordinateRule) or (isinstance(rule, Rule) and not rule.keeps_state)):
        raise FedcontextError(
            f"the state is of another rule: rule '{rule.name}' keeps none; use the rule that returned it, or state=None"
        )
    if not isinstance(rule, SumRule) or rule.last_step is None:
        return
    if state is None and differences:
        raise FedcontextError(
            f"rule '{rule.name}' got differences but no state: give the state of the last result (state=result.state), or, "
            "in the first round, leave differences out"
        )
    try:
        if state is not None:
            rule.last_step(state)
    except (TypeError, LookupError):
        raise FedcontextError(
            f"state must be that of the last result of rule '{rule.name}', or None in the first round, got {shown(state)}"
        ) from None


def raise_not_finite(report: Report, measured: set[str]) -> None:
    """Raise an error that names the first structure of a report with an entry that is not finite.

    >>> raise_not_finite(Report([{"w": np.zeros(2)}, {"w": np.array([1.0, np.inf])}]), {"w"})
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: device 1: leaf 'w' has NaN or infinite entries
    """
    given = {
        **named("device", report.updates),
        **({} if report.gradient is None else {"the gradient": report.gradient}),
        **named("probe", report.gradients),
        **named("own gradient of device", report.own_gradients),
        **named("difference of probe", report.differences),
        **named("pool device", report.pool),
    }
    for owner, structure in given.items():
        for name, leaf in leaves(structure).items():
            if name in measured:
                _check_finite(owner, name, leaf)
    raise FedcontextError("the updates are too large: their squares overflow float64")


def output_leaves(base: Leaves, vectors: Vectors, out: Structure) -> Leaves:
    """Return the arrays to write the new params into, which may not overlap what is still to be read.

    >>> base = {"w": np.zeros(2)}
    >>> output_leaves(base, validate(Report([{"w": np.ones(2)}]), base, {"w"}), {"w": np.zeros(2)})
    {'w': array([0., 0.])}
    """
    targets = checked_leaves("out", out, base, set(base), set())
    for name, leaf in targets.items():
        if not framework(leaf).writable(leaf):
            raise FedcontextError(
                f"out: {leaf_name(name)} cannot be written in place; give a contiguous, writable array"
            )
    sources = {f"device {name}": own for name, own in zip(vectors.names.devices, vectors.updates, strict=True)}
    check_no_overlap(targets, {"params": base, **sources})
    return targets


def checked_leaves(
    owner: str, structure: Structure, base: Leaves, needed: set[str], searched: set[str], advice: str = ""
) -> Leaves:
    """Return the leaves of a structure if they have the names, shapes and types of those in ``base``.

    It must have the leaves ``needed``, else ``advice`` ends the error; those in ``searched`` must be finite.

    >>> checked_leaves("device 7", [np.array([np.nan])], {"0": np.zeros(1)}, {"0"}, {"0"})
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: device 7: leaf '0' has NaN or infinite entries
    """
    try:
        own = leaves(structure)
    except FedcontextError as error:
        raise FedcontextError(f"{owner}: {error}") from None
    missing, unknown = needed - own.keys(), own.keys() - base.keys()
    if missing or unknown:
        lack = ", ".join(leaf_name(name) for name in base if name in missing)
        excess = ", ".join(leaf_name(name) for name in own if name in unknown)
        differences = [f"lacks {lack}"] * bool(lack) + [f"has {excess}, unknown to params"] * bool(excess)
        raise FedcontextError(
            f"{owner}: the structure differs from params: it {' and '.join(differences)}{advice * bool(lack)}"
        )
    for name, leaf in own.items():
        _check_like(owner, name, leaf, base[name])
        if name in searched:
            _check_finite(owner, name, leaf)
    return own


def select_leaves(what: str, chosen: Iterable[str | int], base: Leaves) -> set[str]:
    """Return the names of the chosen leaves, given by name or by position.

    >>> select_leaves("layers", [-1], {"hidden": np.zeros(3), "last": np.zeros(2)})
    {'last'}
    """
    names, selected = list(base), set()
    for choice in [chosen] if isinstance(chosen, str | int) else chosen:
        if isinstance(choice, int) and -len(names) <= choice < len(names):
            selected.add(names[choice])
        elif choice in base:
            selected.add(str(choice))
        else:
            raise FedcontextError(f"{what}: no leaf {choice!r}; there are {', '.join(names) or 'one array'}")
    return selected


def named(kind: str, given: Structures | None) -> dict[str, Structure]:
    """Return structures by the label that error messages use.

    >>> list(named("device", [1.0, 2.0]))
    ['device 0', 'device 1']
    """
    if given is None:
        return {}
    if not hasattr(given, "__len__"):
        raise FedcontextError(f"updates and gradients must be sequences or mappings, got {type(given).__name__}")
    items = given.items() if isinstance(given, Mapping) else enumerate(given)
    by_name = {f"{kind} {key}": value for key, value in items}
    if len(by_name) < len(given):
        raise FedcontextError(f"two of the names {', '.join(map(repr, given))} are the same as text")
    return by_name


def names_of(given: Structures | None, prefix: str = "") -> list[Name]:
    """Return the keys of a mapping, or the positions in a sequence, with ``prefix`` if there is one.

    >>> names_of({"phone": 1.0}), names_of([1.0, 2.0], "probe ")
    (['phone'], ['probe 0', 'probe 1'])
    """
    if isinstance(given, Mapping):
        return list(given)
    return [f"{prefix}{row}" if prefix else row for row in range(0 if given is None else len(given))]


def in_order(what: str, given: Any, owners: Sequence[Name]) -> Any:
    """Return a mapping in the order of its owners, whose names it must have; a sequence as it is.

    >>> in_order("samples", {"b": 2, "a": 1}, ["a", "b"])
    {'a': 1, 'b': 2}
    """
    if not isinstance(given, Mapping):
        return given
    if set(given) != set(owners):
        wanted, got = (shown(", ".join(map(str, names))) for names in (owners, given))
        raise FedcontextError(f"{what}: the names must be those of the devices, {wanted}, got {got}")
    return {name: given[name] for name in owners}


def _check_like(owner: str, name: str, leaf: Array, base: Array) -> None:
    expected = framework(base)
    same = type(leaf) is type(base) and leaf.shape == base.shape and leaf.dtype == base.dtype
    if same and expected.place(leaf) == expected.place(base):
        return
    library = framework(leaf)
    if library.name != expected.name:
        raise FedcontextError(f"{owner}: {leaf_name(name)} must be a {expected.name} array, got {library.name}")
    if tuple(leaf.shape) != tuple(base.shape):
        raise FedcontextError(
            f"{owner}: {leaf_name(name)} must have shape {tuple(base.shape)}, got {tuple(leaf.shape)}"
        )
    if leaf.dtype != base.dtype:
        trained = kind_of(leaf) == "floating" and kind_of(base) == "integer"
        advice = " (or params floating point, if it is trained)" if trained else ""
        raise FedcontextError(f"{owner}: {leaf_name(name)} must have dtype {base.dtype}{advice}, got {leaf.dtype}")
    if library.place(leaf) != library.place(base):
        raise FedcontextError(f"{owner}: {leaf_name(name)} must be on {library.place(base)}, got {library.place(leaf)}")


def _check_finite(owner: str, name: str, leaf: Array) -> None:
    if kind_of(leaf) == "floating" and not all_finite(leaf):
        raise FedcontextError(f"{owner}: {leaf_name(name)} has NaN or infinite entries")


def _numbers(
    what: str,
    given: Iterable[float] | None,
    owners: Sequence[Name],
    invalid: dict[Name, str] | None,
    positive: bool = False,
) -> FloatArray | None:
    """Return ``given`` as float64 if it holds one count for each owner, and not all are zero.

    A count that is not a number of at least 0 (or above, if ``positive``) is an error, or noted in ``invalid``.
    """
    if given is None:
        return None
    values = _values_of(what, given, owners)
    numbers = np.array([_number(value) for value in values])
    bad = ~((numbers >= 0) & (numbers < np.inf)) | (positive & (numbers == 0))
    expected = "positive" if positive else "non-negative"
    if invalid is not None and not bad.all():
        reason = f"{what}: must be a {expected} number"
        invalid |= {owners[row]: f"{reason}, got {values[row]!r:.50}" for row in np.flatnonzero(bad).tolist()}
        numbers, bad = np.where(bad, 0, numbers), np.zeros_like(bad)
    if bad.any() or not numbers.any():
        also = "" if positive else " and not all zero"
        raise FedcontextError(f"{what} must be {expected}{also}, got {numbers.tolist()}")
    return numbers


def _values_of(what: str, given: Iterable[float], owners: Sequence[Name]) -> list[Any]:
    """Return one value for each owner, in their order."""
    if not isinstance(given, Iterable) or isinstance(given, str | Set):
        raise FedcontextError(f"{what} must hold {len(owners)} numbers, one for each device, got {shown(given)}")
    ordered = in_order(what, given, owners)
    values = list(ordered.values() if isinstance(ordered, Mapping) else ordered)
    if len(values) != len(owners):
        raise FedcontextError(f"{what} must hold {len(owners)} numbers, got {len(values)}")
    return values


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return np.nan
