"""Runs as one tidy table, one row per round: as columns for pandas and Polars, or in a Parquet or CSV file."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from fedcontext.errors import FedcontextError, require
from fedcontext.files.storage import replacing
from fedcontext.records import ABOUT, ANNOTATIONS
from fedcontext.results.reader import COSTS, METRICS, NOTES, Row, Run, read_runs

Table: TypeAlias = dict[str, list[Any]]  # columns of equal length

RUN_COLUMNS = {
    "run": "text: the name of the run file",
    "dataset": "text",
    "algorithm": "text",
    "seed": "integer",
    "settings": "text: all settings of the run as JSON",
}
KINDS = {
    "int": "integer",
    "bool": "boolean",
    "str": "text",
    "list[int]": "list of text",
    "list[float]": "list of numbers",
}
KINDS |= {"dict[int, str]": "text: JSON", **dict.fromkeys((*METRICS, *COSTS), "number")}
ORDER = dict.fromkeys(("number", *METRICS, *COSTS, *(f"{name}_total" for name in COSTS), *ABOUT))


def _about(column: str) -> str:
    """Return the type of a column and its description."""
    if column not in ABOUT:
        return f"number: {column.removesuffix('_total')} from the start of the run to the end of this round"
    return f"{KINDS.get(column) or KINDS[ANNOTATIONS[column]]}: {ABOUT[column]}"


SCHEMA = {**RUN_COLUMNS, **{column: _about(column) for column in ORDER}}  # every column, its type and what it is
FORMATS = (".parquet", ".csv")
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would compute a cell that starts like this


def load_runs(path: str | Path | Iterable[str | Path]) -> Table:
    """Return the rounds of all runs in a file, a directory or several of them as columns: one row per round.

    The columns are described in `fedcontext.results.export.SCHEMA`; unknown values are None.
    ``pandas.DataFrame(table)`` and ``polars.DataFrame(table)`` accept the table as it is. Broken lines and files are
    skipped with a warning.

    >>> import tempfile, fedcontext as fc
    >>> from fedcontext.runner import run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     records = run(fc.Experiment("synthetic-iid", "fedavg", rounds=2), Path(folder))
    ...     table = load_runs(folder)
    >>> table["algorithm"], table["number"]
    (['fedavg', 'fedavg'], [1, 2])
    """
    runs, problems = read_runs([path] if isinstance(path, str | Path) else path)
    for problem in problems:
        warnings.warn(problem, stacklevel=2)
    return to_table(runs)


def to_table(runs: Iterable[Run]) -> Table:
    """Return the rounds of ``runs`` as columns, named and ordered as in `SCHEMA`; the totals restart at each run."""
    table: Table = {name: [] for name in SCHEMA}
    for run in runs:
        constant = _run_columns(run)
        totals = dict.fromkeys(COSTS, 0.0)
        for row in run.rows:
            totals = {name: total + row[name] for name, total in totals.items()}
            cells = {**constant, **row, **{f"{name}_total": total for name, total in totals.items()}}
            cells |= {"devices": list(map(str, row["devices"])), **{name: json.dumps(row[name]) for name in NOTES}}
            for name, value in cells.items():
                table[name].append(value)
    return table


def _run_columns(run: Run) -> Row:
    seed = run.settings.get("seed")
    return {
        "run": run.name,
        "dataset": str(run.settings.get("dataset", "")),
        "algorithm": str(run.settings.get("algorithm", "")),
        "seed": seed if isinstance(seed, int) and abs(seed) < 2**63 else None,
        "settings": json.dumps(run.settings),
    }


def export(paths: Iterable[str | Path], out: str | Path) -> tuple[int, list[str]]:
    """Write the runs in ``paths`` to ``out`` (.parquet or .csv); on failure no file is left behind.

    Return the number of rounds, and one message for everything in ``paths`` that was skipped.
    """
    out = Path(out)
    if out.suffix not in FORMATS:
        raise FedcontextError(f"output must end in {' or '.join(FORMATS)}, got {out.name!r}")
    runs, problems = read_runs(paths)
    table = to_table(runs)
    with replacing(out) as temporary:
        (_write_parquet if out.suffix == ".parquet" else _write_csv)(table, temporary)
    return len(table["run"]), problems


def _write_parquet(table: Table, path: Path) -> None:
    pa = require("pyarrow", extra="export")
    types = {"integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_(), "text": pa.string()}
    types |= {"list of text": pa.list_(pa.string()), "list of numbers": pa.list_(pa.float64())}
    schema = pa.schema(
        [pa.field(name, types[about.partition(":")[0]], metadata={"about": about}) for name, about in SCHEMA.items()]
    )
    require("pyarrow.parquet", extra="export").write_table(pa.table(table, schema=schema), path)


def _write_csv(table: Table, path: Path) -> None:
    """Write CSV: an empty cell for None, lists as JSON."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows([_to_cell(value) for value in values] for values in zip(*table.values(), strict=True))


def _to_cell(value: Any) -> Any:
    if isinstance(value, list):
        return json.dumps(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value
