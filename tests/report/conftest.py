"""Small runs that every test here may read, and a real browser where there is one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from fedcontext.experiment import Experiment
from fedcontext.runner import run_all

ALGORITHMS = ("fedavg", "folb", "fedavg-contextual")
SEEDS = (0, 1)
ROUNDS = 6
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def experiments(rounds: int = ROUNDS) -> list[Experiment]:
    settings = {
        "epochs": (1, 2),
        "deadline": 3.0,
        "over_select": 0.5,
        "probes": "cohort",
        "smoothness": 5.0,
        "learning_rate": 0.1,
    }
    return [
        Experiment("synthetic-1-1", name, rounds=rounds, seed=seed, **settings) for name in ALGORITHMS for seed in SEEDS
    ]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_all(experiments(), folder, jobs=1)
    return folder


@pytest.fixture
def write_run(tmp_path: Path):
    """Write a file of records from anything: rounds as mappings, or lines as they are."""

    def write(rounds: list, name: str = "hostile", /, **settings: object) -> Path:
        head = {"schema": 1, "settings": {"dataset": "data", "algorithm": "fedavg", "seed": 0, **settings}}
        lines = [line if isinstance(line, str) else json.dumps(line) for line in [head, *rounds]]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(lines), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def chromium():
    missing = pytest.fail if os.environ.get("FEDCONTEXT_BROWSER") == "required" else pytest.skip
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        missing("no Chromium found: `make browser` installs it")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def window(chromium):
    """One window, of which each page is a tab: to open a window takes as long as to draw most of a page."""
    context = chromium.new_context(permissions=["clipboard-read", "clipboard-write"])
    context.new_page()  # keeps the window open
    yield context
    context.close()


@pytest.fixture
def open_page(window):
    """Open a file at a width and in a colour scheme; anything on the console or from the network fails the test.

    `script` runs before the page's own; a message with `expected` in it may be on the console.
    """
    pages, complaints = [], []

    def watch(request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            complaints.append(f"asked the network for {request.url}")

    def opened(path: Path, width: int = 1400, scheme: str = "light", script: str = "", expected: str | None = None):
        page = window.new_page()
        pages.append(page)
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.add_init_script(script)
        wrong = lambda message: expected is None or expected not in message.text  # noqa: E731
        page.on("console", lambda message: complaints.append(message.text) if wrong(message) else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", watch)
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-drawn=yes]", timeout=30_000)
        return page

    yield opened
    for page in pages:
        page.close()
    assert complaints == []
