"""The benchmark compares equal work, says so where it does not, and leaves the words around its tables alone."""

import sys
from pathlib import Path

import numpy as np
import pytest

from fedcontext import plan
from fedcontext.datasets.synthetic import synthetic

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER / "peers"))
    yield
    for name in ("harness", "rounds", "growth", "run"):
        sys.modules.pop(name, None)


def test_peers_step_through_the_plans_own_batches(tmp_path, monkeypatch):
    import harness
    import rounds

    data = synthetic(1, 1, devices=12)
    monkeypatch.setattr(rounds, "load", lambda name: data)
    rounds.write_work(tmp_path, rounds=3)
    work = harness.Work(tmp_path, "b", 3)
    for number in range(3):
        planned = plan.plan_round(0, number + 1, 12)
        for place, (device, epochs) in enumerate(zip(planned.devices, planned.epochs, strict=True)):
            own = plan.batches(0, number + 1, int(device), int(data.train.sizes[device]), int(epochs), 10)
            for batch, expected in zip(work.batches(number, place), own, strict=True):
                assert np.array_equal(batch, expected + data.train.offsets[device])


def test_a_peer_that_ends_elsewhere_is_named():
    import rounds

    cells = {rounds.OURS: {"loss": 0.5, "accuracy": 0.8}, "same": {"loss": 0.501, "accuracy": 0.801}}
    assert rounds.unequal(cells) == []
    assert rounds.unequal({**cells, "other": {"loss": 0.52, "accuracy": 0.8}}) == ["other"]


def test_results_are_put_between_their_marks(tmp_path):
    import run

    page = tmp_path / "performance.md"
    page.write_text(f"before\n{run.MARKS[0]}\nold\n{run.MARKS[1]}\nafter\n")
    for _ in range(2):
        run.put("new", page)
    assert page.read_text() == f"before\n{run.MARKS[0]}\nnew\n{run.MARKS[1]}\nafter\n"
    assert all(mark in (FOLDER.parent / "docs/performance.md").read_text() for mark in run.MARKS)


def test_a_quick_trial_is_quick_in_its_scripts_too(tmp_path, monkeypatch):
    import run

    commands = []
    monkeypatch.setattr(run.subprocess, "run", lambda command, **_: commands.append(command))
    for quick in (False, True):
        run.script("aggregation", tmp_path, quick)
    assert ["--quick" in command for command in commands] == [False, True]
