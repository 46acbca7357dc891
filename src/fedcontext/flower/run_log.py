"""What a federation writes down: metrics for Flower, records for our reports, checkpoints to go on from."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

from fedcontext import checkpoint, records
from fedcontext.aggregation import Aggregation
from fedcontext.errors import FedcontextError
from fedcontext.flower.protocol import Arrays
from fedcontext.records import RoundRecord
from fedcontext.rules import Rule, State
from fedcontext.simulation import curvature_along

log = logging.getLogger("flwr")
LOSS = ("loss", "eval_loss", "eval-loss")  # what apps call it
ACCURACY = ("accuracy", "eval_acc", "eval_accuracy", "eval-acc", "eval-accuracy")


class History:
    """The run so far: how many rounds, what the rule remembers, and the files where that is kept."""

    def __init__(self, records_at: str | Path | None, checkpoint_at: str | Path | None, name: str) -> None:
        self._records = Path(records_at) if records_at else None
        self._checkpoint = Path(checkpoint_at) if checkpoint_at else None
        self._settings: dict[str, Any] = {"dataset": name}
        self._identity: dict[str, Any] = {}  # what a checkpoint must have been made with
        self._open: RoundRecord | None = None
        self._result: Aggregation | None = None
        self._loss: float | None = None  # at the params, where known
        self._judged: dict[str, float] = {}
        self.number = 0  # rounds done
        self.lost = 0  # rounds lost in a row
        self.rule_state: State = None
        self.excluded: dict[int, str] = {}  # in the last round

    def begin(self, initial: Arrays, identity: Mapping[str, Any], settings: Mapping[str, Any]) -> Arrays | None:
        """Return the params of the checkpoint, and remember its round; None where there is nothing to go on from.

        A checkpoint whose facts differ from ``identity`` is refused: its rounds would not be this run's.
        """
        self._settings |= settings
        self._identity = json.loads(json.dumps(identity, default=str))  # as it comes back from a file
        if not (self._checkpoint and self._checkpoint.exists()):
            if self._records:
                self._records.parent.mkdir(parents=True, exist_ok=True)
                self._records.write_text("", encoding="utf-8")
            return None
        found = checkpoint.load(self._checkpoint, initial)
        for what, value in self._identity.items():
            if found.facts.get(what) != value:
                raise FedcontextError(f"{self._checkpoint}: {what} must be {value!r}, got {found.facts.get(what)!r}")
        self.number, self.lost, self._loss = (found.facts[name] for name in ("number", "lost", "loss"))
        self.rule_state = found.rule
        if self._records:
            records.truncate_run(self._records, self.number)
        log.info("going on after round %d, from %s", self.number, self._checkpoint)
        params: Arrays = found.params
        return params

    def note(
        self,
        number: int,
        rule: Rule | None,
        devices: Sequence[int],
        result: Aggregation | None,
        excluded: dict[int, str],
        bytes_down: int,
        bytes_up: int,
    ) -> None:
        """Remember how the round's aggregation went, until `close`."""
        self.lost = 0 if result else self.lost + 1
        self.excluded = dict(sorted(excluded.items()))
        if result:
            self.rule_state = result.state
        self._result = result
        self._open = RoundRecord(
            number=number,
            loss=None,
            accuracy=None,
            devices=list(devices) if result else [],
            weights=result.weights.tolist() if result else [],
            promised_change=result.promised_change if result else None,
            measured_change=None,
            smoothness=rule.smoothness if rule else None,
            curvature=None,
            condition=result.geometry.condition if result else None,
            seconds=0.0,
            bytes_down=bytes_down,
            bytes_up=bytes_up,
            excluded=self.excluded,
            lost=result is None,
        )

    def judge(self, metrics: MetricRecord) -> None:
        """Remember loss and accuracy; a later judgement stands before an earlier one."""
        for what, names in (("loss", LOSS), ("accuracy", ACCURACY)):
            values = [metrics[name] for name in names if name in metrics]
            if values and isinstance(values[0], int | float):
                self._judged[what] = float(values[0])
        if self._open is None:  # before the first round
            self._loss = self._judged.pop("loss", None)

    def close(self, number: int, params: Arrays, seconds: float) -> None:
        """Write the round's record, then its checkpoint: a crash between the two only repeats the round."""
        loss, accuracy = self._judged.get("loss"), self._judged.get("accuracy")
        change = None if loss is None or self._loss is None else loss - self._loss
        if self._open is not None and self._records is not None:
            bent = curvature_along(self._result, change) if self._result and change is not None else None
            judged: dict[str, Any] = {"loss": loss, "accuracy": accuracy, "measured_change": change, "curvature": bent}
            record = replace(self._open, **judged, seconds=seconds)
            with self._records.open("a", encoding="utf-8") as file:
                list(records.stream_records(self._settings, [record], file))
        self.number, self._loss, self._judged = number, loss, {}
        self._open = self._result = None
        if self._checkpoint is not None:
            facts = {**self._identity, "number": number, "lost": self.lost, "loss": loss}
            checkpoint.save(self._checkpoint, params, self.rule_state, facts, after=self._records)


def round_metrics(
    metrics: MetricRecord, devices: Sequence[int], result: Aggregation | None, excluded: Mapping[int, str]
) -> MetricRecord:
    """Return the devices' own metrics with what the rule did beside them."""
    ours: dict[str, Any] = {
        "devices": list(devices) if result else [],
        "weights": result.weights.tolist() if result else [],
        "promised-change": result.promised_change if result else math.nan,
        "condition": result.geometry.condition if result else math.nan,
        "excluded": sorted(excluded),
        "lost": int(result is None),
    }
    return MetricRecord({**metrics, **{f"fedcontext.{name}": value for name, value in ours.items()}})


def client_metrics(inner: Strategy, contents: Sequence[RecordDict], samples_key: str) -> MetricRecord:
    """Return the inner strategy's summary of the devices' training metrics; none where they do not fit together."""
    summarise = getattr(inner, "train_metrics_aggr_fn", None)
    if summarise is None or not contents:
        return MetricRecord()
    try:
        found: MetricRecord = summarise(list(contents), samples_key)
        return found
    except (ArithmeticError, LookupError, StopIteration, TypeError, ValueError) as error:
        log.warning("the devices' training metrics cannot be summarised: %s", error)
        return MetricRecord()


def sound_metrics(
    replies: Iterable[Message], device_of: Callable[[int], int | None], samples_key: str
) -> list[Message]:
    """Return the replies to an evaluation that can be summarised, ordered by device: sound, and of the usual form."""
    sound = [reply for reply in replies if reply.has_content() and _is_sound(reply.content, samples_key)]
    sound.sort(key=lambda reply: device_of(reply.metadata.src_node_id) or 0)
    forms = [_form(reply.content) for reply in sound]
    usual = Counter(forms).most_common(1)
    return [reply for reply, form in zip(sound, forms, strict=True) if form == usual[0][0]]


def _form(content: RecordDict) -> tuple[object, ...]:
    """Return the names of the metrics, and how long those are that are lists."""
    ((name, metrics),) = content.metric_records.items()
    return name, *sorted((key, len(value) if isinstance(value, list) else -1) for key, value in metrics.items())


def _is_sound(content: RecordDict, samples_key: str) -> bool:
    records_found = list(content.metric_records.values())
    if len(records_found) != 1:
        return False
    values = [v for value in records_found[0].values() for v in (value if isinstance(value, list) else [value])]
    samples = records_found[0].get(samples_key)
    return all(math.isfinite(v) for v in values) and isinstance(samples, int | float) and samples > 0
