"""MNIST in the partition of the FedProx paper."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedcontext.datasets.arrays import train_and_test
from fedcontext.datasets.cache import prepared
from fedcontext.datasets.federated import Features, FederatedData, Pixels, gather
from fedcontext.datasets.files import find, read_arrays
from fedcontext.errors import FedcontextError
from fedcontext.plan import IntArray, Stream, generator

DEVICES, MINIMUM, DIGITS_PER_DEVICE = 1_000, 5, 2
SHAPES = {"x_train": (60_000, 28, 28), "y_train": (60_000,), "x_test": (10_000, 28, 28), "y_test": (10_000,)}
BLOCK = 256  # rows at a time: copies in float64 that fit in a core's cache


def mnist(seed: int = 0) -> FederatedData:
    """Return MNIST on 1,000 devices: device u holds digits u mod 10 and (u + 1) mod 10, sizes follow a power law.

    All 70,000 images are pooled and split 90/10 inside each device. As published, each pixel is standardised over
    the whole set, test samples included: that leaks their mean and deviation (not their labels) into training.
    """
    path = find("mnist")

    def build() -> FederatedData:
        arrays = read_arrays(path, SHAPES)
        labels = np.concatenate([arrays["y_train"], arrays["y_test"]]).astype(np.int64)
        pixels = np.concatenate([arrays.pop("x_train"), arrays.pop("x_test")]).reshape(len(labels), -1)
        parts, scale = two_digits_per_device(labels, generator(seed, 0, Stream.DATA)), standardiser(pixels)
        train, test = (gather(pixels, labels, side, scale) for side in train_and_test(parts))
        return FederatedData("mnist", train, test, classes=10)

    return prepared("mnist", path, 10, build, seed)


def two_digits_per_device(labels: IntArray, random: np.random.Generator) -> list[IntArray]:
    """Return FedProx's partition: 5 samples of each of 2 digits, then log-normal(0, 2) shares of what is left.

    >>> parts = two_digits_per_device(np.arange(70_000) % 10, np.random.default_rng(0))
    >>> len(parts), min(len(part) for part in parts)
    (1000, 10)
    """
    holders = DEVICES * DIGITS_PER_DEVICE // 10
    counts = np.bincount(labels, minlength=10)
    if len(counts) > 10 or counts.min() < MINIMUM * holders:
        raise FedcontextError(
            f"MNIST labels must be digits, at least {MINIMUM * holders} of each, got {counts[:11].tolist()}"
        )
    left = {digit: random.permutation(np.flatnonzero(labels == digit)) for digit in range(10)}
    shares = random.lognormal(0, 2, (10, holders))
    shares /= shares.sum(axis=1, keepdims=True)
    sizes = [MINIMUM + (shares[digit] * (counts[digit] - MINIMUM * holders)).astype(int) for digit in range(10)]
    pieces = [iter(np.split(left[digit], np.cumsum(sizes[digit]))) for digit in range(10)]
    digits = [[(device + offset) % 10 for offset in range(DIGITS_PER_DEVICE)] for device in range(DEVICES)]
    return [random.permutation(np.concatenate([next(pieces[digit]) for digit in own])) for own in digits]


def standardiser(pixels: Pixels) -> Callable[[Pixels], Features]:
    """Return the function that gives each column of ``pixels`` mean 0 and deviation 1, and constant columns 0.

    As in FedProx, it divides by σ + 0.001.

    >>> pixels = np.array([[0, 255], [0, 0]], np.uint8)
    >>> standardiser(pixels)(pixels).round(2)
    array([[ 0.,  1.],
           [ 0., -1.]], dtype=float32)
    """
    count, (total, squares) = len(pixels), np.zeros((2, pixels.shape[1]))
    for start in range(0, count, BLOCK):
        block = pixels[start : start + BLOCK].astype(np.float64)
        total += block.sum(axis=0)
        squares += np.square(block, out=block).sum(axis=0)
    mean = (total / count).astype(np.float32)
    deviation = (np.sqrt(count * squares - total**2) / count + 0.001).astype(np.float32)  # exact: sums of integers
    return lambda rows: (rows.astype(np.float32) - mean) / deviation  # NumPy is slow at bytes minus floats
