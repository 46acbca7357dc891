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


@dataclass(frozen=True, eq=False, repr=False)
class FederatedData:
    """A data set on N devices, each with its own training and test samples.

    >>> whole = join([(np.zeros((2, 3)), np.zeros(2, int)), (np.ones((1, 3)), np.ones(1, int))])
    >>> FederatedData("both", whole, whole, classes=2)
    FederatedData('both', devices=2, train_samples=3, test_samples=3, classes=2, features=3)
    """

    name: str
    train: Split | LazySplit
    test: Split  # of all devices, or of the evaluation devices
    classes: int

    def __repr__(self) -> str:
        """Return the name and the sizes; the samples would fill the screen."""
        samples = f"train_samples={self.train.sizes.sum()}, test_samples={len(self.test.labels)}"
        return (
            f"FederatedData({self.name!r}, devices={self.population}, {samples}, "
            f"classes={self.classes}, features={self.dimension})"
        )

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
    """Return a digest of the arrays' types, shapes and bytes, by CRC-32: fast, but no protection against forgery."""
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
            f"set probes to cohort or a number below {count}, devices_per_round and pool to fewer together, smoothness to a "
            "number or 1/lr, and algorithm to none of the oracles"
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

    >>> whole = join([(np.zeros((2, 3)), np.zeros(2, int)), (np.ones((1, 3)), np.ones(1, int))])
    >>> first_devices(FederatedData("both", whole, whole, classes=2), 1, "one").train.sizes
    array([2])
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
    """Return a split: device k has rows ``parts[k]`` of the arrays, converted to floats (bytes to 0..1) on the way.

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
    if features.dtype == np.uint8:
        return np.asarray(np.divide(features, 255, dtype=np.float32))
    return features.astype(features.dtype.newbyteorder("="), copy=False)


def _offsets(parts: Sequence[npt.NDArray[Any]]) -> IntArray:
    return np.cumsum([0, *map(len, parts)], dtype=np.int64)
