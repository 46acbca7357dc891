"""Synthetic(a, b) and Synthetic_IID, as published with FedProx (after Shamir, Srebro and Zhang)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedcontext.datasets.federated import (
    DrawnSplit,
    Features,
    FederatedData,
    Samples,
    federate,
    join,
    kept_for_training,
)
from fedcontext.errors import FedcontextError
from fedcontext.plan import IntArray, Stream, generator

DIMENSION, CLASSES = 60, 10
EVALUATION_DEVICES = 100  # devices on which a model is evaluated where data is made on demand


def synthetic(
    a: float, b: float, *, iid: bool = False, devices: int = 30, seed: int = 0, on_demand: bool = False
) -> FederatedData:
    """Return Synthetic(a, b): on device k, y = argmax(W x + c) with W, c ~ N(u, 1), u ~ N(0, a).

    Features have mean ~ N(B, 1) with B ~ N(0, b), and covariance diag(j^-1.2); sizes are lognormal(4, 2) + 50. ``iid`` gives all devices one
    W, c ~ N(0, 1) and zero means. As in the published code, a and b are standard deviations. ``on_demand`` makes the
    samples of a device when it trains, the same as without it, and evaluates on 100 devices drawn once.

    >>> data = synthetic(1, 1)
    >>> data.population, data.dimension, data.classes
    (30, 60, 10)
    >>> synthetic(1, 1, devices=1_000_000, on_demand=True).train.device(999_999)[0].shape
    (90, 60)
    """
    if not (0 <= a < np.inf and 0 <= b < np.inf):
        raise FedcontextError(f"synthetic-A-B needs finite A and B of 0 or more, got {a} and {b}")
    if devices < 1:
        raise FedcontextError(f"synthetic-A-B-N needs at least 1 device, got {devices}")
    sizes = generator(seed, 0, Stream.DATA).lognormal(4, 2, devices).astype(int) + 50
    shared = generator(seed, 1, Stream.DATA)
    common = (shared.standard_normal((DIMENSION, CLASSES)), shared.standard_normal(CLASSES)) if iid else None

    def draw(k: int) -> Samples:
        return _device(generator(seed, 2, Stream.DATA, k), int(sizes[k]), a, b, common)

    name = "synthetic-iid" if iid else f"synthetic-{a:g}-{b:g}"
    if on_demand:
        evaluation = np.sort(
            generator(seed, 3, Stream.DATA).choice(devices, min(EVALUATION_DEVICES, devices), replace=False)
        )
        return _on_demand(f"{name}-{devices}", sizes, draw, evaluation.tolist())
    parts = [draw(k) for k in range(devices)]
    rows = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    features, labels = (np.concatenate(side) for side in zip(*parts, strict=True))
    return federate(features, labels, rows, name=name, classes=CLASSES)


def _on_demand(name: str, sizes: IntArray, draw: Callable[[int], Samples], evaluation: list[int]) -> FederatedData:
    counts = kept_for_training(sizes)

    def training(k: int) -> Samples:
        features, labels = draw(k)
        return features[: counts[k]], labels[: counts[k]]

    def test(k: int) -> Samples:
        features, labels = draw(k)
        return features[counts[k] :], labels[counts[k] :]

    train = DrawnSplit(counts, training, join([training(k) for k in evaluation]))
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
