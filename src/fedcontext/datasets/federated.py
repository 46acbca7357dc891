"""Data spread over devices: flat arrays in the order of the devices, so that a device is a slice and no copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcontext.errors import FedcontextError
from fedcontext.plan import IntArray

Features = npt.NDArray[np.floating]
Samples: TypeAlias = tuple[Features, IntArray]


@dataclass(frozen=True)
class Split:
    """One side of a data set (train or test): the samples of device k are rows offsets[k] to offsets[k + 1]."""

    features: Features  # (n, d)
    labels: IntArray  # (n,)
    offsets: IntArray  # (N + 1,)

    @cached_property
    def sizes(self) -> IntArray:
        """(N,) samples on each device."""
        return np.diff(self.offsets)

    def rows(self, device: int) -> slice:
        """Return where the samples of one device are."""
        return slice(int(self.offsets[device]), int(self.offsets[device + 1]))

    def device(self, device: int) -> Samples:
        """Return the features and labels of one device."""
        rows = self.rows(device)
        return self.features[rows], self.labels[rows]

    def each(self, change: Callable[[Samples], Samples]) -> Split:
        """Return the split with its samples changed, all at once."""
        return Split(*change((self.features, self.labels)), self.offsets)


@dataclass(frozen=True)
class DrawnSplit:
    """Training samples made when a device is asked for them, and forgotten: memory does not grow with the devices."""

    sizes: IntArray  # (N,)
    draw: Callable[[int], Samples]
    evaluation: Split  # the training samples of a fixed sample of devices, on which models are evaluated

    def device(self, device: int) -> Samples:
        """Return the features and labels of one device: the same at every call."""
        return self.draw(device)

    def each(self, change: Callable[[Samples], Samples]) -> DrawnSplit:
        """Return the split with its samples changed, as they are drawn."""
        return DrawnSplit(self.sizes, lambda device: change(self.draw(device)), self.evaluation.each(change))


@dataclass(frozen=True, eq=False)
class FederatedData:
    """A data set on N devices, each with its own training and test samples."""

    name: str
    train: Split | DrawnSplit
    test: Split  # of all devices, or of the evaluation devices
    classes: int

    @property
    def evaluation_split(self) -> Split:
        """The training samples on which models are evaluated: all, unless they are made on demand."""
        return evaluation_split(self.train)

    @property
    def population(self) -> int:
        """Return N, the number of devices."""
        return len(self.train.sizes)

    @property
    def dimension(self) -> int:
        """Return d, the number of features."""
        return int(self.evaluation_split.features.shape[1])


def evaluation_split(train: Split | DrawnSplit) -> Split:
    """Return the part of a training side on which models are evaluated."""
    return train if isinstance(train, Split) else train.evaluation


def is_everyone(train: Split | DrawnSplit, devices: IntArray) -> bool:
    """Return whether these are all devices; refuse that where samples are made on demand.

    >>> is_everyone(join([(np.zeros((1, 2)), np.zeros(1, int))] * 3), np.arange(3))
    True
    """
    count = len(train.sizes)
    if len(devices) != count or not np.array_equal(devices, np.arange(count)):
        return False
    if isinstance(train, DrawnSplit):
        raise FedcontextError(
            f"data made on demand cannot be asked for all its {count} devices at once: "
            "set probes to cohort or a number, pool to a number, and smoothness to a number or 1/lr"
        )
    return True


def check_devices(train: Split | DrawnSplit, devices: IntArray) -> None:
    """Refuse numbers that no device has: arrays would take -1 for the last one.

    >>> check_devices(join([(np.zeros((1, 2)), np.zeros(1, int))] * 3), np.array([0, 3]))
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: there is no device 3: the data has 3 devices, numbered from 0
    """
    count = len(train.sizes)
    unknown = devices[(devices < 0) | (devices >= count)]
    if len(unknown):
        raise FedcontextError(f"there is no device {unknown[0]}: the data has {count} devices, numbered from 0")


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Features:
    """Return an empty array that starts at a cache line: loads of whole vectors are a fifth faster there.

    >>> aligned((3, 16), np.float32).ctypes.data % 64
    0
    """
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(kind).reshape(shape)


def join(parts: Sequence[Samples]) -> Split:
    """Return the devices' samples laid end to end.

    >>> join([(np.zeros((2, 3)), np.zeros(2, int)), (np.ones((1, 3)), np.ones(1, int))]).sizes
    array([2, 1])
    """
    offsets = np.cumsum([0, *(len(labels) for _, labels in parts)])
    kind = np.result_type(*(features for features, _ in parts))
    features = aligned((int(offsets[-1]), parts[0][0].shape[1]), kind)
    np.concatenate([features for features, _ in parts], out=features)
    return Split(features, np.concatenate([labels for _, labels in parts]).astype(np.int64), offsets)


def gather(features: Features, labels: IntArray, parts: Sequence[IntArray]) -> Split:
    """Return the samples of each device, rows ``parts[k]`` of the arrays, laid end to end: copied once.

    >>> gather(np.arange(3.0)[:, None], np.array([5, 6, 7]), [np.array([2]), np.array([0, 1])]).labels
    array([7, 5, 6])
    """
    rows = np.concatenate(parts)
    laid = aligned((len(rows), features.shape[1]), np.result_type(features))
    np.take(features, rows, axis=0, out=laid, mode="clip")  # all rows are there; to look for others would be a copy
    return Split(laid, labels[rows].astype(np.int64), np.cumsum([0, *map(len, parts)]))


def federate(
    features: Features,
    labels: IntArray,
    parts: Sequence[IntArray],
    *,
    name: str = "custom",
    classes: int | None = None,
    test_share: float = 0.1,
) -> FederatedData:
    """Return arrays spread over devices: ``parts[k]`` are the samples of device k, the last tenth of them for test.

    A device keeps at least one training sample; the order inside a part decides what is test, so shuffle it (the
    partitioners do). Devices may share samples, such as a public set that all of them hold; one that is for training here
    and for test there makes models look better than they are.

    >>> data = federate(np.zeros((20, 3)), np.arange(20) % 2, [np.arange(10), np.arange(10, 20)])
    >>> data.population, data.train.sizes, data.test.sizes, data.classes
    (2, array([9, 9]), array([1, 1]), 2)
    """
    features, labels = _array("features", features), _array("labels", labels)
    check_arrays(features, labels)
    if not hasattr(parts, "__len__") or not len(parts):
        raise FedcontextError(f"parts must hold the samples of each device, got {parts!r}: there are no devices")
    rows = [_indices(device, part, len(labels)) for device, part in enumerate(parts)]
    if not isinstance(test_share, int | float) or not 0 <= test_share < 1:
        raise FedcontextError(f"test_share must be from 0 to below 1, got {test_share!r}")
    top = max(int(labels[part].max()) for part in rows)
    if classes is not None and (not isinstance(classes, int | np.integer) or classes <= top):
        raise FedcontextError(f"classes must be a whole number above the largest label {top}, got {classes!r}")
    counts = kept_for_training(np.array([len(part) for part in rows]), test_share).tolist()
    train = [part[:count] for part, count in zip(rows, counts, strict=True)]
    test = [part[count:] for part, count in zip(rows, counts, strict=True)]
    return FederatedData(
        name,
        gather(features, labels, train),
        gather(features, labels, test),
        int(labels.max()) + 1 if classes is None else int(classes),
    )


def _array(name: str, given: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        return np.asarray(given)
    except (TypeError, ValueError) as error:  # rows of different lengths, a tensor that is not in this memory
        raise FedcontextError(f"{name} must be an array, got {type(given).__name__}: {error}") from None


def _indices(device: int, part: IntArray, count: int) -> IntArray:
    """Return the samples of a device as indices; refuse masks, other numbers, and samples that are not there."""
    rows = _array(f"the samples of device {device}", part)
    if rows.shape == (0,):
        raise FedcontextError(f"device {device} has no samples")
    if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
        raise FedcontextError(f"the samples of device {device} must be indices (n,), got {rows.dtype} {rows.shape}")
    if rows.min() < 0 or rows.max() >= count:
        raise FedcontextError(
            f"the samples of device {device} must be from 0 to {count - 1}, got {rows.min()} to {rows.max()}"
        )
    return rows.astype(np.int64, copy=False)


def kept_for_training(sizes: IntArray, test_share: float = 0.1) -> IntArray:
    """Return how many samples of each device are for training: all but the test's share, and at least one.

    >>> kept_for_training(np.array([1, 20]))
    array([ 1, 18])
    """
    return np.maximum(1, ((1 - test_share) * sizes + 1e-9).astype(np.int64))


def check_arrays(features: Features, labels: IntArray) -> None:
    """Refuse what cannot be trained on.

    >>> check_arrays(np.zeros((2, 3)), np.array([0, -1]))
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: labels must be whole numbers from 0, got int64 with minimum -1
    """
    if features.ndim != 2 or not np.issubdtype(features.dtype, np.floating):
        raise FedcontextError(f"features must be a floating (n, d) array, got {features.dtype} {features.shape}")
    if labels.shape != features.shape[:1]:
        raise FedcontextError(f"labels must have shape {features.shape[:1]}, got {labels.shape}")
    if not len(labels):
        raise FedcontextError("there are no samples")
    whole = np.issubdtype(labels.dtype, np.integer)
    if not whole or labels.min() < 0:
        got = f"{labels.dtype} with minimum {labels.min()}" if whole else labels.dtype
        raise FedcontextError(f"labels must be whole numbers from 0, got {got}")
    if not all(np.isfinite(features[start : start + 1024]).all() for start in range(0, len(features), 1024)):
        raise FedcontextError("features have NaN or infinite entries")
