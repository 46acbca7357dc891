"""How β is chosen: a number, the paper's 1 / learning rate, or the measured curvature of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcontext.arrays.tree import FloatArray, leaves, rebuild
from fedcontext.datasets.federated import FederatedData
from fedcontext.engines.base import Engine
from fedcontext.measurement.geometry import shares
from fedcontext.measurement.sums import flat, unflat
from fedcontext.plan import Stream, generator

ITERATIONS = 10  # of Lanczos' method
RADIUS = 1e-2  # of the differences of the gradient


def measured_smoothness(engine: Engine, data: FederatedData) -> float:
    """Return the largest curvature of the loss over all devices, at the initial params and one gradient step on.

    The curvature of softmax regression is largest after the first step away from zero params. This takes the gradient
    of all devices some forty times: for simulations only; a federation would estimate β from probes.
    """
    devices = np.arange(data.population)
    weights = shares(data.train.sizes.astype(np.float64), data.population)
    params = engine.initial_params()
    base = leaves(params)
    names = [name for name in base if name not in engine.buffers]

    def gradient(vector: FloatArray) -> FloatArray:
        at = rebuild(params, {**base, **unflat(vector, base, names)})
        return flat(leaves(engine.gradient(at, devices, weights)), names)

    start = flat(base, names)
    beta = curvature(gradient, start)
    return max(beta, curvature(gradient, start - gradient(start) / beta))


def curvature(gradient: Callable[[npt.NDArray[Any]], npt.NDArray[Any]], params: npt.NDArray[Any]) -> float:
    """Return the largest eigenvalue of the Hessian at ``params``, by Lanczos' method on differences of the gradient.

    That is the smoothness of the loss near ``params``; further away the curvature may be larger or smaller.

    >>> hessian = np.diag([1.0, 5.0])
    >>> round(curvature(lambda w: hessian @ w, np.zeros(2)), 6)
    5.0
    """

    def hessian_times(direction: npt.NDArray[Any]) -> npt.NDArray[Any]:
        step = (RADIUS * direction).astype(params.dtype)
        difference: npt.NDArray[Any] = gradient(params + step).astype(np.float64) - gradient(params - step)
        return difference.ravel() / (2 * RADIUS)

    basis = np.zeros((0, params.size))
    images = np.zeros((0, params.size))
    direction = generator(0, 0, Stream.DATA).standard_normal(params.size)
    for _ in range(min(ITERATIONS, params.size)):
        for _ in range(2):  # once leaves rounding errors
            direction = direction - basis.T @ (basis @ direction)
        length = np.linalg.norm(direction)
        if length <= 1e-6 * np.linalg.norm(images):
            break
        basis = np.vstack([basis, direction / length])
        images = np.vstack([images, hessian_times(basis[-1].reshape(params.shape))])
        direction = images[-1]
    projected = basis @ images.T
    return float(np.linalg.eigvalsh((projected + projected.T) / 2)[-1])
