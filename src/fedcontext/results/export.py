"""Runs as one tidy table, one row per round: as columns for pandas and Polars, or in a Parquet or CSV file."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from fedcontext.errors import FedcontextError, require
from fedcontext.results.reader import COSTS, METRICS, Row, Run, read_runs
from fedcontext.storage import replacing

Table: TypeAlias = dict[str, list[Any]]  # columns of equal length

SCHEMA = {
    "run": "text: the name of the run file",
    "dataset": "text",
    "algorithm": "text",
    "seed": "integer",
    "settings": "text: all settings of the run as JSON",
    "number": "integer: the round, from 1",
    "loss": "number: over all devices' training data, after the round",
    "accuracy": "number: over all devices' test data, after the round",
    "promised_change": "number: the bound on the loss change at the round's weights",
    "measured_change": "number: the loss change that happened",
    "smoothness": "number: β of the bound",
    "curvature": "number: the β at which the bound would have been exact along the step",
    "condition": "number: of the Gram matrix of the normalised updates",
    "update_norm": "number: length of the plain mean of the updates",
    "step_norm": "number: length of the step",
    "slope": "number: of the loss along the mean update, by the gradient estimate; negative is downhill",
    "seconds": "number: simulated, of this round",
    "bytes_down": "number: sent to devices in this round",
    "bytes_up": "number: sent by devices in this round",
    "seconds_total": "number: simulated, from the start of the run to the end of this round",
    "bytes_down_total": "number: sent to devices from the start of the run to the end of this round",
    "bytes_up_total": "number: sent by devices from the start of the run to the end of this round",
    "devices": "list of text: whose updates were applied",
    "weights": "list of numbers: of their updates",
    "excluded": "text: JSON, the reason why each excluded device's update was not applied",
    "lost": "boolean: too few replies, the model was kept",
}
FORMATS = (".parquet", ".csv")
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would compute a cell that starts like this


def load_runs(path: str | Path | Iterable[str | Path]) -> Table:
    """Return the rounds of all runs in a file, a directory or several of them as columns: one row per round.

    The columns are described in `fedcontext.results.export.SCHEMA`; unknown values are None. ``pandas.DataFrame(table)`` and
    ``polars.DataFrame(table)`` accept the table as it is. Broken lines and files are skipped with a warning.

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
            cells |= {"devices": list(map(str, row["devices"])), "excluded": json.dumps(row["excluded"])}
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


def export(paths: Iterable[str | Path], out: Path) -> tuple[int, list[str]]:
    """Write the runs in ``paths`` to ``out`` (.parquet or .csv); on failure no file is left behind.

    Return the number of rounds, and one message for everything in ``paths`` that was skipped.
    """
    if out.suffix not in FORMATS:
        raise FedcontextError(f"output must end in {' or '.join(FORMATS)}, got {out.name!r}")
    runs, problems = read_runs(paths)
    table = to_table(runs)
    with replacing(out) as temporary:
        (_write_parquet if out.suffix == ".parquet" else _write_csv)(table, temporary)
    return len(table["run"]), problems


def _write_parquet(table: Table, path: Path) -> None:
    pa = require("pyarrow", extra="export")
    numbers = dict.fromkeys((*METRICS, *COSTS, *(f"{name}_total" for name in COSTS)), pa.float64())
    lists = {"devices": pa.list_(pa.string()), "weights": pa.list_(pa.float64())}
    types = {"seed": pa.int64(), "number": pa.int64(), "lost": pa.bool_(), **numbers, **lists}
    schema = pa.schema([pa.field(n, types.get(n, pa.string()), metadata={"about": SCHEMA[n]}) for n in SCHEMA])
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
