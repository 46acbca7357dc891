"""Everything that may follow a run while it goes on: a table in the terminal, a report page, trackers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich import box
from rich.live import Live
from rich.table import Table

from fedcontext.console import err
from fedcontext.experiment import Experiment
from fedcontext.records import RoundRecord
from fedcontext.runner import OnRound


@contextmanager
def watching(
    experiments: Sequence[Experiment], out: Path, *, quiet: bool = False, report: Path | None = None, track: str = ""
) -> Iterator[OnRound]:
    """Yield one function to call after every round, which tells everyone who wants to know."""
    with ExitStack() as stack:
        listeners = []
        if report is not None:
            from fedcontext.report import watch

            listeners.append(stack.enter_context(watch(experiments, report)))
        if track:
            from fedcontext.callbacks.trackers import tracking

            listeners.append(stack.enter_context(tracking(track, out)))
        if not quiet:
            listeners.append(stack.enter_context(live_table(experiments)))

        def on_round(experiment: Experiment, record: RoundRecord) -> None:
            for listen in listeners:
                listen(experiment, record)

        yield on_round


@contextmanager
def live_table(experiments: Sequence[Experiment]) -> Iterator[OnRound]:
    """Yield the function that keeps a table on standard error: one line an algorithm, and the seconds left."""
    standings = Standings(experiments)
    with Live(get_renderable=standings.table, console=err, transient=True, refresh_per_second=4):
        yield standings.add


class Standings:
    """How far each algorithm is: its rounds over all seeds, the latest values, and the seconds left of all."""

    def __init__(self, experiments: Sequence[Experiment]) -> None:
        self.totals = {each.algorithm: 0 for each in experiments}
        for each in experiments:
            self.totals[each.algorithm] += each.rounds
        self.done = dict.fromkeys(self.totals, 0)
        self.latest: dict[str, RoundRecord] = {}
        self.begun = time.monotonic()

    def add(self, experiment: Experiment, record: RoundRecord) -> None:
        """Take in one more round; a round that was not evaluated does not wipe out the values."""
        self.done[experiment.algorithm] += 1
        if record.loss is not None or experiment.algorithm not in self.latest:
            self.latest[experiment.algorithm] = record

    def left(self, algorithm: str) -> float | None:
        """Return the seconds that an algorithm's other rounds would take at the pace of all rounds so far."""
        done = sum(self.done.values())
        return (
            (time.monotonic() - self.begun) / done * (self.totals[algorithm] - self.done[algorithm]) if done else None
        )

    def table(self) -> Table:
        """Return the table as it stands."""
        table = Table("algorithm", box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("round", "loss", "accuracy", "s left"):
            table.add_column(heading, justify="right", no_wrap=True)
        for name, total in self.totals.items():
            last = self.latest.get(name)
            values = [_number(last.loss), _number(last.accuracy)] if last else ["", ""]
            table.add_row(name, f"{self.done[name]}/{total}", *values, _number(self.left(name), 0))
        return table


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"
