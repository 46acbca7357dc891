"""Control variates: state that devices keep between rounds, and the term it adds to their local gradients.

A device trains on its loss plus a linear term, so that local training from the optimum stays there although the
devices' own optima differ. States are mappings from names of trainable leaves to arrays. A device's state starts at
zero and is kept only once the device has taken part, so memory grows with the devices that did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fedcontext.arrays.tree import Array, Leaves, zeros_like
from fedcontext.errors import positive

VariateState: TypeAlias = dict[str, Any]  # "server": Leaves, "devices": dict of Leaves by device


@dataclass(frozen=True)
class ControlVariates:
    """Formulas for one leaf: server state c (all devices' mean), own state cₖ, update Δₖ of τₖ local steps.

    The server's state changes by the mean change of the own states over all N devices.
    """

    correction: Callable[[Array, Array], Array]  # (c, cₖ) -> the term added to every batch gradient of device k
    own: Callable[[Array, Array, Array, int], Array]  # (c, cₖ, Δₖ, τₖ) -> the next cₖ
    step: Callable[[Array, Array], Array]  # (the rule's step, the next c) -> the step to apply
    sends_state: bool = False  # whether devices receive c beside the params
    plain_sgd: bool = False  # whether the formulas hold without local momentum only


def scaffold(learning_rate: float) -> ControlVariates:
    """Return SCAFFOLD's (Karimireddy et al. 2020, option II): gradients get c - cₖ, and cₖ ← cₖ - c - Δₖ / (τₖ η).

    Devices receive c and send Δₖ alone: the server knows the change of cₖ from it. The formula holds for plain local
    SGD with learning rate η.

    >>> scaffold(0.1).own(0.0, 0.0, -0.2, 2)  # two steps of 0.1 along a gradient of 1
    1.0
    """
    rate = positive("learning rate", learning_rate)
    return ControlVariates(
        correction=lambda c, own: c - own,
        own=lambda c, own, update, steps: own - c - update / (steps * rate),
        step=lambda step, c: step,
        sends_state=True,
        plain_sgd=True,
    )


def feddyn(alpha: float) -> ControlVariates:
    """Return FedDyn's (Acar et al. 2021), for local training with a proximal term of μ = α.

    Gradients get -cₖ, then cₖ ← cₖ - α Δₖ, and the step is the mean update minus c / α (the paper's h is our c).

    >>> feddyn(0.5).own(0.0, 1.0, 2.0, 3), feddyn(0.5).step(1.0, -2.0)
    (0.0, 5.0)
    """
    constant = positive("alpha", alpha)
    return ControlVariates(
        correction=lambda c, own: -own,
        own=lambda c, own, update, steps: own - constant * update,
        step=lambda step, c: step - c / constant,
    )


def initial_state(like: Leaves) -> VariateState:
    """Return the state before the first round: zero on the server, and nothing for any device.

    >>> initial_state({"w": 1.0})
    {'server': {'w': 0.0}, 'devices': {}}
    """
    return {"server": zeros_like(like), "devices": {}}


def corrections(variates: ControlVariates, state: VariateState, devices: Sequence[int]) -> list[Leaves]:
    """Return the term that each device adds to its batch gradients.

    >>> corrections(scaffold(0.1), {"server": {"w": 2.0}, "devices": {7: {"w": 0.5}}}, [7, 8])
    [{'w': 1.5}, {'w': 2.0}]
    """
    server = state["server"]
    return [
        {name: variates.correction(server[name], own[name]) for name in server}
        for own in (_own(state, device) for device in devices)
    ]


def next_state(
    variates: ControlVariates,
    state: VariateState,
    updates: Mapping[int, Leaves],
    steps: Iterable[float],
    population: int,
) -> VariateState:
    """Return the state after a round in which these devices sent their updates, of so many local steps each.

    >>> state = next_state(feddyn(1.0), initial_state({"w": 0.0}), {3: {"w": 2.0}}, [5], population=4)
    >>> state
    {'server': {'w': -0.5}, 'devices': {3: {'w': -2.0}}}
    """
    server, devices = state["server"], dict(state["devices"])
    total = zeros_like(server)
    for (device, update), count in zip(updates.items(), steps, strict=True):
        own = _own(state, device)
        devices[device] = {name: variates.own(server[name], own[name], update[name], int(count)) for name in server}
        total = {name: total[name] + (devices[device][name] - own[name]) for name in server}
    return {"server": {name: server[name] + total[name] / population for name in server}, "devices": devices}


def _own(state: VariateState, device: int) -> Leaves:
    own: Leaves = state["devices"].get(device) or zeros_like(state["server"])
    return own
