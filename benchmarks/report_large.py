"""How a report of 50 runs with 1,000 rounds each behaves: seconds to build, megabytes, longest stalls in a browser.

python benchmarks/report_large.py [--browser /usr/bin/chromium]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedcontext.algorithms import ALGORITHMS
from fedcontext.experiment import Experiment
from fedcontext.records import manifest
from fedcontext.report import write_report

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
STALLS = """window.stalls = [];
new PerformanceObserver((list) => list.getEntries().forEach((e) => window.stalls.push(Math.round(e.duration))))
  .observe({type: 'longtask', buffered: true});"""


def write_runs(folder: Path, runs: int, rounds: int, together: bool) -> None:
    """Write made-up runs: all settings different, or `together`: five algorithms with many seeds."""
    for index in range(runs):
        name = list(ALGORITHMS)[index % 5]
        odd = {"seed": index} if together else {"learning_rate": 0.01 + index / 1000}
        experiment = Experiment(dataset="mnist", algorithm=name, rounds=rounds, **odd)
        lines = [manifest(experiment), *_rounds(np.random.default_rng(index), rounds)]
        (folder / f"{index}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _rounds(random: np.random.Generator, rounds: int) -> list[dict[str, object]]:
    loss, lines = 2.3, []
    for number in range(1, rounds + 1):
        change = -0.004 * loss + 0.02 * random.standard_normal()
        loss = max(0.05, loss + change)
        devices = random.choice(1000, 12, replace=False).tolist()
        line = {"number": number, "loss": loss, "accuracy": float(np.exp(-loss / 2)), "devices": devices[:10]}
        line |= {"weights": random.normal(0.1, 0.1, 10).tolist(), "measured_change": change, "smoothness": 33.0}
        line |= {"promised_change": change + 0.01 * random.standard_normal(), "condition": 1 + random.exponential(5)}
        line |= {"curvature": 20 + random.exponential(5), "seconds": 30 * random.random(), "bytes_down": 314_000}
        lines.append(line | {"bytes_up": 314_000, "excluded": {devices[10]: "missed the deadline"}, "lost": False})
    return lines


def stalls(page_file: Path, browser: str, times: int) -> dict[str, list[int]]:
    """Return the longest task in ms while the page opened, while it was panned, and when a line was hidden, each time."""
    from playwright.sync_api import sync_playwright

    found: dict[str, list[int]] = {"open": [], "pan": [], "hide a line": []}
    with sync_playwright() as driver:
        for _ in range(times):
            chromium = driver.chromium.launch(executable_path=browser, args=list(FLAGS))
            page = chromium.new_page(viewport={"width": 1400, "height": 900})
            page.add_init_script(STALLS)
            for what, act in (("open", opened), ("pan", panned), ("hide a line", hidden)):
                act(page, page_file)
                page.wait_for_selector("body[data-drawn=yes]", timeout=60_000)
                page.wait_for_timeout(500)
                found[what].append(max(page.evaluate("window.stalls.splice(0)"), default=0))
            chromium.close()
    return found


def opened(page: Any, page_file: Path) -> None:
    page.goto(page_file.as_uri())


def panned(page: Any, _: Path) -> None:
    page.evaluate("Plotly.relayout('loss', {dragmode: 'pan'})")
    page.wait_for_timeout(500)
    page.evaluate("window.stalls.splice(0)")
    box = page.locator("#loss .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 100)
    page.mouse.down()
    for step in range(40):
        page.mouse.move(box["x"] + 300 - 4 * step, box["y"] + 100)
    page.mouse.up()


def hidden(page: Any, _: Path) -> None:
    page.locator("#legend button").first.click()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", default=shutil.which("chromium"))
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--times", type=int, default=5, help="how often each page is opened, in a browser of its own")
    given = parser.parse_args()
    for together in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            write_runs(Path(folder), given.runs, given.rounds, together)
            out, begun = Path(folder) / "report.html", time.perf_counter()
            write_report([folder], out)
            took = time.perf_counter() - begun
            print(
                f"{'5 lines' if together else f'{given.runs} lines'}: {took:.1f} s, {out.stat().st_size / 1e6:.2f} MB"
            )
            for what, milliseconds in (stalls(out, given.browser, given.times) if given.browser else {}).items():
                print(f"  {what}: longest task in ms, 0 for below 50: {milliseconds}")


if __name__ == "__main__":
    main()
