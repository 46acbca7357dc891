"""Records into pictures, with Matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcontext.errors import FedcontextError, require
from fedcontext.records import RoundRecord

# Okabe and Ito's colours, told apart by colour-blind readers too; marks and dashes repeat the distinction.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#999999", "#F0E442")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (6, 2, 1, 2)), "-")
FORMATS = (".png", ".pdf", ".svg")


def check(path: Path) -> None:
    """Refuse a picture that could not be drawn at the end, before the work begins."""
    require("matplotlib", extra="plot")
    if path.suffix not in FORMATS:
        raise FedcontextError(f"figure must end in {', '.join(FORMATS)}, got {path.name!r}")


def draw_curves(path: Path, title: str, runs: Mapping[str, Sequence[Sequence[RoundRecord]]]) -> None:
    """Draw loss and accuracy against rounds into ``path``: the mean over seeds, and the band from lowest to highest."""
    figure, axes = new_figure(1, 2, width=10, height=3.8)
    for axis, measure in zip(axes[0], ("loss", "accuracy"), strict=True):
        for index, (label, seeds) in enumerate(runs.items()):
            curve(axis, index, label, seeds, measure)
        axis.set_xlabel("round")
        axis.set_ylabel({"loss": "training loss", "accuracy": "test accuracy"}[measure])
    axes[0][0].set_title(title, loc="left")
    axes[0][1].legend(fontsize=8)
    save(figure, path)


def curve(axis: Any, index: int, label: str, seeds: Sequence[Sequence[RoundRecord]], measure: str) -> None:
    """Draw one algorithm: a line for the mean over seeds, a band from the lowest to the highest."""
    numbers = [record.number for record in seeds[0] if getattr(record, measure) is not None]
    values = np.array([[getattr(r, measure) for r in seed if getattr(r, measure) is not None] for seed in seeds])
    colour = COLOURS[index % len(COLOURS)]
    axis.plot(
        numbers, values.mean(axis=0), label=label, color=colour, linestyle=DASHES[index % len(DASHES)], linewidth=1.6
    )
    axis.fill_between(numbers, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)


def new_figure(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """Return a figure that needs no screen, and its axes as a (rows, columns) array."""
    from matplotlib.figure import Figure

    require("matplotlib", extra="plot")
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, path: Path) -> None:
    """Write the picture, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.part")
    figure.savefig(scratch, format=path.suffix[1:], dpi=150)
    scratch.replace(path)
