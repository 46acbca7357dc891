from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcontext.errors import FedcontextError
from fedcontext.records import RoundRecord, read_run
from fedcontext.report.html import to_json
from fedcontext.report.page_data import content
from fedcontext.results.reader import load, load_run

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from([field.name for field in dataclasses.fields(RoundRecord)])
RECORDS = st.dictionaries(FIELDS, ANY_JSON | st.lists(st.integers() | st.floats() | st.text(max_size=4), max_size=5))


def test_whole_files_read_the_same_as_by_the_strict_reader(runs: Path) -> None:
    for path in runs.glob("*.jsonl"):
        head, records = read_run(path)
        run = load_run(path)
        assert run.settings == head["settings"]
        assert run.problems == []
        for row, record in zip(run.rows, records, strict=True):
            assert {name: getattr(record, name) for name in row} == row


def test_a_last_line_cut_short_is_passed_over_and_said(runs: Path, tmp_path: Path) -> None:
    text = next(runs.glob("*.jsonl")).read_text()
    cut = tmp_path / "cut.jsonl"
    cut.write_text(text[: len(text.rstrip()) - 40])
    run = load_run(cut)
    assert len(run.rows) == text.count("\n") - 2
    assert run.problems == ["cut.jsonl: last line, cut short, was passed over"]


def test_a_round_written_twice_counts_once_with_its_last_word(write_run) -> None:
    run = load_run(write_run([{"number": 1, "loss": 3}, {"number": 2, "loss": 2}, {"number": 1, "loss": 1}]))
    assert [(row["number"], row["loss"]) for row in run.rows] == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "its first line is no manifest"),
        ("hello", "its first line is no manifest"),
        ("[1]", "its first line is no manifest"),
        ('{"schema": 9, "settings": {}}', "schema must be 1, got 9"),
        ("\x00\xff", "its first line is no manifest"),
        ("[" * 100_000, "its first line is no manifest"),
    ],
)
def test_a_file_that_is_no_run_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FedcontextError, match=complaint):
        load([path])


def test_one_bad_file_among_good_ones_is_said_and_the_rest_is_used(runs: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("nonsense")
    loaded, problems = load([runs, bad])
    assert len(loaded) == 6
    assert len(problems) == 1
    assert "bad.jsonl" in problems[0]


def test_an_empty_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(FedcontextError, match="no run"):
        load([tmp_path])


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=6) | st.sampled_from(["dataset", "seed"]), ANY_JSON), st.lists(RECORDS))
def test_any_records_give_a_page(tmp_path_factory: pytest.TempPathFactory, given_settings: dict, rounds: list) -> None:
    path = tmp_path_factory.mktemp("any") / "any.jsonl"
    lines = [{"schema": 1, "settings": given_settings, "versions": given_settings}, *rounds]
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    text = to_json(content(*load([path])))
    assert "<" not in text
    assert json.loads(text)["scenes"][0]["groups"]
