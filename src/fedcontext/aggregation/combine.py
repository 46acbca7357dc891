"""Weighted sums of updates added to params, leaf by leaf, with overflows found before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

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
    rebuild,
)
from fedcontext.errors import FedcontextError


def largest_entry(name: str, leaf: Array, scratch: int) -> float:
    """Return the largest magnitude in a leaf of params; raise `FedcontextError` if one is not finite."""
    value = framework(leaf).largest(leaf, scratch)
    if not np.isfinite(value):
        raise FedcontextError(f"params: {leaf_name(name)} has NaN or infinite entries")
    return value


def add_weighted(
    base: Leaves,
    updates: Sequence[Leaves],
    weights: Mapping[str, FloatArray],
    safe: set[str],
    out: Leaves | None,
    scratch: int,
) -> Leaves:
    """Return base + Σ weights · updates; leaves that might overflow come first, so that an error leaves ``out`` as it was."""
    target: Mapping[str, Array | None] = dict.fromkeys(base) if out is None else out
    rows = {name: [update[name] for update in updates] for name in base}
    unsafe = {
        name: _checked_sum(name, base[name], rows[name], weights[name], scratch) for name in base if name not in safe
    }
    new = {
        name: framework(base[name]).combine(base[name], rows[name], weights[name], scratch, target[name])
        for name in safe
    }
    return {name: new[name] if name in safe else written(unsafe[name], target[name]) for name in base}


def add_step(base: Leaves, step: Leaves, out: Leaves | None, scratch: int) -> Leaves:
    """Return the leaves of params after a step, in ``out`` if given; raise `FedcontextError` if one overflows.

    >>> from fedcontext.arrays.tree import SCRATCH
    >>> add_step({"w": np.ones(2, np.float32)}, {"w": np.array([1.0, 2.0], np.float32)}, None, SCRATCH)
    {'w': array([2., 3.], dtype=float32)}
    """
    return add_weighted(base, [step], dict.fromkeys(step, np.ones(1)), set(), out, scratch)


def _checked_sum(name: str, leaf: Array, rows: Sequence[Array], weights: FloatArray, scratch: int) -> Array:
    try:
        result = framework(leaf).combine(leaf, rows, weights, scratch, None)
        if kind_of(leaf) != "floating" or all_finite(result, scratch):
            return result
    except OverflowError:  # of integers
        pass
    advice = "; increase the smoothness" if kind_of(leaf) == "floating" else ""
    raise FedcontextError(f"the step overflows {leaf.dtype} in {leaf_name(name)}{advice}")


def written(values: Array, target: Array | None) -> Array:
    """Return ``target`` with the values in it, or the values where there is none."""
    if target is None:
        return values
    (target.detach() if hasattr(target, "detach") else target)[...] = values
    return target


def zeros_like(base: Leaves) -> Leaves:
    """Return leaves of zeros."""
    return {name: leaf * 0 for name, leaf in base.items()}


def with_integers(step: Structure, new: Structure, base: Leaves, scratch: int) -> Structure:
    """Return the step with integer leaves as the difference of the params, which were rounded after the step was added."""
    after, zeros = leaves(new), zeros_like({n: leaf for n, leaf in base.items() if kind_of(leaf) == "integer"})
    weights = dict.fromkeys(zeros, np.array([1.0, -1.0]))
    return rebuild(step, {**leaves(step), **add_weighted(zeros, [after, base], weights, set(), None, scratch)})
