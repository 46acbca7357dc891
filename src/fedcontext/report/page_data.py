"""Everything the page shows as plain data: one entry per data set, with its panels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fedcontext.algorithms import ALGORITHMS
from fedcontext.report.curves import curve, diagnostics
from fedcontext.report.devices import bound_check, excluded_devices, weight_heatmap, weight_stages
from fedcontext.report.groups import Group, algorithm_of, dataset_of, group_runs, seed_of
from fedcontext.report.milestones import accuracy_levels, final_metrics, milestones
from fedcontext.report.sentences import headline, reproduction_configs, seeds_note
from fedcontext.results.diagnosis import diagnose, findings_over_seeds
from fedcontext.results.reader import Run
from fedcontext.results.summary import Summary, outcome, summarise
from fedcontext.version import __version__

# Limits for the whole page: the more groups or runs it shows, the fewer points each gets.
MAX_POINTS = 12_000  # of all lines in one chart
MAX_CELLS = 120_000  # of all heatmaps
MAX_EXCLUDED = 4_000  # rows of all tables of excluded devices
MAX_RUNS = 200  # runs with panels of their own; all runs are in the curves
MAX_PROBLEMS = 20


def page_data(
    runs: Sequence[Run],
    problems: Sequence[str] = (),
    status: str = "",
    levels: Sequence[float] = (),
    order: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the data of the page about ``runs``; ``status`` is their progress while they are still running.

    ``levels`` are the accuracies whose cost is shown (usual ones where there are none), and ``order`` is that of the
    algorithms.
    """
    by_dataset: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_dataset[dataset_of(run)].append(run)
    more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    return {
        "version": __version__,
        "status": status,
        "problems": [*problems[:MAX_PROBLEMS], *more],
        "datasets": [_dataset(name, members, len(runs), levels, order) for name, members in by_dataset.items()],
        "versions": sorted({f"{name} {version}" for run in runs for name, version in run.versions.items()}),
    }


def _dataset(
    name: str, runs: Sequence[Run], run_count: int, levels: Sequence[float], order: Sequence[str]
) -> dict[str, Any]:
    groups = group_runs(runs, order)
    levels = accuracy_levels(groups, levels)
    points = min(600, max(40, MAX_POINTS // len(groups)))
    summaries = {group.label: [summarise(run.records, levels) for run in group.runs] for group in groups}
    return {
        "name": name,
        "sentences": [headline(name, groups), outcome(summaries) + seeds_note(groups)],
        "findings": [f"{group.label}: {line}" for group in groups for line in _findings(group)],
        "levels": levels,
        "configs": reproduction_configs(runs),
        "reproducible": all(algorithm_of(run) in ALGORITHMS for run in runs),
        "groups": [_group(group, summaries[group.label], levels, points) for group in groups],
        "runs": [_run(group, run, run_count) for group in groups for run in group.runs][:MAX_RUNS],
    }


def _findings(group: Group) -> list[str]:
    """Return what is wrong with the runs of a group."""
    by_seed = {seed_of(run): diagnose(run.records, run.settings) for run in group.runs}
    return findings_over_seeds(by_seed)


def _group(group: Group, summaries: Sequence[Summary], levels: Sequence[float], points: int) -> dict[str, Any]:
    return {
        "label": group.label,
        "full_label": group.full_label,
        "seeds": [seed_of(run) for run in group.runs],
        "loss": curve(group, "loss", points),
        "accuracy": curve(group, "accuracy", points),
        "diagnostics": diagnostics(group, points),
        "milestones": milestones(group, levels),
        "final": final_metrics(group, summaries),
    }


def _run(group: Group, run: Run, run_count: int) -> dict[str, Any]:
    return {
        "label": f"{group.label}, seed {seed_of(run)}",
        "heatmap": weight_heatmap(run.rows, max_cells=min(12_000, max(200, MAX_CELLS // run_count))),
        "stages": weight_stages(run.rows),
        "excluded": excluded_devices(run.rows, max_rows=min(100, max(10, MAX_EXCLUDED // run_count))),
        "bound": bound_check(run.rows, points=min(600, max(100, MAX_POINTS // run_count))),
    }
