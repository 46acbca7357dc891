"""Limits on the influence of one device, most of them in multiples of the round's median.

Vectors are clipped relative to the lower median of the positive norms that devices sent in this round, and left out
relative to the upper one: no device decides either while fewer than half of them are Byzantine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.errors import FedcontextError
from fedcontext.measurement.geometry import Name

RANGES = {"max_concavity": (0.1, np.inf), "max_uphill": (0.1, 1.0)}  # the others are at least 1
LISTED = 5  # devices that an error names; the others are counted


@dataclass(frozen=True)
class Defences:
    """Limits on the influence of one device, most in multiples of the round's median; 0 turns a defence off.

    >>> Defences(max_gradient=0.5)
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: max_gradient must be 0 (off) or at least 1, got 0.5
    """

    max_gradient: float = 3.0  # largest norm of a gradient, and of a gradient difference: longer ones are clipped
    max_update: float = 5.0  # largest norm of an update
    max_samples: float = 3.0  # largest sample count, where counts weigh devices or probes
    max_step: float = 10.0  # largest norm of the step, in median updates; for rules whose step depends on their lengths
    max_descent: float = 10.0  # largest descent that a gradient promises along the last step, in spreads; with memory
    max_concavity: float = 0.1  # largest negative cosine of a gradient difference with the last step; with memory
    max_uphill: float = 0.1  # largest cosine of an update with the gradient of the same device; with memory
    outlier: float = 100.0  # a device with a longer vector is left out of the round, as for NaN; 0 makes NaN an error

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least, most = RANGES.get(each.name, (1, np.inf))
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not number or value == np.inf or not (value == 0 or least <= value <= most):
                allowed = f"at least {least}" if most == np.inf else f"from {least} to {most:g}"
                raise FedcontextError(f"{each.name} must be 0 (off) or {allowed}, got {value!r}")


OFF = Defences(*[0.0] * len(fields(Defences)))


class NoneUsable(FedcontextError):
    """No update or no gradient of a round can be used.

    ``excluded`` holds the reasons by device, ``brief`` is the message without them.
    """

    def __init__(self, kind: str, count: int, excluded: Mapping[Name, str]) -> None:
        who = "; ".join(f"{name}: {reason}" for name, reason in list(excluded.items())[:LISTED])
        more = f"; and {len(excluded) - LISTED} more" if len(excluded) > LISTED else ""
        self.brief, self.excluded = f"none of {count} {kind}s is usable", dict(excluded)
        super().__init__(f"{self.brief} ({who}{more})")


def lower_median(values: FloatArray) -> float:
    """Return the lower median of the positive, finite values; 0 if there are none.

    >>> lower_median(np.array([1.0, 1e30])), lower_median(np.array([0.0, 3.0, np.nan, 2.0, 5.0]))
    (1.0, 3.0)
    """
    usable = _usable(values)
    return float(usable[(len(usable) - 1) // 2]) if len(usable) else 0.0


def upper_median(values: FloatArray) -> float:
    """Return the upper median of the positive, finite values; 0 if there are none.

    >>> upper_median(np.array([1.0, 4.0])), upper_median(np.array([0.0, 3.0, np.nan, 2.0, 5.0]))
    (4.0, 3.0)
    """
    usable = _usable(values)
    return float(usable[len(usable) // 2]) if len(usable) else 0.0


def _usable(values: FloatArray) -> FloatArray:
    return np.sort(values[np.isfinite(values) & (values > 0)])


def capped(counts: FloatArray, multiple: float) -> FloatArray:
    """Return counts of at most ``multiple`` times their lower median; as they are if it is 0.

    >>> capped(np.array([10.0, 30.0, 2.0**53]), 10)
    array([ 10.,  30., 300.])
    """
    return np.minimum(counts, multiple * lower_median(counts)) if multiple else counts
