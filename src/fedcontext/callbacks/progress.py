"""In the terminal: a live table of progress, and findings about runs, each when it is first seen."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.live import Live
from rich.table import Table

from fedcontext.console import err, warn
from fedcontext.experiment import Experiment
from fedcontext.records import RoundRecord
from fedcontext.results.diagnosis import Monitor
from fedcontext.runner import OnRound


@contextmanager
def live_table(experiments: Sequence[Experiment]) -> Iterator[OnRound]:
    """Yield the callback that updates a table on standard error, one row per algorithm."""
    progress = Progress(experiments)
    with Live(get_renderable=progress.table, console=err, transient=True, refresh_per_second=4):
        yield progress.update


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


class Progress:
    """Rounds done, latest metrics and estimated time left of each algorithm, over all seeds."""

    def __init__(self, experiments: Sequence[Experiment]) -> None:
        self.total: Counter[str] = Counter()
        for experiment in experiments:
            self.total[experiment.algorithm] += experiment.rounds
        self.done: Counter[str] = Counter()
        self.latest: dict[str, RoundRecord] = {}  # the last evaluated round
        self.start = time.monotonic()

    def update(self, experiment: Experiment, record: RoundRecord) -> None:
        """Count one more round."""
        self.done[experiment.algorithm] += 1
        if record.loss is not None or experiment.algorithm not in self.latest:
            self.latest[experiment.algorithm] = record

    def table(self) -> Table:
        """Return the current table."""
        table = Table("algorithm", box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("round", "loss", "accuracy", "s left"):
            table.add_column(heading, justify="right", no_wrap=True)
        done = self.done.total()
        seconds_per_round = (time.monotonic() - self.start) / done if done else None
        for name, total in self.total.items():
            last = self.latest.get(name, RoundRecord(0))
            left = None if seconds_per_round is None else seconds_per_round * (total - self.done[name])
            progress = f"{self.done[name]}/{total}"
            table.add_row(name, progress, _format(last.loss), _format(last.accuracy), _format(left, 0))
        return table


def _format(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"
