"""Callbacks: functions (experiment, record) that the runner calls after every round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fedcontext.experiment import Experiment
from fedcontext.records import RoundRecord
from fedcontext.runner import OnRound


@contextmanager
def follow(
    experiments: Sequence[Experiment],
    out: Path,
    *,
    quiet: bool = False,
    report: Path | None = None,
    levels: Sequence[float] = (),
    track: str = "",
) -> Iterator[OnRound]:
    """Yield one callback that updates everything asked for: a live report, a tracker, progress on standard error.

    ``levels`` are the accuracies of the report, by default some that were reached. With the progress come findings
    about runs that do not train.
    """
    with ExitStack() as stack:
        callbacks: list[OnRound] = []
        if report is not None:
            from fedcontext.report import live_report

            callbacks.append(stack.enter_context(live_report(experiments, report, levels)))
        if track:
            from fedcontext.callbacks.trackers import track_runs

            callbacks.append(stack.enter_context(track_runs(track, out)))
        if not quiet:
            from fedcontext.callbacks.progress import print_findings, progress

            title = experiments[0].algorithm if len(experiments) == 1 else f"{len(experiments)} runs"
            total = sum(experiment.rounds for experiment in experiments)
            callbacks += [stack.enter_context(progress(title, total)), print_findings()]

        def on_round(experiment: Experiment, record: RoundRecord) -> None:
            for callback in callbacks:
                callback(experiment, record)

        yield on_round
