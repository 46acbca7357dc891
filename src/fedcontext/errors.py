"""Errors of callers. Each message names the thing, the expectation and the value."""

from __future__ import annotations

import importlib
from types import ModuleType


class FedcontextError(ValueError):
    """Invalid input or settings; nothing was changed.

    >>> raise FedcontextError("smoothness must be positive, got -1")
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: smoothness must be positive, got -1
    """


class FileError(FedcontextError):
    """A file cannot be written, or another process is writing it; the settings may well be valid."""


class MissingExtra(FedcontextError, ImportError):
    """An optional library is needed but not installed."""


def require(module: str, extra: str) -> ModuleType:
    """Return the optional ``module``, or raise an error that names the extra to install.

    >>> require("json", extra="plot").__name__
    'json'
    >>> require("no_such_module.part", extra="plot")
    Traceback (most recent call last):
    ...
    fedcontext.errors.MissingExtra: no_such_module is not installed: pip install 'fedcontext[plot]'
    """
    try:
        importlib.import_module(module.partition(".")[0])  # so that the error names the library
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{error.name or module} is not installed: pip install 'fedcontext[{extra}]'") from error
    except ImportError as error:
        raise MissingExtra(f"{module} cannot be imported ({error}): pip install -U 'fedcontext[{extra}]'") from error


def positive(name: str, value: float) -> float:
    """Return ``value`` as a float if it is finite and above zero.

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
