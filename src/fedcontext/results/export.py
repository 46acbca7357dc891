"""Runs as one tidy table, one row a round: into Parquet or CSV files, or as columns for pandas and Polars."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from fedcontext.errors import FedcontextError, require
from fedcontext.results.reader import COSTS, MEASURES, Run, load

Table: TypeAlias = dict[str, list[Any]]  # columns of equal length

SCHEMA = {
    "run": "text: the name of the run's file",
    "dataset": "text",
    "algorithm": "text",
    "seed": "whole number",
    "settings": "text: all settings of the run as JSON",
    "number": "whole number: the round, from 1",
    "loss": "number: over all devices' training data, after the round",
    "accuracy": "number: over all devices' test data, after the round",
    "promised_change": "number: the bound on the loss change at the round's weights",
    "measured_change": "number: the loss change that happened",
    "smoothness": "number: β of the bound",
    "curvature": "number: the β at which the bound would have been exact along the step",
    "condition": "number: of the Gram matrix of the normalised updates",
    "seconds": "number: simulated, of this round",
    "bytes_down": "number: sent to devices in this round",
    "bytes_up": "number: sent by devices in this round",
    "devices": "list of text: whose updates were applied",
    "weights": "list of numbers: of their updates",
    "excluded": "text: JSON, why each device was left out",
    "lost": "true or false: too few answers, the model was kept",
}
FORMATS = (".parquet", ".csv")
FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # how a cell begins that a spreadsheet would compute


def load_runs(path: str | Path | Iterable[str | Path]) -> Table:
    """Return the rounds of all runs in a file, a directory or several, as columns: one row a round, None where unknown.

    What each column holds is in `fedcontext.results.export.SCHEMA`. ``pandas.DataFrame(table)`` and ``polars.DataFrame(table)`` take it as it is.
    A warning says each thing in the files that could not be used, such as a line cut short.

    >>> import tempfile, fedcontext as fc
    >>> from fedcontext.runner import run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     records = run(fc.Experiment("synthetic-iid", "fedavg", rounds=2), Path(folder))
    ...     table = load_runs(folder)
    >>> table["algorithm"], table["number"]
    (['fedavg', 'fedavg'], [1, 2])
    """
    runs, problems = load([path] if isinstance(path, str | Path) else path)
    for problem in problems:
        warnings.warn(problem, stacklevel=2)
    return tidy(runs)


def tidy(runs: Iterable[Run]) -> Table:
    """Return the rounds of ``runs`` as columns, named and ordered as in `SCHEMA`."""
    table: Table = {name: [] for name in SCHEMA}
    for run in runs:
        seed = run.settings.get("seed")
        own = {
            "run": run.name,
            "dataset": str(run.settings.get("dataset", "")),
            "algorithm": str(run.settings.get("algorithm", "")),
            "seed": seed if isinstance(seed, int) and abs(seed) < 2**63 else None,
            "settings": json.dumps(run.settings),
        }
        for row in run.rows:
            texts = {"devices": list(map(str, row["devices"])), "excluded": json.dumps(row["excluded"])}
            for name, value in {**own, **row, **texts}.items():
                table[name].append(value)
    return table


def export(paths: Iterable[str | Path], out: Path) -> tuple[int, list[str]]:
    """Write the runs in ``paths`` to ``out`` (.parquet or .csv), whole or not at all.

    Return the number of rounds, and a sentence for each thing in ``paths`` that could not be used.
    """
    if out.suffix not in FORMATS:
        raise FedcontextError(f"output must end in {' or '.join(FORMATS)}, got {out.name!r}")
    runs, problems = load(paths)
    table = tidy(runs)
    scratch = out.with_name(f".{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        (_write_parquet if out.suffix == ".parquet" else _write_csv)(table, scratch)
        scratch.replace(out)
    except OSError as error:
        raise FedcontextError(f"{out}: cannot be written ({error.strerror or error})") from None
    finally:
        with suppress(OSError):  # it is gone where all went well
            scratch.unlink()
    return len(table["run"]), problems


def _write_parquet(table: Table, path: Path) -> None:
    pa = require("pyarrow", extra="export")
    numbers = dict.fromkeys((*MEASURES, *COSTS), pa.float64())
    lists = {"devices": pa.list_(pa.string()), "weights": pa.list_(pa.float64())}
    types = {"seed": pa.int64(), "number": pa.int64(), "lost": pa.bool_(), **numbers, **lists}
    schema = pa.schema([pa.field(n, types.get(n, pa.string()), metadata={"about": SCHEMA[n]}) for n in SCHEMA])
    require("pyarrow.parquet", extra="export").write_table(pa.table(table, schema=schema), path)


def _write_csv(table: Table, path: Path) -> None:
    """Write CSV: nothing for None, lists as JSON, and a quote before text that a spreadsheet would take for a formula."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows([_cell(value) for value in values] for values in zip(*table.values(), strict=True))


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return json.dumps(value)
    return f"'{value}" if isinstance(value, str) and value[:1] in FORMULAS else value
