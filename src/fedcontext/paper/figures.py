"""Figures of the records, with Matplotlib."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedcontext.errors import FedcontextError, require
from fedcontext.files.storage import check_writable, replacing
from fedcontext.paper.experiments import Series, Study
from fedcontext.records import RoundRecord
from fedcontext.results.summary import LEVELS, Summary, summarise

RecordIndex: TypeAlias = Mapping[Series, Sequence[Sequence[RoundRecord]]]  # the records of each seed, by series

# Okabe and Ito's palette for colour-blind readers, as in report/assets/charts.js; dashes repeat the distinction.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#999999")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (6, 2, 1, 2)))
FORMATS = (".png", ".pdf", ".svg")
WHOLE = {"integer": True, "min_n_ticks": 1}  # ticks of an axis with rounds


def check_path(path: Path) -> None:
    """Raise `FedcontextError` before the runs start if the figure could not be written after them."""
    require("matplotlib", extra="plot")
    if path.suffix not in FORMATS:
        raise FedcontextError(f"figure must end in {', '.join(FORMATS)}, got {path.name!r}")
    if path.is_dir() or any(folder.exists() and not folder.is_dir() for folder in path.parents):
        raise FedcontextError(f"figure cannot be written: {path} is not a file in a folder")
    check_writable(path)


def draw_curves(path: Path, runs: Mapping[str, Mapping[str, Sequence[Sequence[RoundRecord]]]]) -> None:
    """Draw loss and accuracy against rounds, one row per data set: means over seeds, with their range as a band."""
    figure, axes = new_figure(len(runs), 2, width=10, height=0.6 + 3.2 * len(runs))
    for row, (dataset, by_label) in zip(axes, runs.items(), strict=True):
        for axis, measure in zip(row, ("loss", "accuracy"), strict=True):
            for index, (label, seeds) in enumerate(by_label.items()):
                curve(axis, index, label, seeds, measure)
            axis.set_xlabel("round")
            axis.set_ylabel({"loss": "training loss", "accuracy": "test accuracy"}[measure])
        row[0].set_title(dataset, loc="left")
    axes[0][1].legend(fontsize=8)
    save(figure, path)


def curve(axis: Any, index: int, label: str, seeds: Sequence[Sequence[RoundRecord]], measure: str) -> None:
    """Draw the mean over seeds of one algorithm as a line, and its range over seeds as a band."""
    numbers = [record.number for record in seeds[0] if getattr(record, measure) is not None]
    values = np.array([[getattr(r, measure) for r in seed if getattr(r, measure) is not None] for seed in seeds])
    colour = COLOURS[index % len(COLOURS)]
    dashes = DASHES[(index + index // len(COLOURS)) % len(DASHES)]  # other ones when the colours come again
    axis.plot(numbers, values.mean(axis=0), label=label, color=colour, linestyle=dashes, linewidth=1.6)
    axis.fill_between(numbers, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)
    axis.locator_params(axis="x", **WHOLE)


def new_figure(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """Return a figure that needs no display, and its axes as a (rows, columns) array."""
    figure = require("matplotlib.figure", extra="plot").Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, path: Path) -> None:
    """Write the figure through a temporary file."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=150)


def draw_figure(study: Study, name: str, index: RecordIndex, folder: Path) -> Path:
    """Draw the figure ``name`` of a study as PNG and PDF, and return the path of the PNG."""
    series = [each for each in study.series if each.figure == name and each in index]
    figure = {"curves": _curves, "weights": _weights, "bars": _bars}[study.chart](series, index)
    figure.suptitle(f"{study.title}: {name}", fontsize=11)
    path = folder / f"{study.name}-{re.sub('[^a-z0-9.]+', '-', name.lower().replace('β', 'beta'))}.png"
    for target in (path, path.with_suffix(".pdf")):
        save(figure, target)
    return path


def _curves(series: Sequence[Series], index: RecordIndex) -> Any:
    panels = list(dict.fromkeys(each.panel for each in series))
    figure, axes = new_figure(2, len(panels), width=4.6 * len(panels), height=6.4, sharey="row")
    for column, panel in enumerate(panels):
        for position, each in enumerate(each for each in series if each.panel == panel):
            for axis, measure in zip(axes[:, column], ("loss", "accuracy"), strict=True):
                curve(axis, position, each.label, index[each], measure)
        axes[0][column].set_title(panel, fontsize=10)
        axes[1][column].set_xlabel("round")
    top = max(float(np.median([_largest_loss(index[each]) for each in series])) * 1.5, 0.1)
    axes[0][0].set_ylim(0, top)
    axes[0][0].set_ylabel("training loss")
    axes[1][0].set_ylabel("test accuracy")
    axes[1][-1].legend(fontsize=8)
    return figure


def _largest_loss(runs: Sequence[Sequence[RoundRecord]]) -> float:
    return max(record.loss for run in runs for record in run if record.loss is not None)


def _weights(series: Sequence[Series], index: RecordIndex) -> Any:
    runs = index[series[0]]
    figure, axes = new_figure(len(runs), 3, width=10, height=2.2 * len(runs))
    for row, run in enumerate(runs):
        for axis, (stage, record) in zip(axes[row], stages(run).items(), strict=True):
            axis.bar(range(1, len(record.weights) + 1), record.weights, color=COLOURS[0])
            axis.axhline(1 / len(record.weights), color=COLOURS[3], linestyle="--", linewidth=1)
            axis.set_title(f"{stage}: round {record.number} (run {row + 1})", fontsize=9)
        axes[row][0].set_ylabel("weight α")
    for axis in axes[-1]:
        axis.set_xlabel("device (dashed: FedAvg's 1/K)")
    return figure


def stages(run: Sequence[RoundRecord]) -> dict[str, RoundRecord]:
    """Return the first round, a near-converged one (90 % of the loss reduction done) and the last.

    A run that nears convergence only in its last round shows the round before as near-converged.
    """
    losses = [record.loss for record in run if record.loss is not None]
    near = losses[-1] + 0.1 * (losses[0] - losses[-1])
    middle = next((record for record in run[1:-1] if record.loss is not None and record.loss <= near), run[-2:][0])
    return {"early": run[0], "near-converged": middle, "converged": run[-1]}


def _bars(series: Sequence[Series], index: RecordIndex) -> Any:
    panels = list(dict.fromkeys(each.panel for each in series))
    figure, axes = new_figure(-(-len(panels) // 2), 2, width=10, height=3.6 * -(-len(panels) // 2))
    for axis, panel in zip(axes.flat, panels, strict=False):
        shown = [each for each in series if each.panel == panel]
        limit = max(len(run) for each in shown for run in index[each])
        for position, each in enumerate(shown):
            _bar_group(axis, position, len(shown), each.label, [summarise(run) for run in index[each]], limit)
        axis.set_title(panel, fontsize=10)
        axis.set_xticks(range(len(LEVELS)), [f"{level:.0%} accuracy" for level in LEVELS])
        axis.set_ylim(0, limit * 1.05)
        axis.set_ylabel("rounds (×: never)")
        axis.locator_params(axis="y", **WHOLE)
    axes[0][0].legend(fontsize=7, loc="upper left")
    return figure


def _bar_group(axis: Any, index: int, count: int, label: str, summaries: Sequence[Summary], limit: int) -> None:
    """Draw one algorithm's bars: the median over seeds, its range as a whisker, a cross for levels never reached."""
    width = 0.8 / count
    positions = np.arange(len(LEVELS)) + (index - (count - 1) / 2) * width
    counts = np.array([[summary.rounds_to[level] or np.inf for summary in summaries] for level in LEVELS])
    middle = np.median(counts, axis=1)
    shown = np.minimum(middle, limit)
    colour = COLOURS[index % len(COLOURS)]
    reached = np.isfinite(middle)
    axis.bar(positions[reached], shown[reached], width, label=label, color=colour)
    if not reached.any():
        axis.bar([], [], width, label=label, color=colour)
    low, high = counts.min(axis=1), np.minimum(counts.max(axis=1), limit)
    axis.vlines(positions[reached], low[reached], high[reached], color="black", linewidth=0.8)
    axis.plot(positions[~reached], np.full((~reached).sum(), limit), "x", color=colour, markersize=5)
