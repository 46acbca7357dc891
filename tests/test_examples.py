"""The examples run as they are."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

import fedcontext as fc

EXAMPLES = Path(__file__).parent.parent / "examples"


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def test_the_quickstart_compares_three_algorithms_in_a_picture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "quickstart.py"))
    lines = [line.replace(",", "").split() for line in capsys.readouterr().out.splitlines()]
    losses = {line[0].rstrip(":"): float(line[2]) for line in lines}
    assert list(losses) == ["fedavg", "folb", "fedavg-memory"]
    assert losses["fedavg-memory"] < min(losses["fedavg"], losses["folb"])
    assert (tmp_path / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    assert len(lines_of(EXAMPLES / "quickstart.py")) < 25


def test_the_rule_added_in_the_docs_clips_and_learns_without_a_name_in_a_table():
    before = dict(fc.ALGORITHMS)
    made = runpy.run_path(str(EXAMPLES / "add_a_rule.py"))
    assert before == fc.ALGORITHMS
    losses = [record.loss for record in made["trained"].records]
    assert losses[-1] < losses[0]
    lengths = np.array([1.0, 2.0, 8.0])
    weights, _ = made["clipped"]().weigh(fc.Geometry(gram=np.diag(lengths**2), samples=np.ones(3)), None)
    assert (weights * lengths).max() == pytest.approx(2 / 3)
    assert len(lines_of(EXAMPLES / "add_a_rule.py")) <= 15
