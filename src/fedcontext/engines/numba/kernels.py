"""Softmax regression, compiled: two products along the features, and local SGD, losses and gradients made of them.

Weights lie class by class, (C, d), so that every inner loop runs along a row of memory and vectorises for any number
of classes. `products` keeps ten sums in registers: 5 samples times 2 classes; a tile that hangs over the edge
repeats its last row instead of needing code of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedcontext.jit import compiled, inner
from fedcontext.plan import IntArray

Matrix = npt.NDArray[Any]
SWEEP = 40  # samples whose scores are held at a time in a pass over many


@inner
def by_class(params: Matrix) -> tuple[Matrix, Matrix]:
    """Return the weights (C, d), a row of memory for each class, and the biases (C,) of params (d + 1, C)."""
    return params[:-1].T.copy(), params[-1].copy()


@inner
def products(features: Matrix, rows: IntArray, weights: Matrix, out: Matrix) -> None:
    """Write out[i, c] = <features[rows[i]], weights[c]>."""
    last, top = rows.size - 1, weights.shape[0] - 1
    for i in range(0, rows.size, 5):
        i1, i2, i3, i4 = min(i + 1, last), min(i + 2, last), min(i + 3, last), min(i + 4, last)
        a, b, c = features[rows[i]], features[rows[i1]], features[rows[i2]]
        d, e = features[rows[i3]], features[rows[i4]]
        for k in range(0, top + 1, 2):
            m = min(k + 1, top)
            sums = _ten_sums(a, b, c, d, e, weights[k], weights[m])
            out[i, k], out[i1, k], out[i2, k], out[i3, k], out[i4, k] = sums[:5]
            out[i, m], out[i1, m], out[i2, m], out[i3, m], out[i4, m] = sums[5:]


@inner
def _ten_sums(a: Matrix, b: Matrix, c: Matrix, d: Matrix, e: Matrix, v: Matrix, w: Matrix) -> Any:
    av = bv = cv = dv = ev = aw = bw = cw = dw = ew = v.dtype.type(0)
    for j in range(v.size):
        av += a[j] * v[j]
        bv += b[j] * v[j]
        cv += c[j] * v[j]
        dv += d[j] * v[j]
        ev += e[j] * v[j]
        aw += a[j] * w[j]
        bw += b[j] * w[j]
        cw += c[j] * w[j]
        dw += d[j] * w[j]
        ew += e[j] * w[j]
    return av, bv, cv, dv, ev, aw, bw, cw, dw, ew


@inner
def add_rows(weights: Matrix, features: Matrix, rows: IntArray, factors: Matrix) -> None:
    """Add Σ_i factors[i, c] · features[rows[i]] to each weights[c]."""
    whole = rows.size - rows.size % 5
    for i in range(0, whole, 5):
        a, b, c = features[rows[i]], features[rows[i + 1]], features[rows[i + 2]]
        d, e = features[rows[i + 3]], features[rows[i + 4]]
        for k in range(weights.shape[0]):
            f, g, h, p, q = factors[i, k], factors[i + 1, k], factors[i + 2, k], factors[i + 3, k], factors[i + 4, k]
            _add_five(weights[k], a, b, c, d, e, f, g, h, p, q)
    for i in range(whole, rows.size):
        a = features[rows[i]]
        for k in range(weights.shape[0]):
            _add_one(weights[k], a, factors[i, k])


@inner
def _add_five(
    w: Matrix, a: Matrix, b: Matrix, c: Matrix, d: Matrix, e: Matrix, f: float, g: float, h: float, p: float, q: float
) -> None:
    for j in range(w.size):
        w[j] += f * a[j] + g * b[j] + h * c[j] + p * d[j] + q * e[j]


@inner
def _add_one(w: Matrix, a: Matrix, f: float) -> None:
    for j in range(w.size):
        w[j] += f * a[j]


@inner
def _add_bias(scores: Matrix, bias: Matrix) -> None:
    for i in range(scores.shape[0]):
        for c in range(bias.size):
            scores[i, c] += bias[c]


@inner
def _add_columns(bias: Matrix, rows: Matrix) -> None:
    for i in range(rows.shape[0]):
        for c in range(bias.size):
            bias[c] += rows[i, c]


@inner
def residuals(scores: Matrix, classes: int, rows: IntArray, labels: IntArray, factors: Matrix) -> tuple[float, int]:
    """Turn scores[i, :classes] into factors[i] · (softmax - one-hot label); return the sum of losses and the hits."""
    loss, hits = 0.0, 0
    for i in range(rows.size):
        own, score = labels[rows[i]], scores[i]
        best = 0
        for c in range(1, classes):
            if score[c] > score[best]:
                best = c
        top, mine, total = score[best], score[own], score.dtype.type(0)
        for c in range(classes):
            score[c] = np.exp(score[c] - top)
            total += score[c]
        loss += float(np.log(total) + top - mine)
        hits += best == own
        factor = factors[i]
        for c in range(classes):
            score[c] *= factor / total
        score[own] -= factor
    return loss, hits


@compiled
def sweep(
    features: Matrix, labels: IntArray, factors: Matrix, params: Matrix, slope: Matrix, backwards: bool
) -> tuple[float, int]:
    """Return the sum of losses and the hits at ``params``; write Σ factors · gradients if ``backwards``, else zeros."""
    weights, bias = by_class(params)
    count, classes, pull = labels.size, bias.size, np.zeros_like(weights)
    scores, rows = np.empty((SWEEP, classes), weights.dtype), np.arange(count)
    slope[-1].fill(0)
    loss, hits = 0.0, 0
    for first in range(0, count, SWEEP):
        block = rows[first : first + SWEEP]
        own = scores[: block.size]
        products(features, block, weights, own)
        _add_bias(own, bias)
        part, right = residuals(own, classes, block, labels, factors[first : first + SWEEP])
        loss, hits = loss + part, hits + right
        if backwards:
            add_rows(pull, features, block, own)
            _add_columns(slope[-1], own)
    _put(slope, pull)
    return loss, hits


@inner
def descend(
    features: Matrix,
    labels: IntArray,
    orders: IntArray,
    size: int,
    rate: float,
    mu: float,
    first: Matrix,
    first_bias: Matrix,
    out: Matrix,
) -> None:
    """Write the update of mini-batch SGD from ``first`` (C, d) and ``first_bias`` into ``out`` (d + 1, C).

    A step is one batch of ``size``, in the order that ``orders`` gives for each epoch.
    """
    weights, bias, classes = first.copy(), first_bias.copy(), first_bias.size
    scores, pull = np.empty((size, classes), first.dtype), first.dtype.type(rate * mu)
    factors = np.empty(size, first.dtype)
    for epoch in range(orders.shape[0]):
        for begin in range(0, labels.size, size):
            rows = orders[epoch, begin : begin + size]
            own = scores[: rows.size]
            products(features, rows, weights, own)
            _add_bias(own, bias)
            factors.fill(-rate / rows.size)
            residuals(own, classes, rows, labels, factors)
            if mu:
                draw_back(weights.reshape(-1), first.reshape(-1), pull)
                draw_back(bias, first_bias, pull)
            add_rows(weights, features, rows, own)
            _add_columns(bias, own)
    for c in range(classes):
        _add_one(weights[c], first[c], -1)
        out[-1, c] = bias[c] - first_bias[c]
    _put(out, weights)


@inner
def _put(out: Matrix, weights: Matrix) -> None:
    """Write weights (C, d) into the first d rows of ``out`` (d + 1, C)."""
    for j in range(weights.shape[1]):
        for c in range(weights.shape[0]):
            out[j, c] = weights[c, j]


@inner
def draw_back(values: Matrix, origin: Matrix, pull: float) -> None:
    """Move flat values towards their origin by this share: the proximal term's part of a step."""
    for x in range(values.size):
        values[x] += pull * (origin[x] - values[x])


@inner
def gram(features: Matrix, result: Matrix) -> None:
    """Write (n, n), 1 + <xᵢ, xⱼ>: the inner products of samples with the constant feature that carries the bias."""
    count = features.shape[0]
    rows = np.arange(count)
    for first in range(0, count, SWEEP):
        block = rows[first : first + SWEEP]
        products(features, block, features[: first + block.size], result[first : first + block.size])
    for i in range(count):
        for j in range(i + 1):
            result[i, j] += 1
            result[j, i] = result[i, j]


@inner
def descend_in_span(
    features: Matrix,
    labels: IntArray,
    orders: IntArray,
    size: int,
    rate: float,
    mu: float,
    first: Matrix,
    first_bias: Matrix,
    out: Matrix,
    inner: Matrix,
) -> None:
    """Write what `descend` writes, with the steps taken in the span of the device's samples.

    The update is Σ coefficients[c, i] · xᵢ, so a step changes the scores of all n samples by products with
    ``inner`` = `gram`: n C numbers a sample instead of 2 d C. The features are read once before and once after.
    """
    count, classes, weights = labels.size, first_bias.size, np.zeros_like(first)
    everyone, before = np.arange(count), np.empty((count, classes), weights.dtype)
    products(features, everyone, first, before)
    _add_bias(before, first_bias)
    origin = before.T.copy()
    scores, coefficients, nothing = origin.copy(), np.zeros_like(before), np.zeros_like(before)
    steps, pull = np.empty((size, classes), weights.dtype), weights.dtype.type(rate * mu)
    factors = np.empty(size, weights.dtype)
    for epoch in range(orders.shape[0]):
        for begin in range(0, count, size):
            rows = orders[epoch, begin : begin + size]
            own = steps[: rows.size]
            for i in range(rows.size):
                for c in range(classes):
                    own[i, c] = scores[c, rows[i]]
            factors.fill(-rate / rows.size)
            residuals(own, classes, rows, labels, factors)
            if mu:
                draw_back(scores.reshape(-1), origin.reshape(-1), pull)
                draw_back(coefficients.reshape(-1), nothing.reshape(-1), pull)
            add_rows(scores, inner, rows, own)
            for i in range(rows.size):
                for c in range(classes):
                    coefficients[rows[i], c] += own[i, c]
    add_rows(weights, features, everyone, coefficients)
    _put(out, weights)
    out[-1].fill(0)
    _add_columns(out[-1], coefficients)
