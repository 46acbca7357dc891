"""From answers to the new model through the door, with the devices that the door refuses left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fedcontext.aggregation import Aggregation, aggregate
from fedcontext.arrays.tree import all_finite, leaf_name
from fedcontext.errors import FedcontextError
from fedcontext.flower.messages import Answer
from fedcontext.flower.protocol import Arrays, shown
from fedcontext.geometry import Report, measure
from fedcontext.rules import Rule, State
from fedcontext.validation import choose, take


def combine(
    params: Arrays,
    answers: Sequence[Answer],
    excluded: dict[int, str],
    *,
    rule: Rule,
    state: State,
    min_replies: int = 1,
    by_samples: bool = True,
    layers: Sequence[str | int] | None = None,
    buffers: Sequence[str | int] = (),
) -> Aggregation:
    """Return the aggregation of the answers; who cannot be used is added to ``excluded`` and left out.

    The answers are read twice, block by block, as the door does; a third time only where it refused something.
    """
    averaged = choose("buffers", buffers, params) | _without_gradient(params, answers)

    def attempt(usable: Sequence[Answer]) -> Aggregation:
        return _aggregate(params, usable, rule, state, min_replies, by_samples, layers, sorted(averaged))

    try:
        return attempt(answers)
    except (FedcontextError, np.linalg.LinAlgError):
        reasons = {answer.task.device: _complaint(params, answer, averaged, layers) for answer in answers}
        bad = {device: reason for device, reason in reasons.items() if reason}
        if not bad:
            raise
        excluded.update(bad)
        return attempt([answer for answer in answers if answer.task.device not in bad])


def _aggregate(
    params: Arrays,
    answers: Sequence[Answer],
    rule: Rule,
    state: State,
    min_replies: int,
    by_samples: bool,
    layers: Sequence[str | int] | None,
    averaged: Sequence[str],
) -> Aggregation:
    cohort = [answer for answer in answers if answer.task.role == "cohort"]
    probes = [answer for answer in answers if answer.task.counts]
    if len(cohort) < min_replies:
        raise FedcontextError(f"at least {min_replies} usable updates are needed, got {len(cohort)}")
    separate = bool(probes) and [a.task for a in probes] != [a.task for a in cohort]
    own = (
        [a.gradient for a in cohort if a.gradient is not None] if not separate or "own gradients" in rule.needs else []
    )
    return aggregate(
        params,
        {answer.task.device: answer.update for answer in cohort},
        rule=rule,
        gradients={answer.task.device: answer.gradient for answer in probes} if separate else None,
        own_gradients=own or None,
        probe_weights=[a.samples for a in probes] if by_samples and "gradient" in rule.needs else None,
        samples=[answer.samples for answer in cohort],
        pool={answer.task.device: answer.update for answer in answers if answer.task.role == "pool"},
        layers=layers,
        buffers=averaged,
        state=state,
    )


def _without_gradient(params: Arrays, answers: Sequence[Answer]) -> set[str]:
    """Return the leaves that most gradients lack, such as the statistics of batch normalisation: buffers.

    The majority decides, so that one device that adds a leaf, or leaves one out, speaks for itself alone.
    """
    gradients = [answer.gradient for answer in answers if answer.gradient is not None]
    counts = Counter(name for gradient in gradients for name in gradient)
    return {name for name in params if 2 * counts[name] <= len(gradients)} if gradients else set()


def _complaint(params: Arrays, answer: Answer, averaged: set[str], layers: Sequence[str | int] | None) -> str:
    """Return what the door has against this answer alone; nothing where it is sound."""
    needed = (set(params) if layers is None else choose("layers", layers, params)) - averaged
    needed = {name for name in needed if params[name].dtype.kind == "f"}
    try:
        take(
            params,
            [answer.update if answer.update is not None else params],
            own_gradients=[answer.gradient] if answer.gradient is not None else None,
            needed=needed,
        )
    except FedcontextError as error:
        said = str(error).replace("own gradient of device 0: ", "gradient: ").replace("device 0: ", "update: ")
        return shown(said)
    for what, arrays in (("update", answer.update), ("gradient", answer.gradient)):
        for name in sorted(needed):
            if arrays is not None and not all_finite(arrays[name]):
                return f"{what}: {leaf_name(name)} has NaN or infinite entries"
    length = measure(Report([answer.update], np.ones(1)), sorted(needed)).gram if answer.update is not None else 0
    return "" if np.isfinite(length).all() else "update: it is too long to be measured"
