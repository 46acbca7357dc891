"""Algorithm 2 as the paper prints it, with a basis of the updates' null space: a reference for small models.

`fedcontext.contextual` gives the same step from the K x K Gram matrix in O(K² n) instead of O(n³).
"""

from __future__ import annotations

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.errors import FedcontextError, positive

MAX_PARAMETERS = 10_000  # memory grows with n², time with n³
SINGULAR_CUT = 3e-7  # singular values of normalised updates below this share of the largest count as zero


def null_space_weights(updates: FloatArray, gradient: FloatArray, smoothness: float) -> FloatArray:
    """Return (K,) weights α that solve g + β Σ αₖ Δₖ = Σ xᵢ eᵢ, where e is a basis of the null space of the updates.

    Args:
        updates: (K, n), one update a row.
        gradient: (n,), the estimate g of the global gradient.
        smoothness: β.

    >>> null_space_weights(np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([-1.0, -3.0]), smoothness=2).round(6)
    array([-1. ,  1.5])
    """
    beta = positive("smoothness", smoothness)
    if updates.shape[1] > MAX_PARAMETERS:
        raise FedcontextError(
            f"the null-space method takes at most {MAX_PARAMETERS} parameters, got {updates.shape[1]}"
        )
    norms = np.linalg.norm(updates, axis=1)
    moved = norms > 0
    weights = np.zeros(len(updates))
    if not moved.any():
        return weights
    directions = updates[moved] / norms[moved, None]
    _, singular, rows = np.linalg.svd(directions, full_matrices=True)
    basis = rows[int((singular > SINGULAR_CUT * singular[0]).sum()) :]
    system = np.hstack([-directions.T, basis.T])  # n equations for the β αₖ ‖Δₖ‖ and the xᵢ
    solution = np.linalg.lstsq(system, gradient, rcond=SINGULAR_CUT)[0]
    weights[moved] = solution[: moved.sum()] / norms[moved] / beta
    return weights
