"""Inner products and weighted sums of K large float32 or float64 arrays, compiled with Numba, on all cores.

NumPy's way converts blocks to float64 copies and calls BLAS, which for a few long rows takes several times as long as
reading them. Here entries are converted in registers, every sum is in float64, and the K arrays are passed by address,
so they need not be stacked. The entries are cut into parts that depend only on their number: results have the same
bits on any number of cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from fedcontext.arrays.tree import FloatArray
from fedcontext.jit import announced, compiled, inner
from fedcontext.threads import on_all_cores

Vector = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]

TILE = 4  # rows and columns of a tile: its 16 sums and 8 factors fit in the vector registers
PARTS = 32  # independent tasks, at most
PARTS_BYTES = 32 * 2**20  # of all parts' sums together, at most
PART = 2**19  # entries of all arrays together in a part, at least: starting one costs time too
FEW_ROWS = 16
FEW_ROWS_WIDTH, WIDTH = 256, 1024  # entries of a piece, for products: 16 rows fit in the L1 cache, 200 in 1 MB
FEW_ROWS_SPAN, SPAN = 128, 8192  # the same for a weighted sum: the prefetcher follows few rows at once


def products(rows: Sequence[Vector], columns: Sequence[Vector]) -> FloatArray:
    """Return (K, K + P), the inner products of the rows with themselves, then with the columns.

    >>> products([np.arange(3.0), np.ones(3)], [np.ones(3)])
    array([[5., 3., 3.],
           [3., 3., 3.]])
    """
    count, like = len(rows), np.empty(0, rows[0].dtype)
    addresses = _addresses([*rows, *columns])  # the last tile of rows is filled up with columns
    shape = count + -count % TILE, len(addresses)
    cuts = _cuts(rows[0].size, len(addresses), PARTS_BYTES // (8 * shape[0] * shape[1]))
    sums = np.zeros((len(cuts) - 1, *shape))
    _compile(rows[0].dtype)
    own = count + len(columns)
    on_all_cores(
        lambda part: _add_products(addresses, own, cuts[part], cuts[part + 1], like, sums[part]), range(len(sums))
    )
    total: FloatArray = sums.sum(axis=0)[:count, :own]
    gram = total[:, :count]  # zero below the diagonal
    gram += np.tril(gram.T, -1)
    return total


def combine(base: Vector, rows: Sequence[Vector], weights: FloatArray, result: Vector) -> None:
    """Write ``base + Σ weights · rows`` into ``result``, which may be ``base`` or one of the rows.

    >>> result = np.zeros(2)
    >>> combine(np.ones(2), [np.arange(2.0)], np.array([10.0]), result)
    >>> result
    array([ 1., 11.])
    """
    addresses = _addresses([*rows, base])
    factors = np.zeros(len(addresses))
    factors[: len(rows) + 1] = [*weights, 1]
    cuts, flat = _cuts(base.size, len(addresses)), result.reshape(-1)
    _compile(base.dtype)
    on_all_cores(lambda part: _write_sum(addresses, factors, cuts[part], cuts[part + 1], flat), range(len(cuts) - 1))


def _addresses(arrays: Sequence[Vector]) -> IntArray:
    """Return where the arrays begin in memory, the last repeated until their number is a multiple of `TILE`."""
    addresses = [array.ctypes.data for array in arrays]
    return np.array(addresses + addresses[-1:] * (-len(arrays) % TILE), np.int64)


def _cuts(size: int, arrays: int, most: int = PARTS) -> list[int]:
    """Return where the ``size`` entries of each of ``arrays`` arrays are cut into ``most`` parts, or fewer if short."""
    parts = max(1, min(most, PARTS, size * arrays // PART))
    return [part * size // parts for part in range(parts + 1)]


@cache
def _compile(dtype: np.dtype[Any]) -> None:
    """Compile the kernels for this dtype, or load them from disk, before several threads need them."""
    with announced("inner products and weighted sums of large arrays (a few seconds)"):
        vector = np.zeros(1, dtype)
        _add_products(_addresses([vector]), 1, 0, 1, vector[:0], np.zeros((TILE, TILE)))
        _write_sum(_addresses([vector]), np.zeros(TILE), 0, 1, vector)


def _integer_to_pointer(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(address), generate


_pointer: Any = intrinsic(_integer_to_pointer)  # from an address to what `carray` takes


@inner
def _four(addresses: IntArray, first: int, offset: int, width: int, like: Vector) -> tuple[Vector, ...]:
    """Return ``width`` entries of four arrays, ``offset`` bytes from where they begin."""
    return (
        carray(_pointer(addresses[first] + offset), (width,), like.dtype),
        carray(_pointer(addresses[first + 1] + offset), (width,), like.dtype),
        carray(_pointer(addresses[first + 2] + offset), (width,), like.dtype),
        carray(_pointer(addresses[first + 3] + offset), (width,), like.dtype),
    )


@compiled
def _add_products(addresses: IntArray, own: int, start: int, stop: int, like: Vector, sums: FloatArray) -> None:
    """Add to ``sums`` the products of the arrays' entries from start to stop, for tiles on and above the diagonal.

    The first ``own`` addresses are of different arrays, ``like`` is an empty array of their dtype. All tiles of one
    piece are done before the next piece is read, so each entry comes from memory once and from the cache after that.
    """
    span = FEW_ROWS_WIDTH if len(addresses) <= FEW_ROWS else WIDTH
    tiled = own - own % TILE  # the last arrays, at most three, have no tiles: corners have their products
    for begin in range(start, stop, span):
        width, offset = min(span, stop - begin), begin * like.itemsize
        for row in range(0, len(sums), TILE):
            _add_corner(addresses, row, tiled, offset, width, like, sums, own % TILE)
            for column in range(row + TILE, tiled, TILE):
                _add_tile(addresses, row, column, offset, width, like, sums)


@inner
def _add_tile(addresses: IntArray, i: int, j: int, offset: int, width: int, like: Vector, sums: FloatArray) -> None:
    """Add to ``sums`` the products of arrays i to i + 3 with arrays j to j + 3.

    Sixteen sums for eight loads: with smaller tiles the loads would be the limit. The sums are separate variables, and
    the loop counts from zero, so that LLVM keeps each of them in a vector register.
    """
    a0, a1, a2, a3 = _four(addresses, i, offset, width, like)
    b0, b1, b2, b3 = _four(addresses, j, offset, width, like)
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = 0.0
    for x in range(width):
        p0, p1, p2, p3 = np.float64(a0[x]), np.float64(a1[x]), np.float64(a2[x]), np.float64(a3[x])
        q0, q1, q2, q3 = np.float64(b0[x]), np.float64(b1[x]), np.float64(b2[x]), np.float64(b3[x])
        s00, s01, s02, s03 = s00 + p0 * q0, s01 + p0 * q1, s02 + p0 * q2, s03 + p0 * q3
        s10, s11, s12, s13 = s10 + p1 * q0, s11 + p1 * q1, s12 + p1 * q2, s13 + p1 * q3
        s20, s21, s22, s23 = s20 + p2 * q0, s21 + p2 * q1, s22 + p2 * q2, s23 + p2 * q3
        s30, s31, s32, s33 = s30 + p3 * q0, s31 + p3 * q1, s32 + p3 * q2, s33 + p3 * q3
    _add(sums, i, j, ((s00, s01, s02, s03), (s10, s11, s12, s13), (s20, s21, s22, s23), (s30, s31, s32, s33)))


@inner
def _add_corner(
    addresses: IntArray, i: int, j: int, offset: int, width: int, like: Vector, sums: FloatArray, last: int
) -> None:
    """Add to ``sums`` the products of arrays i to i + 3 with each other, and with the ``last`` arrays, from j on.

    With each other: ten of the sixteen of a tile on the diagonal, or fewer where these arrays are the last themselves.
    A tile of these few columns would load and convert the four arrays once more. LLVM makes a loop of the one here for
    each number of last arrays.
    """
    a0, a1, a2, a3 = _four(addresses, i, offset, width, like)
    b0, b1, b2, _ = _four(addresses, j if last > 0 else i, offset, width, like)
    s00 = s01 = s02 = s03 = s11 = s12 = s13 = s22 = s23 = s33 = 0.0
    r00 = r01 = r02 = r10 = r11 = r12 = r20 = r21 = r22 = r30 = r31 = r32 = 0.0
    for x in range(width):
        p0, p1, p2 = np.float64(a0[x]), np.float64(a1[x]), np.float64(a2[x])
        s00, s01, s02 = s00 + p0 * p0, s01 + p0 * p1, s02 + p0 * p2
        s11, s12, s22 = s11 + p1 * p1, s12 + p1 * p2, s22 + p2 * p2
        if i < j:
            p3 = np.float64(a3[x])
            s03, s13, s23, s33 = s03 + p0 * p3, s13 + p1 * p3, s23 + p2 * p3, s33 + p3 * p3
            if last > 0:
                q0 = np.float64(b0[x])
                r00, r10, r20, r30 = r00 + p0 * q0, r10 + p1 * q0, r20 + p2 * q0, r30 + p3 * q0
            if last > 1:
                q1 = np.float64(b1[x])
                r01, r11, r21, r31 = r01 + p0 * q1, r11 + p1 * q1, r21 + p2 * q1, r31 + p3 * q1
            if last > 2:
                q2 = np.float64(b2[x])
                r02, r12, r22, r32 = r02 + p0 * q2, r12 + p1 * q2, r22 + p2 * q2, r32 + p3 * q2
    _add(sums, i, i, ((s00, s01, s02, s03), (0.0, s11, s12, s13), (0.0, 0.0, s22, s23), (0.0, 0.0, 0.0, s33)))
    if i < j and last > 0:
        _add(sums, i, j, ((r00, r01, r02, 0.0), (r10, r11, r12, 0.0), (r20, r21, r22, 0.0), (r30, r31, r32, 0.0)))


@inner
def _add(sums: FloatArray, i: int, j: int, tile: tuple[tuple[float, ...], ...]) -> None:
    """Add a tile to ``sums`` from row i and column j on."""
    for row, values in enumerate(tile):
        for column, value in enumerate(values):
            sums[i + row, j + column] += value


@compiled
def _write_sum(addresses: IntArray, weights: FloatArray, start: int, stop: int, result: Vector) -> None:
    """Write ``Σ weights · arrays`` into ``result`` from start to stop; a piece is written after it was read."""
    span = FEW_ROWS_SPAN if len(addresses) <= FEW_ROWS else SPAN
    sums = np.empty(span)
    for begin in range(start, stop, span):
        width, offset = min(span, stop - begin), begin * result.itemsize
        sums[:] = 0
        for row in range(0, len(addresses), TILE):
            a0, a1, a2, a3 = _four(addresses, row, offset, width, result)
            w0, w1, w2, w3 = weights[row], weights[row + 1], weights[row + 2], weights[row + 3]
            for x in range(width):
                sums[x] += w0 * a0[x] + w1 * a1[x] + w2 * a2[x] + w3 * a3[x]
        piece = result[begin : begin + width]
        for x in range(width):
            piece[x] = sums[x]
