"""Everything the page shows, as plain data: one scene for each data set, and what they have in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fedcontext.algorithms import ALGORITHMS
from fedcontext.report import sentences
from fedcontext.report.curves import curve, health
from fedcontext.report.devices import heat, left_out, promise, stages
from fedcontext.report.groups import Group, algorithm_of, dataset_of, group, seed_of
from fedcontext.report.milestones import ending, levels_of, reach
from fedcontext.results.reader import Run
from fedcontext.version import __version__

POINTS = 12_000  # that all lines of one picture share
CELLS = 120_000  # that all runs' grids of weights share
LEFT_OUT = 4_000  # rows that all runs' tables of devices left out share
DETAILED = 200  # runs whose devices are shown; of more, only the curves are
SAID = 20  # problems listed before they are only counted


def content(runs: Sequence[Run], problems: Sequence[str] = (), running: str = "") -> dict[str, Any]:
    """Return the data of a page about ``runs``; ``running`` says how far they are, if they are not done."""
    by_data: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_data[dataset_of(run)].append(run)
    more = [f"and {len(problems) - SAID} more"] if len(problems) > SAID else []
    return {
        "version": __version__,
        "running": running,
        "problems": [*problems[:SAID], *more],
        "scenes": [scene(name, members, len(runs)) for name, members in by_data.items()],
        "versions": sorted({f"{name} {version}" for run in runs for name, version in run.versions.items()}),
    }


def scene(dataset: str, runs: Sequence[Run], everyone: int) -> dict[str, Any]:
    """Return what the page shows of one data set; the more runs on the page, the fewer points each."""
    groups = group(runs)
    levels = levels_of(groups)
    points = min(600, max(40, POINTS // len(groups)))
    shown = [_group(each, levels, points) for each in groups]
    return {
        "dataset": dataset,
        "sentences": [sentences.compared(dataset, groups), sentences.outcome(shown, levels)],
        "levels": levels,
        "repeats": sentences.repeats(runs),
        "comparable": all(algorithm_of(run) in ALGORITHMS for run in runs),
        "groups": shown,
        "runs": [_run(each, run, everyone) for each in groups for run in each.runs][:DETAILED],
    }


def _group(each: Group, levels: Sequence[float], points: int) -> dict[str, Any]:
    return {
        "label": each.label,
        "seeds": [seed_of(run) for run in each.runs],
        "loss": curve(each, "loss", points),
        "accuracy": curve(each, "accuracy", points),
        "health": health(each, points),
        "reach": reach(each, levels),
        "final": ending(each),
    }


def _run(each: Group, run: Run, everyone: int) -> dict[str, Any]:
    return {
        "label": f"{each.label}, seed {seed_of(run)}",
        "heat": heat(run.rows, cells=min(12_000, max(200, CELLS // everyone))),
        "stages": stages(run.rows),
        "left_out": left_out(run.rows, most=min(100, max(10, LEFT_OUT // everyone))),
        "promise": promise(run.rows, points=min(600, max(100, POINTS // everyone))),
    }
