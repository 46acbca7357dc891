"""The documentation site: it builds without a warning, and its Python runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedcontext as fc

DOCS = Path(__file__).parent.parent / "docs"
MADE = {  # what the one block of Python on a page is to have made
    "index.md": lambda names: names["result"].promised_change < 0,
    "guide/quickstart.md": lambda names: np.allclose(names["result"].params, [0.5, 1.5]),
    "guide/rules.md": lambda names: names["rule"].name == "contextual" and names["promised"] < 0,
    "guide/look-at-runs.md": lambda names: list(names["frame"]["number"]) == [1],
}
ELSEWHERE = {"torch-engine.md", "plug-in.md", "privacy.md"}  # whose Python other tests run


def python_on(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", MADE)
def test_the_python_in_the_docs_makes_what_it_says(page, tmp_path, monkeypatch):
    (block,) = python_on(page)
    if "pandas" in block:
        pytest.importorskip("pandas")
        from fedcontext.runner import run

        run(fc.Experiment("synthetic-iid", "fedavg", rounds=1), tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    names = {"params": np.zeros(3), "updates": [np.ones(3)], "g": -np.ones(3), "lr": 0.1}
    exec(block, names)
    assert MADE[page](names)


def test_all_python_in_the_docs_is_run_by_a_test():
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert {page for page in pages if python_on(page)} == MADE.keys() | ELSEWHERE


def test_every_public_name_is_in_the_api_reference():
    page = (DOCS / "guide" / "api.md").read_text("utf-8")
    undocumented = {"ALGORITHMS", "PROFILES", "__version__", "presets", "runner"}  # no page of their own
    missing = [name for name in fc.__all__ if name not in undocumented and f"fedcontext.{name}\n" not in page]
    assert missing == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_needs_no_other_site(tmp_path):
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    commands = (tmp_path / "generated" / "cli.html").read_text("utf-8")
    for command in ("run", "compare", "report", "export", "algorithms", "data fetch"):
        assert f"fedcontext {command}" in commands
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text("utf-8"))
        assert loaded == [], page.name
    assert "<math" in (tmp_path / "guide" / "rules.html").read_text("utf-8")
