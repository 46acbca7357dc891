from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedcontext as fc
from fedcontext.cli.app import app
from fedcontext.results.export import SCHEMA, export


def test_one_row_a_round_with_the_documented_columns(runs: Path) -> None:
    table = fc.load_runs(runs)
    assert list(table) == list(SCHEMA)
    records = [(path.stem, record) for path in sorted(runs.glob("*.jsonl")) for record in fc.read_run(path)[1]]
    assert list(zip(table["run"], table["number"], table["loss"], strict=True)) == [
        (name, record.number, record.loss) for name, record in records
    ]
    assert [len(values) for values in table.values()] == [len(records)] * len(SCHEMA)


def test_every_field_of_a_record_is_exported_as_it_was_written(tmp_path: Path) -> None:
    kinds = {"int": 3, "float": 0.5, "float | None": 0.5, "bool": True, "list[int]": [4], "list[float]": [0.5]}
    kinds["dict[int, str]"] = {4: "late"}
    full = {each.name: kinds[each.type] for each in dataclasses.fields(fc.RoundRecord)}
    fc.write_records(tmp_path / "run.jsonl", {}, [fc.RoundRecord(**full)])
    assert fc.read_run(tmp_path / "run.jsonl")[1] == [fc.RoundRecord(**full)]
    table = fc.load_runs(tmp_path)
    text = {"list[int]": ["4"], "dict[int, str]": '{"4": "late"}'}
    expected = {each.name: text.get(each.type, full[each.name]) for each in dataclasses.fields(fc.RoundRecord)}
    assert {name: table[name][0] for name in full} == expected


def test_pandas_and_polars_take_the_table_as_it_is(runs: Path) -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    table = fc.load_runs(runs)
    frame, other = pandas.DataFrame(table), polars.DataFrame(table)
    assert frame.shape == other.shape == (36, len(SCHEMA))
    assert frame.groupby("algorithm")["loss"].min().to_dict() == {
        name: min(loss for loss, of in zip(table["loss"], table["algorithm"], strict=True) if of == name)
        for name in set(table["algorithm"])
    }
    assert other["weights"].list.len().sum() == sum(map(len, table["weights"]))


def test_parquet_holds_the_same_table(runs: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert export([runs], tmp_path / "deep" / "runs.parquet") == (36, [])
    stored = parquet.read_table(tmp_path / "deep" / "runs.parquet")
    assert stored.to_pydict() == fc.load_runs(runs)
    assert stored.schema.field("loss").metadata == {b"about": SCHEMA["loss"].encode()}


def test_csv_holds_the_same_table_as_text(runs: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(runs), "-o", str(tmp_path / "runs.csv")])
    assert result.exit_code == 0, result.output
    with (tmp_path / "runs.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    table = fc.load_runs(runs)
    assert [float(row["loss"]) for row in rows] == table["loss"]
    assert [json.loads(row["weights"]) for row in rows] == table["weights"]
    assert [row["promised_change"] or None for row in rows] == [
        None if value is None else repr(value) for value in table["promised_change"]
    ]


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "\t", "\r"])
def test_a_spreadsheet_would_not_run_a_name(write_run, tmp_path: Path, begin: str) -> None:
    export([write_run([{"loss": 1}], algorithm=f"{begin}HYPERLINK(1)")], tmp_path / "runs.csv")
    with (tmp_path / "runs.csv").open(encoding="utf-8", newline="") as file:
        assert next(csv.DictReader(file))["algorithm"] == f"'{begin}HYPERLINK(1)"


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_half_a_character_is_replaced(write_run, tmp_path: Path, suffix: str) -> None:
    half = "x\ud800"
    path = write_run([{"loss": 1, "devices": [half], "excluded": {half: half}}], algorithm=half, dataset="é😀")
    assert export([path], tmp_path / f"runs{suffix}") == (1, [])
    table = fc.load_runs(path)
    assert (table["algorithm"], table["devices"], table["dataset"]) == (["x?"], [["x?"]], ["é😀"])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("a mistake")])
def test_a_failed_export_leaves_nothing(runs: Path, tmp_path: Path, monkeypatch, error: Exception) -> None:
    class HalfATable:
        def __init__(self, file: io.TextIOBase) -> None:
            file.write("half a table")

        def writerow(self, row: object) -> None:
            raise error

    monkeypatch.setattr("csv.writer", HalfATable)
    known = fc.FedcontextError if isinstance(error, OSError) else RuntimeError
    with pytest.raises(known, match=r"runs.csv: cannot be written \(No space left|a mistake"):
        export([runs], tmp_path / "runs.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fc.FedcontextError, match=r"runs.csv: cannot be written \("):
        export([runs], tmp_path / "file" / "runs.csv")


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_hostile_records_export(write_run, tmp_path: Path, suffix: str) -> None:
    rounds = [{"loss": "x", "devices": ["<b>", 2], "weights": None, "excluded": {"a": 1}}, {"number": 10**30}, '{"cut']
    count, _ = export([write_run(rounds, seed=10**30)], tmp_path / f"runs{suffix}")
    assert count == 2


def test_whoever_reads_broken_records_says_the_same_about_them(write_run, tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text("no manifest")
    write_run([{"loss": 1}, "nonsense", {"loss": "x"}, '{"cut'])
    said = [
        "hostile.jsonl: line 3 is not a record; skipped",
        "hostile.jsonl: round 2 has no usable loss",
        "hostile.jsonl: last line is truncated; skipped",
        f"{tmp_path / 'odd.jsonl'}: not a fedcontext run: the first line must be a manifest",
    ]
    assert export([tmp_path], tmp_path / "runs.csv") == (2, said)
    for command, name in (("export", "runs.csv"), ("report", "runs.html")):
        result = CliRunner().invoke(app, [command, str(tmp_path), "-o", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        assert result.stderr.splitlines() == said, command
    with pytest.warns(UserWarning, match="jsonl") as warned:
        table = fc.load_runs(tmp_path)
    assert [str(warning.message) for warning in warned] == said
    assert all(Path(warning.filename) == Path(__file__) for warning in warned)
    assert table["loss"] == [1.0, None]


def test_other_formats_are_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(fc.FedcontextError, match=r"output must end in .parquet or .csv, got 'runs.xlsx'"):
        export([runs], tmp_path / "runs.xlsx")


def test_totals_are_cumulative_and_restart_at_each_run(runs: Path) -> None:
    table = fc.load_runs(runs)
    for cost in ("seconds", "bytes_down", "bytes_up"):
        total = dict.fromkeys(table["run"], 0.0)
        for run, spent, so_far in zip(table["run"], table[cost], table[f"{cost}_total"], strict=True):
            total[run] += spent
            assert so_far == total[run]
