"""All benchmarks in one command: measure, check, print a table of ratios, write JSON and docs/performance.md."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import growth
import rounds

ROOT = Path(__file__).parent.parent
MARKS = ("<!-- results: written by benchmarks/run.py -->", "<!-- end of results -->")
TITLES = {"a": "(a) 1 epoch", "b": "(b) 1 to 20 epochs"}


def main() -> None:
    """Run what was asked for; rows (c) and (d) are scripts of their own, whose JSON is taken along."""
    given = arguments()
    given.home.mkdir(parents=True, exist_ok=True)
    names = [
        name for name in rounds.PEERS if given.peers is None or name in given.peers.split(";") or name == rounds.OURS
    ]
    trial = given.quick or given.peers is not None
    path = given.home / "trial.json" if trial else given.results
    results = kept(path)
    if "a" in given.rows or "b" in given.rows:
        count, repeats = (10, 1) if given.quick else (100, given.repeats)
        measured = rounds.measure(given.home, count, repeats, names)
        if lost := [name for name in names if any(name not in measured[row] for row in TITLES)]:
            logs = ", ".join(str(rounds.log_of(name, given.home)) for name in lost)
            sys.exit(f"no result from {', '.join(lost)}: see {logs}")
        results["rounds"] = {"measured": machine(), "rounds": count, "repeats": repeats, **measured}
    for row, name in (("c", "aggregation"), ("d", "gpu")):
        if row in given.rows and (measured := script(name, given.home, given.quick)):
            results[name] = measured
    if "e" in given.rows:
        results["growth"] = {"measured": machine(), "series": growth.measure(given.quick)}
        figure = given.home / "growth.png" if trial else ROOT / "docs/figures/growth.png"
        growth.draw(results["growth"]["series"], figure)
    path.write_text(json.dumps(results, indent=1))
    text = document(results)
    print(text)
    if not trial:
        put(text, ROOT / "docs/performance.md")
    if wrong := [f"{row}: {name}" for row in TITLES for name in unequal(results, row)]:
        sys.exit(f"the work was not equal: {', '.join(wrong)}")


def arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="few rounds, once: too short for figures; documents stay as they are"
    )
    parser.add_argument("--rows", default="abcde", help="which rows of the table, by their letters")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", help="names with ; between; all if not given, else documents stay as they are")
    parser.add_argument("--home", type=Path, default=ROOT / ".benchmarks", help="environments and work")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks/results.json", help="rows left out are kept from here"
    )
    return parser.parse_args()


def kept(path: Path) -> dict:
    """Return the parts that earlier runs measured, each as it was; one that does not say when and where is not kept."""
    measured = json.loads(path.read_text()) if path.exists() else {}
    return {name: part for name, part in measured.items() if "measured" in part}


def machine() -> dict[str, str]:
    """Return what a part is measured on, and when: it stays with the part."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    versions = {name: importlib.metadata.version(name) for name in ("fedcontext", "numpy", "numba")}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": f"{model}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **versions,
    }


def script(name: str, home: Path, quick: bool = False) -> dict | None:
    """Return what benchmarks/NAME.py writes. Without a GPU that of row (d) may come from elsewhere, as gpu.json."""
    path, out = Path(__file__).parent / f"{name}.py", home / f"{name}.json"
    here = path.exists() and (name != "gpu" or shutil.which("nvidia-smi"))
    if here:
        pfl = home / "pfl/lib"
        extra = ["--pfl", str(next(pfl.glob("python*/site-packages"), pfl))] if name == "gpu" else []
        extra += ["--quick"] if quick and name == "aggregation" else []
        subprocess.run([sys.executable, str(path), "--out", str(out), *extra], check=True, stdout=subprocess.DEVNULL)
    if not out.exists():
        return None
    measured = json.loads(out.read_text())
    stamp = machine() if here else {"date": measured.get("date", "not written down")}
    if "machine" in measured:  # the GPU's
        stamp = {"date": stamp["date"], "processor": measured["machine"], **measured["versions"]}
    return {"measured": stamp, **measured}


def unequal(results: dict, row: str) -> list[str]:
    return rounds.unequal(results["rounds"][row]) if "rounds" in results else []


def document(results: dict) -> str:
    """Return the results as Markdown, each part with when, where and with what it was measured."""
    tables = {
        "rounds": table_of_rounds,
        "aggregation": table_of_aggregation,
        "gpu": table_of_gpu,
        "growth": table_of_growth,
    }
    parts = [f"{table(results[name])}\n\n{said(results[name])}" for name, table in tables.items() if name in results]
    return "\n\n".join(parts)


def said(part: dict) -> str:
    return f"Measured: {', '.join(f'{name} {value}' for name, value in part['measured'].items())}."


def table_of_rounds(measured: dict) -> str:
    ours = {row: measured[row][rounds.OURS]["ms_per_round"] for row in TITLES}
    lines = [
        f"Milliseconds of a round of local training and averaging; {measured['rounds']} rounds, {measured['repeats']} repeats, "
        "interleaved: for each round the median over the repeats, then the mean over the rounds.",
        "",
        "| | "
        + " | ".join(f"{title}, ms | times ours" for title in TITLES.values())
        + " | start, s | peak, MB | loss | accuracy |",
        "|---|" + "---|" * (2 * len(TITLES) + 4),
    ]
    for name in measured["a"]:
        cells = [measured[row].get(name) for row in TITLES]
        if all(cells):
            timed = [
                f"{cell['ms_per_round']:.2f} | {cell['ms_per_round'] / ours[row]:.1f}"
                for row, cell in zip(TITLES, cells, strict=True)
            ]
            last = cells[-1]
            rest = (
                f"{last['start_s']:.1f}",
                f"{last['peak_mb']:.0f}",
                f"{last['loss']:.4f}",
                f"{last['accuracy']:.4f}",
            )
            lines.append(f"| {name} | {' | '.join(timed)} | {' | '.join(rest)} |")
    return "\n".join([*lines, "", limit(measured, ours)])


def limit(measured: dict, ours: dict[str, float]) -> str:
    """Return our rounds as multiples of what their arithmetic would take at the machine's peak."""
    told = [
        f"{measured['limit_ms'][row]:.3f} ms in ({row}), and our round {ours[row] / measured['limit_ms'][row]:.1f} times that"
        for row in TITLES
    ]
    return (
        f"The limit: at {measured['peak'] / 1e9:.0f} float32 multiply-adds a nanosecond (NumPy's product of two matrices of "
        f"{rounds.SIDE:,} x {rounds.SIDE:,} on all cores, the best seen in the same run) the dense arithmetic of a round, n d C "
        f"multiply-adds forwards and as many for the gradient, takes {'; '.join(told)}."
    )


def table_of_aggregation(measured: dict) -> str:
    return f"(c) Aggregation of K float32 updates of n entries, milliseconds:\n\n{measured['markdown']}"


def table_of_gpu(measured: dict) -> str:
    """Return a table of row (d)'s milliseconds, ratios and distances."""
    lines = [
        f"(d) A CNN of {measured['work']['parameters']:,} parameters, {measured['work']['cohort']} devices of "
        f"{measured['work']['samples']} images a round, batches of {measured['work']['batch']}. The "
        "distance is that of a device's update from training one by one in full precision, relative: the median device's, "
        "the cohort's as a whole, and the worst device's; alike is the worst device's from training one by one in the same "
        "precision with the same convolutions.",
        "",
        "| | ms a round | times pfl-research | distance: median | cohort | worst | alike |",
        "|---|---|---|---|---|---|---|",
    ]
    faster, shown = measured["times faster"].get("pfl", {}), ("median", "cohort", "distance", "alike")
    for key, each in ((key, each) for key, each in measured["results"].items() if "ms" in each):
        apart = " | ".join(f"{each[kind]:.0e}" if kind in each else "-" for kind in shown)
        lines.append(f"| {key} | {each['ms']:.1f} | {faster.get(key, '-')} | {apart} |")
    timed = measured["results"].get("aggregation", {})
    if timed:
        lines += [
            "",
            "Aggregation of these updates on the GPU: "
            + ", ".join(f"{key} {each['ms']:.1f} ms" for key, each in timed.items())
            + ".",
        ]
    return "\n".join(lines)


def table_of_growth(measured: dict) -> str:
    lines = [
        "How a whole round grows (contextual aggregation, the cohort's own gradients, no evaluation), in milliseconds:",
        "",
    ]
    for name, series in measured["series"].items():
        lines.append(f"- {name}: " + ", ".join(f"{int(value):,}: {ms:.2f}" for value, ms in series.items()))
    return "\n".join([*lines, "", "![growth of a round's cost](figures/growth.png)"])


def put(text: str, path: Path) -> None:
    """Write the results between their marks; the words around them stay."""
    before, _, rest = path.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    path.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
