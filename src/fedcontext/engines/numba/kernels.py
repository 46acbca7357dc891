"""Compiled softmax regression: local SGD on one device, and losses, correct guesses and gradients over many samples.

Weights are stored class by class, (C, d), and scores as (C, n), so that every inner loop runs along contiguous memory
and vectorises for any number of classes. With ten classes both products are too narrow for BLAS: OpenBLAS takes
twice as long as these loops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fedcontext.jit import compiled, inner
from fedcontext.plan import IntArray

Matrix = npt.NDArray[Any]
BLOCK = 50  # samples whose features stay in the cache between the scores and the gradient
LINE = 64  # bytes of memory that are fetched together


@compiled
def train_device(
    features: Matrix,
    labels: IntArray,
    orders: IntArray,
    batch_size: int,
    learning_rate: float,
    mu: float,
    start: Matrix,
    start_bias: Matrix,
    update: Matrix,
) -> None:
    """Write to ``update``, (d + 1, C), how mini-batch SGD changes the weights (C, d) and biases (C,) of ``start``.

    ``orders``, (epochs, n), is the order in which each epoch visits the samples. A step adds the samples of its batch,
    weighted by -learning_rate / batch size · (softmax - one-hot label), after the proximal term has moved the weights
    towards their start.
    """
    weights, bias = start.copy(), start_bias.copy()
    scores, factors = np.empty((bias.size, batch_size), bias.dtype), np.empty(batch_size, bias.dtype)
    for epoch in range(orders.shape[0]):
        for begin in range(0, labels.size, batch_size):
            rows = orders[epoch, begin : begin + batch_size]
            factors.fill(-learning_rate / rows.size)
            _write_scores(features, rows, weights, bias, scores, False)
            _to_residuals(scores, labels, rows, factors)
            if mu:
                for c in range(bias.size):
                    _move_towards(start[c], weights[c], bias.dtype.type(learning_rate * mu))
                _move_towards(start_bias, bias, bias.dtype.type(learning_rate * mu))
            _add_samples(features, rows, scores, weights, bias)
    for c in range(bias.size):
        bias[c] -= start_bias[c]
        for j in range(weights.shape[1]):
            weights[c, j] -= start[c, j]
    _write_transposed(weights, bias, update)


@compiled
def train_device_in_span(
    features: Matrix,
    labels: IntArray,
    orders: IntArray,
    batch_size: int,
    learning_rate: float,
    mu: float,
    start: Matrix,
    start_bias: Matrix,
    update: Matrix,
    gram: Matrix,
) -> None:
    """Write what `train_device` writes, with SGD on the coefficients of the device's own samples.

    Every gradient is a combination of samples, so the update is Σ coefficients[c, i] · (xᵢ, 1). With ``gram``, (n, n),
    1 + <xᵢ, xⱼ>, a step changes the scores of all n samples by n C products for each sample of the batch, instead of
    2 d C: faster if there are several epochs over few samples. The features are read before and after the steps only.
    """
    everyone, classes = np.arange(labels.size), start_bias.size
    weights, bias = np.zeros_like(start), np.zeros_like(start_bias)
    origin = np.empty((classes, labels.size), start.dtype)
    _write_scores(features, everyone, start, start_bias, origin, False)
    scores, coefficients, zeros = origin.copy(), np.zeros_like(origin), np.zeros_like(origin)
    batch, factors = np.empty((classes, batch_size), start.dtype), np.empty(batch_size, start.dtype)
    for epoch in range(orders.shape[0]):
        for begin in range(0, labels.size, batch_size):
            rows = orders[epoch, begin : begin + batch_size]
            factors.fill(-learning_rate / rows.size)
            for c in range(classes):
                for i in range(rows.size):
                    batch[c, i] = scores[c, rows[i]]
            _to_residuals(batch, labels, rows, factors)
            if mu:
                _move_towards(origin.reshape(-1), scores.reshape(-1), bias.dtype.type(learning_rate * mu))
                _move_towards(zeros.reshape(-1), coefficients.reshape(-1), bias.dtype.type(learning_rate * mu))
            _add_samples(gram, rows, batch, scores, bias)
            for c in range(classes):
                for i in range(rows.size):
                    coefficients[c, rows[i]] += batch[c, i]
    bias.fill(0)
    _add_samples(features, everyone, coefficients, weights, bias)
    _write_transposed(weights, bias, update)


@compiled
def sweep(
    features: Matrix, labels: IntArray, factors: Matrix, weights: Matrix, bias: Matrix, gradient: Matrix
) -> tuple[float, int]:
    """Return the sum of the losses and the number of samples classified correctly.

    If there are ``factors``, (n,), Σ factors · gradients is written to ``gradient``, (d + 1, C), in the same pass over
    the features.
    """
    loss, correct, rows = 0.0, 0, np.arange(labels.size)
    total, total_bias = np.zeros_like(weights), np.zeros_like(bias)
    scores, ones = np.empty((bias.size, BLOCK), bias.dtype), np.ones(BLOCK, bias.dtype)
    for begin in range(0, labels.size, BLOCK):
        block = rows[begin : begin + BLOCK]
        own = factors[begin : begin + BLOCK] if factors.size else ones
        _write_scores(features, block, weights, bias, scores, True)
        block_loss, block_correct = _to_residuals(scores, labels, block, own)
        loss, correct = loss + block_loss, correct + block_correct
        if factors.size:
            _add_samples(features, block, scores, total, total_bias)
    if factors.size:
        _write_transposed(total, total_bias, gradient)
    return loss, correct


def _prefetch_entry(context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        function = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], function)
        builder.call(prefetch, [address, number(0), number(2), number(1)])  # for reading, into the L2 cache, data
        return context.get_dummy_value()

    return types.void(array, index), generate


_prefetch: Any = intrinsic(_prefetch_entry)  # of an array in C order; an entry beyond its end is ignored


@inner
def _write_scores(
    features: Matrix, rows: IntArray, weights: Matrix, bias: Matrix, scores: Matrix, in_order: bool
) -> None:
    """Write scores[c, i] = <features[rows[i]], weights[c]> + bias[c], in tiles of 5 samples and 2 classes.

    The ten sums of a tile stay in registers, so that each value loaded is used more than once; five samples are read
    from memory at the same time. A tile beyond the edge repeats the last sample or class. If the rows are ``in_order``,
    the next five samples are fetched into the cache meanwhile, which saves a quarter of a pass over MNIST.
    """
    last, top = rows.size - 1, bias.size - 1
    line = LINE // features.itemsize  # entries of a cache line
    share = -(-5 * features.shape[1] // (top // 2 + 1))  # entries that are fetched for each pair of classes
    for i in range(0, rows.size, 5):
        i1, i2, i3, i4 = min(i + 1, last), min(i + 2, last), min(i + 3, last), min(i + 4, last)
        x0, x1, x2 = features[rows[i]], features[rows[i1]], features[rows[i2]]
        x3, x4 = features[rows[i3]], features[rows[i4]]
        for c in range(0, bias.size, 2):
            n = min(c + 1, top)
            if in_order:
                begin = (rows[i] + 5) * features.shape[1] + c // 2 * share
                for entry in range(begin, begin + share, line):
                    _prefetch(features, entry)
            first, second = _ten_products(x0, x1, x2, x3, x4, weights[c], weights[n])
            scores[c, i], scores[c, i1], scores[c, i2], scores[c, i3], scores[c, i4] = first
            scores[n, i], scores[n, i1], scores[n, i2], scores[n, i3], scores[n, i4] = second
    for c in range(bias.size):
        for i in range(rows.size):
            scores[c, i] += bias[c]


@inner
def _ten_products(x0: Matrix, x1: Matrix, x2: Matrix, x3: Matrix, x4: Matrix, v: Matrix, w: Matrix) -> Any:
    v0 = v1 = v2 = v3 = v4 = w0 = w1 = w2 = w3 = w4 = w.dtype.type(0)
    for j in range(w.size):
        v0 += x0[j] * v[j]
        v1 += x1[j] * v[j]
        v2 += x2[j] * v[j]
        v3 += x3[j] * v[j]
        v4 += x4[j] * v[j]
        w0 += x0[j] * w[j]
        w1 += x1[j] * w[j]
        w2 += x2[j] * w[j]
        w3 += x3[j] * w[j]
        w4 += x4[j] * w[j]
    return (v0, v1, v2, v3, v4), (w0, w1, w2, w3, w4)


@inner
def _to_residuals(scores: Matrix, labels: IntArray, rows: IntArray, factors: Matrix) -> tuple[float, int]:
    """Replace scores[:, i] by factors[i] · (softmax - one-hot label); return the sum of losses and the correct guesses.

    The loops over all entries run along the samples, so that they vectorise; the label's score is looked up between.
    """
    loss, correct = 0.0, 0
    top, total = scores[0].copy(), np.zeros_like(scores[0])
    for c in range(1, scores.shape[0]):
        for i in range(rows.size):
            top[i] = scores[c, i] if scores[c, i] > top[i] else top[i]
    for i in range(rows.size):
        label = labels[rows[i]]
        loss += float(top[i] - scores[label, i])
        correct += _is_first_maximum(scores[:, i], label, top[i])
    for c in range(scores.shape[0]):
        for i in range(rows.size):
            scores[c, i] = _exp(scores[c, i] - top[i])
            total[i] += scores[c, i]
    for i in range(rows.size):
        loss += np.log(float(total[i]))
        total[i] = factors[i] / total[i]
    for c in range(scores.shape[0]):
        for i in range(rows.size):
            scores[c, i] *= total[i]
    for i in range(rows.size):
        scores[labels[rows[i]], i] -= factors[i]
    return loss, correct


@inner
def _is_first_maximum(scores: Matrix, label: int, top: float) -> bool:
    """Return whether argmax(scores) is ``label``: of equal scores the first counts."""
    for c in range(label):
        if scores[c] == top:
            return False
    return bool(scores[label] == top)


@inner
def _exp(x: Any) -> Any:
    """Return exp(x) of x up to 0, as (exp(x / 1024))^1024: arithmetic alone, so that loops over it vectorise.

    The library's exponential is called once per element, which takes a third of an evaluation. The error is 1e-13 in
    float64, and below float32's own. NaN stays NaN.
    """
    r = (-745.0 if x < -745 else float(x)) / 1024
    power = 1.0
    for n in range(12, 0, -1):
        power = 1 + r * power / n
    for _ in range(10):
        power *= power
    return power


@inner
def _add_samples(features: Matrix, rows: IntArray, factors: Matrix, weights: Matrix, bias: Matrix) -> None:
    """Add Σᵢ factors[c, i] · features[rows[i]] to weights[c], and Σᵢ factors[c, i] to bias[c].

    Five samples at a time, so that a weight is loaded and stored once for five of them; the rest one by one.
    """
    whole = rows.size - rows.size % 5
    for i in range(0, whole, 5):
        x0, x1, x2 = features[rows[i]], features[rows[i + 1]], features[rows[i + 2]]
        x3, x4 = features[rows[i + 3]], features[rows[i + 4]]
        for c in range(bias.size):
            f0, f1, f2, f3, f4 = (
                factors[c, i],
                factors[c, i + 1],
                factors[c, i + 2],
                factors[c, i + 3],
                factors[c, i + 4],
            )
            _add_five(x0, x1, x2, x3, x4, f0, f1, f2, f3, f4, weights[c])
    for i in range(whole, rows.size):
        for c in range(bias.size):
            _add_one(features[rows[i]], factors[c, i], weights[c])
    for c in range(bias.size):
        for i in range(rows.size):
            bias[c] += factors[c, i]


@inner
def _add_five(
    a: Matrix, b: Matrix, c: Matrix, d: Matrix, e: Matrix, f: float, g: float, h: float, p: float, q: float, w: Matrix
) -> None:
    for j in range(w.size):
        w[j] += f * a[j] + g * b[j] + h * c[j] + p * d[j] + q * e[j]


@inner
def _add_one(x: Matrix, factor: float, w: Matrix) -> None:
    for j in range(w.size):
        w[j] += factor * x[j]


@inner
def _write_transposed(weights: Matrix, bias: Matrix, params: Matrix) -> None:
    """Write weights (C, d) and biases (C,) as params (d + 1, C)."""
    for c in range(bias.size):
        params[-1, c] = bias[c]
        for j in range(weights.shape[1]):
            params[j, c] = weights[c, j]


@inner
def _move_towards(target: Matrix, values: Matrix, share: float) -> None:
    for j in range(values.size):
        values[j] += share * (target[j] - values[j])
