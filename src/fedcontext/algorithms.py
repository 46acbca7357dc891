"""Named pairs of what devices do and how the server weighs them. To add one, write a function and name it below."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from fedcontext import rules
from fedcontext.errors import FedcontextError, positive
from fedcontext.local_sgd import LocalSGD, proximal, sgd
from fedcontext.rules import Rule

Averaging: TypeAlias = Literal["mean", "samples"]


@dataclass(frozen=True)
class Hyperparameters:
    """The settings that algorithms are made from; each takes what it knows."""

    learning_rate: float
    smoothness: float  # β of the bound; the paper's choice is 1 / learning_rate
    batch_size: int = 10
    mu: float = 0.1
    averaging: Averaging = "mean"


@dataclass(frozen=True)
class Algorithm:
    """What devices do, and the rule that weighs what they send."""

    name: str
    local: LocalSGD
    rule: Rule


def fedavg(hyperparameters: Hyperparameters) -> Algorithm:
    """Return FedAvg: local SGD, averaged."""
    return Algorithm(
        "fedavg", sgd(hyperparameters.learning_rate, hyperparameters.batch_size), _averaging(hyperparameters)
    )


def fedprox(hyperparameters: Hyperparameters) -> Algorithm:
    """Return FedProx: local SGD held near the global model, averaged."""
    return Algorithm(
        "fedprox",
        proximal(hyperparameters.mu, hyperparameters.learning_rate, hyperparameters.batch_size),
        _averaging(hyperparameters),
    )


def folb(hyperparameters: Hyperparameters) -> Algorithm:
    """Return FOLB: FedProx weighed by how each device's gradient agrees with the cohort's."""
    return replace(fedprox(hyperparameters), name="folb", rule=rules.folb(hyperparameters.smoothness))


def contextual_version(algorithm: Algorithm | str, smoothness: float) -> Algorithm:
    """Return ``algorithm`` with the paper's aggregation in place of its own (Algorithm 2).

    A name stands for that algorithm of the table with the learning rate that goes with the paper's β: 1 / smoothness.

    >>> contextual_version(fedavg(Hyperparameters(learning_rate=0.1, smoothness=10)), smoothness=10).name
    'fedavg-contextual'
    >>> contextual_version("fedavg", smoothness=10).local.learning_rate
    0.1
    """
    made = _made(algorithm, smoothness)
    return replace(made, name=f"{made.name}-contextual", rule=rules.contextual(smoothness))


def expected_version(algorithm: Algorithm | str, smoothness: float) -> Algorithm:
    """Return ``algorithm``, made or by name, with the aggregation of section III-C, the exact form of its equation.

    >>> expected_version(fedavg(Hyperparameters(learning_rate=0.1, smoothness=10)), smoothness=10).name
    'fedavg-expected'
    """
    made = _made(algorithm, smoothness)
    return replace(made, name=f"{made.name}-expected", rule=rules.expected_contextual(smoothness))


ALGORITHMS: dict[str, Callable[[Hyperparameters], Algorithm]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "folb": folb,
    "fedavg-contextual": lambda hyperparameters: contextual_version(
        fedavg(hyperparameters), hyperparameters.smoothness
    ),
    "fedprox-contextual": lambda hyperparameters: contextual_version(
        fedprox(hyperparameters), hyperparameters.smoothness
    ),
    "fedavg-expected": lambda hyperparameters: expected_version(fedavg(hyperparameters), hyperparameters.smoothness),
    "fedprox-expected": lambda hyperparameters: expected_version(fedprox(hyperparameters), hyperparameters.smoothness),
}


def algorithm_named(name: str, hyperparameters: Hyperparameters) -> Algorithm:
    """Return an algorithm of the table.

    >>> algorithm_named("fedavg", Hyperparameters(learning_rate=0.1, smoothness=10)).rule.name
    'mean'
    """
    if name not in ALGORITHMS:
        raise FedcontextError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {name!r}")
    return ALGORITHMS[name](hyperparameters)


def _made(algorithm: Algorithm | str, smoothness: float) -> Algorithm:
    if isinstance(algorithm, Algorithm):
        return algorithm
    return algorithm_named(
        algorithm, Hyperparameters(learning_rate=1 / positive("smoothness", smoothness), smoothness=smoothness)
    )


def _averaging(hyperparameters: Hyperparameters) -> Rule:
    if hyperparameters.averaging not in ("mean", "samples"):
        raise FedcontextError(f"averaging must be 'mean' or 'samples', got {hyperparameters.averaging!r}")
    return (
        rules.mean(hyperparameters.smoothness)
        if hyperparameters.averaging == "mean"
        else rules.by_samples(hyperparameters.smoothness)
    )
