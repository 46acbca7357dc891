"""Row (c): contextual aggregation of K updates against NumPy's mean, Flower's FedAvg and the literal null-space method.

    python benchmarks/aggregation.py --out aggregation.json

All methods get the same stacked float32 updates; NumPy's mean and contextual are timed in turns, then Flower's
averaging, its own function on the same arrays as records, without network or serialisation. The minimum counts. Budgets for contextual, as
multiples of NumPy's mean, at n = 1e6 and 1e7: 1.8 at K = 10, 8 at K = 100.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import fedcontext as fc
from fedcontext.paper.null_space import null_space_weights

SIZES = [(10, 10**6), (100, 10**6), (10, 10**7), (100, 10**7), (10, 10**8)]
FLOWER = "Flower's FedAvg"
NULL_SPACE = 7_850  # parameters of softmax regression on MNIST


def main() -> None:
    given = arguments()
    sizes = SIZES[: 2 if given.quick else None]
    measure(2, 10**6, 1)  # compiles or loads the kernels outside the measurements
    if given.only:
        print(table([measure(*given.only, given.repeats, stacked) for stacked in (True, False)]))
        return
    several = {size: given.repeats * (3 if size == 10**6 else 1) for _, size in sizes}  # short runs vary more
    rows = [measure(count, size, several[size]) for count, size in sizes if fits(count, size, given.memory)]
    apart = measure(100, 10**6, several[10**6], stacked=False)
    solvers = {} if given.quick else null_space()
    results = {"rows": rows, "apart": apart, "null space": solvers}
    results["markdown"] = f"{table(rows)}\n\n{separate_arrays(apart)}{solver_sentence(solvers)}"
    print(results["markdown"])
    if given.out:
        given.out.write_text(json.dumps(results, indent=1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory", type=float, default=12, help="skip sizes whose updates need more GB")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--only",
        type=int,
        nargs=2,
        metavar=("K", "N"),
        help="this size only: updates as rows of one array, then as separate arrays",
    )
    return parser.parse_args()


def fits(count: int, size: int, memory: float) -> bool:
    return 4 * count * size <= memory * 1e9


def measure(count: int, size: int, repeats: int, stacked: bool = True) -> dict:
    """Return the minimum milliseconds of each method; ``stacked`` updates are rows of one array."""
    random = np.random.default_rng(0)
    updates = random.standard_normal((count, size), dtype=np.float32)
    params, gradient = updates[0].copy(), updates[1].copy()
    rows = list(updates) if stacked else [row.copy() for row in updates]
    out = params.copy()  # touched pages: untouched ones would count as extra memory
    rule = fc.contextual(smoothness=1.0)
    methods: dict[str, Callable[[], object]] = {
        "NumPy mean": lambda: updates.mean(axis=0),
        "contextual": lambda: fc.aggregate(params, rows, gradient=gradient, rule=rule, out=out),
    }
    extra = extra_memory(methods["contextual"])
    times = lowest(methods, repeats)
    if flower := flowers(rows):  # apart: its copies of the updates would take their place in the cache
        times |= lowest({FLOWER: flower}, repeats)
    return {"K": count, "n": size, "extra MB": round(extra), **times}


def lowest(methods: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the minimum milliseconds of each method, timed in turns."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, method in methods.items():
            start = time.perf_counter()
            method()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(min(values), 2) for name, values in times.items()}


def extra_memory(method: Callable[[], object]) -> float:
    """Return how many MB more than before were in memory at the peak of ``method`` (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = memory("VmRSS")
    method()
    return memory("VmHWM") - before


def memory(kind: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def flowers(rows: list[np.ndarray]) -> Callable[[], object] | None:
    """Return Flower's averaging of these updates; None if Flower is not installed."""
    try:
        from flwr.app import ArrayRecord, MetricRecord, RecordDict
        from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
    except ImportError:
        return None
    replies = [RecordDict({"arrays": ArrayRecord([row]), "metrics": MetricRecord({"num-examples": 1})}) for row in rows]
    return lambda: aggregate_arrayrecords(replies, "num-examples")


def null_space() -> dict:
    """Return the seconds of the null-space and the Gram solver for softmax regression on MNIST."""
    updates = np.random.default_rng(0).standard_normal((10, NULL_SPACE))
    solvers = {
        "null space": (lambda: null_space_weights(updates, updates[1], 1.0), 1),
        "gram": (lambda: fc.aggregate(updates[0], list(updates), gradient=updates[1], rule=fc.contextual(1.0)), 50),
    }
    seconds = {}
    for name, (solve, repeats) in solvers.items():
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            solve()
            times.append(time.perf_counter() - start)
        seconds[name] = min(times)
    return seconds


def separate_arrays(row: dict) -> str:
    """Return a sentence on updates that are separate arrays, as devices send them."""
    flower = f", Flower's FedAvg {row[FLOWER]} ms" if FLOWER in row else ""
    return (
        f"With updates as separate arrays instead of rows of one, at K = {row['K']} and n = {row['n']:.0e}: "
        f"contextual {row['contextual']} ms{flower}."
    )


def solver_sentence(solvers: dict) -> str:
    if not solvers:
        return ""
    return (
        f"\n\nAt n = {NULL_SPACE:,} (softmax regression on MNIST) and K = 10 the paper's null-space system, solved by least "
        f"squares on one core, takes {solvers['null space']:.1f} s, ours {1e3 * solvers['gram']:.2f} ms."
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
