"""A report that is updated while the runs are in progress; an open page keeps its zoom and hidden lines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fedcontext.errors import FileError, require
from fedcontext.experiment import Experiment
from fedcontext.files.storage import write_text
from fedcontext.records import RoundRecord
from fedcontext.report.html import check_page, render, to_json
from fedcontext.report.page_data import page_data
from fedcontext.results.reader import Run, new_run, to_row
from fedcontext.runner import OnRound

INTERVAL = 1.0  # least seconds between two updates, which also take at most a tenth of the time


@contextmanager
def live_report(
    experiments: Sequence[Experiment], out: Path, levels: Sequence[float] = (), interval: float = INTERVAL
) -> Iterator[OnRound]:
    """Yield the callback that updates the page ``out`` after every round, at most once per ``interval`` seconds.

    A page opened from disk may not read other files but may run scripts, so updates are in a script beside it
    (``.live.js``). The final page is complete without the script. The script is not deleted, because a page in a
    suspended tab may ask for the last update much later.
    """
    require("plotly.offline", extra="report")
    check_page(out)
    page = LivePage(experiments, out, levels)
    page.write_update(running=True)  # before the page, which would otherwise load the last update of earlier runs
    page.write_page(running=True)
    due = time.monotonic() + interval

    def on_round(experiment: Experiment, record: RoundRecord) -> None:
        nonlocal due
        page.add(experiment, record)
        start = time.monotonic()
        if start >= due:
            page.write_update(running=True)
            due = time.monotonic() + max(interval, 10 * (time.monotonic() - start))

    try:
        yield on_round
    except BaseException:
        with suppress(FileError):  # the first error counts, not that of a disk which is still full
            page.write_end()
        raise
    page.write_end()


class LivePage:
    """The rounds so far, and the two files that show them."""

    def __init__(self, experiments: Sequence[Experiment], out: Path, levels: Sequence[float] = ()) -> None:
        self.out, self.script, self.levels = out, out.with_suffix(".live.js"), levels
        self.runs: dict[str, Run] = {experiment.name: new_run(experiment) for experiment in experiments}
        self.order = list(dict.fromkeys(experiment.algorithm for experiment in experiments))
        self.total = sum(experiment.rounds for experiment in experiments)
        self.start, self.latest = time.monotonic(), ""

    def add(self, experiment: Experiment, record: RoundRecord) -> None:
        """Add one round."""
        self.runs[experiment.name].rows.append(to_row(record))
        self.latest = f"{experiment.algorithm}, round {record.number} of {experiment.rounds}; "

    def write_page(self, running: bool) -> None:
        """Write the whole page."""
        write_text(self.out, render({**self._data(running), "live": self.script.name}))

    def write_update(self, running: bool) -> None:
        """Write the script that an open page polls."""
        time_ms = time.time_ns() // 1_000_000
        write_text(self.script, f"fedcontextUpdate({time_ms},{to_json(self._data(running))});")

    def write_end(self) -> None:
        """Write both as they stay."""
        self.write_page(running=False)
        self.write_update(running=False)

    def _data(self, running: bool) -> dict[str, object]:
        status = self._progress() if running else ""
        return page_data(list(self.runs.values()), status=status, levels=self.levels, order=self.order)

    def _progress(self) -> str:
        done = sum(len(run.rows) for run in self.runs.values())
        left = (time.monotonic() - self.start) / done * (self.total - done) if done else 0
        estimate = f", about {left:.0f} s left" if done else ""
        return f"Running: {self.latest}{done} of {self.total} rounds done{estimate}."
