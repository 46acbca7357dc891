"""Cost of a large report: seconds to build, megabytes, and how a browser copes with it.

python benchmarks/report_large.py [--runs 50] [--rounds 1000] [--browser /usr/bin/chromium]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from fedcontext.algorithms import ALGORITHMS
from fedcontext.experiment import Experiment
from fedcontext.records import manifest
from fedcontext.report import write_report

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
OBSERVE_LONG_TASKS = """window.longTasks = [];
new PerformanceObserver((list) => list.getEntries().forEach((e) => window.longTasks.push(Math.round(e.duration))))
  .observe({type: 'longtask', buffered: true});"""
FIRST_PAINT = "() => Math.round(performance.getEntriesByName('first-contentful-paint')[0].startTime)"


def write_runs(folder: Path, runs: int, rounds: int, together: bool) -> None:
    """Write synthetic runs: five algorithms with many seeds if `together`, otherwise all with different settings."""
    for index in range(runs):
        name = list(ALGORITHMS)[index % 5]
        varied = {"seed": index} if together else {"learning_rate": 0.01 + index / 1000}
        experiment = Experiment(dataset="mnist", algorithm=name, rounds=rounds, **varied)
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


def measure(page_file: Path, browser: str, times: int) -> dict[str, list[int]]:
    """Return milliseconds: first paint, all charts drawn, main thread busy, and the longest task during each action."""
    from playwright.sync_api import sync_playwright

    results: dict[str, list[int]] = defaultdict(list)
    with sync_playwright() as driver:
        for _ in range(times):
            chromium = driver.chromium.launch(executable_path=browser, args=list(FLAGS))
            page = chromium.new_page(viewport={"width": 1400, "height": 900})
            page.add_init_script(OBSERVE_LONG_TASKS)
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            start = time.perf_counter()
            page.goto(page_file.as_uri())
            _wait_until_drawn(page)
            results["all charts drawn"].append(round(1000 * (time.perf_counter() - start)))
            results["first paint"].append(page.evaluate(FIRST_PAINT))
            metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
            results["CPU time of the main thread"].append(round(1000 * metrics["TaskDuration"]))
            results["longest task, opening"].append(_longest_task(page))
            _pan(page)
            results["longest task, panning"].append(_longest_task(page))
            page.locator("#legend button").first.click()
            _wait_until_drawn(page)
            results["longest task, hiding a line"].append(_longest_task(page))
            chromium.close()
    return results


def _wait_until_drawn(page: Any) -> None:
    page.wait_for_selector("body[data-drawn=yes]", timeout=60_000)


def _longest_task(page: Any) -> int:
    page.wait_for_timeout(500)
    return max(page.evaluate("window.longTasks.splice(0)"), default=0)


def _pan(page: Any) -> None:
    page.evaluate("Plotly.relayout('loss', {dragmode: 'pan'})")
    _longest_task(page)
    box = page.locator("#loss .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 100)
    page.mouse.down()
    for step in range(40):
        page.mouse.move(box["x"] + 300 - 4 * step, box["y"] + 100)
    page.mouse.up()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", default=shutil.which("chromium"))
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--times", type=int, default=5, help="how often each page is opened, each in a new browser")
    options = parser.parse_args()
    for together in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            write_runs(Path(folder), options.runs, options.rounds, together)
            out, start = Path(folder) / "report.html", time.perf_counter()
            write_report([folder], out)
            seconds = time.perf_counter() - start
            lines = min(5, options.runs) if together else options.runs
            print(f"{lines} lines: {seconds:.1f} s, {out.stat().st_size / 1e6:.2f} MB")
            if options.browser:
                for name, milliseconds in measure(out, options.browser, options.times).items():
                    print(f"  {name}: {milliseconds} ms")


if __name__ == "__main__":
    main()
