"""What callers hand to the door, checked: every complaint names the device and the leaf, and comes before any work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

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
from fedcontext.errors import FedcontextError
from fedcontext.geometry import Report

Structures: TypeAlias = Sequence[Structure] | Mapping[object, Structure]


def take(
    base: Leaves,
    updates: Structures,
    *,
    gradient: Structure | None = None,
    gradients: Structures | None = None,
    own_gradients: Structures | None = None,
    samples: Iterable[float] | None = None,
    probe_weights: Iterable[float] | None = None,
    pool: Structures | None = None,
    needed: set[str],
) -> Report:
    """Return the round's `Report`, each structure checked against the leaves ``base`` of the params.

    Updates must have all leaves of ``base``; gradients at least the ``needed`` ones, those that will be measured.
    Measuring shows whether these are finite, so only the others are searched here for entries that are not.

    >>> take({"w": np.zeros(2)}, [{"w": np.zeros(3)}], needed={"w"})
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: device 0: leaf 'w' must have shape (2,), got (3,)
    """
    if gradient is not None and gradients is not None:
        raise FedcontextError("give gradient or gradients, not both")
    moves = _each("device", updates)
    if not moves:
        raise FedcontextError("there are no updates to aggregate")
    pulls = {"the gradient": gradient} if gradient is not None else _each("probe", gradients)
    if gradients is not None and not pulls:
        raise FedcontextError("gradients is empty: leave it out, or give at least one probe's gradient")
    owns = _each("own gradient of device", own_gradients)
    if owns and len(owns) != len(moves):
        raise FedcontextError(f"own_gradients must be one for each of {len(moves)} updates, got {len(owns)}")
    for name, leaf in base.items():
        if kind_of(leaf) == "other":
            raise FedcontextError(f"params: {leaf_name(name)} must be real floating point or integer, got {leaf.dtype}")
    counts = _numbers("samples", samples, len(moves))
    return Report(
        updates=[_checked(owner, move, base, set(base), needed) for owner, move in moves.items()],
        samples=np.ones(len(moves)) if counts is None else counts,
        gradients=[_checked(owner, pull, base, needed, needed) for owner, pull in pulls.items()],
        own_gradients=[_checked(owner, pull, base, needed, needed) for owner, pull in owns.items()],
        probe_weights=_numbers("probe_weights", probe_weights, len(pulls or owns)),
        pool=[_checked(owner, move, base, needed, needed) for owner, move in _each("pool device", pool).items()],
    )


def blame(measured: set[str], **given: Structures | None) -> None:
    """Refuse the first structure with an entry that is not finite, by its name; called when a sum was not.

    >>> blame({"w"}, device=[{"w": np.zeros(2)}, {"w": np.array([1.0, np.inf])}])
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: device 1: leaf 'w' has NaN or infinite entries
    """
    for kind, structures in given.items():
        for owner, structure in _each(kind.replace("_", " "), structures).items():
            for name, leaf in leaves(structure).items():
                if name in measured:
                    _check_finite(owner, name, leaf)
    raise FedcontextError("the updates are too large: their squares overflow float64")


def take_targets(base: Leaves, updates: Structures, out: Structure) -> Leaves:
    """Return the arrays to write the new params into, checked against the params and against what is still to be read.

    >>> take_targets({"w": np.zeros(2)}, [{"w": np.ones(2)}], {"w": np.zeros(2)})
    {'w': array([0., 0.])}
    """
    targets = _checked("out", out, base, set(base), set(base))
    for name, leaf in targets.items():
        if not framework(leaf).writable(leaf):
            raise FedcontextError(
                f"out: {leaf_name(name)} cannot be written in place: give a contiguous, writable array"
            )
    moves = {owner: leaves(move) for owner, move in _each("device", updates).items()}
    check_no_overlap(targets, {"params": base, **moves})
    return targets


def choose(what: str, chosen: Iterable[str | int], base: Leaves) -> set[str]:
    """Return the names of the chosen leaves, given by name or by position.

    >>> choose("layers", [-1], {"hidden": np.zeros(3), "last": np.zeros(2)})
    {'last'}
    """
    names, found = list(base), set()
    for choice in [chosen] if isinstance(chosen, str | int) else chosen:
        if isinstance(choice, int) and -len(names) <= choice < len(names):
            found.add(names[choice])
        elif choice in base:
            found.add(str(choice))
        else:
            raise FedcontextError(f"{what}: there is no leaf {choice!r}, only {', '.join(names) or 'one array'}")
    return found


def _each(kind: str, given: Structures | None) -> dict[str, Structure]:
    """Return what each device gave, under the name by which errors call it."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        named = {f"{kind} {key}".strip(): value for key, value in given.items()}
        if len(named) < len(given):
            raise FedcontextError(f"two of the names {', '.join(map(repr, given))} are written the same")
        return named
    if not isinstance(given, list | tuple) and not hasattr(given, "__len__"):
        raise FedcontextError(f"updates and gradients must be sequences or mappings, got {type(given).__name__}")
    return {f"{kind} {index}": value for index, value in enumerate(given)}


def _checked(owner: str, structure: Structure, base: Leaves, needed: set[str], measured: set[str]) -> Leaves:
    try:
        found = leaves(structure)
    except FedcontextError as error:
        raise FedcontextError(f"{owner}: {error}") from None
    missing, unknown = needed - found.keys(), found.keys() - base.keys()
    if missing or unknown:
        lack = ", ".join(leaf_name(name) for name in base if name in missing)
        excess = ", ".join(leaf_name(name) for name in found if name in unknown)
        said = [f"lacks {lack}"] * bool(lack) + [f"has {excess}, unknown to params"] * bool(excess)
        raise FedcontextError(f"{owner}: the structure differs from params: it {' and '.join(said)}")
    for name, leaf in found.items():
        _check_like(owner, name, leaf, base[name])
        if name not in measured:
            _check_finite(owner, name, leaf)
    return found


def _check_like(owner: str, name: str, leaf: Array, base: Array) -> None:
    expected = framework(base)
    alike = type(leaf) is type(base) and leaf.shape == base.shape and leaf.dtype == base.dtype
    if alike and expected.place(leaf) == expected.place(base):
        return
    ways = framework(leaf)
    if ways.name != expected.name:
        raise FedcontextError(f"{owner}: {leaf_name(name)} must be a {expected.name} array, got {ways.name}")
    if tuple(leaf.shape) != tuple(base.shape):
        raise FedcontextError(
            f"{owner}: {leaf_name(name)} must have shape {tuple(base.shape)}, got {tuple(leaf.shape)}"
        )
    if leaf.dtype != base.dtype:
        raise FedcontextError(f"{owner}: {leaf_name(name)} must have dtype {base.dtype}, got {leaf.dtype}")
    if ways.place(leaf) != ways.place(base):
        raise FedcontextError(f"{owner}: {leaf_name(name)} must be on {ways.place(base)}, got {ways.place(leaf)}")


def _check_finite(owner: str, name: str, leaf: Array) -> None:
    if kind_of(leaf) == "floating" and not all_finite(leaf):
        raise FedcontextError(f"{owner}: {leaf_name(name)} has NaN or infinite entries")


def _numbers(what: str, given: Iterable[float] | None, count: int) -> FloatArray | None:
    """Return ``given`` as float64 if it holds ``count`` non-negative numbers that are not all zero."""
    if given is None:
        return None
    numbers = np.asarray(list(given), dtype=np.float64)
    if numbers.shape != (count,):
        raise FedcontextError(f"{what} must hold {count} numbers, got {numbers.size}")
    if not (np.isfinite(numbers).all() and (numbers >= 0).all() and numbers.sum() > 0):
        raise FedcontextError(f"{what} must be non-negative and not all zero, got {numbers.tolist()}")
    return numbers
