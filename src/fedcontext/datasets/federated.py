"""Data spread over devices: flat arrays in the order of the devices, so that a device is a slice and no copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedcontext.errors import FedcontextError
from fedcontext.plan import IntArray

Features = npt.NDArray[np.floating]


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


@dataclass(frozen=True, eq=False)
class FederatedData:
    """A data set on N devices, each with its own training and test samples."""

    name: str
    train: Split
    test: Split
    classes: int

    @property
    def population(self) -> int:
        """Return N, the number of devices."""
        return len(self.train.sizes)

    @property
    def dimension(self) -> int:
        """Return d, the number of features."""
        return int(self.train.features.shape[1])


def join(parts: Sequence[tuple[Features, IntArray]]) -> Split:
    """Return the devices' samples laid end to end.

    >>> join([(np.zeros((2, 3)), np.zeros(2, int)), (np.ones((1, 3)), np.ones(1, int))]).sizes
    array([2, 1])
    """
    offsets = np.cumsum([0, *(len(labels) for _, labels in parts)])
    features = np.concatenate([features for features, _ in parts])
    return Split(features, np.concatenate([labels for _, labels in parts]).astype(np.int64), offsets)


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
    partitioners do).

    >>> data = federate(np.zeros((20, 3)), np.arange(20) % 2, [np.arange(10), np.arange(10, 20)])
    >>> data.population, data.train.sizes, data.test.sizes, data.classes
    (2, array([9, 9]), array([1, 1]), 2)
    """
    features, labels = np.asarray(features), np.asarray(labels)
    check_arrays(features, labels)
    empty = [device for device, part in enumerate(parts) if len(part) == 0]
    if empty or not len(parts):
        raise FedcontextError(f"device {empty[0]} has no samples" if empty else "there are no devices")
    counts = [max(1, int((1 - test_share) * len(part) + 1e-9)) for part in parts]
    train = [part[:count] for part, count in zip(parts, counts, strict=True)]
    test = [part[count:] for part, count in zip(parts, counts, strict=True)]
    return FederatedData(
        name,
        join([(features[part], labels[part]) for part in train]),
        join([(features[part], labels[part]) for part in test]),
        int(labels.max()) + 1 if classes is None else classes,
    )


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
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise FedcontextError(f"labels must be whole numbers from 0, got {labels.dtype} with minimum {labels.min()}")
    if not np.isfinite(features).all():
        raise FedcontextError("features have NaN or infinite entries")
