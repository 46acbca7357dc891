"""Synthetic(a, b) and Synthetic_IID, as published with FedProx (after Shamir, Srebro and Zhang)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedcontext.datasets.arrays import federate, train_sizes
from fedcontext.datasets.federated import Features, FederatedData, LazySplit, Samples, join
from fedcontext.errors import FedcontextError
from fedcontext.plan import IntArray, Stream, generator

DIMENSION, CLASSES = 60, 10
EVALUATION_DEVICES = 100  # on whose samples models are evaluated if samples are generated on demand
MAX_DEVICES = 10_000_000  # a few numbers are kept of each


def synthetic(
    a: float, b: float, *, iid: bool = False, devices: int = 30, seed: int = 0, on_demand: bool = False
) -> FederatedData:
    """Return Synthetic(a, b): on device k, y = argmax(W x + c) with W, c ~ N(u, 1), u ~ N(0, a).

    Features have mean ~ N(B, 1) with B ~ N(0, b), and covariance diag(j^-1.2); sizes are lognormal(4, 2) + 50. ``iid``
    gives all devices one W, c ~ N(0, 1) and zero means. As in the published code, a and b are standard deviations.
    ``on_demand`` generates the same samples only when a device trains, and evaluates on a fixed random subset of 100
    devices.

    >>> data = synthetic(1, 1)
    >>> data.population, data.dimension, data.classes
    (30, 60, 10)
    >>> synthetic(1, 1, devices=1_000_000, on_demand=True).train.device(999_999)[0].shape
    (90, 60)
    """
    if not (0 <= a < np.inf and 0 <= b < np.inf):
        raise FedcontextError(f"synthetic-A-B needs finite A and B of 0 or more, got {a} and {b}")
    if not 1 <= devices <= MAX_DEVICES:
        raise FedcontextError(f"synthetic-A-B-N needs N from 1 to {MAX_DEVICES} devices, got {devices}")
    sizes = generator(seed, 0, Stream.DATA).lognormal(4, 2, devices).astype(int) + 50
    shared = generator(seed, 1, Stream.DATA)
    common = (shared.standard_normal((DIMENSION, CLASSES)), shared.standard_normal(CLASSES)) if iid else None

    def generate(k: int) -> Samples:
        return _device(generator(seed, 2, Stream.DATA, k), int(sizes[k]), a, b, common)

    name = "synthetic-iid" if iid else f"synthetic-{a:g}-{b:g}"
    if on_demand:
        rng = generator(seed, 3, Stream.DATA)
        chosen = np.sort(rng.choice(devices, min(EVALUATION_DEVICES, devices), replace=False))
        return _on_demand(f"{name}-{devices}", sizes, generate, chosen.tolist())
    whole = join([generate(k) for k in range(devices)])
    rows = np.split(np.arange(sizes.sum()), whole.offsets[1:-1])
    return federate(whole.features, whole.labels, rows, name=name, classes=CLASSES)


def _on_demand(name: str, sizes: IntArray, generate: Callable[[int], Samples], evaluation: list[int]) -> FederatedData:
    counts = train_sizes(sizes)

    def training(k: int) -> Samples:
        features, labels = generate(k)
        return features[: counts[k]], labels[: counts[k]]

    def test(k: int) -> Samples:
        features, labels = generate(k)
        return features[counts[k] :], labels[counts[k] :]

    train = LazySplit(counts, training, join([training(k) for k in evaluation]))
    return FederatedData(name, train, join([test(k) for k in evaluation]), CLASSES)


def _device(
    random: np.random.Generator, size: int, a: float, b: float, common: tuple[Features, Features] | None
) -> Samples:
    weight: Features
    bias: Features
    if common is None:
        centre = a * random.standard_normal()
        weight, bias = random.normal(centre, 1, (DIMENSION, CLASSES)), random.normal(centre, 1, CLASSES)
        middle = random.normal(b * random.standard_normal(), 1, DIMENSION)
    else:
        (weight, bias), middle = common, np.zeros(DIMENSION)
    deviations = np.arange(1, DIMENSION + 1) ** -0.6  # the square roots of j^-1.2
    features = middle + deviations * random.standard_normal((size, DIMENSION))
    return features.astype(np.float32), np.argmax(features @ weight + bias, axis=1)
