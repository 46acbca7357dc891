"""Aggregation of the replies that are usable; each of the others is excluded with a reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedcontext.aggregation.aggregate import aggregate
from fedcontext.aggregation.result import Aggregation
from fedcontext.aggregation.validation import NO_GRADIENT, check_defences, checked_leaves, select_leaves
from fedcontext.errors import FedcontextError
from fedcontext.flower.messages import Reply
from fedcontext.flower.protocol import Arrays, printable
from fedcontext.measurement.defences import Defences, NoneUsable
from fedcontext.measurement.geometry import Report
from fedcontext.records import RoundRecord, round_record
from fedcontext.rules.base import AnyRule, Rule, State
from fedcontext.rules.server import ServerOptimizer
from fedcontext.state import add_server_step

LISTED = 3  # devices that a line names; node ids have 19 digits


@dataclass(frozen=True)
class Settings:
    """How the replies of a round are aggregated."""

    min_replies: int = 1
    probe_averaging: Literal["samples", "mean"] = "samples"
    layers: Sequence[str | int] | None = None  # that enter the geometry; None: all
    buffers: Sequence[str | int] = ()  # averaged instead of weighted
    defences: Defences | None = Defences()  # noqa: RUF009

    def __post_init__(self) -> None:
        check_defences(self.defences)


@dataclass(frozen=True)
class Carried:
    """What the server carries from one aggregation to the next, beside the params."""

    rule: State = None
    previous: Arrays | None = None  # the params before the last aggregation, where the rule needs differences
    server: Any = None  # state of the server optimiser


@dataclass(frozen=True)
class Outcome:
    """The aggregation of one round."""

    rule: AnyRule
    aggregation: Aggregation | None  # None: the round is lost and the model unchanged
    devices: list[int]  # whose updates were applied, in the order of the weights
    replies: Sequence[Reply]  # that were used, in the order of the tasks
    excluded: dict[int, str]  # device: reason
    carried: Carried  # after the round; as before it if the round is lost
    reason: str = ""  # why the round is lost
    bytes_down: int = 0  # of arrays sent
    bytes_up: int = 0  # of arrays received
    buffers: Sequence[str] = ()  # leaves that were averaged instead of weighted

    def record(self, number: int, loss_before: float | None, seconds: float, **evaluation: float) -> RoundRecord:
        """Return the record of the round, with the loss and accuracy of its evaluation if there was one."""
        return round_record(
            number,
            self.aggregation,
            evaluation.get("loss"),
            loss_before,
            accuracy=evaluation.get("accuracy"),
            devices=self.devices,
            smoothness=self.rule.smoothness,
            seconds=seconds,
            bytes_down=self.bytes_down,
            bytes_up=self.bytes_up,
            excluded=dict(sorted(self.excluded.items())),
            clipped=dict(sorted(self.aggregation.clipped.items())) if self.aggregation else {},
        )


def by_reason(excluded: Mapping[int, str]) -> list[str]:
    """Return one line a reason, that of most devices first: a few of its devices by number, the others counted.

    >>> by_reason({5: "no reply", **dict.fromkeys(range(30, 42), "no update")})
    ['12 devices (30, 31, 32 and 9 more): no update', 'device 5: no reply']
    """
    devices = dict[str, list[int]]()
    for device, reason in sorted(excluded.items()):
        devices.setdefault(reason, []).append(device)
    most_first = sorted(devices.items(), key=lambda item: len(item[1]), reverse=True)
    return [f"{_named(group)}: {reason}" for reason, group in most_first]


def _named(devices: Sequence[int]) -> str:
    more = f" and {len(devices) - LISTED} more" if len(devices) > LISTED else ""
    names = ", ".join(map(str, devices[:LISTED]))
    return f"device {names}" if len(devices) == 1 else f"{len(devices)} devices ({names}{more})"


@dataclass(frozen=True)
class Aggregator:
    """How the server aggregates: the rule, its settings, and what may follow it."""

    rule: AnyRule
    settings: Settings
    server: ServerOptimizer | None = None  # acts on the rule's step
    population: int | None = None  # number of devices, where known
    distortions: tuple[float, float] = (0.0, 0.0)  # shares of gradients and differences that are noise of their codes


def aggregate_usable(
    params: Arrays, replies: Sequence[Reply], excluded: dict[int, str], aggregator: Aggregator, carried: Carried
) -> Outcome:
    """Return the aggregation of the usable ``replies``, with the unusable ones added to those ``excluded`` before."""
    rule, settings = aggregator.rule, aggregator.settings
    buffers = select_leaves("buffers", settings.buffers, params) | _leaves_without_gradient(params, replies)
    layers = settings.layers if isinstance(rule, Rule) else None
    defects = {reply.task.device: defect(params, reply, buffers, layers) for reply in replies}
    excluded = excluded | {device: defect for device, defect in defects.items() if defect}
    usable = [reply for reply in replies if not defects[reply.task.device]]
    try:
        aggregation, after = _aggregate(params, usable, aggregator, carried, buffers)
    except (FedcontextError, np.linalg.LinAlgError) as error:
        reason, unusable = (error.brief, error.excluded) if isinstance(error, NoneUsable) else (str(error), {})
        return Outcome(rule, None, [], usable, excluded | unusable, carried, reason)
    excluded = excluded | aggregation.excluded
    usable = [reply for reply in usable if reply.task.device not in excluded]
    applied = list(aggregation.applied)
    return Outcome(rule, aggregation, applied, usable, excluded, after, buffers=sorted(buffers))


def _aggregate(
    params: Arrays, replies: Sequence[Reply], aggregator: Aggregator, carried: Carried, buffers: set[str]
) -> tuple[Aggregation, Carried]:
    rule, settings = aggregator.rule, aggregator.settings
    report = _report(replies, aggregator)
    aggregation = aggregate(
        params,
        report,
        rule=rule,
        layers=settings.layers,
        buffers=sorted(buffers),
        state=carried.rule,
        defences=settings.defences,
    )
    _check_enough(len(aggregation.applied), settings)
    server = None
    if aggregator.server:
        aggregation, server = _server_step(params, aggregation, aggregator.server, carried.server, buffers)
    previous = params if "differences" in rule.needs else None
    return aggregation, Carried(aggregation.state, previous, server)


def _report(replies: Sequence[Reply], aggregator: Aggregator) -> Report:
    rule, settings = aggregator.rule, aggregator.settings
    cohort = [reply for reply in replies if reply.task.group == "cohort"]
    probes = [reply for reply in replies if reply.task.probe]
    _check_enough(len(cohort), settings)
    if "gradient" in rule.needs and not probes:
        raise FedcontextError("no usable gradient from the probes")
    cohort_probes = "gradient" in rule.needs and probes == cohort
    return Report(
        updates={reply.task.device: reply.update for reply in cohort},
        samples=[reply.samples for reply in cohort],
        gradients=None if cohort_probes else {reply.task.device: reply.gradient for reply in probes} or None,
        probe_weights=[reply.samples for reply in probes] if probes and settings.probe_averaging == "samples" else None,
        own_gradients=[r.gradient for r in cohort] if cohort_probes or "own gradients" in rule.needs else None,
        pool={reply.task.device: reply.update for reply in replies if reply.task.group == "pool"},
        differences=[reply.difference for reply in probes if reply.difference is not None] or None,
        population=aggregator.population,
        remaining_slopes=[r.remaining_slope for r in cohort] if "remaining slopes" in rule.needs else None,
        distortions=aggregator.distortions,
    )


def _check_enough(count: int, settings: Settings) -> None:
    if count < settings.min_replies:
        raise FedcontextError(f"at least {settings.min_replies} usable updates are needed, got {count}")


def _server_step(
    params: Arrays, aggregation: Aggregation, optimizer: ServerOptimizer, state: Any, buffers: set[str]
) -> tuple[Aggregation, Any]:
    """Return the aggregation with the optimiser's step in place of the rule's, and the optimiser's next state."""
    step, state = optimizer.update(aggregation.step, optimizer.init(params) if state is None else state, params)
    new = add_server_step(params, step, aggregation, buffers)
    motion = replace(aggregation.motion, step_norm=None)
    return replace(aggregation, params=new, promised_change=math.nan, geometry=None, motion=motion), state


def _leaves_without_gradient(params: Arrays, replies: Sequence[Reply]) -> set[str]:
    """Return the leaves that half of the gradients or more lack: buffers, such as BatchNorm's running statistics.

    The majority decides, so that a device that adds or omits a leaf affects only its own reply. Of two devices neither
    is the majority: then a leaf is averaged, which excludes nobody. A gradient without any leaf of the params has no
    vote.
    """
    voters = [set(reply.gradient) & set(params) for reply in replies if reply.gradient is not None]
    counts = Counter(name for names in voters for name in names)
    return {name for name in params if 2 * counts[name] <= sum(map(bool, voters))} if any(voters) else set()


def without_updates(aggregation: Aggregation, keep_step: bool) -> Aggregation:
    """Return the aggregation without the updates that its step is made from; with the step if it is to be corrected."""
    step, before = (aggregation.step, aggregation.before) if keep_step else (None, None)
    return replace(aggregation, make_step=lambda: step, before=before)


def defect(params: Arrays, reply: Reply, buffers: set[str], layers: Sequence[str | int] | None) -> str:
    """Return what is wrong with the structure of this reply, or an empty string."""
    measured = (set(params) if layers is None else select_leaves("layers", layers, params)) - buffers
    measured = {name for name in measured if params[name].dtype.kind == "f"}
    sent = (
        ("update", reply.update, set(params), ""),
        ("gradient", reply.gradient, measured, NO_GRADIENT),
        ("gradient difference", reply.difference, measured, NO_GRADIENT),
    )
    try:
        for kind, vector, needed, advice in sent:
            if vector is not None:
                checked_leaves(kind, vector, params, needed, set(), advice)
    except FedcontextError as error:
        return printable(str(error))
    return ""
