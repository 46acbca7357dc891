"""Multinomial logistic regression, the paper's model, in plain NumPy: the reference for the other engines.

Params are one (d + 1, C) matrix: a row of class scores per feature, and the biases in the last row. The last bits of
its results depend on the number of threads of BLAS; those of the Numba engine do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcontext.arrays.tree import FloatArray
from fedcontext.datasets.federated import Features, FederatedData, Samples, Split, check_devices, full_participation
from fedcontext.engines.base import Work
from fedcontext.errors import FedcontextError
from fedcontext.plan import IntArray, batches

Matrix = npt.NDArray[Any]
ROWS = 4096  # samples per block in a pass over all data


def probabilities(params: Matrix, features: Features) -> Matrix:
    """Return (n, C) class probabilities, softmax(x W + c).

    >>> probabilities(np.zeros((3, 4)), np.ones((1, 2)))
    array([[0.25, 0.25, 0.25, 0.25]])
    """
    scores = features @ params[:-1]
    scores += params[-1]
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    return scores


def losses(params: Matrix, features: Features, labels: IntArray) -> Matrix:
    """Return (n,) cross-entropies, log Σ exp(scores) - score of the label.

    >>> losses(np.zeros((3, 4)), np.ones((1, 2)), np.array([2])).round(4)
    array([1.3863])
    """
    scores = features @ params[:-1] + params[-1]
    top = scores.max(axis=1)
    own = scores[np.arange(len(labels)), labels]
    return np.asarray(np.log(np.exp(scores - top[:, None]).sum(axis=1)) + top - own)


def gradient(params: Matrix, features: Features, labels: IntArray, weights: Matrix | None = None) -> Matrix:
    """Return (d + 1, C), the gradient of the mean loss; or of Σ weights · losses.

    >>> gradient(np.zeros((2, 2)), np.ones((1, 1)), np.array([0]))
    array([[-0.5,  0.5],
           [-0.5,  0.5]])
    """
    residuals = probabilities(params, features)
    residuals[np.arange(len(labels)), labels] -= 1
    residuals *= 1 / len(labels) if weights is None else weights[:, None]
    result = np.empty_like(params)
    np.matmul(features.T, residuals, out=result[:-1])
    residuals.sum(axis=0, out=result[-1])
    return result


def weighted_sum(weights: FloatArray, gradients: Sequence[Matrix]) -> Matrix:
    """Return Σ weights · gradients, summed in float64.

    >>> weighted_sum(np.array([0.5, 2.0]), [np.ones(1, np.float32), np.ones(1, np.float32)])
    array([2.5], dtype=float32)
    """
    total = np.zeros(gradients[0].shape)
    for weight, own in zip(weights, gradients, strict=True):
        total += weight * own
    return total.astype(gradients[0].dtype)


def check_params(params: Matrix, like: Matrix) -> None:
    """Raise unless params have the shape and dtype of the engine's initial params, ``like``.

    >>> check_params(np.zeros(3), np.zeros((2, 2), np.float32))
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: params must be float32 (2, 2), got float64 (3,)
    """
    if getattr(params, "shape", None) != like.shape or params.dtype != like.dtype:
        got = f"{params.dtype} {params.shape}" if isinstance(params, np.ndarray) else type(params).__name__
        raise FedcontextError(f"params must be {like.dtype} {like.shape}, got {got}")


class SoftmaxReference:
    """Trains one device after another, one mini-batch after another, as in the formulas."""

    buffers = ()  # every parameter has a gradient
    supports_corrections = True

    def __init__(self, data: FederatedData, dtype: npt.DTypeLike = np.float32) -> None:
        self.data, self.dtype = data, np.dtype(dtype)
        self.train_split, self.test_split = data.train.map(self._cast), data.test.map(self._cast)

    def _cast(self, samples: Samples) -> Samples:
        return samples[0].astype(self.dtype, copy=False), samples[1]

    def initial_params(self) -> Matrix:
        """Return zeros: every class equally likely."""
        return np.zeros((self.data.dimension + 1, self.data.classes), self.dtype)

    def train(self, params: Matrix, work: Work) -> list[Matrix]:
        """Return each device's update: mini-batch SGD on F_k(w) + <correction, w> + (μ/2)‖w - wᵗ‖² from ``params``."""
        work.local.check_supported("reference")
        check_params(params, self.initial_params())
        check_devices(self.train_split, work.devices)
        return [self._train_device(params, row, work) for row in range(len(work.devices))]

    def _train_device(self, params: Matrix, row: int, work: Work) -> Matrix:
        device, epochs, local = int(work.devices[row]), int(work.epochs[row]), work.local
        features, labels = self.train_split.device(device)
        correction = None if work.corrections is None else work.corrections[row][""]
        trained = params.copy()
        for batch in batches(work.seed, work.number, device, len(labels), epochs, local.batch_size):
            slope = gradient(trained, features[batch], labels[batch])
            if local.mu:
                slope += local.mu * (trained - params)
            if correction is not None:
                slope += correction
            trained -= local.learning_rate * slope
        trained -= params
        return trained

    def gradients(self, params: Matrix, devices: IntArray) -> list[Matrix]:
        """Return ∇F_k(params) of each device."""
        check_params(params, self.initial_params())
        check_devices(self.train_split, devices)
        return [gradient(params, *self.train_split.device(int(device))) for device in devices]

    def gradient(self, params: Matrix, devices: IntArray, weights: FloatArray) -> Matrix:
        """Return Σ weights ∇F_k(params): one pass over the data for all devices, device by device for fewer."""
        check_params(params, self.initial_params())
        if not full_participation(self.train_split, devices):
            return weighted_sum(weights, self.gradients(params, devices))
        train, total = self.train_split.evaluation, np.zeros(params.shape)
        sample_weights = np.repeat(weights / train.sizes, train.sizes).astype(self.dtype)
        for rows in _blocks(train):
            total += gradient(params, train.features[rows], train.labels[rows], sample_weights[rows])
        return total.astype(self.dtype)

    def evaluate(self, params: Matrix) -> tuple[float, float]:
        """Return the mean loss over all training samples and the accuracy over all test samples."""
        check_params(params, self.initial_params())
        train, test = self.train_split.evaluation, self.test_split
        loss = sum(float(losses(params, train.features[b], train.labels[b]).sum(dtype=float)) for b in _blocks(train))
        correct = sum(int((_predicted(params, test.features[b]) == test.labels[b]).sum()) for b in _blocks(test))
        return loss / len(train.labels), correct / max(1, len(test.labels))


def _predicted(params: Matrix, features: Features) -> IntArray:
    classes: IntArray = (features @ params[:-1] + params[-1]).argmax(axis=1)
    return classes


def _blocks(split: Split) -> Iterator[slice]:
    for start in range(0, len(split.labels), ROWS):
        yield slice(start, start + ROWS)
