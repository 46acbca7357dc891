"""The errors a caller can make. Each message names the thing, what was expected and what came."""

from __future__ import annotations

import importlib
from types import ModuleType


class FedcontextError(ValueError):
    """Something asked for or handed in cannot be used; nothing was changed.

    >>> raise FedcontextError("smoothness must be positive, got -1")
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: smoothness must be positive, got -1
    """


class MissingExtra(FedcontextError, ImportError):
    """An optional library is needed and not installed."""


def require(module: str, extra: str) -> ModuleType:
    """Return the imported optional ``module``, or name the extra that brings it.

    >>> require("json", extra="plot").__name__
    'json'
    >>> require("no_such_module.part", extra="plot")
    Traceback (most recent call last):
    ...
    fedcontext.errors.MissingExtra: no_such_module is not installed: pip install 'fedcontext[plot]'
    """
    try:
        importlib.import_module(module.partition(".")[0])  # whose name is the one to complain about
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{error.name or module} is not installed: pip install 'fedcontext[{extra}]'") from error
    except ImportError as error:
        raise MissingExtra(f"{module} cannot be imported ({error}): pip install -U 'fedcontext[{extra}]'") from error


def positive(name: str, value: float) -> float:
    """Return ``value`` if it is a finite number above zero.

    >>> positive("smoothness", 2)
    2.0
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise FedcontextError(f"{name} must be a number, got {value!r}") from None
    if not 0 < number < float("inf"):
        raise FedcontextError(f"{name} must be positive, got {value}")
    return number
