"""The paper's model with compiled kernels, the devices of a round spread over all cores."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedcontext.arrays.tree import FloatArray
from fedcontext.datasets.federated import FederatedData, Samples, Split, check_devices, full_participation
from fedcontext.engines.base import Work
from fedcontext.engines.numba.kernels import Matrix, sweep, train_device, train_device_in_span
from fedcontext.engines.softmax import SoftmaxReference, check_params, weighted_sum
from fedcontext.jit import announced
from fedcontext.plan import IntArray, orders
from fedcontext.threads import on_all_cores

ROWS = 4096  # samples of one task in a pass over all data
SPAN_COST = 1.5  # of a multiplication in the span, relative to one along the features


class SoftmaxNumba:
    """Softmax regression with the results of `SoftmaxReference`, to rounding, on any number of threads.

    Params are (d + 1, C): a row of class scores per feature, and the biases in the last row.
    """

    buffers = ()  # every parameter has a gradient
    supports_corrections = True

    def __init__(self, data: FederatedData, dtype: npt.DTypeLike = np.float32) -> None:
        self.data, self.dtype = data, np.dtype(dtype)
        self._initial = np.zeros((data.dimension + 1, data.classes), self.dtype)
        self.train_split, self.test_split = data.train.map(self._cast), data.test.map(self._cast)
        self._no_factors = np.empty(0, self.dtype)
        self._factors = self._no_factors  # (n,) of each sample in the full gradient, while rounds ask for it
        self._gradient_used = False  # whether it was asked for since the last evaluation
        self._gradient: tuple[Matrix, Matrix] | None = None  # params, and the full gradient there
        with announced("the numba engine"):
            self._compile()

    def _cast(self, samples: Samples) -> Samples:
        return _read_only(samples[0], self.dtype), _read_only(samples[1], np.int64)

    def _compile(self) -> None:
        """Compile the kernels for this dtype, or load them from the cache on disk."""
        features, labels = self._cast((np.zeros((1, 1)), np.zeros(1, np.int64)))
        params = np.zeros((2, 1), self.dtype)
        start = _by_class(params)
        given = (features, labels, np.zeros((1, 1), np.int64), 1, 0.1, 0.0, *start, params)
        train_device(*given)
        train_device_in_span(*given, features)
        sweep(features, labels, self._no_factors, *start, params)

    def initial_params(self) -> Matrix:
        """Return zeros: every class equally likely."""
        return self._initial.copy()

    def train(self, params: Matrix, work: Work) -> list[Matrix]:
        """Return each device's update: mini-batch SGD on F_k(w) + (μ/2)‖w - wᵗ‖² from ``params``."""
        work.local.check_supported("numba")
        check_params(params, self._initial)
        check_devices(self.train_split, work.devices)
        if work.corrections is not None:  # the kernels have no such term
            return SoftmaxReference(self.data, self.dtype).train(params, work)
        start, local = _by_class(params), work.local
        rate, mu = float(local.learning_rate), float(local.mu)
        devices, epochs = work.devices.tolist(), work.epochs.tolist()
        updates = np.empty((len(devices), *params.shape), self.dtype)

        def arguments(row: int) -> tuple[Any, ...]:
            features, labels = self.train_split.device(devices[row])
            order = orders(work.seed, work.number, devices[row], len(labels), epochs[row])
            return features, labels, order, min(local.batch_size, len(labels)), rate, mu, *start, updates[row]

        def train_row(given: tuple[Any, ...]) -> None:
            features, order = given[0], given[2]
            if self._span_is_faster(*order.shape):
                gram = _read_only(features @ features.T + 1, self.dtype)
                train_device_in_span(*(*given, gram))
            else:
                train_device(*given)

        cost = work.epochs * self.train_split.sizes[work.devices]
        longest_first = np.argsort(-cost, kind="stable").tolist()  # so that threads end together
        # Batch orders are drawn before the threads start: Python code would make them wait for each other.
        on_all_cores(train_row, [arguments(row) for row in longest_first])
        return list(updates)

    def _span_is_faster(self, epochs: int, samples: int) -> bool:
        """Return whether training in the span of a device's samples needs fewer multiplications, by measured cost.

        It depends on nothing else, so that an update does not depend on what ran before.
        """
        features, classes = self._initial.shape
        direct = 2 * epochs * features * classes
        return epochs > 1 and SPAN_COST * samples * (features / 2 + epochs * classes) + 2 * features * classes < direct

    def gradients(self, params: Matrix, devices: IntArray) -> list[Matrix]:
        """Return ∇F_k(params) of each device."""
        check_params(params, self._initial)
        check_devices(self.train_split, devices)
        start = _by_class(params)

        def gradient_of(device: int) -> Matrix:
            (features, labels), gradient = self.train_split.device(device), np.empty_like(self._initial)
            sweep(features, labels, np.full(len(labels), 1 / len(labels), self.dtype), *start, gradient)
            return gradient

        return on_all_cores(gradient_of, devices.tolist())

    def gradient(self, params: Matrix, devices: IntArray, weights: FloatArray) -> Matrix:
        """Return Σ weights ∇F_k(params), over all devices in one pass.

        Where every round asks for that, `evaluate` computes it in its own pass at the end of the round before.
        """
        check_params(params, self._initial)
        if not full_participation(self.train_split, devices):
            return weighted_sum(weights, self.gradients(params, devices))
        sizes = self.train_split.sizes
        factors = np.repeat(weights / sizes, sizes).astype(self.dtype)
        if not np.array_equal(factors, self._factors):
            self._factors, self._gradient = factors, None
        if self._gradient is None or not np.array_equal(params, self._gradient[0]):
            self._gradient = params.copy(), self._pass(params, self.train_split.evaluation, factors)[2]
        self._gradient_used = True
        return self._gradient[1].copy()

    def evaluate(self, params: Matrix) -> tuple[float, float]:
        """Return the mean loss over all training samples and the accuracy over all test samples."""
        check_params(params, self._initial)
        train, test = self.train_split.evaluation, self.test_split
        if not self._gradient_used:
            self._factors = self._no_factors
        self._gradient_used = False
        loss, _, gradient = self._pass(params, train, self._factors)
        self._gradient = (params.copy(), gradient) if len(self._factors) else None
        correct = self._pass(params, test, self._no_factors)[1]
        return loss / len(train.labels), correct / max(1, len(test.labels))

    def _pass(self, params: Matrix, split: Split, factors: Matrix) -> tuple[float, int, Matrix]:
        """Return the sum of losses, the number of correct guesses and Σ factors · gradients (zeros without factors)."""
        start = _by_class(params)

        def block_pass(begin: int) -> tuple[float, int, Matrix]:
            block, gradient = slice(begin, begin + ROWS), np.zeros_like(self._initial)
            loss, correct = sweep(split.features[block], split.labels[block], factors[block], *start, gradient)
            return loss, correct, gradient

        blocks = on_all_cores(block_pass, range(0, len(split.labels), ROWS))
        total = sum((gradient for _, _, gradient in blocks), np.zeros(self._initial.shape))
        return sum(block[0] for block in blocks), sum(block[1] for block in blocks), total.astype(self.dtype)


def _by_class(params: Matrix) -> tuple[Matrix, Matrix]:
    """Return the weights, (C, d), and the biases, (C,), of params (d + 1, C)."""
    return np.array(params[:-1].T, order="C"), np.array(params[-1])


def _read_only(array: Matrix, dtype: npt.DTypeLike) -> Matrix:
    """Return a contiguous read-only view or copy: with one kind of array there is one version to compile."""
    view: Matrix = np.ascontiguousarray(array, dtype).view(np.ndarray)
    view.flags.writeable = False
    return view
