"""One row of the leaderboard: the numbers of an entrant on a task, over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from fedcontext.leaderboard.entries import Entrant, Settings
from fedcontext.leaderboard.tuning import PENALTY, Records, final_loss, rounds_or_penalty, score
from fedcontext.results.summary import summarise

Spread: TypeAlias = Sequence[float]  # median, lowest and highest over seeds
RISE = 0.02  # relative increase of the loss in a round from which it counts as one


@dataclass(frozen=True)
class Row:
    """One entrant on one task, over the test seeds; infinite where a level was not reached or a run diverged."""

    entrant: str
    kind: str
    settings: Settings  # the candidate that was chosen
    tuned: Sequence[str]  # the settings that were chosen from a grid
    rounds: Sequence[Spread]  # to each level
    mean_rounds: float  # over levels and seeds, a level not reached counting as 1.5 times all rounds
    seconds: Sequence[float]  # simulated, to each level, median
    megabytes: Sequence[float]  # sent by devices up to each level, median
    mean_megabytes: float  # sent up to the top level, one not reached counting as 1.5 times all of the run
    megabytes_round: float  # sent in a round, mean
    losses: Sequence[float]  # final, by seed
    accuracy: Spread  # final
    swing: float  # standard deviation of the accuracy over the last 20 rounds, median
    rises: float  # share of rounds in which the loss rises by more than 2 %, mean
    largest_rise: float  # relative, of all rounds and seeds
    diverged: int  # runs that ended early
    made: str  # when and where


def make_row(
    entrant: Entrant, settings: Settings, runs: Sequence[Records], levels: Sequence[float], rounds: int, made: str
) -> Row:
    """Return the row of an entrant from its runs, one per seed."""
    summaries = [summarise(records, levels) for records in runs]
    reached = [[float(summary.rounds_to[level] or math.inf) for summary in summaries] for level in levels]
    rises = [rise for records in runs for rise in relative_rises(records)]
    return Row(
        entrant=entrant.name,
        kind=entrant.kind,
        settings=dict(settings),
        tuned=list(entrant.grid),
        rounds=[spread(counts) for counts in reached],
        mean_rounds=score(runs, levels, rounds)[0],
        seconds=[_median_cost(runs, "seconds", counts) for counts in reached],
        megabytes=[_median_cost(runs, "bytes_up", counts) / 1e6 for counts in reached],
        mean_megabytes=float(np.mean([_megabytes_to(records, levels[-1], rounds) for records in runs])),
        megabytes_round=float(np.mean([record.bytes_up / 1e6 for records in runs for record in records] or [np.inf])),
        losses=[final_loss(records, rounds) for records in runs],
        accuracy=spread([summary.accuracy if math.isfinite(summary.accuracy) else 0.0 for summary in summaries]),
        swing=spread([summary.swing if math.isfinite(summary.swing) else math.inf for summary in summaries])[0],
        rises=float(np.mean([rise > RISE for rise in rises])) if rises else math.inf,
        largest_rise=max(rises, default=math.inf),
        diverged=sum(len(records) < rounds for records in runs),
        made=made,
    )


def relative_rises(records: Records) -> list[float]:
    """Return the loss of every round relative to the round before, minus 1; infinite if it is not a number.

    >>> from fedcontext.records import RoundRecord
    >>> relative_rises([RoundRecord(1, loss=2.0, measured_change=1.0), RoundRecord(2, loss=1.5)])
    [1.0, -0.25]
    """
    if not records:
        return []
    first = records[0]
    start = [first.loss - first.measured_change] if first.loss is not None and first.measured_change is not None else []
    losses = [*start, *(math.inf if record.loss is None else record.loss for record in records)]
    return [after / before - 1 if before < math.inf else math.inf for before, after in pairwise(losses)]


def spread(values: Sequence[float]) -> Spread:
    """Return median, lowest and highest.

    >>> spread([3, 1, 2])
    [2.0, 1.0, 3.0]
    """
    return [float(np.median(values)), float(min(values)), float(max(values))]


def _median_cost(runs: Sequence[Records], name: str, counts: Sequence[float]) -> float:
    return float(np.median([_cost(records, name, count) for records, count in zip(runs, counts, strict=True)]))


def _cost(records: Records, name: str, rounds: float) -> float:
    """Return the sum of a cost over the first ``rounds`` rounds."""
    return math.inf if rounds == math.inf else float(sum(getattr(record, name) for record in records[: int(rounds)]))


def _megabytes_to(records: Records, level: float, rounds: int) -> float:
    """Return what devices sent up to a level, 1.5 times what all rounds would send if it was not reached."""
    (count,) = rounds_or_penalty(records, [level], rounds)
    if count <= rounds:
        return _cost(records, "bytes_up", count) / 1e6
    return PENALTY * rounds * float(np.mean([record.bytes_up / 1e6 for record in records] or [np.inf]))
