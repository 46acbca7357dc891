"""MNIST in the FedProx partition, and FEMNIST by writer, from the files that `files` finds or fetches."""

from __future__ import annotations

import numpy as np

from fedcontext.datasets.federated import Features, FederatedData, federate, gather
from fedcontext.datasets.files import find, read_arrays
from fedcontext.plan import IntArray, Stream, generator

DEVICES, EACH, DIGITS_PER_DEVICE = 1_000, 5, 2
BLOCK = 256  # rows at a time that stay in a core's cache


def mnist(seed: int = 0) -> FederatedData:
    """Return MNIST on 1,000 devices: device u holds digits u mod 10 and (u + 1) mod 10, sizes follow a power law.

    All 70,000 images are pooled and split 90/10 inside each device. As published, each pixel is standardised over
    the whole set, test samples included: that leaks their mean and deviation (not their labels) into training.
    """
    arrays = read_arrays(
        find("mnist"),
        {"x_train": (60_000, 28, 28), "y_train": (60_000,), "x_test": (10_000, 28, 28), "y_test": (10_000,)},
    )
    labels = np.concatenate([arrays["y_train"], arrays["y_test"]]).astype(np.int64)
    pixels = np.concatenate([arrays["x_train"], arrays["x_test"]]).reshape(len(labels), -1)
    parts = two_digits_each(labels, generator(seed, 0, Stream.DATA))
    return federate(standardised(pixels), labels, parts, name="mnist", classes=10)


def two_digits_each(labels: IntArray, random: np.random.Generator) -> list[IntArray]:
    """Return FedProx's partition: 5 samples of each of 2 digits, then log-normal(0, 2) shares of what is left.

    >>> parts = two_digits_each(np.arange(70_000) % 10, np.random.default_rng(0))
    >>> len(parts), min(len(part) for part in parts)
    (1000, 10)
    """
    left = {digit: random.permutation(np.flatnonzero(labels == digit)) for digit in range(10)}
    holders = DEVICES * DIGITS_PER_DEVICE // 10
    shares = random.lognormal(0, 2, (10, holders))
    shares /= shares.sum(axis=1, keepdims=True)
    extra = {digit: (shares[digit] * (len(left[digit]) - EACH * holders)).astype(int) for digit in range(10)}
    taken, served = dict.fromkeys(range(10), 0), dict.fromkeys(range(10), 0)
    parts = []
    for device in range(DEVICES):
        pieces = []
        for digit in ((device + offset) % 10 for offset in range(DIGITS_PER_DEVICE)):
            count = EACH + int(extra[digit][served[digit]])
            pieces.append(left[digit][taken[digit] : taken[digit] + count])
            taken[digit] += count
            served[digit] += 1
        parts.append(random.permutation(np.concatenate(pieces)))
    return parts


def standardised(pixels: IntArray) -> Features:
    """Return each column with mean 0 and deviation 1; a constant column becomes 0 (FedProx divides by σ + 0.001).

    >>> standardised(np.array([[0, 255], [0, 0]])).round(2)
    array([[ 0.,  1.],
           [ 0., -1.]], dtype=float32)
    """
    cuts = range(0, len(pixels), BLOCK)  # whole copies in float64 would take most of the time
    total, squares = np.zeros((2, pixels.shape[1]))
    for start in cuts:
        block = pixels[start : start + BLOCK].astype(np.float64)
        total += block.sum(axis=0)
        squares += np.square(block, out=block).sum(axis=0)
    centre = total / len(pixels)
    spread = np.sqrt(len(pixels) * squares - total**2) / len(pixels)  # of whole numbers, without rounding
    scaled = np.empty(pixels.shape, np.float32)
    for start in cuts:
        rows = scaled[start : start + BLOCK]
        rows[...] = pixels[start : start + BLOCK]
        rows -= centre.astype(np.float32)
        rows /= (spread + 0.001).astype(np.float32)
    return scaled


def femnist() -> FederatedData:
    """Return FEMNIST, one device a writer, 62 classes, LEAF's own 90/10 split inside each writer, ink 1 and paper 0.

    With the file of 328 writers: a subset of LEAF's 3,600, short of the writers with most samples, and about
    70 % digits; say so beside results on it.
    """
    arrays = read_arrays(
        find("femnist"), {"x": (-1, 28, 28), "y": (-1,), "writer": (-1,), "is_test": (-1,)}, {"is_dup"}
    )
    kept = ~arrays["is_dup"].astype(bool) if "is_dup" in arrays else np.ones(len(arrays["y"]), bool)
    ink = (255 - arrays["x"][kept].reshape(kept.sum(), -1)).astype(np.float32) / 255
    labels, writers = arrays["y"][kept].astype(np.int64), arrays["writer"][kept]
    held_out = arrays["is_test"][kept].astype(bool)
    order = np.argsort(writers, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(writers[order])) + 1)
    groups = [group for group in groups if not held_out[group].all()]
    train, test = ([group[held_out[group] == side] for group in groups] for side in (False, True))
    return FederatedData("femnist", gather(ink, labels, train), gather(ink, labels, test), classes=62)
