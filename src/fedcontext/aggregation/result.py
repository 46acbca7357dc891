"""What `aggregate` returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedcontext.arrays.tree import FloatArray, Structure
from fedcontext.measurement.defences import Defences
from fedcontext.measurement.geometry import Geometry, Name, shares
from fedcontext.measurement.screening import Screened
from fedcontext.measurement.sums import Sums, dot
from fedcontext.rules.base import State, SumRule


@dataclass(frozen=True)
class Motion:
    """Lengths and the slope of one aggregation; None where unknown."""

    update_norm: float | None = None  # ‖d‖, d the plain mean of the updates
    step_norm: float | None = None  # of the rule's step
    slope: float | None = None  # <g, d> with the gradient estimate g: negative where the mean update goes downhill


@dataclass(frozen=True)
class Before:
    """What `correct` needs to know of an aggregation: its rule, the params before it, and how it measured vectors."""

    rule: SumRule
    params: Structure
    measured: list[str]  # the leaves that gradients have
    defences: Defences
    population: int | None
    distortion: float  # share of gradient differences that is noise of their code


@dataclass(frozen=True)
class Aggregation:
    """What `aggregate` returns: the new params, and the weights and diagnostics behind them."""

    params: Structure
    weights: FloatArray  # (K,) of the devices, in the order of their updates; 0 for those that are left out
    promised_change: float  # the bound on the loss change over the measured layers; NaN without gradient or smoothness
    geometry: Geometry | None  # None for a rule that works on sums over devices
    state: State  # the rule's state, for the next round
    screened: Screened = field(repr=False)  # what the defences did
    info: dict[str, Any] = field(default_factory=dict)  # numbers that a rule reports
    motion: Motion = Motion()  # how far the updates and the step go
    make_step: Callable[[], Structure] = field(repr=False, default=lambda: None)
    before: Before | None = field(repr=False, default=None)  # None where the step cannot be corrected, or is already

    @cached_property
    def step(self) -> Structure:
        """The step Σ αₖ Δₖ itself, a structure like params; computed when it is first asked for."""
        return self.make_step()

    @property
    def excluded(self) -> dict[Name, str]:
        """Why nothing that a device sent was used, by its key in a mapping or its position in a sequence."""
        return self.screened.excluded

    @property
    def probes(self) -> list[Name]:
        """The probes whose gradients were used."""
        return list(self.screened.probe_names)

    @property
    def clipped(self) -> dict[Name, str]:
        """Notes by device: what was clipped, used in part, or suspiciously short."""
        return self.screened.clipped

    @property
    def applied(self) -> dict[Name, float]:
        """The weights of the devices that were not left out."""
        pairs = zip(self.screened.names, self.weights.tolist(), strict=True)
        return {name: weight for name, weight in pairs if name not in self.excluded}

    @property
    def condition(self) -> float | None:
        """Condition number of the normalised updates' Gram matrix; None for a rule that works on sums."""
        return None if self.geometry is None else self.geometry.condition

    def curvature(self, change: float) -> float | None:
        """Return the β at which the bound would have equalled the measured ``change``: 2 (change - b·α) / αᵀ G α."""
        if self.geometry is None or self.geometry.slopes is None:
            return None
        count = len(self.weights)
        square = float(self.weights @ self.geometry.gram[:count, :count] @ self.weights)
        return 2 * (change - float(self.geometry.slope[:count] @ self.weights)) / square if square > 0 else None


def motion_of_weights(geometry: Geometry, weights: FloatArray) -> Motion:
    """Return the motion of a weighted sum of updates."""
    count = len(weights)
    gram, even = geometry.gram[:count, :count], shares(None, count)
    return Motion(
        math.sqrt(max(0.0, float(even @ gram @ even))),
        math.sqrt(max(0.0, float(weights @ gram @ weights))),
        None if geometry.slopes is None else float(geometry.slope[:count] @ even),
    )


def motion_of_sums(sums: Sums, step: FloatArray) -> Motion:
    """Return the motion of a step that a rule took from sums over devices."""
    mean = sums.mean_update
    slope = dot(sums.mean_gradient, mean) if sums.probes else None
    return Motion(math.sqrt(dot(mean, mean)), math.sqrt(dot(step, step)), slope)
