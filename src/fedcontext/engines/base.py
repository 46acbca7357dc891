"""Engines: who carries out a round's local work. All do the same work; the NumPy one is the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fedcontext.arrays.tree import FloatArray, Structure
from fedcontext.datasets.federated import FederatedData
from fedcontext.engines.softmax import SoftmaxReference
from fedcontext.errors import FedcontextError, require
from fedcontext.local_sgd import Local
from fedcontext.plan import IntArray


@dataclass(frozen=True)
class Work:
    """What the devices of one round are asked to do: all randomness follows from the seed and the round's number."""

    seed: int
    number: int
    devices: IntArray  # (K,)
    epochs: IntArray  # (K,)
    local: Local


class Engine(Protocol):
    """Trains devices, asks them for gradients, and evaluates a model over all of them."""

    def start(self) -> Structure:
        """Return the params that a run starts from."""
        ...

    def train(self, params: Structure, work: Work) -> list[Structure]:
        """Return each device's update after local training from ``params``."""
        ...

    def gradients(self, params: Structure, devices: IntArray) -> list[Structure]:
        """Return the gradient of each device's local loss F_k at ``params``, over all its training data."""
        ...

    def gradient(self, params: Structure, devices: IntArray, weights: FloatArray) -> Structure:
        """Return the mean of the devices' gradients with these weights (they sum to one)."""
        ...

    def evaluate(self, params: Structure) -> tuple[float, float]:
        """Return the loss over all devices' training data and the accuracy over all their test data."""
        ...


def _fast(data: FederatedData) -> Engine:
    require("numba", extra="fast")
    from fedcontext.engines.numba.engine import SoftmaxFast

    return SoftmaxFast(data)


def _ray(data: FederatedData) -> Engine:
    require("ray", extra="ray")
    from fedcontext.engines.ray import SoftmaxRay

    return SoftmaxRay(data)


def _module(data: FederatedData, model: str = "softmax", device: str = "auto", seed: int = 0) -> Engine:
    require("torch", extra="torch")
    from fedcontext.engines.torch.engine import module_engine

    return module_engine(data, model, device, seed)


ENGINES: dict[str, Callable[[FederatedData], Engine]] = {
    "reference": SoftmaxReference,
    "fast": _fast,
    "module": _module,
    "ray": _ray,
}


def engine_named(name: str, data: FederatedData, model: str = "softmax", device: str = "auto", seed: int = 0) -> Engine:
    """Return an engine of the table, ready to work on ``data``; only "module" knows other models and devices.

    >>> from fedcontext.datasets import load
    >>> engine_named("reference", load("synthetic-iid")).start().shape
    (61, 10)
    """
    if name not in ENGINES:
        raise FedcontextError(f"engine must be one of {', '.join(ENGINES)}, got {name!r}")
    _check(data)
    if name == "module":
        return _module(data, model, device, seed)
    for what, asked, only in (("model", model, ("softmax", "logistic")), ("device", device, ("auto", "cpu"))):
        if asked not in only:
            raise FedcontextError(f"{what} {asked} needs engine module, got {name!r}")
    return ENGINES[name](data)


def _check(data: FederatedData) -> None:
    if (data.train.sizes < 1).any():
        raise FedcontextError(f"device {int(data.train.sizes.argmin())} has no training samples")
    if len(data.test.sizes) != len(data.judged.sizes):
        raise FedcontextError(
            f"train and test must have the same devices, got {len(data.judged.sizes)} and {len(data.test.sizes)}"
        )
    for side, split in (("train", data.judged), ("test", data.test)):
        if split.features.shape != (len(split.labels), data.dimension):
            raise FedcontextError(
                f"{side} features must be ({len(split.labels)}, {data.dimension}), got {split.features.shape}"
            )
        if len(split.labels) and not 0 <= split.labels.min() <= split.labels.max() < data.classes:
            raise FedcontextError(
                f"{side} labels must be from 0 to {data.classes - 1}, got {split.labels.min()} to {split.labels.max()}"
            )
