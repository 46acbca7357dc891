"""The benchmark compares equal work, says so where it does not, and leaves the words around its tables alone."""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

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
    for name in ("harness", "rounds", "growth", "run", "flower_rounds", "flower_device", "torch_rounds"):
        sys.modules.pop(name, None)


def test_peers_step_through_the_plans_own_batches(tmp_path, monkeypatch):
    import harness
    import rounds

    data = synthetic(1, 1, devices=12)
    monkeypatch.setattr(rounds, "load_dataset", lambda name: data)
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


CELL = {"ms_per_round": 2.0, "start_s": 1.0, "peak_mb": 100.0, "loss": 0.5, "accuracy": 0.8}


def rounds_part(ours, **stamp):
    cells = {"a": {ours: CELL}, "b": {ours: {**CELL, "ms_per_round": 6.0}}}
    limits = {"peak": 5e10, "limit_ms": {"a": 0.5, "b": 4.0}}
    return {"measured": stamp, "rounds": 10, "repeats": 1, **limits, **cells}


def test_each_part_says_its_own_date_machine_and_versions(tmp_path, monkeypatch):
    """A part that is kept from an earlier run, or that was measured elsewhere, is not given today's."""
    import run

    old = {"rounds": rounds_part(run.rounds.OURS, date="2001-01-01", processor="an abacus", numpy="0.1")}
    (tmp_path / "results.json").write_text(json.dumps({**old, "growth": {"K": {"10": 1.0}}}))
    gpu = {"machine": "a GPU", "versions": {"torch": "9.9"}, "markdown": "", "times faster": {}, "results": {}}
    gpu["work"] = {"parameters": 1, "cohort": 1, "samples": 1, "batch": 1}
    (tmp_path / "gpu.json").write_text(json.dumps(gpu))
    monkeypatch.setattr(run.shutil, "which", lambda name: None)
    monkeypatch.setattr(run.growth, "measure", lambda quick: {"K": {"10": 2.0}})
    monkeypatch.setattr(run.growth, "draw", lambda *given: None)
    monkeypatch.setattr(run, "put", lambda text, path: (tmp_path / "page.md").write_text(text))
    monkeypatch.setattr(run, "machine", lambda: {"date": "2026-01-01", "processor": "this one", "numpy": "2"})
    results = ["--results", str(tmp_path / "results.json")]
    monkeypatch.setattr(sys, "argv", ["run.py", "--rows", "de", "--home", str(tmp_path), *results])
    run.main()
    said = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("Measured")]
    assert said == [
        "Measured: date 2001-01-01, processor an abacus, numpy 0.1.",
        "Measured: date not written down, processor a GPU, torch 9.9.",
        "Measured: date 2026-01-01, processor this one, numpy 2.",
    ]
    assert json.loads((tmp_path / "results.json").read_text())["rounds"] == old["rounds"]


def test_the_page_is_what_the_kept_results_say():
    import run

    text = (FOLDER.parent / "docs/performance.md").read_text("utf-8")
    shown = text.partition(run.MARKS[0])[2].partition(run.MARKS[1])[0]
    assert shown.strip() == run.document(run.kept(FOLDER / "results.json")).strip()


def test_a_part_without_date_and_machine_is_not_kept(tmp_path):
    import run

    path = tmp_path / "results.json"
    path.write_text(json.dumps({"machine": {"date": "2001-01-01"}, "growth": {"K": {"10": 1.0}}}))
    assert run.kept(path) == run.kept(tmp_path / "none.json") == {}


def test_our_rounds_are_told_as_multiples_of_the_limit():
    import run

    text = run.table_of_rounds(rounds_part(run.rounds.OURS))
    assert "at 50 float32 multiply-adds a nanosecond" in text
    assert "0.500 ms in (a), and our round 4.0 times that; 4.000 ms in (b), and our round 1.5 times that" in text


def test_the_limit_counts_two_products_for_every_sample_stepped_through(tmp_path, monkeypatch):
    import harness
    import rounds

    data = synthetic(1, 1, devices=12)
    monkeypatch.setattr(rounds, "load_dataset", lambda name: data)
    rounds.write_work(tmp_path, rounds=3)
    for row in rounds.EPOCHS:
        work = harness.Work(tmp_path, row, 3)
        steps = [len(batch) for number in range(3) for place in range(10) for batch in work.batches(number, place)]
        assert rounds.multiply_adds(tmp_path, row) == pytest.approx(sum(steps) / 3 * 2 * 60 * 10)
    assert rounds.peak(side=64, tries=1) > 0


def test_a_peer_that_fails_keeps_its_own_log_and_names_it(tmp_path, monkeypatch, capfd):
    import rounds

    names = ("broken, Ray", "also broken")
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"import sys; print('row', sys.argv[2]); sys.exit('{name} fell over')")
    monkeypatch.setattr(rounds, "HERE", tmp_path.parent)
    monkeypatch.setattr(rounds, "PEERS", {name: rounds.Peer(str(tmp_path / f"{name}.py")) for name in names})
    assert all(rounds.run_peer(name, row, 1, tmp_path) is None for row in rounds.EPOCHS for name in names)
    told = capfd.readouterr().err
    for name in names:
        log = rounds.log_of(name, tmp_path)
        assert told.count(str(log)) == 2
        assert log.read_text().count(f"{name} fell over") == 2


def test_flower_gets_all_cores_and_is_warmed_up_over_all_rounds(tmp_path, monkeypatch):
    """It has a clock of its own, so what the harness does for the others is repeated there."""
    import flower_rounds
    import rounds

    monkeypatch.setattr(rounds, "load_dataset", lambda name: synthetic(1, 1, devices=12))
    rounds.write_work(tmp_path, rounds=3)
    played = []

    def start(self, grid, initial_arrays, num_rounds):
        played.append(num_rounds)
        self.begins += [0.0] * num_rounds
        self.ends += [float(len(played))] * num_rounds
        return SimpleNamespace(arrays=initial_arrays)

    monkeypatch.setattr(flower_rounds.Planned, "start", start)
    monkeypatch.setattr(sys, "argv", ["flower_rounds.py", str(tmp_path), "a", "3", str(tmp_path / "out.json")])
    flower_rounds.main(None, None)
    assert played == [3, 3]
    assert json.loads((tmp_path / "out.json").read_text())["ms"] == [2000.0] * 3  # of the second pass alone
    assert flower_rounds.RESOURCES["init_args"]["num_cpus"] == len(os.sched_getaffinity(0))


def test_a_quick_trial_is_quick_in_its_scripts_too(tmp_path, monkeypatch):
    import run

    commands = []
    monkeypatch.setattr(run.subprocess, "run", lambda command, **_: commands.append(command))
    for quick in (False, True):
        run.script("aggregation", tmp_path, quick)
    assert ["--quick" in command for command in commands] == [False, True]


def test_every_row_of_the_gpu_table_is_explained():
    page = (FOLDER.parent / "docs" / "performance.md").read_text("utf-8")
    table, words = page.split("\n(d) ")[1].split("Measured:")[0], page.split("### The rows of (d)")[1].split("\n#")[0]
    explained = {name for item in re.findall(r"^- (.*?):", words, re.MULTILINE) for name in item.split(", ")}
    rows = re.findall(r"^\| ([a-z].*?) \|", table, re.MULTILINE)
    assert len(rows) > 3
    assert [row for row in rows if row not in explained and not explained.issuperset(row.split())] == []
