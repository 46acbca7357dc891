"""Declaring settings: the default, the check and the help text of one setting in one dataclass field."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedcontext.errors import FedcontextError, did_you_mean, nearest, shown, unknown_value_error


class TooLarge(ValueError):
    """A number is above the limit, which is the argument."""


class Refused(ValueError):
    """A value of which one part is wrong; the message says which."""


@dataclass(frozen=True)
class Check:
    """Converts a value from Python, TOML or the command line to a setting's type, or says what the setting accepts.

    >>> Check("INTEGER", "an integer", int, words=("all",))("pool", "some")
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: pool must be an integer or all, got 'some'
    """

    kind: str  # the placeholder in command-line help
    expected: str  # completes "must be ..."
    convert: Callable[[Any], Any]  # raises TypeError or ValueError for any other value
    words: tuple[str, ...] = ()  # accepted as they are
    suggest: Callable[[object], str] = lambda value: ""  # in place of an unknown value

    def __call__(self, name: str, value: Any) -> Any:
        """Return ``value`` as the setting ``name`` stores it."""
        if isinstance(value, str) and value in self.words:
            return value
        try:
            return self.convert(value)
        except Refused as reason:
            raise FedcontextError(f"{name}: {reason} {name} must be {self.accepts}") from None
        except TooLarge as limit:
            raise FedcontextError(f"{name} must be at most {limit}, got {shown(value)}") from None
        except (TypeError, ValueError, OverflowError):
            suggestion = self.suggest(value)
            raise unknown_value_error(name, value, (), accepted=self.accepts, suggestion=suggestion) from None

    @property
    def accepts(self) -> str:
        """Return all accepted values in words."""
        *first, last = self.expected, *self.words
        return f"{', '.join(first)} or {last}" if first else last

    @property
    def metavar(self) -> str:
        """Return the placeholder of the value in command-line help."""
        return "|".join((self.kind, *self.words))


def setting(default: Any, check: Check, help: str, *, default_text: str = "", aliases: tuple[str, ...] = ()) -> Any:
    """Return a dataclass field for a setting.

    ``default_text`` describes a default that depends on other settings; ``aliases`` are names that other libraries
    and the paper use: the command line takes them as options, and elsewhere an error suggests the name.
    """
    shown = default_text or ("..".join(map(str, default)) if isinstance(default, tuple) else str(default))
    return field(default=default, metadata={"check": check, "help": help, "default": shown, "aliases": aliases})


INFINITE = float("inf")
MOST = 10**9  # of what a run counts, such as rounds, devices and samples: products of two fit into 64 bits


def integer(least: int, *words: str, most: int = MOST) -> Check:
    """Return the check for an integer from ``least`` to ``most``, or one of ``words``.

    >>> integer(1, "all")("probes", "5"), integer(1, "all")("probes", "all")
    (5, 'all')
    """
    return Check("INTEGER", f"an integer of at least {least}", lambda value: _integer(value, least, most), words)


def number(*words: str, positive: bool = False, most: float = INFINITE, below: float = INFINITE) -> Check:
    """Return the check for a number >= 0 (or > 0), at most ``most`` and below ``below``, or one of ``words``.

    >>> number("1/lr", positive=True)("smoothness", -1)
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: smoothness must be a positive number or 1/lr, got -1
    """

    def convert(value: Any) -> float:
        converted = float(value)
        if isinstance(value, bool) or not 0 <= converted < below or (positive and not converted) or converted > most:
            raise ValueError
        return converted

    expected = "a positive number" if positive else "a number of at least 0"
    limit = f" and at most {most:g}" if most < INFINITE else f" and below {below:g}" if below < INFINITE else ""
    return Check("NUMBER", expected + limit, convert, words)


def text(kind: str = "TEXT") -> Check:
    """Return the check for any text.

    >>> text()("dataset", "mnist")
    'mnist'
    """

    def convert(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError
        return value

    return Check(kind, "text", convert)


def one_of(choices: Collection[str], kind: str = "", suggest: Callable[[object], str] | None = None) -> Check:
    """Return the check for one of ``choices``, which may grow later. Errors ``suggest`` the nearest by default.

    >>> one_of(["mean", "samples"])("averaging", "median")
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: averaging must be mean or samples, got 'median'
    """

    def convert(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError
        return value

    expected = " or ".join(choices) if len(choices) < 3 else f"one of {', '.join(choices)}"
    near = suggest or (lambda value: nearest(value, choices if len(choices) > 3 else ()))
    return Check(kind or "|".join(choices), expected, convert, suggest=near)


def shares_by_name(names: Collection[str]) -> Check:
    """Return the check for shares from 0 to 1 by name, as text or a mapping, with the last round they hold for.

    >>> shares_by_name(["nan", "late"])("faults", "nan=0.1, late=0.30,until=20")
    'nan=0.1,late=0.3,until=20'
    >>> shares_by_name(["nan", "late"])("faults", {"nan": 0.1})
    'nan=0.1'
    """

    def convert(value: Any) -> str:
        if not isinstance(value, str | Mapping):
            raise TypeError
        pairs = (
            value.items() if isinstance(value, Mapping) else [_pair(each, names) for each in value.split(",") if value]
        )
        given: dict[str, float] = {}
        for name, share in pairs:
            if name in given:
                raise Refused(f"{name} is given twice.")
            given[name] = _share(name, share, names)
        exact = (f"{name}={share!r}".removesuffix(".0") for name, share in given.items())  # all digits
        return ",".join(exact) or "none"

    expected = f"shares from 0 to 1 by name, such as {next(iter(names))}=0.2,until=20, with names among"
    return Check("NAME=SHARE,...", f"{expected} {', '.join(names)}", convert, ("none",))


def _pair(text: str, names: Collection[str]) -> tuple[str, str]:
    """Return the name and the share in NAME=SHARE."""
    name, equals, share = text.partition("=")
    if not text.strip():
        raise Refused("there is a comma without NAME=SHARE on one side.")
    if not equals:
        fault = "has no share" if name.strip() in (*names, "until") else "must be NAME=SHARE"
        raise Refused(f"{shown(text.strip())} {fault}.")
    return name.strip(), share


def _share(name: Any, value: Any, names: Collection[str]) -> float:
    """Return the share of a name, or the number of a round for "until"; say which of the two is wrong."""
    if name not in (*names, "until"):
        raise Refused(f"{shown(name)} is unknown{did_you_mean(nearest(name, (*names, 'until')))}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if name == "until" and not (1 <= number <= MOST and number.is_integer()):
        raise Refused(f"until must be the number of a round, got {shown(value)}.")
    if name != "until" and not 0 <= number <= 1:
        raise Refused(f"the share of {name} must be from 0 to 1, got {shown(value)}.")
    return number


def parse_shares(text: str) -> dict[str, float]:
    """Return the numbers in a checked setting of shares by name.

    >>> parse_shares("nan=0.1,until=20"), parse_shares("none")
    ({'nan': 0.1, 'until': 20.0}, {})
    """
    if text == "none":
        return {}
    return {name: float(share) for name, share in (pair.split("=") for pair in text.split(","))}


def integer_range(least: int, most: int = MOST) -> Check:
    """Return the check for a range of integers: a pair, text such as 1..20, or one integer for both ends.

    >>> integer_range(1)("epochs", "1..20"), integer_range(1)("epochs", 5)
    ((1, 20), (5, 5))
    """

    def convert(value: Any) -> tuple[int, int]:
        ends = value.split("..") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
        low, high = ends if len(ends) == 2 else (*ends, *ends)
        bounds = _integer(low, least, most), _integer(high, least, most)
        if bounds[0] > bounds[1]:
            raise ValueError
        return bounds

    return Check("INTEGER|LOW..HIGH", f"an integer of at least {least} or an ascending range such as 1..20", convert)


def _integer(value: Any, least: int, most: int) -> int:
    converted = int(value) if isinstance(value, str) else operator.index(value)
    if isinstance(value, bool) or converted < least:
        raise ValueError
    if converted > most:
        raise TooLarge(most)
    return converted
