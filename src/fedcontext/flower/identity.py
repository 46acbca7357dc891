"""The settings that a run's rounds depend on: a checkpoint is resumed only if they are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from functools import partial
from types import CellType, FunctionType
from typing import Any

import numpy as np

from fedcontext.flower.exclusion import Settings
from fedcontext.rules.base import AnyRule
from fedcontext.rules.server import ServerOptimizer

DEPTH = 8  # of nested closures; the limit ends recursion on those that refer to themselves


def run_identity(
    rule: AnyRule, server: ServerOptimizer | None, settings: Settings, own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that determine a round, those of the strategy itself in ``own``; `min_replies` is not one."""
    shared = {name: value for name, value in dataclasses.asdict(settings).items() if name != "min_replies"}
    inside = {"rule settings": settings_in(rule), "server settings": settings_in(server)}
    names = {"rule": rule.name, "smoothness": rule.smoothness, "server": server and server.name}
    return {**names, **own, **shared, **inside}


def settings_in(value: Any, depth: int = DEPTH) -> Any:
    """Return the settings inside a rule or an optimiser as JSON: values that its functions were made with.

    `contextual_memory(settings)` and ``fedadam(lr)`` return closures over their arguments, and so do rules of users:
    the same name does not imply the same settings.

    >>> from fedcontext.rules.server import fedavgm
    >>> settings_in(fedavgm(momentum=0.5).update)
    {'decay': 0.5, 'rate': 1.0}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if depth == 0:
        return "..."
    if isinstance(value, FunctionType):
        return _in_mapping(_closure(value), depth)
    if isinstance(value, partial):
        return settings_in([value.func, value.args, value.keywords], depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _in_mapping(vars(value), depth)
    if isinstance(value, Mapping):
        return _in_mapping(value, depth)
    if isinstance(value, list | tuple | Set):
        children = [settings_in(child, depth - 1) for child in value]
        return sorted(children, key=str) if isinstance(value, Set) else children
    return type(value).__name__


def _in_mapping(values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    return {str(name): settings_in(value, depth - 1) for name, value in values.items()}


def _closure(function: FunctionType) -> dict[str, Any]:
    """Return the closure variables and the defaults of a function."""
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    known = {name: _content(cell) for name, cell in zip(names, cells, strict=True)}
    defaults = {f"default {index}": value for index, value in enumerate(function.__defaults__ or ())}
    return {**known, **defaults, **(function.__kwdefaults__ or {})}


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not yet assigned
        return None
