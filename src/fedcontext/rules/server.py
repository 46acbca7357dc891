"""Server optimisers: how the step that a rule proposes is applied to the global model.

Each one is a value of two functions, as in Optax: ``init(params)`` gives its state, and
``update(step, state, params)`` the step to apply instead, with the next state. A step Δ is what an aggregation rule
proposes, such as FedAvg's mean update; the new params are params + step. Params, steps and states are structures of
NumPy, PyTorch or JAX arrays, handled leaf by leaf; leaves that do not hold floating-point numbers pass unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from fedcontext.arrays.tree import Array, Structure, kind_of, leaves, rebuild
from fedcontext.errors import FedcontextError, positive

State: TypeAlias = Any  # dicts and tuples of structures like params, which a checkpoint can hold
ADAPTIVE_RATE = 0.1  # the server learning rate that FedAdagrad, FedAdam and FedYogi have by default


@dataclass(frozen=True)
class ServerOptimizer:
    """A server optimiser: ``init(params) -> state`` and ``update(step, state, params) -> (step, state)``."""

    name: str
    init: Callable[[Structure], State]
    update: Callable[[Structure, State, Structure], tuple[Structure, State]]


def server_sgd(lr: float = 1.0) -> ServerOptimizer:
    """Return plain descent with a server learning rate, η Δ; with η = 1 it is FedAvg.

    >>> sgd = server_sgd(lr=0.5)
    >>> sgd.update([np.array([2.0])], sgd.init([np.zeros(1)]), [np.zeros(1)])
    ([array([1.])], {})
    """
    rate = positive("lr", lr)
    return ServerOptimizer(
        "server_sgd", lambda params: {}, lambda step, state, params: (_map_leaves(lambda d: rate * d, step), state)
    )


def fedavgm(lr: float = 1.0, momentum: float = 0.9) -> ServerOptimizer:
    """Return FedAvgM: m ← μ m + Δ, step η m.

    Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", 2019.

    >>> optimizer, params = fedavgm(momentum=0.5), np.zeros(1)
    >>> first, state = optimizer.update(np.array([2.0]), optimizer.init(params), params)
    >>> optimizer.update(np.array([2.0]), state, params)
    (array([3.]), {'m': array([3.])})
    """
    rate, decay = positive("lr", lr), _decay("momentum", momentum)

    def init(params: Structure) -> State:
        return {"m": _filled(params, 0.0)}

    def update(step: Structure, state: State, params: Structure) -> tuple[Structure, State]:
        m = _map_leaves(lambda d, m: decay * m + d, step, state["m"])
        return _map_leaves(lambda d, m: rate * m, step, m), {"m": m}

    return ServerOptimizer("fedavgm", init, update)


def fedadagrad(lr: float = ADAPTIVE_RATE, beta1: float = 0.0, tau: float = 1e-3) -> ServerOptimizer:
    """Return FedAdagrad: v ← v + Δ²; the rest is as in `fedadam`.

    >>> optimizer, params = fedadagrad(lr=0.4, tau=1.0), np.zeros(1)  # v = 1 + 3
    >>> step, _ = optimizer.update(np.full(1, 3**0.5), optimizer.init(params), params)
    >>> np.round(step, 4)
    array([0.2309])
    """
    return _adaptive("fedadagrad", lr, beta1, tau, lambda v, square: v + square)


def fedadam(lr: float = ADAPTIVE_RATE, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> ServerOptimizer:
    """Return FedAdam: m ← β₁ m + (1 - β₁) Δ, v ← β₂ v + (1 - β₂) Δ², step η m / (√v + τ).

    Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2: m starts at 0 and v at τ², and neither is
    corrected for that start. (Flower's FedAdam has these defaults, but starts v at 0 and corrects for the start.)

    >>> optimizer, params = fedadam(), np.zeros(2)
    >>> step, _ = optimizer.update(np.array([1.0, -0.01]), optimizer.init(params), params)
    >>> np.round(step, 4)
    array([ 0.099 , -0.0415])
    """
    decay = _decay("beta2", beta2)
    return _adaptive("fedadam", lr, beta1, tau, lambda v, square: decay * v + (1 - decay) * square)


def fedyogi(lr: float = ADAPTIVE_RATE, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> ServerOptimizer:
    """Return FedYogi: v ← v - (1 - β₂) Δ² sign(v - Δ²); the rest is as in `fedadam`.

    Flower's FedYogi has a server learning rate of 0.01.

    >>> optimizer, params = fedyogi(), np.zeros(2)
    >>> step, _ = optimizer.update(np.array([1.0, -0.01]), optimizer.init(params), params)
    >>> np.round(step, 4)
    array([ 0.099 , -0.0414])
    """
    decay = _decay("beta2", beta2)
    return _adaptive("fedyogi", lr, beta1, tau, lambda v, square: v - (1 - decay) * square * _sign(v - square))


def chain(*optimizers: ServerOptimizer) -> ServerOptimizer:
    """Return the optimisers one after the other: each takes the step of the one before it.

    >>> halved = chain(fedavgm(momentum=0.0), server_sgd(lr=0.5))
    >>> halved.name, halved.update(np.ones(1), halved.init(np.zeros(1)), np.zeros(1))[0]
    ('fedavgm, server_sgd', array([0.5]))
    """

    def update(step: Structure, state: State, params: Structure) -> tuple[Structure, State]:
        states = []
        for optimizer, before in zip(optimizers, state, strict=True):
            step, after = optimizer.update(step, before, params)
            states.append(after)
        return step, tuple(states)

    name = ", ".join(optimizer.name for optimizer in optimizers)
    return ServerOptimizer(name, lambda params: tuple(o.init(params) for o in optimizers), update)


def _adaptive(
    name: str, lr: float, beta1: float, tau: float, second: Callable[[Array, Array], Array]
) -> ServerOptimizer:
    """Return Algorithm 2 of Reddi et al. with ``second(v, Δ²)`` as its line for v."""
    rate, decay, floor = positive("lr", lr), _decay("beta1", beta1), positive("tau", tau)

    def init(params: Structure) -> State:
        return {"m": _filled(params, 0.0), "v": _filled(params, floor**2)}

    def update(step: Structure, state: State, params: Structure) -> tuple[Structure, State]:
        m = _map_leaves(lambda d, m: decay * m + (1 - decay) * d, step, state["m"])
        v = _map_leaves(lambda d, v: second(v, d * d), step, state["v"])
        return _map_leaves(lambda d, m, v: rate * m / (v**0.5 + floor), step, m, v), {"m": m, "v": v}

    return ServerOptimizer(name, init, update)


def _map_leaves(function: Callable[..., Array], first: Structure, *others: Structure) -> Structure:
    """Return ``function`` of the structures' floating-point leaves, in the structure and types of the first one."""
    named, rest = leaves(first), [leaves(other) for other in others]
    if any(other.keys() != named.keys() for other in rest):
        raise FedcontextError(f"step and state must have the leaves of the params, got {[*named]} and {[*rest[0]]}")

    def apply(name: str, leaf: Array) -> Array:
        if kind_of(leaf) != "floating":
            return leaf
        value = function(leaf, *(other[name] for other in rest))
        return np.asarray(value, leaf.dtype) if isinstance(leaf, np.ndarray) else value  # an array even if 0-d

    return rebuild(first, {name: apply(name, leaf) for name, leaf in named.items()})


def _filled(params: Structure, value: float) -> Structure:
    return _map_leaves(lambda leaf: leaf * 0 + value, params)


def _sign(array: Array) -> Array:
    return array / (abs(array) + (array == 0))


def _decay(name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise FedcontextError(f"{name} must be at least 0 and below 1, got {value}")
    return float(value)
