"""Data sets from arrays of samples and their partition over devices, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcontext.datasets.federated import BLOCK, FederatedData, gather
from fedcontext.errors import FedcontextError, warn_user
from fedcontext.plan import IntArray


def federate(
    features: npt.ArrayLike,
    labels: npt.ArrayLike,
    parts: Sequence[IntArray],
    *,
    name: str = "custom",
    classes: int | None = None,
    test_share: float = 0.1,
) -> FederatedData:
    """Return arrays partitioned over devices: ``parts[k]`` are device k's samples, the last ``test_share`` for test.

    Features are floats of shape (n, d), or images such as (n, 28, 28) or (n, 32, 32, 3), which are flattened; uint8
    features become float32 from 0 to 1. PyTorch tensors on the CPU are accepted. A device keeps at least one training
    sample. The order inside a part decides which samples are for test, so shuffle it (the partitioners do). Devices may
    share samples, such as a public set; one that is both trained and tested on inflates the test accuracy: a warning.

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
    sides = train_and_test(rows, test_share)
    _warn_of_leak(*sides, len(targets))
    train, test = (gather(flat, targets, side) for side in sides)
    return FederatedData(name, train, test, int(targets.max()) + 1 if classes is None else int(classes))


def _array(name: str, given: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged rows; a tensor on a GPU or that requires grad
        raise FedcontextError(f"{name} must be an array, got {type(given).__name__}: {str(error)[:200]}") from None


def _indices(device: int, part: IntArray, count: int) -> IntArray:
    """Return a device's samples as int64 indices; raise an error for masks, other types and out-of-range indices."""
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


def _warn_of_leak(train: Sequence[IntArray], test: Sequence[IntArray], count: int) -> None:
    """Warn of the first of ``count`` samples that one device tests on and one, the same or another, trains on."""
    trainer, devices = np.full(count, -1), np.arange(len(train))
    trainer[np.concatenate(train)] = np.repeat(devices, [len(part) for part in train])
    tested, tester = np.concatenate(test), np.repeat(devices, [len(part) for part in test])
    if len(leaks := np.flatnonzero(trainer[tested] >= 0)):
        sample = tested[leaks[0]]
        warn_user(
            f"{len(leaks)} test samples are training samples too, which inflates the test accuracy: device {tester[leaks[0]]} "
            f"tests on sample {sample}, and device {trainer[sample]} trains on it; give each sample to one device"
        )


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
    fedcontext.errors.FedcontextError: labels must be whole numbers from 0, got int64 with minimum -1; use np.unique(labels, return_inverse=True)[1]
    """  # noqa: W505
    is_float, is_byte = np.issubdtype(features.dtype, np.floating), features.dtype == np.uint8
    if features.ndim != 2 or not (is_float or is_byte):
        advice = "; use features.astype(float)" if features.dtype.kind in "biu" and not is_byte else ""
        got = f"{features.dtype} {features.shape}{advice}"
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
        raise FedcontextError(
            f"labels must be whole numbers from 0, got {got}; use np.unique(labels, return_inverse=True)[1]"
        )
    blocks = range(0, len(features) if is_float else 0, BLOCK)
    if not all(np.isfinite(features[start : start + BLOCK]).all() for start in blocks):
        raise FedcontextError("features have NaN or infinite entries")
