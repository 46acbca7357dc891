"""What a device does with its data: mini-batch SGD, plain or proximal. Engines carry it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedcontext.arrays.tree import Structure
from fedcontext.errors import FedcontextError, positive
from fedcontext.plan import IntArray

NAMED = 3  # devices that an error names; the others are counted


class Diverged(FedcontextError):
    """Local training produced NaN or infinity; ``updates`` has those of all devices, as far as an engine knows them."""

    updates: Sequence[Structure] = ()


@dataclass(frozen=True)
class LocalSGD:
    """Local SGD on F_k(w) + (μ/2)‖w - wᵗ‖², FedProx's convention (the paper prints μ without the half).

    The last three are for engine 'torch'. One step: the batch's gradient is scaled to a norm of at most ``clip``, then
    g = gradient + weight_decay w + μ (w - wᵗ) + correction (of control variates, where there are any),
    v = momentum v + g (v = g at first) and w = w - learning_rate v.
    """

    learning_rate: float
    batch_size: int
    mu: float = 0.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # 0: gradients are not clipped

    def __post_init__(self) -> None:
        positive("learning rate", self.learning_rate)
        if self.batch_size < 1:
            raise FedcontextError(f"batch size must be at least 1, got {self.batch_size}")
        for name in ("mu", "weight_decay", "clip"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise FedcontextError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not 0 <= self.momentum < 1:
            raise FedcontextError(f"momentum must be from 0 to below 1, got {self.momentum}")

    def steps(self, samples: IntArray, epochs: IntArray) -> IntArray:
        """Return the number of steps of devices with these samples and epochs: batches are rounded up in each epoch."""
        return epochs * -(-samples // self.batch_size)

    def check_supported(self, engine: str) -> None:
        """Raise an error, in the name of ``engine``, for settings that only engine 'torch' supports.

        >>> LocalSGD(0.1, 10, momentum=0.9).check_supported("reference")
        Traceback (most recent call last):
        ...
        fedcontext.errors.FedcontextError: engine 'reference' does not support momentum (got 0.9); use engine 'torch'
        """
        for name in ("momentum", "weight_decay", "clip"):
            if getattr(self, name):
                raise FedcontextError(
                    f"engine '{engine}' does not support {name} (got {getattr(self, name)}); use engine 'torch'"
                )

    def divergence_error(self, devices: Sequence[int], updates: Sequence[Structure] = ()) -> Diverged:
        """Return what to raise where the training of these devices produced NaN or infinity.

        >>> print(LocalSGD(100.0, 10).divergence_error([3, 7, 1, 4, 8]))  # doctest: +NORMALIZE_WHITESPACE
        devices 3, 7, 1 and 2 more: the loss turned NaN or infinite in local training, and nothing was aggregated;
        lower the learning rate (100.0) or clip gradients (engine 'torch')
        """
        words = [str(device) for device in devices[:NAMED]]
        words += [f"{len(devices) - NAMED} more"] if len(devices) > NAMED else []
        who = f"devices {', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else f"device {words[0]}"
        error = Diverged(
            f"{who}: the loss turned NaN or infinite in local training, and nothing was aggregated; "
            f"lower the learning rate ({self.learning_rate}) or clip gradients (engine 'torch')"
        )
        error.updates = updates
        return error


def sgd(learning_rate: float, batch_size: int = 10) -> LocalSGD:
    """Return plain mini-batch SGD.

    >>> sgd(0.03).mu
    0.0
    """
    return LocalSGD(learning_rate, batch_size)


def proximal(mu: float, learning_rate: float, batch_size: int = 10) -> LocalSGD:
    """Return SGD with FedProx's proximal term: its gradient adds μ (w - wᵗ).

    >>> proximal(0.1, learning_rate=0.03).mu
    0.1
    """
    return LocalSGD(learning_rate, batch_size, mu)
