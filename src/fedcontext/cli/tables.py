"""Tables and sentences on standard output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich import box
from rich.table import Table

from fedcontext.results.summary import TAIL, Summaries, decimal, levels_of, median_rounds

LEGEND = (
    f"swing: standard deviation of the accuracy over the last {TAIL} evaluated rounds; loss rose: share of the evaluated "
    "rounds whose loss is above the one before; sim. s: simulated seconds; MB up: sent by devices"
)


def comparison(title: str, summaries: Summaries) -> Table:
    """Return a table with one row per algorithm: mean ± standard deviation over seeds, medians for rounds."""
    levels = "/".join(f"{level * 100:g}" for level in levels_of(summaries))
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("algorithm", no_wrap=True)
    headings = "final\nloss", "final\naccuracy", f"rounds to\n{levels}%", "swing", "loss\nrose", "sim.\ns", "MB\nup"
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, overflow="fold")
    for label, runs in summaries.items():
        rounds = [median_rounds([run.rounds_to[level] for run in runs]) for level in levels_of(summaries)]
        rises = np.mean([run.rises for run in runs])
        table.add_row(
            label,
            mean_and_deviation([run.loss for run in runs]),
            mean_and_deviation([run.accuracy for run in runs]),
            "/".join(f"{count:g}" if np.isfinite(count) else "-" for count in rounds),
            f"{np.mean([run.swing for run in runs]):.3f}",
            f"{rises:.0%}" if np.isfinite(rises) else "-",  # unknown where a single round was evaluated
            f"{np.mean([run.seconds for run in runs]):.0f}",
            f"{np.mean([run.bytes_up for run in runs]) / 1e6:.1f}",
        )
    return table


def lost_rounds(summaries: Summaries) -> str:
    """Return a line about the rounds with too few replies, empty if there are none.

    >>> from fedcontext.results.summary import summarise
    >>> lost_rounds({"fedavg": [summarise([])]})
    ''
    """
    counts = {label: (sum(r.lost for r in runs), sum(r.rounds for r in runs)) for label, runs in summaries.items()}
    parts = [f"{label} {lost} of {rounds}" for label, (lost, rounds) in counts.items() if lost]
    return f"rounds lost (too few usable replies, the model was kept): {', '.join(parts)}" if parts else ""


def excluded_replies(summaries: Summaries, with_clipped: bool) -> str:
    """Return a line about the replies that were excluded, and clipped: defences clip some of honest devices too.

    >>> from fedcontext.results.summary import summarise
    >>> from fedcontext.records import RoundRecord
    >>> excluded_replies({"fedavg": [summarise([RoundRecord(1, excluded={3: "late"}, clipped={5: "update"})])]}, False)
    'replies: fedavg 1 excluded (the records have the reasons)'
    """
    parts = []
    for label, runs in summaries.items():
        excluded, clipped = sum(run.excluded for run in runs), sum(run.clipped for run in runs)
        if excluded or (with_clipped and clipped):
            parts.append(f"{label} {excluded} excluded" + f", {clipped} clipped" * with_clipped)
    return f"replies: {'; '.join(parts)} (the records have the reasons)" if parts else ""


def mean_and_deviation(values: Sequence[float]) -> str:
    """Return mean ± standard deviation, or a single value as it is.

    >>> mean_and_deviation([1.0, 2.0]), mean_and_deviation([0.5])
    ('1.500±0.50', '0.500')
    """
    deviation = f"±{decimal(float(np.std(values)), 2)}" if len(values) > 1 else ""
    return decimal(float(np.mean(values)), 3) + deviation


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of text."""
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table
