"""Errors of callers. Each message names the thing, the expectation and the value."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType

LONGEST = 480  # characters of a message
LONGEST_VALUE = 80  # characters of a value in a message


class FedcontextError(ValueError):
    """Invalid input or settings; nothing was changed. Of a long message the middle is left out.

    >>> raise FedcontextError("smoothness must be positive, got -1")
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: smoothness must be positive, got -1
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(shortened(str(message), LONGEST))


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

    >>> nearest("minst", ["mnist", "femnist"]), nearest("cifar", ["mnist"])
    ('mnist', '')
    """
    found = difflib.get_close_matches(name[:LONGEST_VALUE], known, n=1) if isinstance(name, str) else []
    return found[0] if found else ""


def unknown(what: str, name: object, accepted: str, suggestion: str = "") -> FedcontextError:
    """Return the error for a value that is not among those accepted; a suggestion comes before the list of all.

    >>> print(unknown("data set", "minst", "one of mnist, femnist", "mnist"))
    data set 'minst' is unknown, did you mean mnist? data set must be one of mnist, femnist
    >>> print(unknown("data set", "cifar", "one of mnist, femnist"))
    data set must be one of mnist, femnist, got 'cifar'
    """
    if suggestion:
        return FedcontextError(f"{what} {shown(name)} is unknown, did you mean {suggestion}? {what} must be {accepted}")
    return FedcontextError(f"{what} must be {accepted}, got {shown(name)}")


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
