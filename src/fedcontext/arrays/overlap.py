"""A check that writing results in place cannot change what is still to be read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from fedcontext.arrays.tree import Array, Leaves, leaf_name, size_of
from fedcontext.errors import FedcontextError


def check_no_overlap(targets: Leaves, sources: Mapping[str, Leaves]) -> None:
    """Refuse targets that share memory with each other or with a source, unless it is the same leaf in the same order.

    A leaf may be its own target because its entries are read before they are written.

    >>> buffer = np.zeros(5)
    >>> check_no_overlap({"w": buffer[1:4]}, {"params": {"w": buffer[1:4]}, "device 0": {"w": np.ones(3)}})
    >>> check_no_overlap({"w": buffer[1:4]}, {"params": {"w": buffer[:3]}})
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: out: leaf 'w' shares memory with leaf 'w' of params; pass separate memory, or params itself (without tied weights)
    """  # noqa: W505
    spans = sorted((*_span(leaf), name) for name, leaf in targets.items() if size_of(leaf))
    for (_, stop, name), (start, _, other) in pairwise(spans):
        if start < stop:
            raise _overlap(name, other, "out")
    stops = [stop for _, stop, _ in spans]
    for owner, source in sources.items():
        for other, leaf in source.items():
            start, stop = _span(leaf)
            place = bisect_right(stops, start)  # the first target that ends after the leaf begins
            if not size_of(leaf) or place == len(spans) or spans[place][0] >= stop:
                continue
            name = spans[place][2]
            if name != other or spans[place][:2] != (start, stop) or not _is_contiguous(leaf):
                raise _overlap(name, other, owner)


def _overlap(name: str, other: str, owner: str) -> FedcontextError:
    return FedcontextError(
        f"out: {leaf_name(name)} shares memory with {leaf_name(other)} of {owner}; "
        "pass separate memory, or params itself (without tied weights)"
    )


def _span(leaf: Array) -> tuple[int, int]:
    """Return the addresses of an array's first byte and the one past its last; (0, 0) for JAX, which never shares."""
    if isinstance(leaf, np.ndarray):
        start, strides = leaf.ctypes.data, leaf.strides
        if leaf.flags.c_contiguous:
            return start, start + leaf.nbytes
    elif hasattr(leaf, "data_ptr"):
        start, strides = leaf.data_ptr(), tuple(step * leaf.dtype.itemsize for step in leaf.stride())
    else:
        return 0, 0
    reach = [(count - 1) * step for count, step in zip(leaf.shape, strides, strict=True)]
    return start + sum(min(r, 0) for r in reach), start + sum(max(r, 0) for r in reach) + leaf.dtype.itemsize


def _is_contiguous(leaf: Array) -> bool:
    return bool(leaf.flags.c_contiguous if isinstance(leaf, np.ndarray) else leaf.is_contiguous())
