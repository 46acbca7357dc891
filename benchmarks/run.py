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
    path = given.home / ("quick.json" if given.quick else "results.json")
    results = json.loads(path.read_text()) if path.exists() else {}
    results["machine"] = machine()
    if "a" in given.rows or "b" in given.rows:
        count, repeats = (10, 1) if given.quick else (100, given.repeats)
        results["rounds"] = {"rounds": count, "repeats": repeats, **rounds.measure(given.home, count, repeats, names)}
        if lost := [name for name in names if any(name not in results["rounds"][row] for row in TITLES)]:
            sys.exit(f"no result from {', '.join(lost)}: see the logs in {given.home}")
    for row, name in (("c", "aggregation"), ("d", "gpu")):
        if row in given.rows and (found := script(name, given.home, given.quick)):
            results[name] = found
    if "e" in given.rows:
        results["growth"] = growth.measure(given.quick)
        figure = given.home / "growth.png" if given.quick else ROOT / "docs/figures/growth.png"
        growth.draw(results["growth"], figure)
    path.write_text(json.dumps(results, indent=1))
    text = document(results)
    print(text)
    if not given.quick:
        put(text, ROOT / "docs/performance.md")
    if wrong := [f"{row}: {name}" for row in TITLES for name in unequal(results, row)]:
        sys.exit(f"the work was not equal: {', '.join(wrong)}")


def arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, once; the documents stay as they are")
    parser.add_argument("--rows", default="abcde", help="which rows of the table, by their letters")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", help="names with ; between; all if not given")
    parser.add_argument("--home", type=Path, default=ROOT / ".benchmarks", help="environments, work and results")
    return parser.parse_args()


def machine() -> dict[str, str]:
    """Return what the figures were measured on."""
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
    if path.exists() and (name != "gpu" or shutil.which("nvidia-smi")):
        pfl = home / "pfl/lib"
        extra = ["--pfl", str(next(pfl.glob("python*/site-packages"), pfl))] if name == "gpu" else []
        extra += ["--quick"] if quick and name == "aggregation" else []
        subprocess.run([sys.executable, str(path), "--out", str(out), *extra], check=True, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text()) if out.exists() else None


def unequal(results: dict, row: str) -> list[str]:
    return rounds.unequal(results["rounds"][row]) if "rounds" in results else []


def document(results: dict) -> str:
    """Return the results as Markdown."""
    said = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    parts = [f"Measured: {said}."]
    if "rounds" in results:
        parts += [table_of_rounds(results["rounds"])]
    parts += [table_of_script(name, results[name]) for name in ("aggregation", "gpu") if name in results]
    if "growth" in results:
        parts += [table_of_growth(results["growth"])]
    return "\n\n".join(parts)


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
    return "\n".join(lines)


def table_of_script(name: str, found: dict) -> str:
    """Return the script's own Markdown, or for row (d) a table of its milliseconds, ratios and distances."""
    if "markdown" in found:
        return f"(c) Aggregation of K float32 updates of n entries, milliseconds:\n\n{found['markdown']}"
    versions = ", ".join(f"{key} {value}" for key, value in found["versions"].items())
    lines = [
        f"(d) A CNN of {found['work']['parameters']:,} parameters, {found['work']['cohort']} devices of "
        f"{found['work']['samples']} images a round, batches of {found['work']['batch']}; {found['machine']}, {versions}. The "
        "distance is that of a device's update from training one by one in full precision, relative: the median device's, "
        "the cohort's as a whole, and the worst device's.",
        "",
        "| | ms a round | times pfl-research | distance: median | cohort | worst |",
        "|---|---|---|---|---|---|",
    ]
    faster = found["times faster"].get("pfl", {})
    for key, each in ((key, each) for key, each in found["results"].items() if "ms" in each):
        apart = " | ".join(f"{each[kind]:.0e}" if kind in each else "-" for kind in ("median", "cohort", "distance"))
        lines.append(f"| {key} | {each['ms']:.1f} | {faster.get(key, '-')} | {apart} |")
    timed = found["results"].get("aggregation", {})
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
    for name, series in measured.items():
        lines.append(f"- {name}: " + ", ".join(f"{int(value):,}: {ms:.2f}" for value, ms in series.items()))
    return "\n".join([*lines, "", "![growth of a round's cost](figures/growth.png)"])


def put(text: str, path: Path) -> None:
    """Write the results between their marks; the words around them stay."""
    before, _, rest = path.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    path.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
