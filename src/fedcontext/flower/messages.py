"""The messages of a round, one per device, and their replies, parsed and checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict

from fedcontext.errors import FedcontextError
from fedcontext.flower.coding import Extras, read_vector
from fedcontext.flower.protocol import (
    DIFFERENCE,
    DIFFERENCE_CODE,
    EPOCHS,
    GRADIENT,
    GRADIENT_CODE,
    PREVIOUS,
    QUERY_GRADIENT,
    REMAINING,
    REQUEST,
    SAMPLES,
    SHARE,
    TRAIN,
    UPDATE,
    Arrays,
    arrays_of,
    metric,
    printable,
    view,
)
from fedcontext.plan import Probes, plan_round
from fedcontext.rules.base import Need

Pool: TypeAlias = int | Literal["all"]
MAX_SAMPLES = 2**53  # larger counts are not exact in float64, and their sums may overflow
HELPERS = "the client app must be made with fedcontext.flower.torch_client or numpy_client"
LATE = "no reply before the timeout"
# Flower's codes: message expired, reply expired, node without heartbeats
ERRORS = {3: LATE, 4: LATE, 5: "node unavailable"}


@dataclass(frozen=True)
class Task:
    """What one device is asked to do in a round."""

    device: int
    group: Literal["cohort", "pool"] | None  # of those that train; None: it only reports its gradient
    probe: bool  # its gradient enters the estimate of the global gradient
    gradient: bool  # it reports its gradient, as a probe or for a rule that needs own gradients
    epochs: int | None = None  # None: the client app decides


@dataclass(frozen=True)
class Reply:
    """What a device returned for its task."""

    task: Task
    update: Arrays | None  # None: it did not train
    gradient: Arrays | None  # None: not asked for
    difference: Arrays | None  # None: not asked for
    samples: float
    remaining_slope: float  # along the update at its end, as a share of that before; 0 where it is not known
    content: RecordDict


@dataclass(frozen=True)
class Round:
    """A round between `configure_train` and its aggregation."""

    number: int
    arrays: ArrayRecord  # the model
    params: Arrays  # the model, as views of its record
    trains: bool  # whether the wrapped strategy sampled any node
    content: RecordDict = field(default_factory=RecordDict)  # of the wrapped strategy's messages
    sent: Sequence[tuple[Task, Message]] = ()
    extras: Extras = Extras()  # noqa: RUF009
    population: int | None = None  # connected devices
    bytes_down: int = 0

    @property
    def tasks(self) -> dict[str, Task]:
        """The task of each message id; messages get their ids when they are sent."""
        return {message.metadata.message_id: task for task, message in self.sent}


def plan_tasks(
    seed: int,
    number: int,
    devices: Sequence[int],
    cohort: int,
    needs: Collection[Need],
    probes: Probes = "cohort",
    pool: Pool = 0,
    epochs: tuple[int, int] | None = None,
) -> list[Task]:
    """Return the tasks of round ``number``, planned as the simulator does; the pool is at most all other ``devices``.

    A device that is both in the cohort and a probe has one task: it trains and reports its gradient.

    >>> tasks = plan_tasks(0, 1, devices=[10, 11, 12, 13], cohort=2, needs={"gradient"}, probes="all")
    >>> [(task.group, task.gradient) for task in tasks]
    [('cohort', True), ('cohort', True), (None, True), (None, True)]
    """
    pooled = min(pool, len(devices) - cohort) if isinstance(pool, int) else pool
    plan = plan_round(
        seed,
        number,
        len(devices),
        devices_per_round=cohort,
        epochs=epochs or (1, 1),
        probes=probes if "gradient" in needs else None,
        pool=pooled if "pool" in needs else 0,
    )
    probing = set(plan.probes.tolist())
    groups: tuple[tuple[Literal["cohort", "pool"], Any, Any], ...] = (
        ("cohort", plan.devices.tolist(), plan.epochs.tolist()),
        ("pool", plan.pool.tolist(), plan.pool_epochs.tolist()),
    )
    tasks = []
    for group, positions, lengths in groups:
        own = group == "cohort" and "own gradients" in needs
        for k, length in zip(positions, lengths, strict=True):
            tasks.append(Task(devices[k], group, k in probing, own or k in probing, length if epochs else None))
    others = probing - {*plan.devices.tolist(), *plan.pool.tolist()}
    return tasks + [Task(devices[k], None, probe=True, gradient=True) for k in sorted(others)]


def message_for(task: Task, template: RecordDict, node: int, ttl: float | None, extras: Extras) -> Message:
    """Return the message for a task: the wrapped strategy's content, with our request added to its config."""
    difference = task.probe and extras.previous is not None
    request = [UPDATE] * (task.group is not None) + [GRADIENT] * task.gradient + [DIFFERENCE] * difference
    request += [REMAINING] * (extras.remaining and task.group == "cohort")
    codes = extras.codes(task.device)
    keys = ((GRADIENT, GRADIENT_CODE), (DIFFERENCE, DIFFERENCE_CODE))
    added: dict[str, Any] = {REQUEST: " ".join(request), **({EPOCHS: task.epochs} if task.epochs else {})}
    added |= {key: [code.bits, *code.key] for name, key in keys if name in request and (code := codes[name])}
    configs = template.config_records or {"config": ConfigRecord()}
    content = RecordDict({**template.array_records})
    if difference and extras.previous is not None:
        content[PREVIOUS] = extras.previous
    for key, config in configs.items():
        content[key] = ConfigRecord({**config, **added})
    return Message(content, node, TRAIN if task.group else QUERY_GRADIENT, ttl=ttl)


def parse_replies(
    sent: Mapping[str, Task],
    replies: Iterable[Message],
    params: Arrays,
    extras: Extras,
    device_of: Callable[[int], int | None],
    samples_key: str,
) -> tuple[list[Reply], dict[int, str]]:
    """Return the replies in the order of the tasks, and the reason for each device that is excluded.

    ``sent`` maps message ids to tasks. Replies are matched by message id, since error replies may not name their node;
    a reply from another device than the one the message was sent to is not used.
    """
    received: dict[str, list[Message]] = {identity: [] for identity in sent}
    parsed, excluded = [], dict[int, str]()
    for reply in replies:
        identity, device = reply.metadata.reply_to_message_id, device_of(reply.metadata.src_node_id)
        if identity in received and device in (None, sent[identity].device):
            received[identity].append(reply)
        elif device is not None:
            excluded[device] = "late or unsolicited reply"
    for identity, task in sent.items():
        excluded.pop(task.device, None)
        try:
            parsed.append(_parse(task, received[identity], params, extras, samples_key))
        except FedcontextError as error:
            excluded[task.device] = str(error)
        except Exception as error:  # the reply is untrusted: whatever is wrong with it concerns its device alone
            excluded[task.device] = printable(f"unreadable reply ({type(error).__name__}: {error})")
    return parsed, excluded


def _parse(task: Task, replies: Sequence[Message], params: Arrays, extras: Extras, samples_key: str) -> Reply:
    if len(replies) != 1:
        raise FedcontextError("more than one reply" if replies else LATE)
    if replies[0].has_error():
        raise FedcontextError(_reason(replies[0].error, task))
    content, codes = replies[0].content, extras.codes(task.device)
    update = _update(content, params) if task.group else None
    gradient = read_vector(content, GRADIENT, params, codes[GRADIENT]) if task.gradient else None
    wants_difference = task.probe and extras.previous is not None
    difference = read_vector(content, DIFFERENCE, params, codes[DIFFERENCE]) if wants_difference else None
    if task.group and update is None:
        raise FedcontextError("gradient but no update" if gradient else "no update")
    if task.gradient and gradient is None:
        raise FedcontextError(f"{'update but ' if update else ''}no gradient: {HELPERS}")
    if wants_difference and difference is None:
        raise FedcontextError(f"no gradient difference: {HELPERS} of this version")
    samples = metric(content, samples_key, SAMPLES)
    if not 0 < samples <= MAX_SAMPLES:
        raise FedcontextError(f"{samples_key} must be between 1 and 2**53, got {samples:g}")
    return Reply(task, update, gradient, difference, samples, _remaining_slope(content), content)


def _remaining_slope(content: RecordDict) -> float:
    value = content.config_records.get(REMAINING, ConfigRecord()).get(SHARE)
    return value if isinstance(value, float) else 0.0


def _update(content: RecordDict, params: Arrays) -> Arrays | None:
    """Return the update; of a stock client, which sends new weights, it is new - old."""
    if UPDATE in content.array_records:
        return arrays_of(content.array_records[UPDATE])
    weights = [record for key, record in content.array_records.items() if key not in (GRADIENT, DIFFERENCE)]
    return _difference(weights[0], params) if weights else None


def _difference(weights: ArrayRecord, params: Arrays) -> Arrays:
    """Return new - old, removing each leaf from the reply once it is used, so that memory does not double."""
    update: Arrays = {}
    for name in list(weights):
        new, old = view(weights.pop(name)), params.get(name)
        same = old is not None and old.shape == new.shape and old.dtype == new.dtype
        with np.errstate(invalid="ignore", over="ignore"):
            update[name] = np.asarray(new - old) if same else new  # `aggregate` reports what does not match
    return update


def _reason(error: Error, task: Task) -> str:
    if error.code in ERRORS:
        return ERRORS[error.code]
    lines = [line.strip() for line in (error.reason or "").splitlines() if line.strip()]
    if task.group is None and "No query function registered" in (error.reason or ""):  # what a stock ClientApp raises
        return f"no gradient: {HELPERS}"
    return f"failed with code {error.code}" + (f": {printable(lines[-1])}" if lines else "")
