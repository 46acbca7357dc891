"""JAX arrays: read as NumPy arrays, which have float64 without a global switch, and put back on their device."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from fedcontext.arrays.numpy import NUMPY
from fedcontext.arrays.tree import Array, FloatArray, Framework, flat_on_host, unflat_each


class _JAX:
    name = "JAX"

    def place(self, array: Array) -> object:
        return array.sharding

    def products(self, rows: Sequence[Array], columns: Sequence[Array], scratch: int) -> FloatArray:
        return NUMPY.products(_to_host(rows), _to_host(columns), scratch)

    def combine(
        self, base: Array, rows: Sequence[Array], weights: FloatArray, scratch: int, out: Array | None = None
    ) -> Array:
        assert out is None, "JAX arrays are immutable"
        return jax.device_put(NUMPY.combine(np.asarray(base), _to_host(rows), weights, scratch), base.sharding)

    def largest(self, array: Array, scratch: int) -> float:
        return NUMPY.largest(np.asarray(array), scratch)

    def writable(self, array: Array) -> bool:
        return False

    def from_numpy(self, values: Array, dtype: str, like: Array) -> Array:
        return jax.device_put(values.astype(jax.numpy.dtype(dtype)), like.sharding)

    def flat(self, arrays: Sequence[Array]) -> FloatArray:
        return flat_on_host(arrays)

    def unflat(self, vector: FloatArray, like: Sequence[Array]) -> list[Array]:
        return unflat_each(self, vector, like)


def _to_host(arrays: Sequence[Array]) -> list[Array]:
    return [np.asarray(array) for array in arrays]


JAX: Framework = _JAX()
