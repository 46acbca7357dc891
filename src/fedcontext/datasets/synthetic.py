"""Synthetic(a, b) and Synthetic_IID, as published with FedProx (after Shamir, Srebro and Zhang)."""

from __future__ import annotations

import numpy as np

from fedcontext.datasets.federated import Features, FederatedData, federate
from fedcontext.errors import FedcontextError
from fedcontext.plan import IntArray, Stream, generator

DIMENSION, CLASSES = 60, 10


def synthetic(a: float, b: float, *, iid: bool = False, devices: int = 30, seed: int = 0) -> FederatedData:
    """Return Synthetic(a, b): on device k, y = argmax(W x + c) with W, c ~ N(u, 1), u ~ N(0, a).

    Features have mean ~ N(B, 1) with B ~ N(0, b), and covariance diag(j^-1.2); sizes are lognormal(4, 2) + 50. ``iid`` gives all devices one
    W, c ~ N(0, 1) and zero means. As in the published code, a and b are standard deviations.

    >>> data = synthetic(1, 1)
    >>> data.population, data.dimension, data.classes
    (30, 60, 10)
    """
    if not (0 <= a < np.inf and 0 <= b < np.inf):
        raise FedcontextError(f"synthetic-A-B needs finite A and B of 0 or more, got {a} and {b}")
    sizes = generator(seed, 0, Stream.DATA).lognormal(4, 2, devices).astype(int) + 50
    shared = generator(seed, 1, Stream.DATA)
    common = (shared.standard_normal((DIMENSION, CLASSES)), shared.standard_normal(CLASSES)) if iid else None
    parts = [_device(generator(seed, 2, Stream.DATA, k), int(size), a, b, common) for k, size in enumerate(sizes)]
    rows = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    features, labels = (np.concatenate(side) for side in zip(*parts, strict=True))
    name = "synthetic-iid" if iid else f"synthetic-{a:g}-{b:g}"
    return federate(features, labels, rows, name=name, classes=CLASSES)


def _device(
    random: np.random.Generator, size: int, a: float, b: float, common: tuple[Features, Features] | None
) -> tuple[Features, IntArray]:
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
