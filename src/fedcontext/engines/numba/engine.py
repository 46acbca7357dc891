"""The paper's model at full speed: the reference engine's work, compiled, with devices spread over all cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcontext import plan
from fedcontext.arrays.tree import FloatArray
from fedcontext.datasets.federated import (
    FederatedData,
    Samples,
    Split,
    check_devices,
    full_participation,
    join,
)
from fedcontext.engines.numba.draws import compiled_orders, entropy
from fedcontext.engines.numba.kernels import sweep
from fedcontext.engines.numba.scheduler import Cohort, Step, descend_all
from fedcontext.engines.numba.sparse import Sparse, sparse
from fedcontext.engines.numba.sparse_kernels import sweep_sparsely
from fedcontext.engines.numba.vectors import LANES
from fedcontext.engines.softmax import SoftmaxReference, check_params, weighted_sum
from fedcontext.jit import announced
from fedcontext.plan import IntArray
from fedcontext.threads import on_all_cores, together

if TYPE_CHECKING:
    from fedcontext.engines.base import Work

Matrix = npt.NDArray[Any]
ROWS = 4096  # samples of one task in a pass over all data
GRAM_COST, SPAN_COST, SPARSE_COST = 1.4, 1.9, 1.5  # of a product there, measured against one in `descend`
SPAN_LIMIT = 4096  # samples, so that the inner products of one device stay under 64 MB in float32
GRAM_BYTES = 256 * 2**20  # kept inner products of devices' samples, in all


class Side(NamedTuple):
    """The samples of a training or a test side: as they are, and what differs from their background if that is little."""

    features: Matrix
    labels: IntArray
    found: Sparse

    @property
    def stored(self) -> bool:
        """Whether that is little enough to be stored."""
        return self.found.leans.size > 0


class SoftmaxNumba:
    """Does what `SoftmaxReference` does, to rounding."""

    buffers = ()  # every parameter has a gradient
    supports_corrections = True

    def __init__(self, data: FederatedData, dtype: npt.DTypeLike = np.float32) -> None:
        self.data, self.dtype = data, np.dtype(dtype)
        self.dimension, self.classes = data.dimension, data.classes
        self._start = np.zeros((self.dimension + 1, self.classes), self.dtype)
        self.train_split, self.test_split = data.train.map(self._laid_out), data.test.map(self._laid_out)
        self._inner = np.empty(0, self.dtype)  # inner products of devices' samples, where they are kept
        self._places: dict[int, int] = {}  # where those of a device begin
        self._known: set[int] = set()  # devices whose inner products are there
        self._used = 0
        self._factors: Matrix | None = None  # of each sample, in the last gradient over all devices
        self._ahead: tuple[Matrix, Matrix] | None = None  # params, and that gradient there
        self._wanted = False  # whether it has been asked for since the last evaluation
        with announced("the fast engine (about ten seconds)"):
            self._drawn = compiled_orders() is not plan.orders  # whether compiled code can draw the batch orders
            self.train_side, self.test_side = (_side(split) for split in (self.train_split.evaluation, self.test_split))
            self._nothing = sparse(self.train_side.features[:0])  # of devices whose samples are drawn on demand
            self._compile()

    def initial_params(self) -> Matrix:
        """Return zeros: every class equally likely."""
        return self._start.copy()

    def train(self, params: Matrix, work: Work) -> list[Matrix]:
        """Return each device's update: mini-batch SGD on F_k(w) + (μ/2)‖w - wᵗ‖² from ``params``."""
        work.local.check_supported("numba")
        check_devices(self.train_split, work.devices)
        if work.corrections is not None:  # steps then leave the span of the samples, on which the kernels rely
            return SoftmaxReference(self.data, self.dtype).train(params, work)
        params, (side, firsts) = self._checked(params), self._samples(work.devices)
        updates = np.empty((len(work.devices), *params.shape), self.dtype)
        cohort = self._cohort(work, side, firsts)
        together(self._crew(params, work, side, cohort, updates), len(updates))
        self._known.update(cohort.devices[cohort.places >= 0].tolist())
        return list(updates)

    def _samples(self, devices: IntArray) -> tuple[Side, IntArray]:
        """Return samples among which are those of these devices, and where each device's begin."""
        split = self.train_split
        if isinstance(split, Split) or not len(devices):
            return self.train_side, split.evaluation.offsets[devices]
        drawn = join(on_all_cores(split.device, devices.tolist())).map(self._laid_out)
        return Side(drawn.features, drawn.labels, self._nothing), drawn.offsets[:-1]

    def _cohort(self, work: Work, side: Side, firsts: IntArray) -> Cohort:
        """Return the devices with the way that each of them takes, the longest at work first."""
        devices, epochs = _plain(work.devices, np.int64), _plain(work.epochs, np.int64)
        counts = self.train_split.sizes[devices]
        spans = self._spans(side.found, counts, epochs)
        places, known = np.full(len(counts), -1), np.zeros(len(counts), np.bool_)
        writing: set[int] = set()  # a device that is here twice writes its inner products once
        for row in np.flatnonzero(spans).tolist() if side is self.train_side else ():
            device = int(devices[row])
            if device not in writing:
                places[row], known[row] = self._place(device, int(counts[row])), device in self._known
                writing |= {device} - self._known
        longest = np.argsort(-epochs * counts, kind="stable")
        return Cohort(longest, devices, firsts, counts, epochs, spans, places, known)

    def _crew(self, params: Matrix, work: Work, side: Side, cohort: Cohort, updates: Matrix) -> Callable[[], bool]:
        """Return a function that trains these devices, called once or by several threads at a time."""
        step = Step(work.local.batch_size, float(work.local.learning_rate), float(work.local.mu))
        orders = np.empty(0, np.int64) if self._drawn else _orders(work, cohort.counts)
        told = (np.zeros(2, np.int64), cohort, step, entropy(work.seed, work.number), orders, *side)
        return lambda: descend_all(*told, params, self._inner, updates)

    def _spans(self, found: Sparse, counts: IntArray, epochs: IntArray) -> npt.NDArray[np.bool_]:
        """Return where steps in the span of a device's samples take less time than the other way.

        The inner products are counted even where they are kept already: a result must not depend on what came before.
        """
        if epochs.max(initial=1) == 1:  # one epoch never pays
            return np.zeros(len(counts), np.bool_)
        once = an_epoch = 2.0 * self.dimension * self.classes
        if found.leans.size:
            an_epoch = SPARSE_COST * 2 * found.values.size / found.leans.size * -(-self.classes // LANES) * LANES
        in_span = once + counts * (GRAM_COST * self.dimension / 2 + SPAN_COST * self.classes * epochs)
        return (epochs > 1) & (counts <= SPAN_LIMIT) & (in_span < an_epoch * epochs)

    def _place(self, device: int, count: int) -> int:
        """Return where the inner products of a device's samples are to be kept; -1 where there is no room left."""
        if not self._inner.size:
            self._inner = np.empty(GRAM_BYTES // self.dtype.itemsize, self.dtype)  # taken when it is written to
        if device not in self._places:
            if self._used + count * count > self._inner.size:
                return -1
            self._places[device], self._used = self._used, self._used + count * count
        return self._places[device]

    def gradients(self, params: Matrix, devices: IntArray) -> list[Matrix]:
        """Return ∇F_k(params) of each device."""
        check_devices(self.train_split, devices)
        params, split = self._checked(params), self.train_split

        def own(device: int) -> Matrix:
            count = int(split.sizes[device])
            factors = np.full(count, 1 / count, self.dtype)
            if isinstance(split, Split):
                return passing(split.rows(device), factors)[2]
            return _passing(Side(*split.device(device), self._nothing), params)(slice(0, count), factors)[2]

        passing = _passing(self.train_side, params)
        return on_all_cores(own, devices.tolist())

    def gradient(self, params: Matrix, devices: IntArray, weights: FloatArray) -> Matrix:
        """Return Σ weights ∇F_k(params), over all devices in one pass.

        Where rounds ask for that every time, `evaluate` takes it along in its own pass over the data at the end of a
        round, and the next one finds it ready.
        """
        params = self._checked(params)
        if not full_participation(self.train_split, devices):
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
        params = self._checked(params)
        if not self._wanted:
            self._factors = None
        self._wanted = False
        loss, slope = self._pass_over_train(params)
        self._ahead = params.copy(), slope
        hits = sum(hits for _, hits, _ in _sweep(self.test_side, params, None))
        return loss / len(self.train_side.labels), hits / max(1, len(self.test_side.labels))

    def _pass_over_train(self, params: Matrix) -> tuple[float, Matrix]:
        """Return the sum of all training losses, and Σ factors · gradients where factors are set."""
        parts = _sweep(self.train_side, params, self._factors)
        slope = sum((slope for _, _, slope in parts), np.zeros(params.shape))
        return sum(loss for loss, _, _ in parts), slope.astype(self.dtype)

    def _laid_out(self, samples: Samples) -> Samples:
        """Return samples row by row in memory (they mostly are), read-only so that there is one kind to compile for."""
        return _sealed(samples[0], self.dtype), _sealed(samples[1], np.dtype(np.int64))

    def _checked(self, params: Matrix) -> Matrix:
        check_params(params, self._start)
        return _plain(params, self.dtype)

    def _compile(self) -> None:
        """Compile every kernel for this dtype, or load it from the cache."""
        features, labels = _sealed(np.zeros((1, 1)), self.dtype), _sealed(np.zeros(1), np.dtype(np.int64))
        params, none, one = np.zeros((2, 2), self.dtype), np.empty(0, np.int64), np.ones(1, np.int64)
        found, cohort = sparse(features), Cohort(none, none, none, none, none, none > 0, none, none > 0)
        told = (np.zeros(2, np.int64), cohort, Step(1, 1.0, 0.0), entropy(0, 0), one, features, labels, found)
        descend_all(*told, params, params[0], params[None])
        sweep(features, labels, params[0, :1], params, params, True)
        sweep_sparsely(found, 0, labels[:0], params[0, :0], params[:1], params[:1], True)


def _side(split: Split) -> Side:
    return Side(split.features, split.labels, sparse(split.features))


def _orders(work: Work, counts: IntArray) -> IntArray:
    """Return the batch orders of all devices, laid end to end."""
    told = zip(work.devices.tolist(), counts.tolist(), work.epochs.tolist(), strict=True)
    return np.concatenate([plan.orders(work.seed, work.number, *each).ravel() for each in told])


def _plain(array: Matrix, dtype: npt.DTypeLike) -> Matrix:
    """Return the array as there is code for: another kind, such as a read-only one, would be compiled for anew."""
    if type(array) is np.ndarray and array.dtype == dtype and array.flags.carray:
        return array  # as nearly always, and sooner known than by asking NumPy
    return np.require(array, dtype, ["C", "A", "W"])


def _sealed(array: Matrix, dtype: np.dtype[Any]) -> Matrix:
    view: Matrix = np.ascontiguousarray(array, dtype).view(np.ndarray)
    view.flags.writeable = False
    return view


def _passing(side: Side, params: Matrix) -> Callable[..., tuple[float, int, Matrix]]:
    """Return a function that gives (sum of losses, hits, Σ factors · gradients) over some rows of a side."""

    def over(rows: slice, factors: Matrix, backwards: bool = True) -> tuple[float, int, Matrix]:
        labels, slope = side.labels[rows], np.empty_like(params)
        if side.stored:
            loss, hits = sweep_sparsely(side.found, rows.start, labels, factors, params, slope, backwards)
        else:
            loss, hits = sweep(side.features[rows], labels, factors, params, slope, backwards)
        return loss, hits, slope

    return over


def _sweep(side: Side, params: Matrix, factors: Matrix | None) -> list[tuple[float, int, Matrix]]:
    """Return what `_passing` gives for each block of samples, in one pass over the data."""
    over, ones = _passing(side, params), np.ones(min(ROWS, len(side.labels)), params.dtype)

    def block(first: int) -> tuple[float, int, Matrix]:
        rows = slice(first, min(first + ROWS, len(side.labels)))
        return over(rows, ones[: rows.stop - first] if factors is None else factors[rows], factors is not None)

    return on_all_cores(block, range(0, len(side.labels), ROWS))
