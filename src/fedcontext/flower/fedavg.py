"""Flower's FedAvg with a rule of fedcontext, in one call."""

from __future__ import annotations

from typing import Any

from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg

from fedcontext.errors import FedcontextError, positive
from fedcontext.flower.strategy import ContextualStrategy
from fedcontext.rules.base import Rule
from fedcontext.rules.contextual import contextual


def fedavg(*args: Any, **settings: Any) -> ContextualStrategy:
    """Return a `ContextualStrategy` with all defaults around Flower's `FedAvg`, whose arguments it takes.

    ``from fedcontext.flower import FedAvg`` imports it under FedAvg's name, so that only the import of an app changes.

    >>> strategy = fedavg(fraction_train=0.5)
    >>> strategy.inner.fraction_train, strategy.rule.name
    (0.5, 'contextual memory')
    """
    return ContextualStrategy(FedAvg(*args, **settings))


def contextual_fedavg(*args: Any, **settings: Any) -> ContextualStrategy:
    """Return a `ContextualStrategy` with the paper's rule around Flower's `FedAvg`, whose arguments it takes.

    The smoothness is 1 / ``lr`` of the train config, and the cohort reports its gradients.

    >>> contextual_fedavg(fraction_train=0.5).inner.fraction_train
    0.5
    """
    return ContextualStrategy(FedAvg(*args, **settings), rule=_contextual_of)


def _contextual_of(config: ConfigRecord) -> Rule:
    rate = config.get("lr", config.get("learning-rate"))
    if not isinstance(rate, int | float):
        raise FedcontextError("contextual_fedavg needs the learning rate: set 'lr' in the train config")
    return contextual(smoothness=1 / positive("lr", rate))
