"""One exchange a round: who is asked for what, in one message each, and what of the replies can be used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict

from fedcontext.errors import FedcontextError
from fedcontext.flower.protocol import (
    ASKED,
    EPOCHS,
    GRADIENT,
    QUERY_GRADIENT,
    SAMPLES,
    TRAIN,
    UPDATE,
    Arrays,
    arrays_of,
    number_in,
    shown,
    size,
    view,
)
from fedcontext.plan import IntArray, Stream, generator, plan_round

Probes: TypeAlias = int | Literal["cohort", "all"]
Role: TypeAlias = Literal["cohort", "pool", "probe"]
log = logging.getLogger("flwr")
MOST_SAMPLES = 2**53  # beyond it counts are not whole, and their sums may overflow
GONE = 5  # Flower's code for a node that stopped answering


@dataclass(frozen=True)
class Task:
    """What one device is asked in one round."""

    device: int
    role: Role
    gradient: bool  # asked for
    counts: bool  # whether its gradient is one of the probes'
    epochs: int | None = None


@dataclass(frozen=True)
class Answer:
    """What came back, in the order of the tasks."""

    task: Task
    update: Arrays | None
    gradient: Arrays | None
    samples: float
    content: RecordDict


def plan_tasks(
    seed: int,
    number: int,
    devices: Sequence[int],
    cohort: int,
    *,
    probes: Probes | None,
    own_gradients: bool = False,
    pool: int = 0,
    epochs: tuple[int, int] | None = None,
) -> list[Task]:
    """Return the round's tasks: the simulator's plan over ``devices``, with probes outside the cohort.

    No probes (None) are for a rule that needs no estimate of the global gradient.

    >>> tasks = plan_tasks(0, 1, devices=[10, 11, 12, 13], cohort=2, probes=1)
    >>> [task.role for task in tasks], len({task.device for task in tasks})
    (['cohort', 'cohort', 'probe'], 3)
    """
    plan = plan_round(seed, number, len(devices), devices_per_round=cohort, epochs=epochs or (1, 1), pool=pool)
    asked = set(_probes(seed, number, len(devices), plan.devices, probes).tolist())

    def training(role: Role, positions: IntArray, lengths: IntArray) -> list[Task]:
        own = own_gradients and role == "cohort"
        pairs = zip(positions.tolist(), lengths.tolist(), strict=True)
        return [Task(devices[k], role, own or k in asked, k in asked, n if epochs else None) for k, n in pairs]

    trained = [*training("cohort", plan.devices, plan.epochs), *training("pool", plan.pool, plan.pool_epochs)]
    others = sorted(asked - {*plan.devices.tolist(), *plan.pool.tolist()})
    return trained + [Task(devices[k], "probe", True, True) for k in others]


def _probes(seed: int, number: int, population: int, cohort: IntArray, probes: Probes | None) -> IntArray:
    if probes is None:
        return cohort[:0]
    if probes == "cohort":
        return cohort
    if probes == "all":
        return np.arange(population)
    others = np.setdiff1d(np.arange(population), cohort)
    if probes > len(others):
        raise FedcontextError(
            f"{len(cohort)} devices train and {probes} others probe, but {population} are connected: "
            "lower fraction_train or probes, or use probes='cohort'"
        )
    return generator(seed, number, Stream.PROBES).permutation(others)[:probes]


def message_for(task: Task, template: RecordDict, node: int, ttl: float | None) -> Message:
    """Return the message for a task: the content of the inner strategy's, and what we ask beyond it."""
    asked = [UPDATE] * (task.role != "probe") + [GRADIENT] * task.gradient
    extra: dict[str, Any] = {ASKED: " ".join(asked), **({EPOCHS: task.epochs} if task.epochs else {})}
    configs = template.config_records or {"config": ConfigRecord()}
    content = RecordDict({**template.array_records})
    for key, config in configs.items():
        content[key] = ConfigRecord({**config, **extra})
    return Message(content, node, QUERY_GRADIENT if task.role == "probe" else TRAIN, ttl=ttl)


def collect(
    sent: Mapping[str, Task],
    replies: Iterable[Message],
    params: Arrays,
    device_of: Callable[[int], int | None],
    samples_key: str = SAMPLES,
) -> tuple[list[Answer], dict[int, str]]:
    """Return the answers that can be used, in the order of the tasks, and why the other devices' cannot.

    ``sent`` has the task of each message's id: a reply names its message, where it may not name its node.
    """
    got: dict[str, list[Message]] = {identity: [] for identity in sent}
    excluded: dict[int, str] = {}
    for reply in replies:
        if (identity := reply.metadata.reply_to_message_id) in got:
            got[identity].append(reply)
        elif (device := device_of(reply.metadata.src_node_id)) is not None:
            excluded[device] = "answered late, or what was not asked"
    answers = []
    for identity, task in sent.items():
        excluded.pop(task.device, None)
        try:
            answers.append(_answer(task, got[identity], params, samples_key))
        except FedcontextError as error:
            excluded[task.device] = str(error)
            log.warning("device %d is left out: %s", task.device, error)
    return answers, excluded


def _answer(task: Task, replies: Sequence[Message], params: Arrays, samples_key: str) -> Answer:
    if len(replies) != 1:
        raise FedcontextError("answered twice" if replies else "no answer in time")
    if replies[0].has_error():
        raise FedcontextError(_said(replies[0].error))
    content = replies[0].content
    update = None if task.role == "probe" else _update(content, params)
    gradient = arrays_of(content.array_records[GRADIENT]) if GRADIENT in content.array_records else None
    if task.role != "probe" and update is None:
        raise FedcontextError("gradient but no update" if gradient else "no update")
    if task.gradient and gradient is None:
        raise FedcontextError("update but no gradient" if update else "no gradient")
    samples = number_in(content, samples_key, SAMPLES)
    if not 0 < samples <= MOST_SAMPLES:
        raise FedcontextError(f"{samples_key} must be positive, got {samples:g}")
    return Answer(task, update, gradient if task.gradient else None, samples, content)


def _update(content: RecordDict, params: Arrays) -> Arrays | None:
    """Return the update as sent; or from the new weights of a stock client, whose record is used up leaf by leaf."""
    if UPDATE in content.array_records:
        return arrays_of(content.array_records[UPDATE])
    weights = [record for key, record in content.array_records.items() if key != GRADIENT]
    return _difference(weights[0], params) if weights else None


def _difference(weights: ArrayRecord, params: Arrays) -> Arrays:
    """Return new weights less the old ones, each leaf's bytes let go of when it is done: memory does not double."""
    update: Arrays = {}
    for name in list(weights):
        new, old = view(weights.pop(name)), params.get(name)
        same = old is not None and old.shape == new.shape and old.dtype == new.dtype
        with np.errstate(invalid="ignore", over="ignore"):
            update[name] = np.asarray(new - old) if same else new  # the door says what is wrong with it
    return update


def _said(error: Error) -> str:
    if error.code == GONE:
        return "its node stopped answering"
    lines = [line.strip() for line in (error.reason or "").splitlines() if line.strip()]
    return f"failed with code {error.code}" + (f": {shown(lines[-1])}" if lines else "")


def received(replies: Iterable[Message]) -> int:
    """Return the bytes of arrays that came."""
    records = [record for reply in replies if reply.has_content() for record in reply.content.array_records.values()]
    return sum(size(record) for record in records)
