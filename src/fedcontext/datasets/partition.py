"""Partitioners: each returns the shuffled sample indices of every device, drawn with a generator or a seed."""

from __future__ import annotations

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.errors import FedcontextError, positive, shown
from fedcontext.plan import IntArray


def iid(labels: IntArray, devices: int, random: np.random.Generator | int) -> list[IntArray]:
    """Return equal random parts.

    >>> [len(part) for part in iid(np.zeros(10), 3, np.random.default_rng(0))]
    [4, 3, 3]
    """
    _check(len(labels), devices)
    return list(np.array_split(np.random.default_rng(random).permutation(len(labels)), devices))


def shards(labels: IntArray, devices: int, random: np.random.Generator | int, per_device: int = 2) -> list[IntArray]:
    """Return parts of few classes: samples sorted by class are cut into shards, ``per_device`` for each device.

    >>> labels = np.repeat(np.arange(10), 20)
    >>> parts = shards(labels, 10, np.random.default_rng(0))
    >>> max(len(np.unique(labels[part])) for part in parts)
    2
    """
    labels, random = np.asarray(labels), np.random.default_rng(random)
    _check(len(labels), devices, per_device)
    order = random.permutation(len(labels))
    pieces = np.array_split(order[np.argsort(labels[order], kind="stable")], devices * per_device)
    assigned = random.permutation(len(pieces)).reshape(devices, per_device)
    return [random.permutation(np.concatenate([pieces[piece] for piece in own])) for own in assigned]


def dirichlet(labels: IntArray, devices: int, random: np.random.Generator | int, alpha: float = 0.5) -> list[IntArray]:
    """Return parts whose share of every class is drawn from a Dirichlet(α): the smaller α, the more uneven.

    >>> parts = dirichlet(np.repeat(np.arange(3), 30), 4, np.random.default_rng(0), alpha=0.5)
    >>> sum(len(part) for part in parts)
    90
    """
    positive("alpha", alpha)
    labels, random = np.asarray(labels), np.random.default_rng(random)
    _check(len(labels), devices)
    parts: list[list[IntArray]] = [[] for _ in range(devices)]
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        cuts = np.cumsum(random.dirichlet(np.full(devices, alpha)))[:-1] * len(members)
        for part, piece in zip(parts, np.split(members, cuts.astype(int)), strict=True):
            part.append(piece)
    return _fill_empty([random.permutation(np.concatenate(part)) for part in parts])


def power_law(labels: IntArray, devices: int, random: np.random.Generator | int, sigma: float = 2.0) -> list[IntArray]:
    """Return random parts of very different sizes: shares are log-normal with this sigma.

    >>> sizes = [len(part) for part in power_law(np.zeros(1000), 5, np.random.default_rng(0))]
    >>> sum(sizes), max(sizes) > 3 * min(sizes)
    (1000, True)
    """
    positive("sigma", sigma)
    _check(len(labels), devices)
    random = np.random.default_rng(random)
    shares: FloatArray = np.exp(sigma * random.standard_normal(devices))
    cuts = np.cumsum(shares / shares.sum())[:-1] * len(labels)
    return _fill_empty(np.split(random.permutation(len(labels)), cuts.astype(int)))


def _fill_empty(parts: list[IntArray]) -> list[IntArray]:
    """Return the parts, each empty one filled with a sample of the largest."""
    for device, part in enumerate(parts):
        if len(part) == 0:
            largest = max(range(len(parts)), key=lambda k: len(parts[k]))
            parts[device], parts[largest] = parts[largest][:1], parts[largest][1:]
    return parts


def _check(samples: int, devices: int, per_device: int = 1) -> None:
    if not isinstance(devices, int | np.integer) or isinstance(devices, bool):
        raise FedcontextError(f"devices must be a whole number, got {shown(devices)}")
    if not 1 <= devices * per_device <= samples:
        raise FedcontextError(f"{samples} samples cannot be split into {devices * per_device} parts of at least one")
