"""Sums over K large arrays at the speed of memory, compiled: inner products in one pass, a weighted sum in another.

Arrays are handed over by address, so that K separate models need not be stacked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import numpy as np

from fedcontext.arrays.tiles import (
    FREE,
    LEAD,
    LINE,
    PIECE,
    TILE,
    IntArray,
    Matrix,
    add_products,
    entries,
    fetch,
    pointer,
)
from fedcontext.arrays.tree import FloatArray
from fedcontext.jit import announced, compiled
from fedcontext.threads import on_all_cores, workers

SHARES = 2  # tasks for each core: one that begins late leaves more to the others
PARTS = 32  # sums of products that are kept apart, on any number of cores: with it every bit stays the same
PARTS_BYTES = 32 * 2**20  # that all parts take at most
MANY = 40  # rows, from which it pays to bring their pieces side by side
SAMPLE = 256  # entries of a row by which its length is judged
AHEAD = 2  # widths between what is added to the weighted sum and what is fetched for it
WIDTH = 128  # entries of the weighted sum that are worked on at a time


def products(rows: Sequence[Matrix], columns: Sequence[Matrix], quick: bool = False) -> FloatArray:
    """Return (K, K + P): the inner products of ``rows`` with themselves, then with ``columns``, summed in float64.

    With ``quick``, float32 entries are multiplied and added in float32, 768 at a time; only their sums are in float64.

    >>> products([np.arange(3.0), np.ones(3)], [np.ones(3)])
    array([[5., 3., 3.],
           [3., 3., 3.]])
    """
    count, entry, first = len(rows), rows[0].dtype.type, columns[0] if columns else rows[0]
    packed = count >= MANY
    order = _by_length(rows) if packed and quick and entry is np.float32 else np.arange(count)
    upright, across = _fours([rows[row] for row in order]), _fours(columns[1:])
    addresses = _addresses([*upright, *across, *[first] * TILE])
    shape = len(upright) // TILE, (len(upright) + len(across)) // TILE, TILE * TILE
    parts = np.empty((max(1, min(PARTS, PARTS_BYTES // (8 * math.prod(shape)))), *shape))
    cuts = _cuts(rows[0].nbytes, len(parts))

    kinds = np.empty(0, entry), np.empty(0, entry if quick else np.float64)

    def work(task: tuple[int, int]) -> None:
        add_products(addresses, packed, *kinds, cuts, *task, parts)

    with _ready(entry, quick):
        on_all_cores(work, _tasks(len(parts)))
    found = parts.sum(axis=0).reshape(-1)[_places(count, len(columns), shape[1])]
    if packed:
        turns: IntArray = np.argsort(order)
        found = found[np.ix_(turns, [*turns, *range(count, count + len(columns))])]
    return np.asarray(found)


@lru_cache(2)
def _places(count: int, columns: int, width: int) -> IntArray:
    """Return (K, K + P): where each product stands among the sums of the tiles, ``width`` of them in a line."""
    i, j = np.indices((count, count + columns))
    inside, others = j < count, -(-count // TILE) * TILE - count - 1
    i, j = np.where(inside, np.minimum(i, j), i), np.where(inside, np.maximum(i, j), j + others)
    if columns:  # the first has its places below the diagonal
        within = np.arange(count) % TILE
        i[:, count], j[:, count] = np.arange(count) - within + np.array(FREE)[:, within]
    return ((i // TILE * width + j // TILE) * TILE + i % TILE) * TILE + j % TILE


def combine(base: Matrix, rows: Sequence[Matrix], weights: FloatArray, result: Matrix) -> None:
    """Write ``base + Σ weights · rows`` into ``result``, which may be ``base`` itself.

    >>> result = np.zeros(2)
    >>> combine(np.ones(2), [np.arange(2.0)], np.array([10.0]), result)
    >>> result
    array([ 1., 11.])
    """
    addresses = _addresses(_fours([*rows, base]))
    factors = np.zeros(addresses.size)
    factors[: len(rows) + 1] = [*weights, 1]

    cuts = _cuts(base.nbytes, SHARES * workers()) // base.itemsize

    def work(part: int) -> None:
        _combine(addresses, factors, cuts[part], cuts[part + 1], result.reshape(-1))

    with _ready(base.dtype.type, None):
        on_all_cores(work, range(len(cuts) - 1))


def _addresses(arrays: Sequence[Matrix]) -> IntArray:
    return np.array([array.ctypes.data for array in arrays], np.int64)


def _by_length(rows: Sequence[Matrix]) -> IntArray:
    """Return the rows' numbers by their length, as far as a sample from their middle shows it.

    Tiles of rows of like lengths are fast; nothing depends on the order but last bits.
    """
    middle = rows[0].size // 2
    samples = np.array([row.reshape(-1)[middle : middle + SAMPLE] for row in rows], np.float64)
    return np.argsort(np.square(samples).sum(axis=1), kind="stable")


def _fours(rows: Sequence[Matrix]) -> list[Matrix]:
    """Return the rows, the last repeated until their number is a multiple of four."""
    return [*rows, *(list(rows[-1:]) * (-len(rows) % TILE))]


def _cuts(size: int, parts: int) -> IntArray:
    """Return (parts + 1,) where an array of so many bytes is cut: at the ends of pieces."""
    ends = [max(0, size * part // parts // PIECE * PIECE - LEAD) for part in range(parts)]
    return np.array([*ends, size], np.int64)


def _tasks(parts: int) -> list[tuple[int, int]]:
    """Return the tasks for all cores: the parts, from and to, that each works on."""
    count = min(parts, SHARES * workers())
    return [(parts * task // count, parts * (task + 1) // count) for task in range(count)]


def _ready(entry: type, quick: bool | None) -> AbstractContextManager[None]:
    """Return the context of a call: the first of its kind may have to compile, and says so."""
    if (entry, quick) in _called:
        return nullcontext()
    _called.add((entry, quick))
    return announced("sums of this type over many or large models (a few seconds)")


_called: set[tuple[type, bool | None]] = set()


@compiled
def _combine(addresses: IntArray, weights: FloatArray, start: int, stop: int, result: Matrix) -> None:
    sums, size = np.empty(WIDTH), result.itemsize
    for begin in range(start, stop, WIDTH):
        width = min(WIDTH, stop - begin)
        sums[:] = 0
        for row in range(0, addresses.size, TILE):
            for line in range(0, WIDTH * size, LINE):
                for each in addresses[row : row + TILE]:
                    fetch(each + (begin + AHEAD * WIDTH) * size + line)
            a = entries(pointer(addresses[row]), (stop,), result.dtype)[begin : begin + width]
            b = entries(pointer(addresses[row + 1]), (stop,), result.dtype)[begin : begin + width]
            c = entries(pointer(addresses[row + 2]), (stop,), result.dtype)[begin : begin + width]
            d = entries(pointer(addresses[row + 3]), (stop,), result.dtype)[begin : begin + width]
            p, q, r, s = weights[row], weights[row + 1], weights[row + 2], weights[row + 3]
            for x in range(width):
                sums[x] += p * a[x] + q * b[x] + r * c[x] + s * d[x]
        target = result[begin : begin + width]
        for x in range(width):
            target[x] = sums[x]
