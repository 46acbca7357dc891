"""Federated data: flat arrays sorted by device, so that the samples of a device are a slice and not a copy."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcontext.errors import FedcontextError
from fedcontext.plan import IntArray

Features = npt.NDArray[np.floating]
Pixels = npt.NDArray[np.uint8]
Samples: TypeAlias = tuple[Features, IntArray]
BLOCK = 1024  # rows that are checked or converted at a time, to need little memory beside the result


@dataclass(frozen=True)
class Split:
    """The training or test samples of all devices: those of device k are rows offsets[k] to offsets[k + 1]."""

    features: Features  # (n, d)
    labels: IntArray  # (n,)
    offsets: IntArray  # (N + 1,)

    @cached_property
    def sizes(self) -> IntArray:
        """(N,) samples on each device."""
        return np.diff(self.offsets)

    @property
    def evaluation(self) -> Split:
        """The samples on which models are evaluated: all of them."""
        return self

    def rows(self, device: int) -> slice:
        """Return the rows of one device."""
        return slice(int(self.offsets[device]), int(self.offsets[device + 1]))

    def device(self, device: int) -> Samples:
        """Return the features and labels of one device."""
        rows = self.rows(device)
        return self.features[rows], self.labels[rows]

    def map(self, function: Callable[[Samples], Samples]) -> Split:
        """Return the split with ``function`` applied to its samples, all at once."""
        return Split(*function((self.features, self.labels)), self.offsets)


@dataclass(frozen=True)
class LazySplit:
    """Training samples generated each time a device needs them, so that memory does not grow with the devices."""

    sizes: IntArray  # (N,)
    generate: Callable[[int], Samples]  # the same samples at every call
    evaluation: Split  # the training samples of a fixed subset of devices, on which models are evaluated

    def device(self, device: int) -> Samples:
        """Return the features and labels of one device."""
        return self.generate(device)

    def map(self, function: Callable[[Samples], Samples]) -> LazySplit:
        """Return the split with ``function`` applied to samples when they are generated."""
        return LazySplit(self.sizes, lambda device: function(self.generate(device)), self.evaluation.map(function))


@dataclass(frozen=True, eq=False)
class FederatedData:
    """A data set on N devices, each with its own training and test samples."""

    name: str
    train: Split | LazySplit
    test: Split  # of all devices, or of the evaluation devices
    classes: int

    @cached_property
    def digest(self) -> str:
        """A digest of all samples and of who holds them; of the evaluation devices' samples where they are lazy."""
        train, test = self.evaluation_split, self.test
        splits = (array for split in (train, test) for array in (split.features, split.labels, split.offsets))
        return _digest([self.train.sizes, *splits])

    @property
    def evaluation_split(self) -> Split:
        """The training samples on which models are evaluated: all, or a fixed subset where they are lazy."""
        return self.train.evaluation

    @property
    def population(self) -> int:
        """Return N, the number of devices."""
        return len(self.train.sizes)

    @property
    def dimension(self) -> int:
        """Return d, the number of features."""
        return int(self.evaluation_split.features.shape[1])


def _digest(arrays: Sequence[npt.NDArray[Any]]) -> str:
    """Return a digest of the arrays' types, shapes and bytes: CRC-32 is fast, and nobody forges a data set."""
    facts = [
        f"{a.dtype} {a.shape} {zlib.crc32(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data)}" for a in arrays
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def full_participation(train: Split | LazySplit, devices: IntArray) -> bool:
    """Return whether ``devices`` are all devices in order; raise an error if that is so and their samples are lazy.

    >>> full_participation(join([(np.zeros((1, 2)), np.zeros(1, int))] * 3), np.arange(3))
    True
    """
    count = len(train.sizes)
    if len(devices) != count or not np.array_equal(devices, np.arange(count)):
        return False
    if isinstance(train, LazySplit):
        raise FedcontextError(
            f"samples are generated on demand, so one round cannot use all {count} devices: "
            "set probes to cohort or a number, pool to a number, and smoothness to a number or 1/lr"
        )
    return True


def check_devices(train: Split | LazySplit, devices: IntArray) -> None:
    """Raise an error for a device number out of range (an array index of -1 would be the last device).

    >>> check_devices(join([(np.zeros((1, 2)), np.zeros(1, int))] * 3), np.array([0, 3]))
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: device must be from 0 to 2, got 3
    """
    count = len(train.sizes)
    unknown = devices[(devices < 0) | (devices >= count)]
    if len(unknown):
        raise FedcontextError(f"device must be from 0 to {count - 1}, got {unknown[0]}")


def join(parts: Sequence[Samples]) -> Split:
    """Return the concatenated samples of the devices.

    >>> join([(np.zeros((2, 3)), np.zeros(2, int)), (np.ones((1, 3)), np.ones(1, int))]).sizes
    array([2, 1])
    """
    features, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Split(features, labels.astype(np.int64), _offsets([own for _, own in parts]))


def first_devices(data: FederatedData, count: int, name: str) -> FederatedData:
    """Return the first ``count`` devices of a data set, under another name.

    >>> data = federate(np.zeros((20, 3)), np.arange(20) % 2, [np.arange(10), np.arange(10, 20)])
    >>> first_devices(data, 1, "half").train.sizes
    array([9])
    """
    if not 1 <= count <= data.population:
        raise FedcontextError(f"dataset {name!r}: devices must be from 1 to {data.population}, got {count}")
    assert isinstance(data.train, Split), "only data sets in memory can be cut"

    def cut(split: Split) -> Split:
        rows = slice(0, int(split.offsets[count]))
        return Split(split.features[rows], split.labels[rows], split.offsets[: count + 1])

    return FederatedData(name, cut(data.train), cut(data.test), data.classes)


def gather(
    features: npt.NDArray[Any],
    labels: IntArray,
    parts: Sequence[IntArray],
    convert: Callable[[npt.NDArray[Any]], Features] | None = None,
) -> Split:
    """Return a split whose device k has rows ``parts[k]`` of the arrays, converted to floats (bytes to 0..1) on the way.

    >>> gather(np.array([[0], [51], [255]], np.uint8), np.array([5, 6, 7]), [np.array([2]), np.array([0, 1])]).features
    array([[1. ],
           [0. ],
           [0.2]], dtype=float32)
    """
    rows, convert = np.concatenate(parts), convert or _to_floats
    gathered = np.empty((len(rows), features.shape[1]), convert(features[:0]).dtype)
    for start in range(0, len(rows), BLOCK):
        gathered[start : start + BLOCK] = convert(features[rows[start : start + BLOCK]])
    return Split(gathered, labels[rows].astype(np.int64), _offsets(parts))


def _to_floats(features: npt.NDArray[Any]) -> Features:
    floats: Features
    if features.dtype == np.uint8:
        floats = np.divide(features, 255, dtype=np.float32)
    else:
        floats = features.astype(features.dtype.newbyteorder("="), copy=False)
    return floats


def _offsets(parts: Sequence[npt.NDArray[Any]]) -> IntArray:
    return np.cumsum([0, *map(len, parts)], dtype=np.int64)


def federate(
    features: npt.ArrayLike,
    labels: npt.ArrayLike,
    parts: Sequence[IntArray],
    *,
    name: str = "custom",
    classes: int | None = None,
    test_share: float = 0.1,
) -> FederatedData:
    """Return arrays partitioned over devices: ``parts[k]`` are the samples of device k, the last tenth of them for test.

    Features are floats of shape (n, d), or images such as (n, 28, 28) or (n, 32, 32, 3), which are flattened; uint8
    features become float32 from 0 to 1. PyTorch tensors on the CPU are accepted. A device keeps at least one training
    sample. The order inside a part decides which samples are for test, so shuffle it (the partitioners do). Devices may
    share samples, such as a public set; a sample that one trains on and another tests on inflates the test accuracy.

    >>> data = federate(np.zeros((20, 3)), np.arange(20) % 2, [np.arange(10), np.arange(10, 20)])
    >>> data.population, data.train.sizes, data.test.sizes, data.classes
    (2, array([9, 9]), array([1, 1]), 2)
    """
    flat, targets = _array("features", features), _array("labels", labels)
    flat = flat.reshape(len(flat), -1) if flat.ndim > 2 and flat.size else flat
    check_arrays(flat, targets)
    if not hasattr(parts, "__len__") or not len(parts):
        raise FedcontextError(f"parts must list the samples of each device, got {parts!r}: there are no devices")
    rows = [_indices(device, part, len(targets)) for device, part in enumerate(parts)]
    if not isinstance(test_share, int | float) or not 0 <= test_share < 1:
        raise FedcontextError(f"test_share must be from 0 to below 1, got {test_share!r}")
    top = max(int(targets[part].max()) for part in rows)
    if classes is not None and (not isinstance(classes, int | np.integer) or classes <= top):
        raise FedcontextError(f"classes must be a whole number above the largest label {top}, got {classes!r}")
    train, test = (gather(flat, targets, side) for side in train_and_test(rows, test_share))
    return FederatedData(name, train, test, int(targets.max()) + 1 if classes is None else int(classes))


def _array(name: str, given: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged rows; a tensor on a GPU or that requires grad
        raise FedcontextError(f"{name} must be an array, got {type(given).__name__}: {str(error)[:200]}") from None


def _indices(device: int, part: IntArray, count: int) -> IntArray:
    """Return the samples of a device as int64 indices; raise an error for masks, other types and out-of-range indices."""
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


def train_and_test(parts: Sequence[IntArray], test_share: float = 0.1) -> tuple[list[IntArray], list[IntArray]]:
    """Return the training and the test samples of each device.

    >>> [[len(part) for part in side] for side in train_and_test([np.arange(1), np.arange(20)])]
    [[1, 18], [0, 2]]
    """
    counts = train_sizes(np.array([len(part) for part in parts]), test_share).tolist()
    pairs = list(zip(parts, counts, strict=True))
    return [part[:count] for part, count in pairs], [part[count:] for part, count in pairs]


def train_sizes(sizes: IntArray, test_share: float = 0.1) -> IntArray:
    """Return how many samples of each device are for training: all but the share for test, and at least one.

    >>> train_sizes(np.array([1, 20]))
    array([ 1, 18])
    """
    return np.maximum(1, ((1 - test_share) * sizes + 1e-9).astype(np.int64))


def check_arrays(features: npt.NDArray[Any], labels: npt.NDArray[Any]) -> None:
    """Raise an error for samples that cannot be trained on.

    >>> check_arrays(np.zeros((2, 3)), np.array([0, -1]))
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: labels must be whole numbers from 0, got int64 with minimum -1
    """
    is_float = np.issubdtype(features.dtype, np.floating)
    if features.ndim != 2 or not (is_float or features.dtype == np.uint8):
        got = f"{features.dtype} {features.shape}"
        raise FedcontextError(
            f"features must be floats or uint8 of shape (n, d) or images (n, height, width), got {got}"
        )
    if labels.shape != features.shape[:1]:
        raise FedcontextError(f"labels must have shape {features.shape[:1]}, got {labels.shape}")
    if not features.size:
        raise FedcontextError(f"features must not be empty, got shape {features.shape}")
    is_whole = np.issubdtype(labels.dtype, np.integer)
    if not is_whole or labels.min() < 0:
        got = f"{labels.dtype} with minimum {labels.min()}" if is_whole else str(labels.dtype)
        raise FedcontextError(f"labels must be whole numbers from 0, got {got}")
    blocks = range(0, len(features) if is_float else 0, BLOCK)
    if not all(np.isfinite(features[start : start + BLOCK]).all() for start in blocks):
        raise FedcontextError("features have NaN or infinite entries")
