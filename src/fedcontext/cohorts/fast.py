"""The paper's model at full speed: the reference engine's work, compiled, with devices spread over all cores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedcontext.arrays import FloatArray
from fedcontext.cohorts import kernels
from fedcontext.cohorts.draws import compiled_orders
from fedcontext.cohorts.softmax import weighted_sum
from fedcontext.compiling import announced
from fedcontext.datasets.federated import FederatedData, Samples, Split, is_everyone, judged
from fedcontext.errors import FedcontextError
from fedcontext.plan import IntArray
from fedcontext.threads import on_all_cores

if TYPE_CHECKING:
    from fedcontext.cohorts import Work

Matrix = npt.NDArray[Any]
ROWS = 4096  # samples of one task in a pass over all data
GRAM_COST, SPAN_COST = 1.4, 1.9  # of a product in `gram` and `descend_in_span`, measured against one in `descend`
SPAN_LIMIT = 4096  # samples, so that the inner products of one device stay under 64 MB in float32
GRAM_BYTES = 256 * 2**20  # kept inner products of devices' samples, in all


class SoftmaxFast:
    """Does what `SoftmaxReference` does, to rounding."""

    def __init__(self, data: FederatedData, dtype: npt.DTypeLike = np.float32) -> None:
        self.data, self.dtype = data, np.dtype(dtype)
        self.dimension, self.classes = data.dimension, data.classes
        self.train_split, self.test_split = data.train.each(self._laid_out), data.test.each(self._laid_out)
        self._grams: dict[int, Matrix] = {}
        self._kept = 0
        self._factors: Matrix | None = None  # of each sample, in the last gradient over all devices
        self._ahead: tuple[Matrix, Matrix] | None = None  # params, and that gradient there
        self._wanted = False  # whether it has been asked for since the last evaluation
        with announced():
            self._orders = compiled_orders()
            self._compile()

    def start(self) -> Matrix:
        """Return zeros: every class equally likely."""
        return np.zeros((self.dimension + 1, self.classes), self.dtype)

    def train(self, params: Matrix, work: Work) -> list[Matrix]:
        """Return each device's update: mini-batch SGD on F_k(w) + (μ/2)‖w - wᵗ‖² from ``params``."""
        work.local.check_plain("fast")
        params = self._checked(params)
        longest = np.argsort(-work.epochs * self.train_split.sizes[work.devices], kind="stable")
        start, updates = _by_class(params), [np.empty_like(params) for _ in longest]
        told = [(int(work.devices[row]), int(work.epochs[row]), updates[row]) for row in longest]
        on_all_cores(lambda each: self._train_device(start, work, *each), told)
        return updates

    def _train_device(self, start: tuple[Matrix, Matrix], work: Work, device: int, epochs: int, update: Matrix) -> None:
        local = work.local
        features, labels = self.train_split.device(device)
        orders = self._orders(work.seed, work.number, device, len(labels), epochs)
        size = min(local.batch_size, len(labels))
        given = (features, labels, orders, size, float(local.learning_rate), float(local.mu), *start, update)
        if self._spans(len(labels), epochs):
            kernels.descend_in_span(*given, self._gram(device, features))
        else:
            kernels.descend(*given)

    def _spans(self, count: int, epochs: int) -> bool:
        """Return whether steps in the span of the device's samples take less time than steps in the features.

        The inner products are counted even where they are kept already: a result must not depend on what came before.
        """
        dimension, classes = self.dimension, self.classes
        in_features = 2 * dimension * classes * epochs
        in_span = 2 * dimension * classes + count * (GRAM_COST * dimension / 2 + SPAN_COST * classes * epochs)
        return count <= SPAN_LIMIT and in_span < in_features

    def _gram(self, device: int, features: Matrix) -> Matrix:
        found = self._grams.get(device)
        if found is None:
            found = kernels.gram(features)
            if self._kept + found.nbytes <= GRAM_BYTES:
                self._grams[device] = found
                self._kept += found.nbytes
        return found

    def gradients(self, params: Matrix, devices: IntArray) -> list[Matrix]:
        """Return ∇F_k(params) of each device."""
        start = _by_class(self._checked(params))

        def own(device: int) -> Matrix:
            features, labels = self.train_split.device(device)
            slope, factors = np.empty_like(params), np.full(len(labels), 1 / len(labels), self.dtype)
            kernels.sweep(features, labels, factors, *start, slope, True)
            return slope

        return on_all_cores(own, devices.tolist())

    def gradient(self, params: Matrix, devices: IntArray, weights: FloatArray) -> Matrix:
        """Return Σ weights ∇F_k(params), over all devices in one pass.

        Where rounds ask for that every time, `evaluate` takes it along in its own pass over the data at the end of a
        round, and the next one finds it ready.
        """
        params = self._checked(params)
        if not is_everyone(self.train_split, devices):
            return weighted_sum(weights, self.gradients(params, devices))
        sizes = self.train_split.sizes
        factors = np.repeat(weights / sizes, sizes).astype(self.dtype)
        if self._factors is None or not np.array_equal(factors, self._factors):
            self._factors, self._ahead = factors, None
        if self._ahead is None or not np.array_equal(params, self._ahead[0]):
            self._ahead = params.copy(), self._pass_over_train(params)[1]
        self._wanted = True
        return self._ahead[1].copy()

    def evaluate(self, params: Matrix) -> tuple[float, float]:
        """Return the mean loss over all training samples and the share of all test samples classified right."""
        params, test = self._checked(params), self.test_split
        if not self._wanted:
            self._factors = None
        self._wanted = False
        loss, slope = self._pass_over_train(params)
        self._ahead = params.copy(), slope
        hits = sum(hits for _, hits, _ in _sweep(test, params, None))
        return loss / len(judged(self.train_split).labels), hits / max(1, len(test.labels))

    def _pass_over_train(self, params: Matrix) -> tuple[float, Matrix]:
        """Return the sum of all training losses, and Σ factors · gradients where factors are set."""
        parts = _sweep(judged(self.train_split), params, self._factors)
        slope = sum((slope for _, _, slope in parts), np.zeros(params.shape))
        return sum(loss for loss, _, _ in parts), slope.astype(self.dtype)

    def _laid_out(self, samples: Samples) -> Samples:
        """Return samples row by row in memory (they mostly are), read-only so that there is one kind to compile for."""
        return _sealed(samples[0], self.dtype), _sealed(samples[1], np.dtype(np.int64))

    def _checked(self, params: Matrix) -> Matrix:
        shape = (self.dimension + 1, self.classes)
        if params.shape != shape or params.dtype != self.dtype:
            raise FedcontextError(f"params must be {self.dtype} {shape}, got {params.dtype} {params.shape}")
        return np.ascontiguousarray(params)

    def _compile(self) -> None:
        """Compile every kernel for this dtype, or load it from the cache."""
        features, labels = _sealed(np.zeros((1, 1)), self.dtype), _sealed(np.zeros(1), np.dtype(np.int64))
        params = np.zeros((2, 2), self.dtype)
        start = _by_class(params)
        given = (features, labels, np.zeros((1, 1), np.int64), 1, 1.0, 0.0, *start, params)
        kernels.descend(*given)
        kernels.descend_in_span(*given, kernels.gram(features))
        kernels.sweep(features, labels, params[0, :1], *start, params, True)


def _by_class(params: Matrix) -> tuple[Matrix, Matrix]:
    """Return weights (C, d), a row of memory for each class, and biases (C,)."""
    return params[:-1].T.copy(order="C"), params[-1].copy()


def _sealed(array: Matrix, dtype: np.dtype[Any]) -> Matrix:
    view: Matrix = np.ascontiguousarray(array, dtype).view(np.ndarray)
    view.flags.writeable = False
    return view


def _sweep(split: Split, params: Matrix, factors: Matrix | None) -> list[tuple[float, int, Matrix]]:
    """Return (sum of losses, hits, Σ factors · gradients) of each block of samples, in one pass over the data."""
    start, ones = _by_class(params), np.ones(min(ROWS, len(split.labels)), params.dtype)

    def block(first: int) -> tuple[float, int, Matrix]:
        rows, slope = slice(first, first + ROWS), np.empty_like(params)
        labels = split.labels[rows]
        own = ones[: len(labels)] if factors is None else factors[rows]
        loss, hits = kernels.sweep(split.features[rows], labels, own, *start, slope, factors is not None)
        return loss, hits, slope

    return on_all_cores(block, range(0, len(split.labels), ROWS))
