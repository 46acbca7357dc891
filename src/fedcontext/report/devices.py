"""Panels about the devices of one run: weights, excluded devices, and the bound on the loss change."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.report.downsample import downsample, round_values
from fedcontext.report.milestones import bound_held
from fedcontext.results.reader import Row, column

MAX_BARS = 100  # devices in a bar chart
MAX_MARKS = 100  # violations of the bound that are marked


def weight_heatmap(rows: Sequence[Row], max_cells: int) -> dict[str, Any]:
    """Return the weights as a (devices, rounds) grid with at most ``max_cells`` cells.

    In larger runs a column is the mean of several rounds, and only the devices selected most often are shown.
    """
    rows = [row for row in rows if row["devices"] or row["excluded"]]
    width = min(len(rows), int((2 * max_cells) ** 0.5))
    selected = Counter(device for row in rows for device in row["devices"])
    most_selected = selected.most_common(min(200, max_cells // max(width, 1)))
    devices = sorted((device for device, _ in most_selected), key=_sort_key)
    position = {device: index for index, device in enumerate(devices)}
    values = _mean_weights(rows, position, width)
    known = np.abs(values[np.isfinite(values)])
    return {
        "rounds": [rows[-(-column * len(rows) // width)]["number"] for column in range(width)],
        "devices": [str(device) for device in devices],
        "values": [round_values(line) for line in values],
        "limit": float(np.quantile(known, 0.98)) if known.size and known.max() > 0 else 1.0,
        "device_count": len(selected),
        "rounds_per_column": -(-len(rows) // width) if width else 1,
        "excluded": _excluded_marks(rows, position, max_cells // 20),
    }


def weight_stages(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the weights of the first, the middle and the last round, in descending order."""
    weighted = [row for row in rows if any(weight is not None for weight in row["weights"])]
    positions = dict.fromkeys((0, len(weighted) // 2, len(weighted) - 1)) if weighted else ()
    return [_sorted_weights(weighted[position]) for position in positions]


def excluded_devices(rows: Sequence[Row], max_rows: int) -> dict[str, Any]:
    """Return the excluded devices with reason and rounds, the most frequent first, and the rounds that were lost."""
    rounds: dict[tuple[int | str, str], list[int]] = defaultdict(list)
    for row in rows:
        for device, reason in row["excluded"].items():
            rounds[device, reason].append(row["number"])
    ranked = sorted(rounds.items(), key=lambda item: (-len(item[1]), _sort_key(item[0][0])))
    shown = [[str(device), reason, len(numbers), ranges(numbers)] for (device, reason), numbers in ranked[:max_rows]]
    lost = ranges(row["number"] for row in rows if row["lost"])
    return {"rows": shown, "more": len(ranked) - len(shown), "lost": lost}


def bound_check(rows: Sequence[Row], points: int) -> dict[str, Any]:
    """Return the promised and the measured loss change, and the rounds in which the bound was violated."""
    checked = [(row, held) for row in rows if (held := bound_held(row)) is not None]
    measured = np.array([row["measured_change"] for row, _ in checked], dtype=float)
    drawn = [checked[position][0] for position in downsample(measured, points)]
    violations = [row for row, held in checked if not held]
    worst = sorted(violations, key=lambda row: row["promised_change"] - row["measured_change"])[:MAX_MARKS]
    return {
        "rounds": column(drawn, "number"),
        "promised": round_values(column(drawn, "promised_change")),
        "measured": round_values(column(drawn, "measured_change")),
        "violations": sorted([row["number"], *round_values([row["measured_change"]])] for row in worst),
        "violated": len(violations),
        "checked": len(checked),
    }


def ranges(numbers: Iterable[int], max_ranges: int = 12) -> str:
    """Return numbers as ranges; beyond ``max_ranges`` of them only how many more.

    >>> ranges([1, 2, 3, 7, 9, 10])
    '1–3, 7, 9–10'
    """
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(low) if low == high else f"{low}–{high}" for low, high in spans]
    more = f" and {len(texts) - max_ranges} more" if len(texts) > max_ranges else ""
    return ", ".join(texts[:max_ranges]) + more


def _mean_weights(rows: Sequence[Row], position: dict[int | str, int], width: int) -> FloatArray:
    """Return (devices, width) mean weights over the rounds of each column; NaN where a device has none."""
    sums, counts = np.zeros((len(position), width)), np.zeros((len(position), width))
    for index, row in enumerate(rows):
        for device, weight in zip(row["devices"], row["weights"], strict=True):
            if device in position and weight is not None:
                cell = position[device], index * width // len(rows)
                sums[cell] += weight
                counts[cell] += 1
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _sorted_weights(row: Row) -> dict[str, Any]:
    known = [pair for pair in zip(row["devices"], row["weights"], strict=True) if pair[1] is not None]
    ranked = sorted(known, key=lambda pair: -pair[1])[:MAX_BARS]
    weights = round_values(weight for _, weight in ranked)
    return {"round": row["number"], "devices": [str(device) for device, _ in ranked], "weights": weights}


def _excluded_marks(rows: Sequence[Row], position: dict[int | str, int], max_marks: int) -> list[list[int]]:
    """Return [round, row in the heatmap] of excluded devices, evenly sampled if there are too many."""
    marks = [[row["number"], position[device]] for row in rows for device in row["excluded"] if device in position]
    return [marks[index] for index in np.linspace(0, len(marks) - 1, min(len(marks), max_marks)).astype(int)]


def _sort_key(device: int | str) -> tuple[bool, int, str]:
    """Return a key that sorts numbered devices by number, and named ones after them."""
    return (isinstance(device, str), device if isinstance(device, int) else 0, str(device))
