"""Softmax regression on `Sparse` samples xᵢ = b + sᵢ: training needs no entries but those of sᵢ.

With weights w = v + m ⊗ b, where m is how far the biases have moved and v starts at w⁰, a step on sample i with the
pull r adds r sᵢ to v and r to m, and the scores are <xᵢ, w> = <sᵢ, v> + u + m (<sᵢ, b> + <b, b>), where u = <b, v>
moves by r <sᵢ, b>.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcontext.engines.numba.kernels import SWEEP, draw_back, residuals
from fedcontext.engines.numba.sparse import Sparse
from fedcontext.engines.numba.vectors import LANES, add_to_rows, move, put_products, put_row
from fedcontext.jit import compiled, inner
from fedcontext.plan import IntArray

Matrix = npt.NDArray[Any]


class Start(NamedTuple):
    """Params laid out for vectors of sixteen classes, and the scores of the background."""

    weights: Matrix  # (blocks, d, 16)
    bias: Matrix  # (16 · blocks,)
    under: Matrix  # (16 · blocks,) <b, w> of each class


@inner
def _room(shape: tuple[int, int, int], dtype: Any) -> Matrix:
    """Return an empty array that starts at a cache line, so that no vector lies across two."""
    size = shape[0] * shape[1] * shape[2]
    room = np.empty(size + LANES, dtype)
    first = (-room.ctypes.data % 64) // room.itemsize
    return room[first : first + size].reshape(shape)


@compiled
def laid_out(params: Matrix, found: Sparse) -> Start:
    """Return params (d + 1, C) as a start for the steps below; classes beyond C have zeros.

    >>> from fedcontext.engines.numba.sparse import sparse
    >>> start = laid_out(np.ones((4, 2)), sparse(np.array([[1.0, 0, 0], [1, 0, 0], [1, 3, 0]])))
    >>> start.weights.shape, start.under[:3]
    ((1, 3, 16), array([1., 1., 0.]))
    """
    dimension, classes = params.shape[0] - 1, params.shape[1]
    blocks = -(-classes // LANES)
    weights, scores = _room((blocks, dimension, LANES), params.dtype), np.zeros((1, blocks * LANES), params.dtype)
    bias, ours = np.zeros(blocks * LANES, params.dtype), np.zeros(blocks * LANES, params.dtype)
    for c in range(classes):
        bias[c], ours[c] = params[-1, c], 1
    whole = _whole_rows(params, blocks)
    for j in range(whole):
        for block in range(blocks):
            first, row = block * LANES, (block * dimension + j) * LANES
            move(params, j * classes + first, ours, first, weights, row)
    for j in range(whole, dimension):
        for lane in range(blocks * LANES):
            weights[lane // LANES, j, lane % LANES] = params[j, lane] if lane < classes else 0
    if found.leans.size:
        _scores(found, np.array([found.leans.size - 1]), 0, weights, scores)
    return Start(weights, bias, scores[0])


@inner
def _whole_rows(params: Matrix, blocks: int) -> int:
    """Return how many rows of params (d + 1, C) can be read or written as whole vectors without leaving the array."""
    rows: int = max(0, min(params.shape[0] - 1, (params.size - blocks * LANES) // params.shape[1] + 1))
    return rows


@inner
def _scores(found: Sparse, rows: IntArray, first: int, weights: Matrix, scores: Matrix) -> None:
    """Write <s, v> of some samples."""
    blocks, apart = weights.shape[0], weights.shape[1] * LANES
    for i in range(rows.size):
        begin, end = found.starts[first + rows[i]], found.starts[first + rows[i] + 1]
        for block in range(blocks):
            place = (i * blocks + block) * LANES
            put_products(found.values, found.columns, begin, end, weights, block * apart, scores, place)


@inner
def _pull(found: Sparse, rows: IntArray, first: int, weights: Matrix, factors: Matrix) -> None:
    """Add factors · s of some samples to v."""
    blocks, apart = weights.shape[0], weights.shape[1] * LANES
    for i in range(rows.size):
        begin, end = found.starts[first + rows[i]], found.starts[first + rows[i] + 1]
        for block in range(blocks):
            place = (i * blocks + block) * LANES
            add_to_rows(found.values, found.columns, begin, end, weights, block * apart, factors, place)


@inner
def _fetch(found: Sparse, begin: int, end: int) -> float:
    """Read the entries of a device in a row, once: the steps, which visit them at random, then find them close by."""
    total = 0.0
    for t in range(begin, end, 64 // found.values.itemsize):
        total += found.values[t]
    for t in range(begin, end, 64 // found.columns.itemsize):
        total += found.columns[t]
    return total


@inner
def descend_sparsely(
    found: Sparse,
    first: int,
    labels: IntArray,
    orders: IntArray,
    size: int,
    rate: float,
    mu: float,
    start: Start,
    out: Matrix,
) -> None:
    """Write what `kernels.descend` writes, for the device whose samples begin at ``first``."""
    weights, bias, under = _room(start.weights.shape, out.dtype), start.bias.copy(), start.under.copy()
    moved, still, square = np.zeros_like(bias), np.zeros_like(bias), found.leans[-1]
    classes, pull = out.shape[1], weights.dtype.type(rate * mu)
    scores, factors = np.empty((size, bias.size), weights.dtype), np.empty(size, weights.dtype)
    _copy(start.weights.reshape(-1), weights.reshape(-1))
    out[0, 0] = _fetch(found, found.starts[first], found.starts[first + labels.size])  # or it would be left out
    for epoch in range(orders.shape[0]):
        for begin in range(0, labels.size, size):
            rows = orders[epoch, begin : begin + size]
            _scores(found, rows, first, weights, scores)
            for i in range(rows.size):
                lean = found.leans[first + rows[i]] + square
                for c in range(bias.size):
                    scores[i, c] += bias[c] + under[c] + lean * moved[c]
            factors.fill(-rate / rows.size)
            residuals(scores, classes, rows, labels, factors)
            if mu:
                draw_back(weights.reshape(-1), start.weights.reshape(-1), pull)
                draw_back(moved, still, pull)
                draw_back(under, start.under, pull)
            _pull(found, rows, first, weights, scores)
            for i in range(rows.size):
                lean = found.leans[first + rows[i]]
                for c in range(bias.size):
                    moved[c] += scores[i, c]
                    under[c] += lean * scores[i, c]
            for c in range(bias.size):
                bias[c] = start.bias[c] + moved[c]
    _put(out, weights, start.weights, moved, found.background)


@inner
def _copy(values: Matrix, target: Matrix) -> None:
    """Copy values; an assignment of whole arrays would take a second to compile."""
    for x in range(values.size):
        target[x] = values[x]


@inner
def _put(out: Matrix, weights: Matrix, origin: Matrix, bias: Matrix, background: Matrix) -> None:
    """Write v - origin + bias ⊗ b, and the biases, into ``out`` (d + 1, C).

    Vectors are written whole: what one writes beyond its own row, the next ones write again, and the biases last.
    """
    blocks, dimension, classes = weights.shape[0], background.size, out.shape[1]
    whole = _whole_rows(out, blocks)
    for j in range(whole):
        for block in range(blocks):
            row, first = (block * dimension + j) * LANES, block * LANES
            put_row(weights, origin, row, bias, first, background[j], out, j * classes + first)
    for j in range(whole, dimension):
        for c in range(classes):
            block, lane = c // LANES, c % LANES
            out[j, c] = weights[block, j, lane] - origin[block, j, lane] + bias[c] * background[j]
    for c in range(classes):
        out[-1, c] = bias[c]


@compiled
def sweep_sparsely(
    found: Sparse, first: int, labels: IntArray, factors: Matrix, params: Matrix, slope: Matrix, backwards: bool
) -> tuple[float, int]:
    """Return and write what `kernels.sweep` does, for the samples from ``first`` on."""
    start, classes = laid_out(params, found), slope.shape[1]
    pull, bias = _room(start.weights.shape, slope.dtype), np.zeros_like(start.bias)
    scores, everyone = np.empty((SWEEP, bias.size), slope.dtype), np.arange(labels.size)
    pull.fill(0)
    loss, hits = 0.0, 0
    for begin in range(0, labels.size, SWEEP):
        rows = everyone[begin : begin + SWEEP]
        _scores(found, rows, first, start.weights, scores)
        for i in range(rows.size):
            for c in range(bias.size):
                scores[i, c] += start.bias[c] + start.under[c]
        part, right = residuals(scores, classes, rows, labels, factors[begin : begin + SWEEP])
        loss, hits = loss + part, hits + right
        if backwards:
            _pull(found, rows, first, pull, scores)
            for i in range(rows.size):
                for c in range(bias.size):
                    bias[c] += scores[i, c]
    _put(slope, pull, np.zeros_like(pull), bias, found.background)
    return loss, hits
