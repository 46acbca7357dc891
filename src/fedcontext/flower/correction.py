"""The second exchange of a round: probes report how their gradients change over the proposed step, to correct it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedcontext.aggregation.correction import correct
from fedcontext.aggregation.result import Aggregation
from fedcontext.errors import FedcontextError
from fedcontext.flower.exclusion import Outcome, by_reason, defect, without_updates
from fedcontext.flower.messages import Round, Task, message_for, parse_replies
from fedcontext.flower.protocol import Arrays, array_bytes
from fedcontext.measurement.screening import CHANGE
from fedcontext.plan import Stream, second_probes

log = logging.getLogger("flwr")


def corrected(
    current: Round,
    outcome: Outcome,
    proposed: ArrayRecord,
    grid: Grid,
    timeout: float | None,
    device_of: Callable[[int], int | None],
    samples_key: str,
) -> Outcome:
    """Return the outcome of a round with its step corrected by probes that it used; ``proposed`` is its model.

    Where no reply is usable, or `correct` fails, the proposed step stands.
    """
    assert outcome.aggregation is not None
    asked = _asked(current, outcome.aggregation, proposed, timeout)
    log.info("configure_correction: %s nodes report the change of their gradients", len(asked.sent))
    messages = [message for _, message in asked.sent]
    replies = list(grid.send_and_receive(messages, timeout=timeout)) if messages else []
    failures = sum(reply.has_error() for reply in replies)
    log.info("aggregate_correction: Received %s results and %s failures", len(replies) - failures, failures)
    size = array_bytes(replies)  # before parsing, which empties them
    changes, unusable = _changes(asked, replies, set(outcome.buffers), device_of, samples_key)
    for line in by_reason(unusable):
        log.warning("\t> Not in the correction: %s", line)
    aggregation = _corrected(outcome.aggregation, changes)
    notes = {device: f"{CHANGE}: {why}" for device, why in unusable.items()}
    aggregation = replace(aggregation, screened=aggregation.screened.with_notes(notes))
    return replace(
        outcome,
        aggregation=without_updates(aggregation, keep_step=False),
        carried=replace(outcome.carried, rule=aggregation.state),
        bytes_down=outcome.bytes_down + asked.bytes_down,
        bytes_up=outcome.bytes_up + size,
    )


def _asked(current: Round, aggregation: Aggregation, proposed: ArrayRecord, ttl: float | None) -> Round:
    """Return the round with one message for each probe asked, which has the proposed model in place of the round's."""
    extras = replace(current.extras, previous=current.arrays, remaining=False, stream=Stream.CHANGE_CODE)
    probes = second_probes(extras.seed, extras.number, [int(device) for device in aggregation.probes])
    node_of = {task.device: message.metadata.dst_node_id for task, message in current.sent}
    content = RecordDict({**dict.fromkeys(current.content.array_records, proposed), **current.content.config_records})
    tasks = [Task(device, None, probe=True, gradient=False) for device in probes]
    sent = [(task, message_for(task, content, node_of[task.device], ttl, extras)) for task in tasks]
    return replace(current, extras=extras, sent=sent, bytes_down=array_bytes(message for _, message in sent))


def _changes(
    asked: Round,
    replies: list[Message],
    buffers: set[str],
    device_of: Callable[[int], int | None],
    samples_key: str,
) -> tuple[dict[int, Arrays], dict[int, str]]:
    """Return the usable changes by device, in the order of the requests, and why the others are not used."""
    params, tasks = asked.params, asked.tasks
    parsed, excluded = parse_replies(tasks, replies, params, asked.extras, device_of, samples_key)
    defects = {reply.task.device: defect(params, reply, buffers, None) for reply in parsed}
    unusable = excluded | {device: why for device, why in defects.items() if why}
    devices = [task.device for task in tasks.values()]  # not those with a late reply to another message
    changes = {reply.task.device: reply.difference for reply in parsed if reply.difference is not None}
    usable = {device: changes[device] for device in devices if device not in unusable}
    return usable, {device: unusable[device] for device in devices if device in unusable}


def _corrected(proposed: Aggregation, changes: Mapping[int, Arrays]) -> Aggregation:
    reason = "no usable change of a gradient"
    try:
        result = correct(proposed, changes)
    except (FedcontextError, np.linalg.LinAlgError) as error:
        result, reason = proposed, str(error)
    if result.params is proposed.params:
        log.warning("\t> The step is not corrected: %s", reason)
    else:
        log.debug("\t> Correction: %.3g of the step's length", result.info.get("correction", np.nan))
    return result
