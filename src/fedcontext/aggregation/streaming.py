"""A round whose updates are folded into sums as they arrive, for rules that need sums over devices alone.

The server's memory does not grow with the number of devices. Several aggregators can each fold in a part of the
devices; their rounds add up with ``+``, in a fixed order to the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedcontext.aggregation.combine import add_step
from fedcontext.aggregation.decision import checked_step
from fedcontext.aggregation.validation import check_population, check_state, checked_leaves
from fedcontext.arrays.tree import FloatArray, Leaves, Structure, kind_of, leaf_name, leaves, rebuild, size_of
from fedcontext.errors import FedcontextError
from fedcontext.measurement.sums import Sums, flat, unflat
from fedcontext.rules.base import AnyRule, State, SumRule, shown_rule


@dataclass(frozen=True)
class Streamed:
    """The outcome of a streamed round."""

    params: Structure
    step: Structure
    state: State  # the rule's state, for the next round
    info: dict[str, Any]  # numbers that the rule reports


@dataclass
class StreamedRound:
    """The sums of one round over what devices sent so far.

    ``params`` holds floating-point leaves only: average integer leaves and buffers, such as BatchNorm's statistics,
    yourself. Defences against faulty devices compare single vectors, and are not available here.

    >>> import numpy as np, fedcontext as fc
    >>> edges = [fc.StreamedRound(np.zeros(2)), fc.StreamedRound(np.zeros(2))]
    >>> edges[0].add_update(np.array([1.0, 0.0])); edges[1].add_update(np.array([1.0, 1.0]))
    >>> edges[0].add_probe(np.array([-1.0, -3.0]))
    >>> (edges[0] + edges[1]).aggregate(fc.contextual_memory()).params  # the first step is FedAvg's
    array([1. , 0.5])
    """

    params: Structure
    distortions: tuple[float, float] = (0.0, 0.0)  # of the codes of gradients and of differences: `Codec.distortion`
    sums: Sums = field(init=False)
    differences: int = field(init=False, default=0)  # probes that reported a difference

    def __post_init__(self) -> None:
        self._leaves = leaves(self.params)
        for name, leaf in self._leaves.items():
            if kind_of(leaf) != "floating":
                raise FedcontextError(
                    f"params: {leaf_name(name)} must be floating point to be streamed, got {leaf.dtype}"
                )
        self.sums = Sums(sum(map(size_of, self._leaves.values())), distortions=self.distortions)

    def add_update(self, update: Structure, name: object = "update", remaining_slope: float = 0.0) -> None:
        """Fold in one device's update; if it cannot be used, an error names it and the sums are as before.

        ``remaining_slope`` is the slope along it at its end, as a share of that before, as in `aggregate`.
        """
        self.sums.add_update(self._vector(update, name), remaining_slope)

    def add_probe(self, gradient: Structure, difference: Structure | None = None, name: object = "probe") -> None:
        """Fold in one probe's gradient and its difference to the last round's."""
        own, change = self._vector(gradient, name), None if difference is None else self._vector(difference, name)
        self.sums.add_probe(own, change)
        self.differences += difference is not None

    def __add__(self, other: StreamedRound) -> StreamedRound:
        """Return the round of the devices of both."""
        total = StreamedRound(self.params, self.distortions)
        total.sums, total.differences = self.sums + other.sums, self.differences + other.differences
        return total

    def aggregate(self, rule: AnyRule, state: State = None, population: int | None = None) -> Streamed:
        """Return the params after the step of ``rule``; ``population`` is the total number of devices, where known."""
        if not isinstance(rule, SumRule):
            raise FedcontextError(
                f"rule must work on sums over devices, such as contextual_memory(), got {shown_rule(rule)}"
            )
        check_population(population)
        check_state(rule, state, differences=self.differences > 0)
        self._check_enough(rule, state)
        state = rule.init(self.params) if state is None else state
        vector, state, info = checked_step(
            rule.step(self.sums, state, population), self.sums.size, f"rule '{rule.name}': step"
        )
        step: Leaves = unflat(vector, self._leaves, list(self._leaves))
        moved = add_step(self._leaves, step)
        return Streamed(rebuild(self.params, moved), rebuild(self.params, step), state, info)

    def _check_enough(self, rule: SumRule, state: State) -> None:
        probes = self.sums.probes
        if not self.sums.devices:
            raise FedcontextError("there are no updates to aggregate")
        if "gradient" in rule.needs and not probes:
            raise FedcontextError(f"rule '{rule.name}' needs a gradient: add_probe at least one")
        if "differences" in rule.needs and state is not None and self.differences < probes:
            raise FedcontextError(
                f"rule '{rule.name}' needs the gradient difference of every probe from the second round on, "
                f"got {self.differences} of {probes}"
            )
        if not self.sums.finite:
            raise FedcontextError("the updates are too large: their squares overflow float64")

    def _vector(self, structure: Structure, name: object) -> FloatArray:
        own = checked_leaves(str(name), structure, self._leaves, set(self._leaves), set(self._leaves))
        return flat(own, list(self._leaves))
