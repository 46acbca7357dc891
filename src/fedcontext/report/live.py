"""A report that grows while the runs go on: an open page hears of new rounds and keeps its zoom and hidden lines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedcontext.errors import require
from fedcontext.experiment import Experiment
from fedcontext.records import RoundRecord
from fedcontext.report.html import replace, to_html, to_json
from fedcontext.report.page_data import content
from fedcontext.results.reader import Run, new_run, to_row
from fedcontext.runner import OnRound

PAUSE = 1.0  # seconds between two pages at least, and ten times what a page takes


@contextmanager
def watch(experiments: Sequence[Experiment], out: Path, pause: float = PAUSE) -> Iterator[OnRound]:
    """Yield the function to call after every round: it brings the page ``out`` up to date.

    A page from disk may not read other files, but it may run scripts: the news are in one beside it (``.live.js``).
    The last page is complete in itself and does not need it. The script stays, since nobody knows when a page that was
    opened before, perhaps on a machine that sleeps, asks for the last news.
    """
    require("plotly.offline", extra="report")
    live = LivePage(experiments, out)
    live.write_news(running=True)  # first, or the page would hear the last news of earlier runs
    live.write_page(running=True)
    due = time.monotonic() + pause

    def on_round(experiment: Experiment, record: RoundRecord) -> None:
        nonlocal due
        live.add(experiment, record)
        begun = time.monotonic()
        if begun >= due:
            live.write_news(running=True)
            due = time.monotonic() + max(pause, 10 * (time.monotonic() - begun))

    try:
        yield on_round
    finally:
        live.write_page(running=False)
        live.write_news(running=False)


class LivePage:
    """The runs so far, and the two files that show them."""

    def __init__(self, experiments: Sequence[Experiment], out: Path) -> None:
        self.out, self.script = out, out.with_suffix(".live.js")
        self.runs: dict[str, Run] = {each.name: new_run(each) for each in experiments}
        self.total = sum(each.rounds for each in experiments)
        self.begun, self.latest = time.monotonic(), ""

    def add(self, experiment: Experiment, record: RoundRecord) -> None:
        """Take in one more round."""
        self.runs[experiment.name].rows.append(to_row(record))
        self.latest = f"{experiment.algorithm}, round {record.number} of {experiment.rounds}; "

    def write_page(self, running: bool) -> None:
        """Write the whole page."""
        replace(self.out, to_html({**self._content(running), "live": self.script.name}))

    def write_news(self, running: bool) -> None:
        """Write what an open page loads."""
        count = time.time_ns() // 1_000_000
        replace(self.script, f"fedcontextNews({count},{to_json(self._content(running))});")

    def _content(self, running: bool) -> dict[str, object]:
        return content(list(self.runs.values()), running=self._progress() if running else "")

    def _progress(self) -> str:
        done = sum(len(run.rows) for run in self.runs.values())
        left = (time.monotonic() - self.begun) / done * (self.total - done) if done else 0
        more = f", about {left:.0f} s left" if done else ""
        return f"Running: {self.latest}{done} of {self.total} rounds done{more}."
