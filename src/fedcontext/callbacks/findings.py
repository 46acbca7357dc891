"""Findings about runs on standard error, each when it is first seen."""

from __future__ import annotations

from fedcontext.console import warn
from fedcontext.experiment import Experiment
from fedcontext.records import RoundRecord
from fedcontext.results.diagnosis import Monitor
from fedcontext.runner import OnRound


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
