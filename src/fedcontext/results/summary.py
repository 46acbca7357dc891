"""Summary statistics of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fedcontext.fleet import QUOTA_MET
from fedcontext.records import RoundRecord

LEVELS = (0.5, 0.6, 0.7, 0.8)  # the accuracies of the paper's last figure
TAIL = 20  # evaluated rounds over which the swing is computed
MAX_NAMES = 6  # names listed in a sentence; more are counted
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
    excluded: int  # replies that were late, invalid or outliers; not those beyond the over-selection quota
    clipped: int  # replies that were clipped, used in part or suspiciously short


Summaries: TypeAlias = Mapping[str, Sequence[Summary]]  # by algorithm, one per seed


def summarise(records: Sequence[RoundRecord], levels: Iterable[float] = LEVELS) -> Summary:
    """Return the summary of a run's records; metrics that were never evaluated are NaN.

    >>> import fedcontext as fc
    >>> summary = summarise(fc.train(dataset="synthetic-iid", algorithm="fedavg", rounds=5).records)
    >>> 0 <= summary.accuracy <= 1, list(summary.rounds_to)
    (True, [0.5, 0.6, 0.7, 0.8])
    >>> summarise([RoundRecord(1, excluded={3: QUOTA_MET, 4: "missed the deadline"})]).excluded
    1
    """
    losses = [record.loss for record in records if record.loss is not None]
    accuracies = {record.number: record.accuracy for record in records if record.accuracy is not None}
    known = list(accuracies.values())
    first = next((record.measured_change for record in records if record.loss is not None), None)
    changes = [*([] if first is None else [first]), *np.diff(losses)]
    return Summary(
        loss=losses[-1] if losses else float("nan"),
        accuracy=known[-1] if known else float("nan"),
        rounds_to={level: next((n for n, each in accuracies.items() if each >= level), None) for level in levels},
        swing=float(np.std(known[-TAIL:])) if known else float("nan"),
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


def outcome(summaries: Summaries) -> str:
    """Return one sentence about the results: rounds to the highest accuracy level reached, and the lowest final loss.

    >>> fast, slow = ([RoundRecord(n, 1.0, a) for n, a in enumerate(run, 1)] for run in ((0.6, 0.9), (0.1, 0.6)))
    >>> outcome({"a": [summarise(fast)], "b": [summarise(slow)]})
    'a reached 80 % accuracy after 2 rounds (b: not reached); the lowest final loss is 1.000, of a and b.'
    """
    median, mean = ("a median of ", "mean ") if any(len(runs) > 1 for runs in summaries.values()) else ("", "")
    end = _lowest_loss(summaries, mean)
    for level in sorted(levels_of(summaries), reverse=True):
        rounds = {label: median_rounds([run.rounds_to[level] for run in runs]) for label, runs in summaries.items()}
        if np.isfinite(fewest := min(rounds.values())):
            return f"{_first(rounds, fewest)} {level * 100:g} % accuracy after {median}{_after(rounds, fewest)}; {end}"
    return f"No accuracy level was reached; {end}"


def levels_of(summaries: Summaries) -> list[float]:
    """Return the accuracy levels of the summaries, which have the same ones."""
    return list(next(iter(summaries.values()))[0].rounds_to)


def _lowest_loss(summaries: Summaries, mean: str) -> str:
    losses = {label: float(np.mean([run.loss for run in runs])) for label, runs in summaries.items()}
    finite = [loss for loss in losses.values() if np.isfinite(loss)]
    lowest = decimal(min(finite, default=np.nan), 3)
    with_it = [label for label, loss in losses.items() if decimal(loss, 3) == lowest]
    return (
        f"the lowest {mean}final loss is {lowest}, of {join_names(with_it)}." if finite else "no final loss is known."
    )


def _first(rounds: Mapping[str, float], fewest: float) -> str:
    first = [label for label, count in rounds.items() if count == fewest]
    return f"All {len(first)} reached" if 2 < len(first) == len(rounds) else f"{join_names(first)} reached"


def _after(rounds: Mapping[str, float], fewest: float) -> str:
    """Return after how many rounds the first reached a level, and in brackets when the others did, fastest first."""
    ranked = sorted((count, label) for label, count in rounds.items() if count > fewest)
    others = [f"{label}: {f'{count:g}' if np.isfinite(count) else 'not reached'}" for count, label in ranked]
    compared = f" ({', '.join(at_most(others))})" if others else ""
    return f"{fewest:g} round{'' if fewest == 1 else 's'}{compared}"


def join_names(names: Sequence[str]) -> str:
    """Return names as an enumeration; many are counted.

    >>> join_names(["a", "b", "c"]), join_names("abcdefgh")
    ('a, b and c', 'a, b, c, d, e and 3 more')
    """
    names = at_most(names)
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + [*names[-1:]])


def at_most(names: Sequence[str], count: int = MAX_NAMES) -> list[str]:
    """Return at most ``count`` names, the last of which is the number of those left out.

    >>> at_most("abcd", 3)
    ['a', 'b', '2 more']
    """
    return [*names[: count - 1], f"{len(names) - count + 1} more"] if len(names) > count else [*names]


def decimal(value: float, decimals: int) -> str:
    """Return a number with so many decimals, or in scientific notation where it is large, as in diverging runs.

    >>> decimal(2.34567, 3), decimal(1.2e9, 3), decimal(-0.0001, 3)
    ('2.346', '1.2e+09', '0.000')
    """
    return f"{value:.1e}" if abs(value) >= LARGE else f"{value:z.{decimals}f}"
