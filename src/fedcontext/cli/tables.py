"""What the terminal shows: live progress on standard error, tables on standard output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedcontext.console import err
from fedcontext.experiment import Experiment
from fedcontext.records import RoundRecord
from fedcontext.results.summary import LEVELS, Summary, median_rounds
from fedcontext.runner import OnRound

Summaries: TypeAlias = Mapping[str, Sequence[Summary]]  # by label, one for each seed

LARGE = 1e6  # from here on figures are written in short


@contextmanager
def progress(what: str, total: int, quiet: bool) -> Iterator[OnRound]:
    """Yield the function to call after every round; it moves a bar with an estimate of the time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[latest]}"),
    )
    with Progress(*columns, console=err, disable=quiet, transient=True) as bar:
        task = bar.add_task(what, total=total, latest="")

        def on_round(experiment: Experiment, record: RoundRecord) -> None:
            values = "" if record.loss is None else f"loss {figure(record.loss, 3)} accuracy {record.accuracy:.3f}"
            bar.update(task, advance=1, latest=f"{experiment.algorithm} {values}")

        yield on_round


def comparison(title: str, summaries: Summaries) -> Table:
    """Return the table that compares algorithms: mean ± standard deviation over seeds, rounds as medians."""
    levels = "/".join(f"{level * 100:.0f}" for level in LEVELS)
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("algorithm", no_wrap=True)
    for heading in (
        "final\nloss",
        "final\naccuracy",
        f"rounds to\n{levels}%",
        "swing",
        "loss\nrose",
        "sim.\ns",
        "MB\nup",
    ):
        table.add_column(heading, justify="right", no_wrap=True, overflow="fold")
    for label, runs in summaries.items():
        rounds = [median_rounds([run.rounds_to[level] for run in runs]) for level in LEVELS]
        table.add_row(
            label,
            spread([run.loss for run in runs]),
            spread([run.accuracy for run in runs]),
            "/".join(f"{count:g}" if np.isfinite(count) else "-" for count in rounds),
            f"{np.mean([run.swing for run in runs]):.3f}",
            f"{np.mean([run.rises for run in runs]):.0%}",
            f"{np.mean([run.seconds for run in runs]):.0f}",
            f"{np.mean([run.bytes_up for run in runs]) / 1e6:.1f}",
        )
    return table


def lost_rounds(summaries: Summaries) -> str:
    """Return what to say of rounds in which too few devices answered; nothing where there are none.

    >>> from fedcontext.results.summary import summarise
    >>> lost_rounds({"fedavg": [summarise([])]})
    ''
    """
    counts = {
        label: (sum(run.lost for run in runs), sum(run.rounds for run in runs)) for label, runs in summaries.items()
    }
    told = [f"{label} {lost} of {rounds}" for label, (lost, rounds) in counts.items() if lost]
    return f"rounds lost (too few devices answered in time, the model was kept): {', '.join(told)}" if told else ""


def spread(values: Sequence[float]) -> str:
    """Return mean ± standard deviation; a single value stands alone.

    >>> spread([1.0, 2.0]), spread([0.5])
    ('1.500±0.50', '0.500')
    """
    return figure(float(np.mean(values)), 3) + (f"±{figure(float(np.std(values)), 2)}" if len(values) > 1 else "")


def figure(value: float, decimals: int) -> str:
    """Return a number with so many decimals; from a million on, as losses of a run that diverges, in short.

    >>> figure(2.34567, 3), figure(1.2e9, 3), figure(-0.0001, 3)
    ('2.346', '1.2e+09', '0.000')
    """
    return f"{value:.1e}" if abs(value) >= LARGE else f"{value:z.{decimals}f}"


def listing(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a plain table."""
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table
