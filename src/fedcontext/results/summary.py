"""Summary statistics of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fedcontext.fleet import QUOTA_MET
from fedcontext.records import RoundRecord

LEVELS = (0.5, 0.6, 0.7, 0.8)  # the accuracies of the paper's last figure
TAIL = 20  # evaluated rounds over which the swing is computed
LARGE = 1e6  # numbers from here on are written in scientific notation


@dataclass(frozen=True)
class Summary:
    """Final metrics of a run, rounds to reach accuracy levels, stability and total cost."""

    loss: float  # at the last evaluated round
    accuracy: float
    rounds_to: dict[float, int | None]  # the first round with at least this accuracy
    swing: float  # standard deviation of the accuracy over the last 20 evaluated rounds
    rises: float  # share of evaluated rounds whose loss is above that of the evaluated round before
    seconds: float  # simulated, in total
    bytes_up: int
    bytes_down: int
    rounds: int
    lost: int  # rounds with too few replies in time: the model was kept
    excluded: int  # replies that were late, faulty or out of all proportion; not those beyond the over-selection quota
    clipped: int  # replies that were used in part


def summarise(records: Sequence[RoundRecord], levels: Iterable[float] = LEVELS) -> Summary:
    """Return the summary of a run's records; metrics that were never evaluated are NaN.

    >>> import fedcontext as fc
    >>> summary = summarise(fc.train(dataset="synthetic-iid", algorithm="fedavg", rounds=5).records)
    >>> 0 <= summary.accuracy <= 1, list(summary.rounds_to)
    (True, [0.5, 0.6, 0.7, 0.8])
    >>> summarise([RoundRecord(1, excluded={3: QUOTA_MET, 4: "missed the deadline"})]).excluded
    1
    """
    evaluated = [(r.number, r.loss, r.accuracy) for r in records if r.loss is not None and r.accuracy is not None]
    accuracies = [accuracy for _, _, accuracy in evaluated]
    first = evaluated[0][0] if evaluated else None
    first_change = [r.measured_change for r in records if r.number == first and r.measured_change is not None]
    changes = [*first_change, *np.diff([loss for _, loss, _ in evaluated])]
    return Summary(
        loss=evaluated[-1][1] if evaluated else float("nan"),
        accuracy=evaluated[-1][2] if evaluated else float("nan"),
        rounds_to={level: next((n for n, _, accuracy in evaluated if accuracy >= level), None) for level in levels},
        swing=float(np.std(accuracies[-TAIL:])) if evaluated else float("nan"),
        rises=float(np.mean([change > 0 for change in changes])) if changes else float("nan"),
        seconds=sum(record.seconds for record in records),
        bytes_up=sum(record.bytes_up for record in records),
        bytes_down=sum(record.bytes_down for record in records),
        rounds=len(records),
        lost=sum(record.lost for record in records),
        excluded=sum(reason != QUOTA_MET for record in records for reason in record.excluded.values()),
        clipped=sum(len(record.clipped) for record in records),
    )


def median_rounds(counts: Sequence[int | None]) -> float:
    """Return the median round over seeds; infinite if half of the runs or more never reached the level.

    >>> median_rounds([3, None, 5]), median_rounds([None, None, 5])
    (5.0, inf)
    """
    return float(np.median([np.inf if count is None else count for count in counts])) if counts else float("nan")


def join_names(names: Sequence[str]) -> str:
    """Return names as an enumeration.

    >>> join_names(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + [*names[-1:]])


def decimal(value: float, decimals: int) -> str:
    """Return a number with so many decimals, or in scientific notation where it is large, as in diverging runs.

    >>> decimal(2.34567, 3), decimal(1.2e9, 3), decimal(-0.0001, 3)
    ('2.346', '1.2e+09', '0.000')
    """
    return f"{value:.1e}" if abs(value) >= LARGE else f"{value:z.{decimals}f}"
