from __future__ import annotations

from pathlib import Path

import pytest

from fedcontext.experiment import Experiment
from fedcontext.paper.figures import COLOURS
from fedcontext.preparation import train
from fedcontext.records import RoundRecord
from fedcontext.report import live_report
from fedcontext.report.live import LivePage
from fedcontext.results.reader import read_runs

from .conftest import experiments

LATEST = "() => Math.max(...document.getElementById('loss').data.flatMap(trace => trace.x))"
RANGE = "() => document.getElementById('loss').layout.xaxis.range"


@pytest.fixture(scope="module")
def finished() -> list:
    pair = [experiments()[0], experiments()[-1]]
    return [(experiment, train(experiment).records) for experiment in pair]


def test_an_open_page_shows_round_3_then_round_6_and_keeps_zoom_and_hidden_lines(open_page, finished, tmp_path) -> None:
    live = LivePage([experiment for experiment, _ in finished], tmp_path / "out.html")
    for experiment, records in finished:
        for record in records[:3]:
            live.add(experiment, record)
    live.write_page(running=True)
    live.write_update(running=True)
    page = open_page(tmp_path / "out.html")
    assert "round 3" in page.locator("#status").inner_text()
    assert page.evaluate(LATEST) == 3
    page.evaluate("Plotly.relayout('loss', {'xaxis.range': [1.5, 2.5]})")
    page.get_by_role("button", name="fedavg-contextual").click()

    for experiment, records in finished:
        for record in records[3:]:
            live.add(experiment, record)
    live.write_update(running=True)
    page.wait_for_function("() => document.getElementById('status').textContent.includes('round 6')", timeout=10_000)
    page.wait_for_function(f"() => ({LATEST})() === 6", timeout=10_000)
    assert page.evaluate(RANGE) == [1.5, 2.5]
    assert page.get_by_role("button", name="fedavg-contextual").get_attribute("aria-pressed") == "false"

    live.write_page(running=False)
    live.write_update(running=False)
    page.wait_for_selector("#status", state="hidden", timeout=10_000)
    assert page.evaluate(RANGE) == [1.5, 2.5]


def test_the_last_page_is_the_one_that_the_records_give(finished, tmp_path: Path, runs: Path) -> None:
    with live_report([experiment for experiment, _ in finished], tmp_path / "out.html", interval=0) as on_round:
        for experiment, records in finished:
            for record in records:
                on_round(experiment, record)
    live = LivePage([experiment for experiment, _ in finished], tmp_path / "out.html")
    for experiment, records in finished:
        for record in records:
            live.add(experiment, record)
    from_files, _ = read_runs([runs / f"{experiment.name}.jsonl" for experiment, _ in finished])
    assert list(live.runs.values()) == from_files
    assert '"status":""' in (tmp_path / "out.html").read_text(encoding="utf-8")
    assert (tmp_path / "out.live.js").read_text(encoding="utf-8").startswith("fedcontextUpdate(")


def test_a_page_opened_at_once_does_not_hear_of_earlier_runs(open_page, finished, tmp_path: Path) -> None:
    (tmp_path / "out.live.js").write_text('fedcontextUpdate(1, {"datasets": "of earlier runs"});', encoding="utf-8")
    with live_report([experiment for experiment, _ in finished], tmp_path / "out.html"):
        page = open_page(tmp_path / "out.html")
        assert "0 of 12 rounds done" in page.locator("#status").inner_text()


@pytest.mark.parametrize(("level", "note"), [(0.0625, "Median rounds"), (0.9995, "No accuracy level was reached.")])
def test_a_level_that_was_asked_for_is_shown_whether_it_was_reached_or_not(
    open_page, finished, tmp_path: Path, level: float, note: str
) -> None:
    with live_report([experiment for experiment, _ in finished], tmp_path / "out.html", [level]) as on_round:
        for experiment, records in finished:
            for record in records:
                on_round(experiment, record)
    page = open_page(tmp_path / "out.html")
    assert page.locator("#results thead th").last.inner_text() == f"to {100 * level:g} %"
    assert page.locator("#milestones-note").inner_text().startswith(note)
    assert page.locator("#milestones.empty").count() == note.startswith("No")


def test_the_algorithms_have_the_order_asked_for_and_the_colours_of_the_figure(open_page, tmp_path: Path) -> None:
    names = ["fedadam", "fedavg-memory", "fedavg"]
    asked = [Experiment(algorithm=name, rounds=1) for name in names]
    with live_report(asked, tmp_path / "out.html") as on_round:
        for experiment in asked:
            on_round(experiment, RoundRecord(1, loss=2.0))
    page = open_page(tmp_path / "out.html")
    assert page.locator("#legend button").all_inner_texts() == names
    assert page.evaluate("document.getElementById('loss').data.map(trace => trace.name)") == names
    drawn = page.evaluate("[...Array(9).keys()].map(index => colour(index))")
    assert drawn == [colour.lower() for colour in (*COLOURS, COLOURS[0])]


def test_an_interrupted_run_leaves_a_page_of_what_was_done(finished, tmp_path: Path) -> None:
    experiment, records = finished[0]

    def interrupted() -> None:
        with live_report([experiment], tmp_path / "out.html") as on_round:
            on_round(experiment, records[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "1 round, 1 seed" in page
    assert '"status":""' in page
