from __future__ import annotations

import dataclasses
import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from typer.testing import CliRunner

from fedcontext.cli.app import app
from fedcontext.cli.run import COMPARE
from fedcontext.errors import FedcontextError
from fedcontext.experiment import Experiment, settings_from_toml
from fedcontext.records import read_run
from fedcontext.report import write_report
from fedcontext.report.downsample import downsample
from fedcontext.report.html import render, to_json
from fedcontext.report.page_data import MAX_POINTS, page_data
from fedcontext.results.reader import Run, read_runs
from fedcontext.results.summary import median_rounds, summarise

from .conftest import ALGORITHMS, SEEDS, experiments

HOSTILE = "</script><script>alert(1)</script>\"'&<img src=x onerror=alert(1)>"


@given(arrays.arrays(np.float64, st.integers(1, 300), elements=st.floats(-1e6, 1e6)), st.integers(4, 100))
def test_downsampling_keeps_the_ends_and_the_extremes(values: np.ndarray, count: int) -> None:
    kept = downsample(values, count)
    assert len(kept) <= count
    assert list(kept) == sorted(set(kept.tolist()))
    assert {0, len(values) - 1} <= set(kept.tolist())
    assert {values.min(), values.max()} <= set(values[kept].tolist())


@given(st.recursive(st.text() | st.floats(allow_nan=False, allow_infinity=False), st.lists))
def test_embedded_json_says_the_same_and_cannot_end_its_script(value: object) -> None:
    text = to_json(value)
    assert json.loads(text) == value
    assert "<" not in text


def test_the_page_agrees_with_the_summary(runs: Path) -> None:
    dataset = page_data(*read_runs([runs]))["datasets"][0]
    assert [group["label"] for group in dataset["groups"]] == list(ALGORITHMS)
    for group in dataset["groups"]:
        files = [path for path in runs.glob("*.jsonl") if read_run(path)[0]["settings"]["algorithm"] == group["label"]]
        summaries = [summarise(read_run(path)[1], dataset["levels"]) for path in files]
        assert group["final"]["loss"] == pytest.approx(np.mean([s.loss for s in summaries]), rel=1e-4)
        assert group["final"]["accuracy"] == pytest.approx(np.mean([s.accuracy for s in summaries]), rel=1e-4)
        assert group["final"]["rises"] == pytest.approx(np.mean([s.rises for s in summaries]), rel=1e-4)
        assert group["final"]["swing"] == pytest.approx(np.mean([s.swing for s in summaries]), rel=1e-4)
        for level, count in zip(dataset["levels"], group["milestones"]["rounds"], strict=True):
            assert (count or np.inf) == median_rounds([s.rounds_to[level] for s in summaries])


def test_seconds_and_bytes_to_a_level_are_those_spent_until_then(write_run) -> None:
    rounds = [{"accuracy": a, "seconds": 10, "bytes_up": 3, "bytes_down": 4} for a in (0.1, 0.55, 0.2, 0.65)]
    dataset = page_data(*read_runs([write_run(rounds)]))["datasets"][0]
    assert dataset["levels"][-2:] == [0.5, 0.6]
    assert {unit: costs[-2:] for unit, costs in dataset["groups"][0]["milestones"].items()} == {
        "rounds": [2, 4],
        "seconds": [20, 40],
        "bytes": [14, 28],
    }


def test_runs_that_differ_in_a_setting_are_separate_lines_named_by_it(write_run) -> None:
    choices = (10, "all", 9)
    paths = [
        write_run([{"loss": 1}], f"{probes}-{seed}", algorithm="fedavg-memory", probes=probes, seed=seed)
        for probes in choices
        for seed in (0, 1)
    ]
    groups = page_data(*read_runs(paths))["datasets"][0]["groups"]
    assert [(group["label"], group["seeds"]) for group in groups] == [
        ("fedavg-memory (probes=9)", ["0", "1"]),
        ("fedavg-memory (probes=10)", ["0", "1"]),
        ("fedavg-memory (probes=all)", ["0", "1"]),
    ]


def test_a_setting_is_named_where_it_tells_lines_apart_or_makes_a_comparison_unequal(write_run) -> None:
    odd = {"fedavg": [(1, 1)], "folb": [(1, 1), (2, 1)], "fedprox": [(1, 3)]}
    pairs = [(name, *pair) for name, pairs in odd.items() for pair in pairs]
    paths = [write_run([], f"{name}{a}{b}", algorithm=name, a=a, b=b) for name, a, b in pairs]
    labels = [group["label"] for group in page_data(*read_runs(paths))["datasets"][0]["groups"]]
    assert labels == ["fedavg (b=1)", "fedprox (b=3)", "folb (a=1, b=1)", "folb (a=2, b=1)"]


def test_runs_that_differ_in_rounds_or_in_a_setting_without_effect_are_one_line(write_run) -> None:
    short, long = [{"loss": 2}] * 2, [{"loss": 2}] * 3
    paths = [
        write_run(short, "short", rounds=2, mu=0.1),
        write_run(long, "long", rounds=3, mu=0.1),
        write_run(short, "mu", rounds=2, mu=5.0),
        write_run(short, "other", rounds=2, mu=0.1, seed=1),
        write_run(short, "folb", rounds=2, mu=0.1, algorithm="folb"),
    ]
    dataset = page_data(*read_runs(paths))["datasets"][0]
    lines = [(group["label"], group["seeds"], group["final"]["rounds"]) for group in dataset["groups"]]
    assert lines == [("fedavg", ["0", "1"], 2.5), ("folb", ["0"], 2)]
    assert "2 to 3 rounds" in dataset["sentences"][0]
    assert dataset["sentences"][1].endswith("The seeds differ: fedavg has 2 seeds, folb has 1 seed.")


def test_a_label_has_few_settings_and_is_no_others(write_run) -> None:
    paths = [write_run([], f"{at}", **{key: at % (3 + n) for n, key in enumerate("abcdefghi")}) for at in range(12)]
    groups = page_data(*read_runs(paths))["datasets"][0]["groups"]
    labels = {group["label"] for group in groups}
    assert len(labels) == 12
    assert all(label.count("=") == 3 and label.endswith(", 6 more)") for label in labels)
    assert all(group["full_label"].count("=") == 9 for group in groups)


def test_a_weight_of_minus_zero_is_a_zero_on_the_page(write_run) -> None:
    path = write_run([{"number": 1, "loss": -0.0, "accuracy": 0.5, "devices": [3, 4], "weights": [-0.0, 0.5]}])
    page = page_data(*read_runs([path]))
    assert "-0" not in to_json([page["datasets"][0][part] for part in ("runs", "groups", "sentences")])
    assert "final loss is 0.000, of fedavg" in page["datasets"][0]["sentences"][1]


def test_every_data_set_has_its_own_entry(write_run) -> None:
    paths = [write_run([{"loss": 1}], name, dataset=name) for name in ("mnist", "femnist")]
    assert [dataset["name"] for dataset in page_data(*read_runs(paths))["datasets"]] == ["mnist", "femnist"]


def test_a_promise_failed_where_the_loss_fell_less_than_it_said(write_run) -> None:
    pairs = [(-1.0, -2.0), (-1.0, -0.5), (-1.0, -1.0), (None, -1.0), (-1.0, None)]
    rounds = [{"promised_change": promised, "measured_change": measured} for promised, measured in pairs]
    bound = page_data(*read_runs([write_run(rounds)]))["datasets"][0]["runs"][0]["bound"]
    assert (bound["violations"], bound["violated"], bound["checked"]) == ([[2, -0.5]], 1, 3)


def test_who_was_left_out_when_and_why(write_run) -> None:
    late = {"excluded": {"7": "late"}}
    rounds = [late, late, {"excluded": {"3": "slow", "7": "late"}}, {}, {**late, "lost": True}]
    left = page_data(*read_runs([write_run(rounds)]))["datasets"][0]["runs"][0]["excluded"]
    assert left["rows"] == [["7", "late", 4, "1–3, 5"], ["3", "slow", 1, "3"]]
    assert left["lost"] == "5"


def test_the_settings_on_the_page_repeat_the_runs(runs: Path, tmp_path: Path) -> None:
    configs = page_data(*read_runs([runs]))["datasets"][0]["configs"]
    assert len(configs) == 1
    file = tmp_path / "repeat.toml"
    file.write_text(configs[0], encoding="utf-8")
    settings = settings_from_toml(file, COMPARE)
    names, seeds = settings.pop("algorithms"), settings.pop("seeds")
    assert (sorted(names), seeds) == (sorted(ALGORITHMS), list(SEEDS))
    again = {Experiment(**settings, algorithm=name, seed=seed) for name in names for seed in seeds}
    assert again == set(experiments())


def test_text_from_records_stays_text(write_run, tmp_path: Path) -> None:
    rounds = [{"devices": [HOSTILE], "weights": [1.0], "excluded": {HOSTILE: HOSTILE}, "loss": 1.0}]
    runs, problems = read_runs([write_run(rounds, dataset=HOSTILE, algorithm=HOSTILE, odd={HOSTILE: HOSTILE})])
    page = render(page_data(runs, [*problems, HOSTILE]))
    without_plotly = re.sub(r"<script[^>]*>/\*\*\s+\* plotly.*?</script>", "", page, flags=re.DOTALL)
    assert "alert(1)</script>" not in without_plotly
    assert "<img" not in without_plotly
    assert html.escape(HOSTILE) in without_plotly


def test_half_a_character_in_a_name_does_not_stop_the_page(write_run, tmp_path: Path) -> None:
    write_report([write_run([{"loss": 1}], dataset="\ud800")], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 0


def test_fifty_runs_of_a_thousand_rounds_stay_small(runs: Path) -> None:
    loaded, _ = read_runs([runs])
    rows = [{**loaded[-1].rows[at % 6], "number": at + 1, "loss": 2 + np.sin(at)} for at in range(1000)]
    many = [Run(str(rate), {**loaded[-1].settings, "learning_rate": rate}, {}, rows) for rate in range(50)]
    data = page_data(many)
    page = render(data)
    assert len(page) < 8e6
    for measure in ("loss", "accuracy"):
        assert sum(len(group[measure]["mean"]) for group in data["datasets"][0]["groups"]) <= MAX_POINTS
    assert {group["final"]["rounds"] for group in data["datasets"][0]["groups"]} == {1000}
    assert max(data["datasets"][0]["groups"][0]["loss"]["mean"]) == pytest.approx(max(r["loss"] for r in rows), 1e-4)


def test_the_command_writes_a_page_and_reports_what_it_skipped(runs: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("nonsense")
    result = CliRunner().invoke(app, ["report", str(runs), str(bad), "-o", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not list(tmp_path.glob(".*.part"))


def test_a_page_that_cannot_be_written_is_named(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FedcontextError, match=r"page.html: cannot be written"):
        write_report([runs], tmp_path / "file" / "page.html")


def test_a_page_that_cannot_be_read_before_it_is_replaced_is_named(runs: Path, tmp_path: Path, monkeypatch) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "page.html").touch()
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FedcontextError, match=r"page.html: cannot be written \(Permission denied\)"):
        write_report([runs], tmp_path / "page.html")


def test_a_page_replaces_reports_and_nothing_else(runs: Path, tmp_path: Path) -> None:
    page, notes = tmp_path / "page.html", tmp_path / "notes.html"
    page.touch()
    for _ in range(2):
        write_report([runs], page)
    notes.write_text("<!doctype html><title>fedcontext: my notes</title>")
    with pytest.raises(
        FedcontextError, match=r"notes.html: exists and is not a report of fedcontext: use another path"
    ):
        write_report([runs], notes)
    assert "my notes" in notes.read_text()


def test_a_seed_that_waits_for_its_turn_does_not_count_as_failed(write_run) -> None:
    paths = [write_run([{"accuracy": 0.6}], "first"), write_run([], "second", seed=1)]
    dataset = page_data(*read_runs(paths))["datasets"][0]
    assert dataset["groups"][0]["milestones"]["rounds"][-1] == 1
    assert dataset["sentences"][1].startswith("fedavg reached 60 % accuracy after 1 round")


def test_runs_of_another_system_are_shown_and_not_said_to_repeat_here(write_run) -> None:
    rounds = [{"number": 1, "loss": 1.0, "accuracy": 0.5, "devices": [1407], "weights": [1.0], "seconds": 2.0}]
    dataset = page_data(*read_runs([write_run(rounds, algorithm="FedAvg, contextual", probes="cohort")]))["datasets"][0]
    assert not dataset["reproducible"]
    assert dataset["groups"][0]["label"] == "FedAvg, contextual"
    assert dataset["runs"][0]["stages"] == [{"round": 1, "devices": ["1407"], "weights": [1.0]}]


def test_a_run_without_any_round_gives_a_page(write_run) -> None:
    assert "0 rounds" in render(page_data(*read_runs([write_run([])])))


def test_all_settings_of_an_experiment_are_on_the_page(runs: Path) -> None:
    text = page_data(*read_runs([runs]))["datasets"][0]["configs"][0]
    for field in dataclasses.fields(Experiment):
        assert field.name in text


def test_the_outcome_over_seeds_says_which_number_is_a_median_and_which_a_mean(write_run) -> None:
    rounds = {0: [0.1, 0.6], 1: [0.1, 0.1, 0.1, 0.6], 2: [0.1, 0.1, 0.6]}
    losses = {0: 1.0, 1: 1.0, 2: 4.0}
    paths = [
        write_run([{"accuracy": a, "loss": losses[seed]} for a in accuracies], str(seed), seed=seed)
        for seed, accuracies in rounds.items()
    ]
    sentence = page_data(*read_runs(paths))["datasets"][0]["sentences"][1]
    expected = (
        "fedavg reached 60 % accuracy after a median of 3 rounds; the lowest mean final loss is 2.000, of fedavg."
    )
    assert sentence == expected


def test_the_share_of_rises_is_known_where_not_every_round_is_evaluated(write_run) -> None:
    rounds = [{"loss": loss} for loss in (3.0, None, 2.0, None, 2.5)]
    assert page_data(*read_runs([write_run(rounds)]))["datasets"][0]["groups"][0]["final"]["rises"] == 0.5
