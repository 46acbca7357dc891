"""What a rule decides, checked: a rule that users write may return anything."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.errors import FedcontextError, shown
from fedcontext.measurement.geometry import Geometry
from fedcontext.measurement.sums import Sums
from fedcontext.rules.base import CoordinateRule, Rule, State, SumRule


def weights_of(rule: Rule, geometry: Geometry, state: State) -> tuple[FloatArray, State]:
    """Return one weight for each device, and the next state.

    >>> from fedcontext.rules.base import stateless
    >>> weights_of(stateless("mine", lambda geometry: "equal"), Geometry(np.eye(2), np.ones(2)), None)
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: rule 'mine' must give 2 finite weights, an array of shape (2,), got 'equal'
    """
    returned = rule.weigh(geometry, state)
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise FedcontextError(f"rule '{rule.name}': weigh must return (weights, state), got {_described(returned)}")
    weights, after = returned
    count, must = len(geometry.samples), f"rule '{rule.name}' must give"
    weights = _numbers(weights, count, must, "finite weights")
    if not np.isfinite(weights).all():
        raise FedcontextError(f"{must} {count} finite weights, got {shown(weights)}")
    return weights, after


def step_of(
    rule: SumRule, sums: Sums, state: State, population: int | None
) -> tuple[FloatArray, State, dict[str, Any]]:
    """Return the step of a rule on sums, the next state, and the numbers that the rule reports."""
    returned = rule.step(sums, state, population)
    if not (isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[2], dict)):
        raise FedcontextError(
            f"rule '{rule.name}': step must return (step, state, info), info a dict, got {_described(returned)}"
        )
    step, after, info = returned
    return _numbers(step, sums.size, f"rule '{rule.name}' must give a step of", "entries"), after, info


def combination_of(rule: CoordinateRule, block: FloatArray) -> FloatArray:
    """Return one value for each entry of a block of the devices' values."""
    return _numbers(rule.combine(block), block.shape[1], f"rule '{rule.name}': combine must return", "entries")


def _numbers(value: object, count: int, must: str, what: str) -> FloatArray:
    """Return the value as ``count`` numbers, if it is."""
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        numbers = np.zeros(())
    if numbers.shape != (count,):
        raise FedcontextError(f"{must} {count} {what}, an array of shape ({count},), got {_described(value)}")
    return numbers


def _described(value: object) -> str:
    return f"an array of shape {value.shape}" if isinstance(value, np.ndarray) else shown(value)
