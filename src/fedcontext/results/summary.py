"""A run in a few numbers, and several runs side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fedcontext.records import RoundRecord

LEVELS = (0.5, 0.6, 0.7, 0.8)  # the accuracies of the paper's last figure
TAIL = 20  # rounds over which the swing is taken


@dataclass(frozen=True)
class Summary:
    """How a run ended, how fast it got there, and how steadily."""

    loss: float  # in the last evaluated round
    accuracy: float
    rounds_to: dict[float, int | None]  # the first round with at least this accuracy
    swing: float  # standard deviation of the accuracy over the last 20 evaluated rounds
    rises: float  # share of evaluated rounds in which the loss was above the one evaluated before
    seconds: float  # simulated, in total
    bytes_up: int
    bytes_down: int
    rounds: int
    lost: int  # of these rounds, the ones with too few answers in time: the model was kept


def summarise(records: Sequence[RoundRecord], levels: Iterable[float] = LEVELS) -> Summary:
    """Return the summary of a run's records; what was never evaluated is NaN.

    >>> import fedcontext as fc
    >>> summary = summarise(list(fc.rounds(dataset="synthetic-iid", algorithm="fedavg", rounds=5)))
    >>> 0 <= summary.accuracy <= 1, list(summary.rounds_to)
    (True, [0.5, 0.6, 0.7, 0.8])
    """
    judged = [(r.number, r.loss, r.accuracy) for r in records if r.loss is not None and r.accuracy is not None]
    accuracies = [accuracy for _, _, accuracy in judged]
    losses = [loss for _, loss, _ in judged]
    first = [
        r.measured_change for r in records if r.measured_change is not None and judged and r.number == judged[0][0]
    ]
    changes = [*first, *np.diff(losses)]
    return Summary(
        loss=judged[-1][1] if judged else float("nan"),
        accuracy=judged[-1][2] if judged else float("nan"),
        rounds_to={level: next((n for n, _, accuracy in judged if accuracy >= level), None) for level in levels},
        swing=float(np.std(accuracies[-TAIL:])) if judged else float("nan"),
        rises=float(np.mean([change > 0 for change in changes])) if changes else float("nan"),
        seconds=sum(record.seconds for record in records),
        bytes_up=sum(record.bytes_up for record in records),
        bytes_down=sum(record.bytes_down for record in records),
        rounds=len(records),
        lost=sum(record.lost for record in records),
    )


def median_rounds(counts: Sequence[int | None]) -> float:
    """Return the median round over seeds; infinite where half of the runs or more never got there.

    >>> median_rounds([3, None, 5]), median_rounds([None, None, 5])
    (5.0, inf)
    """
    return float(np.median([np.inf if count is None else count for count in counts])) if counts else float("nan")
