"""What β is: a number, the paper's 1 / learning rate, or the curvature of the loss, measured."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcontext.arrays.tree import Array, Structure, leaves, rebuild
from fedcontext.errors import FedcontextError, positive
from fedcontext.plan import Stream, generator


def smoothness_of(choice: float | str, learning_rate: float, measure: Callable[[], float]) -> float:
    """Return β for a choice: a positive number, "1/lr" (the paper's), or "measured".

    >>> smoothness_of("1/lr", learning_rate=0.25, measure=lambda: 3.0)
    4.0
    >>> smoothness_of("measured", learning_rate=0.25, measure=lambda: 3.0)
    3.0
    """
    if choice == "1/lr":
        return 1 / positive("learning rate", learning_rate)
    if choice == "measured":
        return positive("measured smoothness", measure())
    try:
        return positive("smoothness", float(choice))
    except FedcontextError:
        raise
    except ValueError:
        raise FedcontextError(f"smoothness must be a positive number, 1/lr or measured, got {choice!r}") from None


def curvature(
    gradient: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
    params: npt.NDArray[Any],
    *,
    iterations: int = 10,
    reach: float = 1e-2,
) -> float:
    """Return the largest eigenvalue of the Hessian at ``params``, by Lanczos' method on differences of the gradient.

    That is the smoothness of the loss near ``params``; further away the loss may bend more or less.

    >>> hessian = np.diag([1.0, 5.0])
    >>> round(curvature(lambda w: hessian @ w, np.zeros(2)), 6)
    5.0
    """

    def bend(direction: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the Hessian times ``direction``."""
        step = (reach * direction).astype(params.dtype)
        difference: npt.NDArray[Any] = gradient(params + step).astype(np.float64) - gradient(params - step)
        return difference.ravel() / (2 * reach)

    basis = np.zeros((0, params.size))
    images = np.zeros((0, params.size))
    direction = generator(0, 0, Stream.DATA).standard_normal(params.size)
    for _ in range(min(iterations, params.size)):
        for _ in range(2):  # once leaves rounding errors behind
            direction = direction - basis.T @ (basis @ direction)
        length = np.linalg.norm(direction)
        if length <= 1e-6 * np.linalg.norm(images):
            break
        basis = np.vstack([basis, direction / length])
        images = np.vstack([images, bend(basis[-1].reshape(params.shape))])
        direction = images[-1]
    projected = basis @ images.T
    return float(np.linalg.eigvalsh((projected + projected.T) / 2)[-1])


def as_vector(
    params: Structure, buffers: Collection[str] = ()
) -> tuple[npt.NDArray[Any], Callable[[npt.NDArray[Any]], Structure]]:
    """Return params as one flat NumPy vector without the ``buffers``, and the way back from such a vector.

    >>> vector, back = as_vector({"w": np.ones((2, 2)), "steps": np.zeros(1)}, buffers=["steps"])
    >>> vector, back(vector * 3)["w"]
    (array([1., 1., 1., 1.]), array([[3., 3.],
           [3., 3.]]))
    """
    base = leaves(params)
    moving = {name: leaf for name, leaf in base.items() if name not in buffers}
    hosts = {name: leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else leaf for name, leaf in moving.items()}
    cuts = np.cumsum([host.size for host in hosts.values()])[:-1]

    def back(vector: npt.NDArray[Any]) -> Structure:
        pieces = dict(zip(hosts, np.split(vector, cuts), strict=True))
        return rebuild(
            params, {name: _like(leaf, pieces[name]) if name in pieces else leaf for name, leaf in base.items()}
        )

    return np.concatenate([host.reshape(-1) for host in hosts.values()]), back


def _like(leaf: Array, values: npt.NDArray[Any]) -> Array:
    """Return ``values`` as an array of the library, shape and place of ``leaf``."""
    shaped = values.reshape(leaf.shape)
    return leaf.new_tensor(shaped) if hasattr(leaf, "new_tensor") else shaped
