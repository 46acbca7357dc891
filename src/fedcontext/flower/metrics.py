"""Metrics of clients and of the aggregation; those of a faulty client affect no others."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedcontext.flower.exclusion import Outcome
from fedcontext.flower.protocol import metric
from fedcontext.measurement.defences import Defences, capped

log = logging.getLogger("flwr")
LOSS = ("loss", "eval_loss", "eval-loss")  # names that apps use
ACCURACY = ("accuracy", "eval_acc", "eval_accuracy", "eval-acc", "eval-accuracy")


def round_metrics(outcome: Outcome, strategy: FedAvg, defences: Defences | None) -> MetricRecord:
    """Return the clients' training metrics, aggregated by ``strategy``, and those of the aggregation."""
    aggregation = outcome.aggregation
    ours: dict[str, Any] = {
        "devices": outcome.devices,
        "weights": list(aggregation.applied.values()) if aggregation else [],
        "promised-change": aggregation.promised_change if aggregation else math.nan,
        "condition": math.nan if aggregation is None or aggregation.condition is None else aggregation.condition,
        "excluded": sorted(outcome.excluded),
        "clipped": sorted(aggregation.clipped) if aggregation else [],
        "lost": int(aggregation is None),
    }
    trained = [reply.content for reply in outcome.replies if reply.task.group]
    trained = usable_metrics(trained, strategy.weighted_by_key, defences)
    return MetricRecord({**_client_metrics(trained, strategy), **{f"fedcontext.{k}": v for k, v in ours.items()}})


def _client_metrics(contents: Sequence[RecordDict], strategy: FedAvg) -> Mapping[str, Any]:
    if not contents:
        return {}
    try:
        return strategy.train_metrics_aggr_fn(list(contents), strategy.weighted_by_key)
    except (ArithmeticError, LookupError, StopIteration, TypeError, ValueError) as error:
        log.warning("the clients' training metrics cannot be aggregated: %s", error)
        return {}


def note_metrics(results: dict[int, MetricRecord], number: int, metrics: MetricRecord | None) -> dict[str, float]:
    """Log the metrics of a round, add them to ``results``, and return the loss and accuracy among them."""
    if metrics is None:
        return {}
    log.info("\t└──> Aggregated MetricRecord: %s", metrics)
    results[number] = metrics
    return loss_and_accuracy(metrics)


def loss_and_accuracy(metrics: MetricRecord) -> dict[str, float]:
    """Return the loss and the accuracy in ``metrics``, if there, under these names.

    >>> loss_and_accuracy(MetricRecord({"eval_loss": 0.5, "lr": 0.1}))
    {'loss': 0.5}
    """
    content = RecordDict({"metrics": metrics})
    values = {"loss": metric(content, *LOSS), "accuracy": metric(content, *ACCURACY)}
    return {name: value for name, value in values.items() if not math.isnan(value)}


def usable_evaluations(
    replies: Iterable[Message],
    device_of: Callable[[int], int | None],
    samples_key: str,
    defences: Defences | None,
) -> list[Message]:
    """Return the evaluation replies with finite metrics of the most common form, sorted by device, then the errors.

    The sample counts, by which metrics are averaged, are capped as those of updates are.
    """
    replies = sorted(replies, key=lambda reply: device_of(reply.metadata.src_node_id) or 0)
    usable = usable_metrics([reply.content for reply in replies if reply.has_content()], samples_key, defences)
    kept = {id(content) for content in usable}
    good = [reply for reply in replies if reply.has_content() and id(reply.content) in kept]
    return good + [reply for reply in replies if reply.has_error()]


def usable_metrics(contents: Sequence[RecordDict], samples_key: str, defences: Defences | None) -> list[RecordDict]:
    """Return the contents whose metrics are finite and of the most common form, with sample counts capped."""
    finite = [content for content in contents if _has_finite_metrics(content, samples_key)]
    common = Counter(map(_form, finite)).most_common(1)
    usable = [content for content in finite if _form(content) == common[0][0]]
    if usable and defences:
        _cap_samples([next(iter(c.metric_records.values())) for c in usable], samples_key, defences.max_samples)
    return usable


def _cap_samples(records: Sequence[MetricRecord], samples_key: str, multiple: float) -> None:
    counts = np.array([record[samples_key] for record in records], np.float64)
    for record, count in zip(records, capped(counts, multiple).tolist(), strict=True):
        if count < record[samples_key]:
            record[samples_key] = count


def _has_finite_metrics(content: RecordDict, samples_key: str) -> bool:
    records = list(content.metric_records.values())
    if len(records) != 1:
        return False
    values = [v for value in records[0].values() for v in (value if isinstance(value, list) else [value])]
    samples = records[0].get(samples_key)
    return all(math.isfinite(v) for v in values) and isinstance(samples, int | float) and samples > 0


def _form(content: RecordDict) -> tuple[object, ...]:
    """Return the names of the metrics, with the lengths of those that are lists."""
    ((name, metrics),) = content.metric_records.items()
    return name, *sorted((key, len(value) if isinstance(value, list) else -1) for key, value in metrics.items())
