"""Errors of callers. Each message names the thing, the expectation and the value."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from types import ModuleType
from typing import TypeVar

Entry = TypeVar("Entry")
LONGEST = 480  # characters of a message
LONGEST_VALUE = 80  # characters of a value in a message


class FedcontextError(ValueError):
    """Invalid input or settings; nothing was changed. Of a long message the middle is left out.

    ``advice`` ends the message; the attribute ``problem`` is the message without it, for a caller that knows a way on.

    >>> raise FedcontextError("smoothness must be positive, got -1")
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: smoothness must be positive, got -1
    """

    def __init__(self, message: object = "", advice: str = "") -> None:
        super().__init__(shortened(f"{message}{advice}", LONGEST))
        self.problem = shortened(str(message), LONGEST)


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


def warn_user(message: str) -> None:
    """Issue a `UserWarning` at the line that called into this package, however deep in it the reason was found.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warn_user("no test samples")
    >>> str(caught[0].message)
    'no test samples'
    """
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "fedcontext":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def shortened(text: str, length: int) -> str:
    """Return text of at most ``length`` characters: its beginning and its end.

    >>> shortened("abcdefghijklm", 9)
    'abc...klm'
    """
    half = (length - 3) // 2
    return text if len(text) <= length else f"{text[:half]}...{text[-half:]}"


def shown(value: object) -> str:
    """Return a value from outside as an error message shows it: its repr, shortened.

    >>> shown("some"), shown(1 << 99_999)
    ("'some'", 'a value too large to print')
    """
    try:
        return shortened(repr(value), LONGEST_VALUE)
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits, or lists nested too deeply
        return "a value too large to print"


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the known name most similar to a wrong one, "" if there is none.

    >>> nearest("MINST", ["mnist", "femnist"]), nearest("cifar", ["mnist"])
    ('mnist', '')
    """
    matches = difflib.get_close_matches(name[:LONGEST_VALUE].lower(), known, n=1) if isinstance(name, str) else []
    return matches[0] if matches else ""


def did_you_mean(suggestion: str) -> str:
    """Return the end of a sentence that says that a name is unknown; ``suggestion`` may be "".

    >>> did_you_mean("mnist"), did_you_mean("")
    (', did you mean mnist?', '.')
    """
    return f", did you mean {suggestion}?" if suggestion else "."


def unknown_value_error(
    what: str, value: object, known: Collection[str], *, accepted: str = "", suggestion: str = ""
) -> FedcontextError:
    """Return the error for a value that is not known; a suggestion comes before the list of all.

    ``accepted`` completes "must be ..." in place of the known values, and ``suggestion`` replaces the nearest one.

    >>> print(unknown_value_error("data set", "minst", ["mnist", "femnist"]))
    data set 'minst' is unknown, did you mean mnist? data set must be one of mnist, femnist
    >>> print(unknown_value_error("data set", "cifar", ["mnist", "femnist"]))
    data set must be one of mnist, femnist, got 'cifar'
    """
    must = f"{what} must be " + (accepted or f"one of {', '.join(known)}")
    if suggestion := suggestion or nearest(value, known):
        return FedcontextError(f"{what} {shown(value)} is unknown{did_you_mean(suggestion)} {must}")
    return FedcontextError(f"{must}, got {shown(value)}")


def by_name(what: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """Return the entry of a table with this name, or raise the error for an unknown value.

    >>> by_name("digit", "one", {"one": 1})
    1
    """
    if name not in table:
        raise unknown_value_error(what, name, table)
    return table[name]


def accepts(function: object, *arguments: object) -> bool:
    """Return whether ``function`` is one that can be called with these arguments.

    >>> accepts(abs, 3), accepts(abs), accepts([])
    (True, False, False)
    """
    try:
        inspect.signature(function).bind(*arguments)  # type: ignore[arg-type]
    except TypeError:  # other arguments, or no function
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def positive(name: str, value: float) -> float:
    """Return ``value`` as a float if it is finite and above zero.

    >>> positive("smoothness", 2)
    2.0
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise FedcontextError(f"{name} must be a number, got {shown(value)}") from None
    if not 0 < number < float("inf"):
        raise FedcontextError(f"{name} must be positive, got {value}")
    return number
