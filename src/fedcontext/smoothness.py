"""What β is: a number, the paper's 1 / learning rate, or the curvature of the loss measured at the start."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcontext.arrays import Array, Structure, leaves, rebuild
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
    iterations: int = 30,
    reach: float = 1e-2,
) -> float:
    """Return the largest eigenvalue of the Hessian at ``params``, by power iteration on differences of the gradient.

    That is the smoothness of the loss near ``params``; further away the loss may bend more or less.

    >>> hessian = np.diag([1.0, 5.0])
    >>> round(curvature(lambda w: hessian @ w, np.zeros(2)), 6)
    5.0
    """
    direction = generator(0, 0, Stream.DATA).standard_normal(params.shape)
    value = 0.0
    for _ in range(iterations):
        direction /= np.linalg.norm(direction)
        step = (reach * direction).astype(params.dtype)
        bent = (gradient(params + step).astype(np.float64) - gradient(params - step)) / (2 * reach)
        value = float((direction * bent).sum())
        if not np.linalg.norm(bent) > 0:
            break
        direction = bent
    return value


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
