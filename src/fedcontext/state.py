"""What a run carries from round to round, and how control variates and server optimisers change it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedcontext.aggregation.result import Aggregation
from fedcontext.algorithms import Algorithm
from fedcontext.arrays.tree import FloatArray, Leaves, Structure, all_finite, leaf_name, leaves, rebuild, trained_leaves
from fedcontext.errors import FedcontextError
from fedcontext.measurement.geometry import Report
from fedcontext.rules.base import State as RuleState
from fedcontext.rules.server import State as ServerState
from fedcontext.variates import VariateState, next_state


@dataclass(frozen=True)
class State:
    """What a run carries from round to round."""

    number: int  # rounds done
    params: Structure
    rule: RuleState
    loss: float | None  # at params, where known
    previous: Structure | None = None  # the params before the last aggregation, where the rule needs them
    server: ServerState = None  # of the server optimiser, where there is one
    variates: VariateState | None = None  # of the server and of devices that took part, for control variates

    @property
    def carried(self) -> dict[str, Any]:
        """What a checkpoint holds beside number, params and loss."""
        return {"rule": self.rule, "previous": self.previous, "server": self.server, "variates": self.variates}


def changes_step(algorithm: Algorithm) -> bool:
    """Return whether the server's step is another than the rule's."""
    return algorithm.server is not None or algorithm.variates is not None


def server_step(
    algorithm: Algorithm, buffers: Collection[str], state: State, report: Report, result: Aggregation
) -> State:
    """Return ``state`` with new params, variates and optimiser state.

    Control variates, then the server optimiser, change the rule's step; buffers are averaged.
    """
    step, variates, server = result.step, state.variates, state.server
    if algorithm.variates:
        variates = _next_variates(algorithm, buffers, state, report, result.screened.factors)
        center, trained = variates["server"], trained_leaves(step, buffers)
        moved = {name: algorithm.variates.step(leaf, center[name]) for name, leaf in trained.items()}
        step = rebuild(step, {**leaves(step), **moved})
    if algorithm.server:
        step, server = algorithm.server.update(step, server, state.params)
    params = add_server_step(state.params, step, result, buffers)
    return replace(state, params=params, server=server, variates=variates)


def add_server_step(params: Structure, step: Structure, result: Aggregation, buffers: Collection[str]) -> Structure:
    """Return params plus the server's step, with the buffers of ``result``, which are averaged."""
    steps = leaves(step)
    moved = {name: leaf + steps[name] for name, leaf in trained_leaves(params, buffers).items()}
    if bad := [leaf_name(name) for name, leaf in moved.items() if not all_finite(leaf)]:
        raise FedcontextError(
            f"the server's step overflows in {', '.join(bad)}; lower the server learning rate (with FedDyn: increase mu)"
        )
    return rebuild(params, {**leaves(result.params), **moved})


def _next_variates(
    algorithm: Algorithm, buffers: Collection[str], state: State, report: Report, factors: FloatArray
) -> VariateState:
    """Return the control variates after the round, from the updates as the rule used them: times ``factors``."""
    assert algorithm.variates
    assert state.variates
    assert isinstance(report.updates, dict)
    assert report.population
    names, steps = list(report.updates), list(report.steps or ())
    first = [row for row in np.flatnonzero(factors).tolist() if isinstance(names[row], int)]  # not a second reply
    updates = {names[row]: _scaled(trained_leaves(report.updates[names[row]], buffers), factors[row]) for row in first}
    return next_state(algorithm.variates, state.variates, updates, [steps[row] for row in first], report.population)


def _scaled(named: Leaves, factor: float) -> Leaves:
    return named if factor == 1 else {name: float(factor) * leaf for name, leaf in named.items()}
