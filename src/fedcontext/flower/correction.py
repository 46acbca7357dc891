"""The second exchange of a round: probes report how their gradients change over the proposed step, which corrects it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedcontext.aggregation.correction import correct
from fedcontext.aggregation.result import Aggregation
from fedcontext.errors import FedcontextError
from fedcontext.flower.exclusion import Outcome, by_reason, defect, without_updates
from fedcontext.flower.messages import Round, Task, message_for, parse_replies
from fedcontext.flower.protocol import Arrays, array_bytes
from fedcontext.measurement.defences import Defences
from fedcontext.plan import Stream, second_probes

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Correction:
    """How the steps of a run are corrected. Where no reply is usable, or `correct` fails, the proposed step stands."""

    grid: Grid
    timeout: float | None
    device_of: Callable[[int], int | None]
    samples_key: str
    defences: Defences | None

    def corrected(self, current: Round, outcome: Outcome, proposed: ArrayRecord) -> Outcome:
        """Return the outcome of a round with its step corrected by probes that it used; ``proposed`` is its model."""
        assert outcome.aggregation is not None
        devices = [int(device) for device in outcome.aggregation.probes]
        probes = second_probes(current.extras.seed, current.extras.number, devices)
        extras = replace(current.extras, previous=current.arrays, remaining=False, stream=Stream.CHANGE_CODE)
        asked = _asked(replace(current, extras=extras), probes, proposed, self.timeout)
        replies = self._replies([message for _, message in asked.sent])
        down, up = outcome.bytes_down + asked.bytes_down, outcome.bytes_up + array_bytes(replies)
        changes, unusable = self._changes(asked, replies, set(outcome.buffers))
        for line in by_reason(unusable):
            log.warning("\t> Not in the correction: %s", line)
        aggregation = _corrected(current, outcome, changes, self.defences)
        notes = {device: f"gradient change: {why}" for device, why in unusable.items()}
        aggregation = replace(aggregation, screened=aggregation.screened.with_notes(notes))
        carried, kept = replace(outcome.carried, rule=aggregation.state), without_updates(aggregation, keep_step=False)
        return replace(outcome, aggregation=kept, carried=carried, bytes_down=down, bytes_up=up)

    def _replies(self, messages: list[Message]) -> list[Message]:
        log.info("configure_correction: %s nodes report the change of their gradients", len(messages))
        replies = list(self.grid.send_and_receive(messages, timeout=self.timeout)) if messages else []
        failures = sum(reply.has_error() for reply in replies)
        log.info("aggregate_correction: Received %s results and %s failures", len(replies) - failures, failures)
        return replies

    def _changes(
        self, asked: Round, replies: list[Message], buffers: set[str]
    ) -> tuple[dict[int, Arrays], dict[int, str]]:
        """Return the usable changes by device, in the order of the requests, and why the others are not used."""
        params, tasks = asked.params, asked.tasks
        parsed, excluded = parse_replies(tasks, replies, params, asked.extras, self.device_of, self.samples_key)
        defects = {reply.task.device: defect(params, reply, buffers, None) for reply in parsed}
        unusable = excluded | {device: why for device, why in defects.items() if why}
        devices = [task.device for task in tasks.values()]  # not those with a late reply to another message
        found = {reply.task.device: reply.difference for reply in parsed if reply.difference is not None}
        usable = {device: found[device] for device in devices if device not in unusable}
        return usable, {device: unusable[device] for device in devices if device in unusable}


def _asked(current: Round, probes: list[int], proposed: ArrayRecord, ttl: float | None) -> Round:
    """Return the round with one message a probe, which has the proposed model in place of the round's."""
    node_of = {task.device: message.metadata.dst_node_id for task, message in current.sent}
    content = RecordDict({**dict.fromkeys(current.content.array_records, proposed), **current.content.config_records})
    tasks = [Task(device, None, probe=True, gradient=False) for device in probes]
    sent = [(task, message_for(task, content, node_of[task.device], ttl, current.extras)) for task in tasks]
    return replace(current, sent=sent, bytes_down=array_bytes(message for _, message in sent))


def _corrected(
    current: Round, outcome: Outcome, changes: Mapping[int, Arrays], defences: Defences | None
) -> Aggregation:
    proposed, rule, reason = outcome.aggregation, outcome.rule, "no usable change of a gradient"
    assert proposed is not None
    try:
        found = correct(
            current.params,
            proposed,
            changes,
            rule=rule,
            population=current.population,
            distortion=current.extras.coding.distortions[1],
            buffers=outcome.buffers,
            defences=defences,
        )
        if found.params is not proposed.params:
            log.debug("\t> Correction: %.3g of the step's length", found.info.get("correction", np.nan))
            return found
    except (FedcontextError, np.linalg.LinAlgError) as error:
        found, reason = proposed, str(error)
    log.warning("\t> The step is not corrected: %s", reason)
    return found
