"""A round's report as one reply a device, in flat vectors: the form in which faults and attacks change it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedcontext.arrays.tree import FloatArray, Structure, leaves, rebuild, zeros_like
from fedcontext.measurement.geometry import Report, shares
from fedcontext.measurement.sums import flat, unflat
from fedcontext.rules.base import Need


@dataclass(frozen=True)
class Reply:
    """What one device sends: vectors over the trained leaves, None where it sends none."""

    device: int
    update: FloatArray | None = None  # (n,)
    gradient: FloatArray | None = None  # (n,)
    difference: FloatArray | None = None  # (n,)
    samples: float = 1.0
    steps: float = 1.0
    remaining_slope: float = 0.0  # along the update at its end, as a share of that before
    pool: bool = False  # whether the update informs the weights only
    probe: bool = False  # whether the gradient counts as a probe's
    copy: str = ""  # tells a second reply of the same device from the first

    @property
    def name(self) -> int | str:
        """The device, or its number and which copy this is."""
        return f"{self.device} {self.copy}" if self.copy else self.device

    def scaled(self, factor: float, parts: Sequence[str] = ("update", "gradient", "difference")) -> Reply:
        """Return the reply with those of its vectors that it has multiplied with ``factor``."""
        return replace(self, **{part: factor * vector for part in parts if (vector := getattr(self, part)) is not None})


def device_of(name: object) -> int:
    """Return the device of a reply's name.

    >>> device_of(7), device_of("7 late")
    (7, 7)
    """
    return int(str(name).split()[0])


def replies_of(report: Report, samples: Any, names: Sequence[str]) -> list[Reply]:
    """Return the replies in a report that names its devices; ``samples`` are those of all devices.

    ``names`` are the trained leaves.

    >>> report = Report({4: {"w": np.ones(2)}}, gradients={9: {"w": np.zeros(2)}})
    >>> [(reply.device, reply.update, reply.gradient) for reply in replies_of(report, np.ones(10), ["w"])]
    [(4, array([1., 1.]), None), (9, None, array([0., 0.]))]
    """
    updates, pool = _mapping(report.updates), _mapping(report.pool or {})
    own = dict(zip(updates, report.own_gradients or (), strict=False))
    answers = own if report.gradients is None else _mapping(report.gradients)
    differences = dict(zip(answers, report.differences or (), strict=False))
    steps = dict(zip(updates, report.steps or (), strict=False))
    slopes = dict(zip(updates, report.remaining_slopes or (), strict=False))

    def vector(structure: Structure | None) -> FloatArray | None:
        return None if structure is None else flat(leaves(structure), names)

    def reply(device: Any, update: Structure | None, in_pool: bool = False) -> Reply:
        return Reply(
            int(device),
            vector(update),
            vector(own.get(device, answers.get(device))),
            vector(differences.get(device)),
            float(samples[device]),
            float(steps.get(device, 1)),
            float(slopes.get(device, 0)),
            in_pool,
            device in answers,
        )

    trained = [*(reply(k, update) for k, update in updates.items()), *(reply(k, u, True) for k, u in pool.items())]
    return trained + [reply(device, None) for device in answers if device not in {**updates, **pool}]


def report_of(
    replies: Sequence[Reply],
    like: Report,
    params: Structure,
    names: Sequence[str],
    needs: Collection[Need],
    by_samples: bool,
) -> Report:
    """Return the report that these replies make up; ``by_samples`` says how the probes' gradients are weighed.

    Leaves outside ``names`` stay as they were in the report ``like``; those of copies come from the device's first
    reply. Updates without the device's own gradient are left out where the rule ``needs`` it.
    """
    base, updates, pool = leaves(params), _mapping(like.updates), _mapping(like.pool or {})
    zeros = zeros_like(base)

    def structure(vector: FloatArray | None, before: Structure | None = None) -> Structure:
        assert vector is not None
        rest = zeros if before is None else leaves(before)
        return rebuild(params, {**rest, **unflat(vector, base, names)})

    cohort = [reply for reply in replies if reply.update is not None and not reply.pool]
    if "own gradients" in needs:
        cohort = [reply for reply in cohort if reply.gradient is not None]
    order = {device: row for row, device in enumerate(like.gradients or ())}
    probes = [reply for reply in replies if reply.probe and reply.gradient is not None]
    probes.sort(key=lambda reply: order.get(reply.device, 0))
    own = like.own_gradients is not None and all(reply.gradient is not None for reply in cohort)
    separate = bool(probes) and not (own and like.gradients is None)
    asked = probes if separate else cohort if own else []
    weights = (
        shares(np.array([reply.samples for reply in asked]) if by_samples else None, len(asked)) if asked else None
    )
    return replace(
        like,
        updates={reply.name: structure(reply.update, updates.get(reply.device)) for reply in cohort},
        samples=[reply.samples for reply in cohort],
        steps=[reply.steps for reply in cohort],
        remaining_slopes=None if like.remaining_slopes is None else [reply.remaining_slope for reply in cohort],
        gradients={reply.name: structure(reply.gradient) for reply in probes} if separate else None,
        own_gradients=[structure(reply.gradient) for reply in cohort] if own else None,
        probe_weights=weights if asked is probes or "gradient" in needs else None,
        differences=[structure(r.difference) for r in asked] if like.differences is not None else None,
        pool={r.name: structure(r.update, pool.get(r.device)) for r in replies if r.pool and r.update is not None},
    )


def _mapping(structures: Any) -> dict[Any, Structure]:
    assert isinstance(structures, Mapping), "reports of simulations are by device"
    return dict(structures)
