"""Row (c): contextual aggregation of K updates against NumPy's mean, Flower's FedAvg and the literal null-space method.

    python benchmarks/aggregation.py --out aggregation.json

All ways get the same stacked float32 updates and are timed in turn; the lowest of the repeats counts. Flower's figure
is its own function on the same arrays as records, without network or serialisation.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import fedcontext as fc

SIZES = [(10, 10**6), (100, 10**6), (10, 10**7), (100, 10**7), (10, 10**8)]
FLOWER = "Flower's FedAvg"
NULL_SPACE = 7_850  # parameters of softmax regression on MNIST


def main() -> None:
    given = arguments()
    sizes = SIZES[: 2 if given.quick else None]
    measure(2, 10**6, 1)  # loads what is compiled, so that it is not counted
    if given.only:
        print(table([measure(*given.only, given.repeats, stacked) for stacked in (True, False)]))
        return
    several = {size: given.repeats * (3 if size == 10**6 else 1) for _, size in sizes}  # short ones vary more
    rows = [measure(count, size, several[size]) for count, size in sizes if fits(count, size, given.memory)]
    apart = measure(100, 10**6, several[10**6], stacked=False)
    slow = {} if given.quick else null_space()
    found = {"rows": rows, "apart": apart, "null space": slow}
    found["markdown"] = f"{table(rows)}\n\n{of_their_own(apart)}{sentence(slow)}"
    print(found["markdown"])
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory", type=float, default=12, help="GB that the updates may take")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--only", type=int, nargs=2, metavar=("K", "N"), help="this size alone: rows of one array, then not"
    )
    return parser.parse_args()


def fits(count: int, size: int, memory: float) -> bool:
    return 4 * count * size <= memory * 1e9


def measure(count: int, size: int, repeats: int, stacked: bool = True) -> dict:
    """Return milliseconds of each way, lowest of the repeats, taken in turn; updates are rows of one array, or not."""
    random = np.random.default_rng(0)
    updates = random.standard_normal((count, size), dtype=np.float32)
    params, gradient = updates[0].copy(), updates[1].copy()
    rows = list(updates) if stacked else [row.copy() for row in updates]
    out = params.copy()  # a copy: fresh pages would count as extra memory
    rule = fc.contextual(smoothness=1.0)
    ways: dict[str, Callable[[], object]] = {
        "NumPy mean": lambda: updates.mean(axis=0),
        "contextual": lambda: fc.aggregate(params, rows, gradient=gradient, rule=rule, out=out),
    }
    extra = extra_memory(ways["contextual"])
    if flower := flowers(rows):
        ways[FLOWER] = flower
    times = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {"K": count, "n": size, "extra MB": round(extra), **{name: round(min(t), 2) for name, t in times.items()}}


def extra_memory(way: Callable[[], object]) -> float:
    """Return how many MB more than before were in memory at the worst moment of ``way`` (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = memory("VmRSS")
    way()
    return memory("VmHWM") - before


def memory(kind: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def flowers(rows: list[np.ndarray]) -> Callable[[], object] | None:
    """Return Flower's own averaging of these updates, where it is installed."""
    try:
        from flwr.app import ArrayRecord, MetricRecord, RecordDict
        from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
    except ImportError:
        return None
    replies = [RecordDict({"arrays": ArrayRecord([row]), "metrics": MetricRecord({"num-examples": 1})}) for row in rows]
    return lambda: aggregate_arrayrecords(replies, "num-examples")


def null_space() -> dict:
    """Return seconds of the paper's literal method and of ours at the size of MNIST's softmax regression."""
    updates = list(np.random.default_rng(0).standard_normal((10, NULL_SPACE)))
    found = {}
    for name, solver, repeats in (("null space", "null-space", 1), ("gram", "gram", 50)):
        rule, times = fc.contextual(1.0, solver), []
        for _ in range(repeats):
            start = time.perf_counter()
            fc.aggregate(updates[0], updates, gradient=updates[1], rule=rule)
            times.append(time.perf_counter() - start)
        found[name] = min(times)
    return {**found, "times faster": round(found["null space"] / found["gram"])}


def of_their_own(row: dict) -> str:
    """Return what changes where each update is an array of its own, as devices send them."""
    flower = f", Flower's FedAvg {row[FLOWER]} ms" if FLOWER in row else ""
    return (
        f"Where updates are arrays of their own instead of rows of one, at K = {row['K']} and n = {row['n']:.0e}: "
        f"contextual {row['contextual']} ms{flower}."
    )


def sentence(found: dict) -> str:
    if not found:
        return ""
    return (
        f"\n\nAt n = {NULL_SPACE:,} (softmax regression on MNIST) and K = 10 the literal null-space method takes "
        f"{found['null space']:.1f} s, ours {1e3 * found['gram']:.2f} ms: {found['times faster']:,} times faster."
    )


def table(rows: list[dict]) -> str:
    heads = ["K", "n", "NumPy mean", "contextual", "ratio", FLOWER, "extra MB"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = {**row, "n": f"{row['n']:.0e}", "ratio": f"{row['contextual'] / row['NumPy mean']:.2f}"}
        lines.append("| " + " | ".join(str(cells.get(head, "-")) for head in heads) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
