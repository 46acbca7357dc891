"""Where arrays lie in memory, and whether some may be written while others are read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from fedcontext.arrays.tree import Array, Leaves, leaf_name
from fedcontext.errors import FedcontextError


def check_apart(targets: Leaves, given: Mapping[str, Leaves]) -> None:
    """Refuse a target in the memory of anything else, tied weights too, but for exactly that of its own leaf.

    A leaf's entries are read before they are written, one by one; those of others would be read after.

    >>> buffer = np.zeros(5)
    >>> check_apart({"w": buffer[1:4]}, {"params": {"w": buffer[1:4]}, "device 0": {"w": np.ones(3)}})
    >>> check_apart({"w": buffer[1:4]}, {"params": {"w": buffer[:3]}})
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: out: leaf 'w' shares memory with leaf 'w' of params: give it memory of its own, or params itself (with tied weights: leave out= out, and copy the result)
    """
    spans = sorted((_memory(leaf), name) for name, leaf in targets.items())
    for ((_, stop), name), ((start, _), other) in pairwise(spans):
        if start < stop:
            raise _shared(name, "out", other)
    stops = [stop for (_, stop), _ in spans]
    for owner, read in given.items():
        for other, leaf in read.items():
            first, last = _memory(leaf)
            found = bisect_right(stops, first)  # spans do not overlap: only this one can begin before the leaf's end
            if found < len(spans) and spans[found][0][0] < last:
                name = spans[found][1]
                if name != other or _layout(leaf) != _layout(targets[name]):
                    raise _shared(name, owner, other)


def _shared(name: str, owner: str, other: str) -> FedcontextError:
    return FedcontextError(
        f"out: {leaf_name(name)} shares memory with {leaf_name(other)} of {owner}: give it memory of its own, or params "
        "itself (with tied weights: leave out= out, and copy the result)"
    )


def _memory(leaf: Array) -> tuple[int, int]:
    """Return where an array begins and ends in memory, gaps between its entries included; nowhere for nothing, or JAX."""
    start, steps = _layout(leaf)
    stop = start + (leaf.dtype.itemsize if start else 0)
    for count, step in steps:
        if count == 0:
            return 0, 0
        reach = (count - 1) * step
        start, stop = (start, stop + reach) if reach > 0 else (start + reach, stop)
    return start, stop


def _layout(leaf: Array) -> tuple[int, list[tuple[int, int]]]:
    """Return the address of an array's first entry, and the length of each axis with the bytes from entry to entry."""
    if hasattr(leaf, "data_ptr"):
        start, strides = leaf.data_ptr(), [step * leaf.dtype.itemsize for step in leaf.stride()]
    elif isinstance(leaf, np.ndarray):
        start, strides = leaf.ctypes.data, list(leaf.strides)
    else:
        return 0, []
    return start, [(count, step) for count, step in zip(leaf.shape, strides, strict=True) if count != 1]
