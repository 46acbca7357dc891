"""What β is: a number, the paper's 1 / learning rate, or the curvature of the loss measured at the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

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
