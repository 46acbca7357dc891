"""Sums over K large arrays at the speed of memory, compiled: inner products in one pass, a weighted sum in another.

Arrays are handed over by address, so that K separate models need not be stacked. Rows are read in stretches, turned
into float64, and multiplied three by three: nine sums stay in registers and every value loaded is used three times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fedcontext.arrays import FloatArray
from fedcontext.compiling import compiled
from fedcontext.threads import on_all_cores, workers

Matrix = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
STRETCH = 8192  # entries of one row that are read at a time
PIECE = 256  # entries that are multiplied at a time, so that all rows of a piece stay close
TILE = 3


def products(rows: Sequence[Matrix], columns: Sequence[Matrix]) -> FloatArray:
    """Return (K, K + P): the inner products of ``rows`` with themselves, then with ``columns``, summed in float64.

    >>> products([np.arange(3.0), np.ones(3)], [np.ones(3)])
    array([[5., 3., 3.],
           [3., 3., 3.]])
    """
    count, total = len(rows), len(rows) + len(columns)
    everyone = _addresses([*rows, *columns])
    padded = -(-count // TILE) * TILE
    width = -(-total // TILE) * TILE
    parts = np.zeros((workers(), padded, width))

    def work(task: tuple[int, int, int]) -> None:
        worker, start, stop = task
        pieces = np.zeros((STRETCH // PIECE, width, PIECE))
        _products(everyone, count, rows[0].dtype.type, start, stop, pieces, parts[worker])

    on_all_cores(work, _shares(rows[0].size))
    whole: FloatArray = parts.sum(axis=0)[:count, :total]
    upper = np.triu(whole[:, :count])
    whole[:, :count] = upper + np.triu(upper, 1).T
    return whole


def combine(base: Matrix, rows: Sequence[Matrix], weights: FloatArray, result: Matrix) -> None:
    """Write ``base + Σ weights · rows`` into ``result``, which may be ``base`` itself.

    >>> result = np.zeros(2)
    >>> combine(np.ones(2), [np.arange(2.0)], np.array([10.0]), result)
    >>> result
    array([ 1., 11.])
    """
    everyone = _addresses([base, *rows])
    factors = np.concatenate([[1.0], weights])

    def work(task: tuple[int, int, int]) -> None:
        _, start, stop = task
        _combine(everyone, factors, base.dtype.type, start, stop, result.reshape(-1))

    on_all_cores(work, _shares(base.size))


def _addresses(arrays: Sequence[Matrix]) -> IntArray:
    return np.array([array.ctypes.data for array in arrays], np.int64)


def _shares(size: int) -> list[tuple[int, int, int]]:
    """Return one task for each core: its number, and the stretch of entries it works on."""
    cuts = [size * part // workers() // STRETCH * STRETCH for part in range(workers())] + [size]
    return [(part, cuts[part], cuts[part + 1]) for part in range(workers())]


def _typed_pointer(context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


_pointer: Any = intrinsic(_typed_pointer)
_array: Any = vars(numba)["carray"]


@compiled
def _products(addresses: IntArray, count: int, dtype: Any, start: int, stop: int, pieces: Matrix, out: Matrix) -> None:
    total = addresses.size
    for stretch in range(start, stop, STRETCH):
        width = min(STRETCH, stop - stretch)
        used = -(-width // PIECE)
        if width < STRETCH:
            pieces[:] = 0
        for row in range(total):
            values = _array(_pointer(addresses[row]), (stop,), dtype)[stretch : stretch + width]
            for piece in range(used):
                _load(values[piece * PIECE : piece * PIECE + PIECE], pieces[piece, row])
        for piece in range(used):
            for row in range(0, count, TILE):
                for column in range(row, total, TILE):
                    _multiply(pieces[piece], row, column, out)


@compiled
def _load(values: Matrix, target: Matrix) -> None:
    for x in range(values.size):
        target[x] = values[x]


@compiled
def _multiply(piece: Matrix, row: int, column: int, out: Matrix) -> None:
    """Add to out the nine inner products of three rows and three columns of a piece."""
    a0, a1, a2 = piece[row], piece[row + 1], piece[row + 2]
    b0, b1, b2 = piece[column], piece[column + 1], piece[column + 2]
    s00 = s01 = s02 = s10 = s11 = s12 = s20 = s21 = s22 = 0.0
    for x in range(piece.shape[1]):
        p0, p1, p2, q0, q1, q2 = a0[x], a1[x], a2[x], b0[x], b1[x], b2[x]
        s00 += p0 * q0
        s01 += p0 * q1
        s02 += p0 * q2
        s10 += p1 * q0
        s11 += p1 * q1
        s12 += p1 * q2
        s20 += p2 * q0
        s21 += p2 * q1
        s22 += p2 * q2
    sums = ((s00, s01, s02), (s10, s11, s12), (s20, s21, s22))
    for i in range(TILE):
        for j in range(TILE):
            out[row + i, column + j] += sums[i][j]


@compiled
def _combine(addresses: IntArray, weights: FloatArray, dtype: Any, start: int, stop: int, result: Matrix) -> None:
    sums = np.empty(PIECE)
    for piece in range(start, stop, PIECE):
        width = min(PIECE, stop - piece)
        sums[:] = 0
        for row in range(addresses.size):
            values = _array(_pointer(addresses[row]), (stop,), dtype)[piece : piece + width]
            weight = weights[row]
            for x in range(width):
                sums[x] += weight * values[x]
        target = result[piece : piece + width]
        for x in range(width):
            target[x] = sums[x]
