"""NumPy arrays: compiled sums where Numba is installed and the arrays are large, else BLAS on float64 blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType

import numpy as np

from fedcontext.arrays.tree import (
    Array,
    FloatArray,
    Framework,
    blocks,
    check_integers,
    flat_on_host,
    kind_of,
    unflat_each,
)

COMPILED_FROM = 2**20  # entries of all arrays together from which the compiled sums pay for being loaded


class _NumPy:
    name = "NumPy"

    def place(self, array: Array) -> object:
        return "cpu"

    def products(self, rows: Sequence[Array], columns: Sequence[Array], scratch: int) -> FloatArray:
        if gram := _compiled_sums([*rows, *columns]):
            compiled: FloatArray = gram.products(rows, columns)
            return compiled
        total = np.zeros((len(rows), len(rows) + len(columns)))
        for start, stop in blocks(rows[0].size, len(rows) + len(columns), scratch):
            block = _load([*rows, *columns], start, stop)
            total += block[: len(rows)] @ block.T
        return total

    def combine(
        self, base: Array, rows: Sequence[Array], weights: FloatArray, scratch: int, out: Array | None = None
    ) -> Array:
        result = np.empty(base.shape, base.dtype) if out is None else out
        if gram := _compiled_sums([base, result, *rows]):
            gram.combine(base, rows, weights, result)
            return result
        flat = result.reshape(-1)
        for start, stop in blocks(base.size, len(rows) + 1, scratch):
            block = _load([base, *rows], start, stop)
            total = block[0] + weights @ block[1:]
            with np.errstate(over="ignore"):  # `aggregate` checks that results are finite
                flat[start:stop] = total if kind_of(base) == "floating" else check_integers(np.rint(total), base)
        return result

    def largest(self, array: Array, scratch: int) -> float:
        if array.dtype in (np.float32, np.float64) and array.flags.c_contiguous:
            with np.errstate(over="ignore", invalid="ignore"):
                length = math.sqrt(np.vdot(array, array))  # one pass at the speed of BLAS; NaN and overflow go on below
            if length < math.inf:
                return length
        pieces = (_entries(array, start, stop) for start, stop in blocks(array.size, 1, scratch))
        extremes = np.array([extreme for piece in pieces for extreme in (piece.max(), piece.min())], np.float64)
        return float(np.abs(extremes).max(initial=0))

    def writable(self, array: Array) -> bool:
        return bool(array.flags.writeable and array.flags.c_contiguous)

    def from_numpy(self, values: Array, dtype: str, like: Array) -> Array:
        return values.astype(dtype)

    def flat(self, arrays: Sequence[Array]) -> FloatArray:
        return flat_on_host(arrays)

    def unflat(self, vector: FloatArray, like: Sequence[Array]) -> list[Array]:
        return unflat_each(self, vector, like)


def _compiled_sums(arrays: Sequence[Array]) -> ModuleType | None:
    """Return the module of compiled sums if Numba is installed and they can and should be used for these arrays."""
    first = arrays[0]
    if first.size * len(arrays) < COMPILED_FROM or first.dtype not in (np.float32, np.float64):
        return None
    if not all(a.dtype == first.dtype and a.flags.c_contiguous and a.flags.aligned for a in arrays):
        return None
    if find_spec("numba") is None:
        return None
    from fedcontext.arrays import gram

    return gram


def _load(arrays: Sequence[Array], start: int, stop: int) -> FloatArray:
    """Return some entries of each array as the rows of a float64 matrix."""
    block = np.empty((len(arrays), stop - start))
    for row, array in zip(block, arrays, strict=True):
        row[:] = _entries(array, start, stop)
    return block


def _entries(array: Array, start: int, stop: int) -> Array:
    """Return some entries in C order; where memory has another order, only these are copied."""
    return array.reshape(-1)[start:stop] if array.flags.c_contiguous else array.flat[start:stop]


NUMPY: Framework = _NumPy()
