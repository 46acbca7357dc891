"""The engine protocol, and the engines by name. All do the same work; the NumPy one is the reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from fedcontext.arrays.tree import FloatArray, Leaves, Structure
from fedcontext.datasets.federated import FederatedData
from fedcontext.errors import FedcontextError, by_name, require
from fedcontext.local_sgd import LocalSGD
from fedcontext.plan import IntArray


@dataclass(frozen=True)
class Work:
    """What the devices of one round train; all randomness follows from the seed and the round's number."""

    seed: int
    number: int
    devices: IntArray  # (K,)
    epochs: IntArray  # (K,)
    local: LocalSGD
    corrections: Sequence[Leaves] | None = None  # K terms by trainable leaf, added to each batch gradient of a device

    def rows(self, rows: IntArray) -> Work:
        """Return the work of the devices at these positions."""
        corrections = None if self.corrections is None else [self.corrections[row] for row in rows]
        return replace(self, devices=self.devices[rows], epochs=self.epochs[rows], corrections=corrections)


class Engine(Protocol):
    """Trains devices, computes their gradients, and evaluates a model over all of them."""

    @property
    def buffers(self) -> Collection[str]:
        """Names of the leaves that no gradient moves; they are averaged."""
        ...

    def initial_params(self) -> Structure:
        """Return the params that a run starts from."""
        ...

    def train(self, params: Structure, work: Work) -> list[Structure]:
        """Return each device's update after local training from ``params``.

        An engine that adds ``work.corrections`` to the gradients has an attribute ``supports_corrections = True``.
        """
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


@dataclass(frozen=True)
class EngineOptions:
    """What to train and where: names of a model and a device, and the seed of random initial weights."""

    model: str = "softmax"
    device: str = "auto"
    seed: int = 0

    def check_softmax(self, engine: str) -> None:
        """Refuse another model or device than an engine for softmax regression on the CPU has."""
        choices = (("model", self.model, ("softmax", "logistic")), ("device", self.device, ("auto", "cpu")))
        for name, value, supported in choices:
            if value not in supported:
                raise FedcontextError(f"engine '{engine}' does not support {name} '{value}'; use engine 'torch'")


def _reference(data: FederatedData, options: EngineOptions) -> Engine:
    options.check_softmax("reference")
    from fedcontext.engines.softmax import SoftmaxReference

    return SoftmaxReference(data)


def _numba(data: FederatedData, options: EngineOptions) -> Engine:
    options.check_softmax("numba")
    require("numba", extra="numba")
    from fedcontext.engines.numba.engine import SoftmaxNumba

    return SoftmaxNumba(data)


def _ray(data: FederatedData, options: EngineOptions) -> Engine:
    options.check_softmax("ray")
    require("ray", extra="ray")
    from fedcontext.engines.ray import SoftmaxRay

    return SoftmaxRay(data)


def _torch(data: FederatedData, options: EngineOptions) -> Engine:
    from fedcontext.engines.torch.engine import TorchEngine
    from fedcontext.engines.torch.models import model_named

    factory, shape = model_named(options.model, data.dimension, data.classes)
    return TorchEngine(data, factory, input_shape=shape, device=options.device, seed=options.seed)


EngineFactory: TypeAlias = Callable[[FederatedData, EngineOptions], Engine]
ENGINES: dict[str, EngineFactory] = {"reference": _reference, "numba": _numba, "torch": _torch, "ray": _ray}


def engine_named(name: str, data: FederatedData, options: EngineOptions | None = None) -> Engine:
    """Return an engine of the table, ready to work on ``data``.

    >>> from fedcontext.datasets import load_dataset
    >>> engine_named("reference", load_dataset("synthetic-iid")).initial_params().shape
    (61, 10)
    """
    make = by_name("engine", name, ENGINES)
    _check(data)
    return make(data, options or EngineOptions())


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
