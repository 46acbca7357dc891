"""What a device does with its data: mini-batch SGD, plain or proximal. Engines carry it out."""

from __future__ import annotations

from dataclasses import dataclass

from fedcontext.errors import FedcontextError, positive


@dataclass(frozen=True)
class Local:
    """Local SGD on F_k(w) + (μ/2)‖w - wᵗ‖², FedProx's convention (the paper prints μ without the half)."""

    learning_rate: float
    batch_size: int
    mu: float = 0.0

    def __post_init__(self) -> None:
        positive("learning rate", self.learning_rate)
        if self.batch_size < 1:
            raise FedcontextError(f"batch size must be at least 1, got {self.batch_size}")
        if not 0 <= self.mu < float("inf"):
            raise FedcontextError(f"mu must be 0 or more, got {self.mu}")


def sgd(learning_rate: float, batch_size: int = 10) -> Local:
    """Return plain mini-batch SGD.

    >>> sgd(0.03)
    Local(learning_rate=0.03, batch_size=10, mu=0.0)
    """
    return Local(learning_rate, batch_size)


def proximal(mu: float, learning_rate: float, batch_size: int = 10) -> Local:
    """Return SGD with FedProx's proximal term: its gradient adds μ (w - wᵗ).

    >>> proximal(0.1, learning_rate=0.03).mu
    0.1
    """
    return Local(learning_rate, batch_size, mu)
