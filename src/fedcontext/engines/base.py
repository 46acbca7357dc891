"""Engines: who carries out a round's local work. All do the same work; the NumPy one is the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fedcontext.arrays.tree import FloatArray, Structure
from fedcontext.datasets.federated import FederatedData
from fedcontext.engines.softmax import SoftmaxReference
from fedcontext.errors import FedcontextError, require
from fedcontext.local_sgd import LocalSGD
from fedcontext.plan import IntArray


@dataclass(frozen=True)
class Work:
    """What the devices of one round are asked to do: all randomness follows from the seed and the round's number."""

    seed: int
    number: int
    devices: IntArray  # (K,)
    epochs: IntArray  # (K,)
    local: LocalSGD


class Engine(Protocol):
    """Trains devices, asks them for gradients, and evaluates a model over all of them."""

    def initial_params(self) -> Structure:
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
    require("numba", extra="numba")
    from fedcontext.engines.numba.engine import SoftmaxNumba

    return SoftmaxNumba(data)


def _ray(data: FederatedData) -> Engine:
    require("ray", extra="ray")
    from fedcontext.engines.ray import SoftmaxRay

    return SoftmaxRay(data)


def _module(data: FederatedData, model: str = "softmax", device: str = "auto", seed: int = 0) -> Engine:
    require("torch", extra="torch")
    from fedcontext.engines.torch.engine import torch_engine

    return torch_engine(data, model, device, seed)


ENGINES: dict[str, Callable[[FederatedData], Engine]] = {
    "reference": SoftmaxReference,
    "numba": _fast,
    "torch": _module,
    "ray": _ray,
}


def engine_named(name: str, data: FederatedData, model: str = "softmax", device: str = "auto", seed: int = 0) -> Engine:
    """Return an engine of the table, ready to work on ``data``; only "torch" knows other models and devices.

    >>> from fedcontext.datasets import load_dataset
    >>> engine_named("reference", load_dataset("synthetic-iid")).initial_params().shape
    (61, 10)
    """
    if name not in ENGINES:
        raise FedcontextError(f"engine must be one of {', '.join(ENGINES)}, got {name!r}")
    _check(data)
    if name == "torch":
        return _module(data, model, device, seed)
    for what, asked, only in (("model", model, ("softmax", "logistic")), ("device", device, ("auto", "cpu"))):
        if asked not in only:
            raise FedcontextError(f"{what} {asked} needs engine 'torch', got {name!r}")
    return ENGINES[name](data)


def _check(data: FederatedData) -> None:
    if (data.train.sizes < 1).any():
        raise FedcontextError(f"device {int(data.train.sizes.argmin())} has no training samples")
    if len(data.test.sizes) != len(data.evaluation_split.sizes):
        raise FedcontextError(
            f"train and test must have the same devices, got {len(data.evaluation_split.sizes)} and {len(data.test.sizes)}"
        )
    for side, split in (("train", data.evaluation_split), ("test", data.test)):
        if split.features.shape != (len(split.labels), data.dimension):
            raise FedcontextError(
                f"{side} features must be ({len(split.labels)}, {data.dimension}), got {split.features.shape}"
            )
        if len(split.labels) and not 0 <= split.labels.min() <= split.labels.max() < data.classes:
            raise FedcontextError(
                f"{side} labels must be from 0 to {data.classes - 1}, got {split.labels.min()} to {split.labels.max()}"
            )
