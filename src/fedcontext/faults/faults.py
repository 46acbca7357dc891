"""Faults of devices and networks in simulations, drawn for each device and round: the same for every algorithm.

A setting such as "dropout=0.3,nan=0.1" gives the chance of each fault for a device in a round; "until=20" ends them
after round 20. Faults come after attacks: a false reply can get lost on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.faults.reply import Reply
from fedcontext.plan import IntArray, RoundPlan, Stream, generator

FAULTS = {  # what happens to a device; the order decides the draws, so new ones come last
    "dropout": "takes no part in the round",
    "lost-reply": "trains, but its reply is lost",
    "partial": "trains for fewer epochs than asked",
    "late": "its update arrives one round later",
    "stale": "trains from the last round's params",
    "duplicate": "its reply arrives twice",
    "nan": "sends NaN in place of numbers",
    "scale": "sends its update and its gradient multiplied by 1000",
    "lost-gradient": "its gradient is lost",
    "old-gradient": "sends its gradient at the last round's params",
    "churn": "leaves, and joins again after ten rounds",
    "outage": "its region, one of five, is disconnected for five rounds",
}
ABSENT = {"dropout": "dropped out", "churn": "left", "outage": "region disconnected"}
FROM_LAST_ROUND = frozenset({"late", "stale", "old-gradient"})  # these need the params of the last round
SCALE = 1000.0
CHURN_ROUNDS, OUTAGE_ROUNDS, REGIONS = 10, 5, 5

Shares: TypeAlias = Mapping[str, float]  # chances by name, and maybe the last round under "until"
Vectors: TypeAlias = Callable[[Sequence[Reply]], Sequence[FloatArray]]  # one for each reply


def active(settings: Shares, number: int) -> bool:
    """Return whether faults (or attacks) happen in a round.

    >>> active({"nan": 0.1, "until": 20}, 20), active({"nan": 0.1, "until": 20}, 21), active({}, 1)
    (True, False, False)
    """
    return bool(settings) and number <= settings.get("until", np.inf)


def hit(seed: int, number: int, device: int, name: str, faults: Shares) -> bool:
    """Return whether a device suffers a fault in a round.

    >>> hits = [hit(0, number, 7, "dropout", {"dropout": 0.3}) for number in range(1, 1001)]
    >>> 250 < sum(hits) < 350
    True
    """
    if not faults.get(name) or not active(faults, number):
        return False
    key = {"churn": ((number - 1) // CHURN_ROUNDS, device), "outage": ((number - 1) // OUTAGE_ROUNDS, device % REGIONS)}
    period, who = key.get(name, (number, device))
    return bool(
        generator(seed, period, Stream.FAULTS, who).random(len(FAULTS))[list(FAULTS).index(name)] < faults[name]
    )


def without_absent(seed: int, plan: RoundPlan, faults: Shares) -> tuple[RoundPlan, dict[int, str]]:
    """Return the plan of the devices that take part, some for fewer epochs, and why the others do not."""
    excluded = {
        int(device): reason
        for device in np.unique(np.concatenate([plan.devices, plan.pool, plan.probes]))
        for name, reason in ABSENT.items()
        if hit(seed, plan.number, int(device), name, faults)
    }
    cohort, pool = (np.array([k not in excluded for k in group], bool) for group in (plan.devices, plan.pool))
    asked = plan.epochs, plan.pool_epochs
    epochs, pool_epochs = (
        _shorter(seed, plan.number, group, each, faults)
        for group, each in zip((plan.devices, plan.pool), asked, strict=True)
    )
    present = replace(
        plan,
        devices=plan.devices[cohort],
        epochs=epochs[cohort],
        probes=plan.probes[np.array([k not in excluded for k in plan.probes], bool)],
        pool=plan.pool[pool],
        pool_epochs=pool_epochs[pool],
    )
    return present, excluded


def _shorter(seed: int, number: int, devices: IntArray, epochs: IntArray, faults: Shares) -> IntArray:
    """Return the epochs, drawn again from 1 to one less than asked for devices that stop early."""
    cut = epochs.copy()
    for row, device in enumerate(devices.tolist()):
        if epochs[row] > 1 and hit(seed, number, device, "partial", faults):
            cut[row] = generator(seed, number, Stream.PARTIAL, device).integers(1, epochs[row])
    return cut


def with_faults(
    replies: Sequence[Reply],
    seed: int,
    number: int,
    faults: Shares,
    *,
    trained_before: Vectors,
    gradients_before: Vectors,
    late: Sequence[Reply] = (),
) -> tuple[list[Reply], dict[int, str]]:
    """Return what arrives of the replies of a round, and why some devices' updates do not.

    ``trained_before`` and ``gradients_before`` give updates and gradients from the params of the last round, ``late``
    are the replies of the last round that arrive now.

    >>> lost = with_faults([Reply(7, np.ones(1))], 0, 1, {"lost-reply": 1.0}, trained_before=list, gradients_before=list)
    >>> lost
    ([], {7: 'reply lost'})
    """  # noqa: W505

    def suffers(name: str) -> Callable[[Reply], bool]:
        return lambda reply: hit(seed, number, reply.device, name, faults)

    arrived = _replaced(replies, suffers("stale"), "update", trained_before)
    arrived = _replaced(arrived, suffers("old-gradient"), "gradient", gradients_before)
    arrived = [reply.scaled(SCALE) if suffers("scale")(reply) else reply for reply in arrived]
    arrived = [reply.scaled(np.nan) if suffers("nan")(reply) else reply for reply in arrived]
    arrived = [replace(r, gradient=None, difference=None) if suffers("lost-gradient")(r) else r for r in arrived]
    arrived += [replace(reply, copy="again") for reply in arrived if suffers("duplicate")(reply)]
    excluded = {reply.device: "reply lost" for reply in arrived if suffers("lost-reply")(reply)}
    excluded |= {
        r.device: "late" for r in arrived if r.device not in excluded and r.update is not None and suffers("late")(r)
    }
    return [*(reply for reply in arrived if reply.device not in excluded), *late], excluded


def faulty_changes(changes: Mapping[int, FloatArray], seed: int, number: int, faults: Shares) -> dict[int, FloatArray]:
    """Return the changes of the probes' gradients over a proposed step, as faults change them.

    A fault strikes both exchanges of a round alike, so probes whose gradient was lost or NaN are not asked again.

    >>> faulty_changes({7: np.ones(1)}, 0, 1, {"scale": 1.0}), faulty_changes({7: np.ones(1)}, 0, 1, {"old-gradient": 1.0})
    ({7: array([1000.])}, {7: array([0.])})
    """  # noqa: W505
    factors = {"scale": SCALE, "old-gradient": 0.0}

    def factor(device: int) -> float:
        return float(np.prod([factors[name] for name in factors if hit(seed, number, device, name, faults)]))

    return {device: factor(device) * change for device, change in changes.items()}


def _replaced(replies: Sequence[Reply], affected: Callable[[Reply], bool], field: str, vectors: Vectors) -> list[Reply]:
    """Return the replies with ``field`` replaced in affected ones that have it; an old gradient has no difference."""
    chosen = [reply for reply in replies if getattr(reply, field) is not None and affected(reply)]
    new = dict(zip((reply.device for reply in chosen), vectors(chosen) if chosen else (), strict=False))

    def one(reply: Reply) -> Reply:
        if reply.device not in new:
            return reply
        if field == "update":
            return replace(reply, update=new[reply.device])
        still = None if reply.difference is None else 0 * reply.difference
        return replace(reply, gradient=new[reply.device], difference=still)

    return [one(reply) for reply in replies]
