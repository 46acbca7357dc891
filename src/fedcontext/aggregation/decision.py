"""Call a rule and validate what it returns: rules can be written by users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.errors import FedcontextError, shown
from fedcontext.measurement.geometry import Geometry
from fedcontext.rules.base import CoordinateRule, Rule, State


def weights_of(rule: Rule, geometry: Geometry, state: State) -> tuple[FloatArray, State]:
    """Return one weight for each device, and the next state.

    >>> from fedcontext.rules.base import stateless
    >>> weights_of(stateless("mine", lambda geometry: "equal"), Geometry(np.eye(2), np.ones(2)), None)
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: rule 'mine': weigh must return 2 finite weights, got 'equal'
    """
    returned = rule.weigh(geometry, state)
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise FedcontextError(f"rule '{rule.name}': weigh must return (weights, state), got {_described(returned)}")
    return _numbers(returned[0], len(geometry.samples), f"rule '{rule.name}': weigh", "weights"), returned[1]


def combination_of(rule: CoordinateRule, block: FloatArray) -> FloatArray:
    """Return one value for each entry of a block of the devices' values.

    What is not finite because the devices' values are not, or are too large, is returned: `aggregate` names the device.
    """
    function = f"rule '{rule.name}': combine"
    combined = _numbers(rule.combine(block), block.shape[1], function, "entries", check_finite=False)
    if np.isnan(combined).any() and np.isfinite(block).all():
        raise FedcontextError(f"{function} must return {len(combined)} finite entries, got {shown(combined)}")
    return combined


def checked_step(returned: Any, size: int, function: str) -> tuple[FloatArray, State, dict[str, Any]]:
    """Return (step, state, info) from a rule's ``function``, checked, with Python's own numbers for NumPy's."""
    if not (isinstance(returned, tuple | list) and len(returned) == 3 and isinstance(returned[2], Mapping)):
        raise FedcontextError(f"{function} must return (step, state, info), info a dict, got {_described(returned)}")
    step, after, info = returned
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in info.items()}
    return _numbers(step, size, function, "entries"), after, plain


def _numbers(value: object, count: int, function: str, what: str, *, check_finite: bool = True) -> FloatArray:
    """Return ``value`` as an array of ``count`` finite numbers, or raise an error that names the function."""
    try:
        numbers = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # of a torch tensor that requires a gradient: the last
        numbers = np.zeros(())
    if numbers.dtype.kind not in "biuf" or numbers.shape != (count,):
        raise FedcontextError(f"{function} must return {count} finite {what}, got {_described(value)}")
    if check_finite and not np.isfinite(numbers).all():
        raise FedcontextError(f"{function} must return {count} finite {what}, got {shown(numbers)}")
    return np.asarray(numbers, np.float64)


def _described(value: object) -> str:
    return f"an array of shape {value.shape}" if isinstance(value, np.ndarray) else shown(value)
