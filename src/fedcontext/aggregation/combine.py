"""Weighted sums of updates added to params, leaf by leaf, with overflows found before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from fedcontext.arrays.tree import (
    SCRATCH,
    Array,
    FloatArray,
    Leaves,
    all_finite,
    framework,
    kind_of,
    leaf_name,
    zeros_like,
)
from fedcontext.errors import FedcontextError

Rows: TypeAlias = Mapping[str, Sequence[Array]]  # by leaf: the arrays of several devices


def largest_entries(params: Leaves, scratch: int) -> dict[str, float]:
    """Return the largest magnitude in each floating-point leaf; raise `FedcontextError` if one is not finite."""
    floating = {name: leaf for name, leaf in params.items() if kind_of(leaf) == "floating"}
    largest = {name: framework(leaf).largest(leaf, scratch) for name, leaf in floating.items()}
    for name, value in largest.items():
        if not np.isfinite(value):
            raise FedcontextError(f"params: {leaf_name(name)} has NaN or infinite entries")
    return largest


def add_weighted(
    base: Leaves, rows: Rows, weights: Mapping[str, FloatArray], safe: set[str], out: Leaves | None, scratch: int
) -> Leaves:
    """Return base + Σ weights · rows; leaves that might overflow come first: after an error ``out`` is unchanged."""
    target: Mapping[str, Array | None] = dict.fromkeys(base) if out is None else out
    unsafe = {
        name: _checked_sum(name, base[name], rows[name], weights[name], scratch) for name in base if name not in safe
    }
    new = {
        name: framework(base[name]).combine(base[name], rows[name], weights[name], scratch, target[name])
        for name in safe
    }
    return {name: new[name] if name in safe else _written(unsafe[name], target[name]) for name in base}


def add_step(base: Leaves, step: Leaves) -> Leaves:
    """Return the leaves of params after a step; raise `FedcontextError` if one overflows.

    >>> add_step({"w": np.ones(2, np.float32)}, {"w": np.array([1.0, 2.0], np.float32)})
    {'w': array([2., 3.], dtype=float32)}
    """
    rows = {name: [leaf] for name, leaf in step.items()}
    return add_weighted(base, rows, dict.fromkeys(step, np.ones(1)), set(), None, SCRATCH)


def _checked_sum(name: str, leaf: Array, rows: Sequence[Array], weights: FloatArray, scratch: int) -> Array:
    try:
        result = framework(leaf).combine(leaf, rows, weights, scratch, None)
        if kind_of(leaf) != "floating" or all_finite(result, scratch):
            return result
    except OverflowError:  # of integers
        pass
    advice = "; lower the learning rate of the devices, or increase the smoothness of a rule that has one"
    raise FedcontextError(
        f"the step overflows {leaf.dtype} in {leaf_name(name)}{advice if kind_of(leaf) == 'floating' else ''}"
    )


def _written(values: Array, target: Array | None) -> Array:
    if target is None:
        return values
    (target.detach() if hasattr(target, "detach") else target)[...] = values
    return target


def step_of_integers(new: Leaves, base: Leaves, scratch: int) -> Leaves:
    """Return how far the integer leaves of params moved: they were rounded after the step was added."""
    zeros = zeros_like({name: leaf for name, leaf in base.items() if kind_of(leaf) == "integer"})
    rows = {name: [new[name], base[name]] for name in zeros}
    return add_weighted(zeros, rows, dict.fromkeys(zeros, np.array([1.0, -1.0])), set(), None, scratch)
