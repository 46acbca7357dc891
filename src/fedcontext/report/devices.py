"""One run from its devices' side: the weights they got, who was left out and why, and promises against what happened."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedcontext.report.downsample import short, thin
from fedcontext.report.milestones import promise_kept
from fedcontext.results.reader import Row, column

MOST = 100  # devices in a picture of stages, and marks of failed promises


def heat(rows: Sequence[Row], cells: int) -> dict[str, Any]:
    """Return the weights as a grid of devices by rounds with at most so many cells.

    Where there are too many, rounds share a column (its mean), and only the devices who took part most are there.
    """
    rows = [row for row in rows if row["devices"] or row["excluded"]]
    wide = min(len(rows), int((2 * cells) ** 0.5))
    took_part = Counter(device for row in rows for device in row["devices"])
    chosen = sorted((device for device, _ in took_part.most_common(min(200, cells // max(wide, 1)))), key=_order)
    place = {device: position for position, device in enumerate(chosen)}
    sums, counts = np.zeros((len(chosen), wide)), np.zeros((len(chosen), wide))
    for index, row in enumerate(rows):
        for device, weight in zip(row["devices"], row["weights"], strict=True):
            if device in place and weight is not None:
                sums[place[device], index * wide // len(rows)] += weight
                counts[place[device], index * wide // len(rows)] += 1
    values = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    known = np.abs(values[np.isfinite(values)])
    return {
        "rounds": [rows[-(-column * len(rows) // wide)]["number"] for column in range(wide)],
        "devices": [str(device) for device in chosen],
        "values": [short(line) for line in values],
        "limit": float(np.quantile(known, 0.98)) if known.size and known.max() > 0 else 1.0,
        "of": len(took_part),
        "per_column": -(-len(rows) // wide) if wide else 1,
        "left_out": _left_out_marks(rows, place, cells // 20),
    }


def stages(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the weights at the start, halfway and at the end, the heaviest first."""
    weighed = [row for row in rows if any(weight is not None for weight in row["weights"])]
    chosen = {position: weighed[position] for position in (0, len(weighed) // 2, len(weighed) - 1) if weighed}
    return [_stage(row) for row in chosen.values()]


def left_out(rows: Sequence[Row], most: int) -> dict[str, Any]:
    """Return who was left out, why and in which rounds, the most frequent first; and the rounds that were lost."""
    when: dict[tuple[int | str, str], list[int]] = defaultdict(list)
    for row in rows:
        for device, why in row["excluded"].items():
            when[device, why].append(row["number"])
    ranked = sorted(when.items(), key=lambda item: (-len(item[1]), _order(item[0][0])))
    shown = [[str(device), why, len(numbers), ranges(numbers)] for (device, why), numbers in ranked[:most]]
    lost = [row["number"] for row in rows if row["lost"]]
    return {"rows": shown, "more": len(ranked) - len(shown), "lost": ranges(lost), "lost_count": len(lost)}


def promise(rows: Sequence[Row], points: int) -> dict[str, Any]:
    """Return the bound's promised loss change and the measured one, the rounds where it failed, and how often it held."""
    judged = [(row, kept) for row in rows if (kept := promise_kept(row)) is not None]
    measured = np.array([row["measured_change"] for row, _ in judged], dtype=float)
    drawn = [judged[position][0] for position in thin(measured, points)]
    failed = [row for row, kept in judged if not kept]
    worst = sorted(failed, key=lambda row: row["promised_change"] - row["measured_change"])[:MOST]
    return {
        "rounds": column(drawn, "number"),
        "promised": short(column(drawn, "promised_change")),
        "measured": short(column(drawn, "measured_change")),
        "failed": sorted([row["number"], *short([row["measured_change"]])] for row in worst),
        "failures": len(failed),
        "of": len(judged),
    }


def ranges(numbers: Iterable[int], most: int = 12) -> str:
    """Return numbers as ranges; after ``most`` of them only how many more.

    >>> ranges([1, 2, 3, 7, 9, 10])
    '1–3, 7, 9–10'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}–{high}" for low, high in runs]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def _stage(row: Row) -> dict[str, Any]:
    known = [pair for pair in zip(row["devices"], row["weights"], strict=True) if pair[1] is not None]
    ranked = sorted(known, key=lambda pair: -pair[1])[:MOST]
    weights = [weight for _, weight in ranked]
    return {"round": row["number"], "devices": [str(device) for device, _ in ranked], "weights": short(weights)}


def _left_out_marks(rows: Sequence[Row], place: dict[int | str, int], most: int) -> list[list[int]]:
    """Return [round, position of the device] of those left out, an even choice where there are very many."""
    marks = [[row["number"], place[device]] for row in rows for device in row["excluded"] if device in place]
    return [marks[position] for position in np.linspace(0, len(marks) - 1, min(len(marks), most)).astype(int)]


def _order(device: int | str) -> tuple[bool, int, str]:
    return (isinstance(device, str), device if isinstance(device, int) else 0, str(device))
