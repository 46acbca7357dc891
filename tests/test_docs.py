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
PAGES = ["index.md", "guide/quickstart.md", "guide/rules.md", "guide/look-at-runs.md"]
BLOCKS = [
    pytest.param(block, id=f"{page}-{index}")
    for page in PAGES
    for index, block in enumerate(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_python_in_the_docs_runs(block, tmp_path, monkeypatch):
    if "pandas" in block:
        pytest.importorskip("pandas")
        from fedcontext.runner import run

        run(fc.Experiment("synthetic-iid", "fedavg", rounds=1), tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    exec(block, {"params": np.zeros(3), "updates": [np.ones(3)], "g": -np.ones(3), "lr": 0.1})


def test_every_public_name_is_in_the_api_reference():
    page = (DOCS / "guide" / "api.md").read_text("utf-8")
    undocumented = {"ALGORITHMS", "PROFILES", "__version__"}  # tables and a number, not things with a docstring
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
