from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcontext.errors import FedcontextError
from fedcontext.records import RoundRecord, read_run
from fedcontext.report.html import to_json
from fedcontext.report.page_data import page_data
from fedcontext.results.reader import coerce_row, read_file, read_runs
from fedcontext.results.run_file import write_records

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
        run = read_file(path)
        assert run.settings == head["settings"]
        assert run.problems == []
        for row, record in zip(run.rows, records, strict=True):
            assert {name: getattr(record, name) for name in row} == row


def test_a_last_line_cut_short_is_skipped_and_reported(runs: Path, tmp_path: Path) -> None:
    text = next(runs.glob("*.jsonl")).read_text()
    cut = tmp_path / "cut.jsonl"
    cut.write_text(text[: len(text.rstrip()) - 40])
    run = read_file(cut)
    assert len(run.rows) == text.count("\n") - 2
    assert run.problems == ["cut.jsonl: last line is truncated; skipped"]


def test_a_round_written_twice_counts_once_with_its_last_word(write_run) -> None:
    run = read_file(write_run([{"number": 1, "loss": 3}, {"number": 2, "loss": 2}, {"number": 1, "loss": 1}]))
    assert [(row["number"], row["loss"]) for row in run.rows] == [(1, 1.0), (2, 2.0)]


def test_a_row_has_every_field_of_a_record_whatever_it_was_given() -> None:
    absurd = {each.name: "absurd" for each in dataclasses.fields(RoundRecord)}
    assert coerce_row(absurd, 3) == coerce_row({}, 3) == vars(RoundRecord(3))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "the first line must be a manifest"),
        ("hello", "the first line must be a manifest"),
        ("[1]", "the first line must be a manifest"),
        ('{"schema": 9, "settings": {}}', "schema must be 1, got 9"),
        ("\x00\xff", "the first line must be a manifest"),
        ("[" * 100_000, "the first line must be a manifest"),
    ],
)
def test_a_file_that_is_no_run_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FedcontextError, match=complaint):
        read_runs([path])


def test_one_bad_file_among_good_ones_is_said_and_the_rest_is_used(runs: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("nonsense")
    loaded, problems = read_runs([runs, bad])
    assert len(loaded) == 6
    assert len(problems) == 1
    assert "bad.jsonl" in problems[0]


def test_an_empty_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(FedcontextError, match="no run"):
        read_runs([tmp_path])


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=6) | st.sampled_from(["dataset", "seed"]), ANY_JSON), st.lists(RECORDS))
def test_any_records_give_a_page(tmp_path_factory: pytest.TempPathFactory, given_settings: dict, rounds: list) -> None:
    path = tmp_path_factory.mktemp("any") / "any.jsonl"
    lines = [{"schema": 1, "settings": given_settings, "versions": given_settings}, *rounds]
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    text = to_json(page_data(*read_runs([path])))
    assert "<" not in text
    assert json.loads(text)["datasets"][0]["groups"]


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (lambda lines: [lines[0], lines[1][:40], lines[2]], "line 2 is not a JSON object"),
        (lambda lines: [lines[0].replace('"settings"', '"x"'), *lines[1:]], "the first line must be a manifest"),
        (lambda lines: ["[]", *lines[1:]], "the first line must be a manifest"),
        (lambda lines: ["[" * 100_000, *lines[1:]], "the first line must be a manifest"),
        (lambda lines: [lines[0], '{"number":' + "[" * 100_000, lines[2]], "line 2 is not a JSON object"),
        (lambda lines: [lines[0], "\udcff", lines[2]], "is not valid UTF-8"),
        (lambda lines: [lines[0], '{"number": "1"}', lines[2]], "line 2: number must be int, got '1'"),
        (lambda lines: [lines[0], '{"number": 1, "excluded": [1]}', lines[2]], "line 2: excluded must be dict"),
        (lambda lines: [lines[0], '{"number": 1, "colour": 1}', lines[2]], "unexpected keyword argument 'colour'"),
        (lambda lines: [], "the first line must be a manifest"),
    ],
)
def test_the_strict_reader_names_what_is_broken(runs: Path, tmp_path: Path, broken, complaint: str) -> None:
    lines = broken(next(runs.glob("*.jsonl")).read_text("utf-8").splitlines())
    path = tmp_path / "broken.jsonl"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8", errors="surrogateescape"))
    with pytest.raises(FedcontextError, match=complaint):
        read_run(path)


@settings(max_examples=100, deadline=None)
@given(
    st.binary()
    | ANY_JSON.map(
        lambda value: json.dumps({"schema": 1, "settings": {}}).encode() + b"\n" + json.dumps(value).encode() + b"\n"
    )
)
def test_the_strict_reader_raises_no_other_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "any.jsonl"
    path.write_bytes(content)
    with contextlib.suppress(FedcontextError):
        read_run(path)


def test_a_users_own_loop_can_write_records(tmp_path: Path) -> None:
    records = (RoundRecord(n, loss=np.float32(1 / n), devices=np.array([n]), weights=np.ones(1)) for n in (1, 2))  # type: ignore[arg-type]
    write_records(tmp_path / "own.jsonl", {"dataset": "hospitals", "clients": np.int64(3)}, records)
    head, again = read_run(tmp_path / "own.jsonl")
    assert head["settings"] == {"dataset": "hospitals", "clients": 3}
    assert [(record.number, record.loss, record.devices) for record in again] == [(1, 1.0, [1]), (2, 0.5, [2])]
