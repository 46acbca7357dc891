"""On standard error: the progress of runs, and findings about them, each when it is first seen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedcontext.console import err, print_line, warn
from fedcontext.experiment import Experiment
from fedcontext.records import RoundRecord
from fedcontext.results.diagnosis import Monitor
from fedcontext.results.summary import decimal
from fedcontext.runner import OnRound

LOG_SECONDS = 20.0  # between two lines of progress where there is no terminal


@contextmanager
def progress(title: str, total: int, quiet: bool = False) -> Iterator[OnRound]:
    """Yield the function to call after every round; it advances a progress bar with the remaining time.

    Where standard error is not a terminal, such as in a log file, it prints a line now and then instead.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[latest]}"),
    )
    shown = time.monotonic()
    with Progress(*columns, console=err, disable=quiet or not err.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=total, latest="")

        def on_round(experiment: Experiment, record: RoundRecord) -> None:
            nonlocal shown
            values = "" if record.loss is None else f" loss {decimal(record.loss, 3)} accuracy {record.accuracy:.3f}"
            bar.update(task, advance=1, latest=f"{experiment.algorithm}{values}")
            if not quiet and not err.is_terminal and time.monotonic() - shown >= LOG_SECONDS:
                shown = time.monotonic()
                done = f"{bar.tasks[0].completed:g} of {total} rounds"
                print_line(f"{title}: {done}; {experiment.algorithm} seed {experiment.seed}{values}", err)

        yield on_round


def print_findings() -> OnRound:
    """Return the callback that prints a finding once for each data set and algorithm, whatever the number of seeds."""
    monitors: dict[str, Monitor] = {}
    seen: set[tuple[str, str, str]] = set()

    def on_round(experiment: Experiment, record: RoundRecord) -> None:
        monitor = monitors.setdefault(experiment.name, Monitor(vars(experiment)))
        for finding in monitor.add(record):
            key = experiment.dataset, experiment.algorithm, finding.what
            if key not in seen:
                seen.add(key)
                where = f"{experiment.algorithm} on {experiment.dataset}, seed {experiment.seed}, round {record.number}"
                warn(f"{where}: {finding}")

    return on_round
