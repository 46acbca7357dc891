"""Runs from files, whatever state those are in: what cannot be used is passed over, and said.

`fedcontext.read_run` is for files that must be whole. Here a crash may have cut a line, another program may have written
the records, and a device may be called anything: every value comes back with the type it should have, or as None.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fedcontext.errors import FedcontextError
from fedcontext.experiment import Experiment
from fedcontext.records import SCHEMA, RoundRecord, manifest

Row: TypeAlias = dict[str, Any]  # the fields of one round, by the names of `RoundRecord`

MEASURES = ("loss", "accuracy", "promised_change", "measured_change", "smoothness", "curvature", "condition")
COSTS = ("seconds", "bytes_down", "bytes_up")
LARGEST = 1e100  # a value beyond it is a mistake, and would make every picture of it unreadable
TEXT = 200  # characters of a name or a reason that are kept


@dataclass(frozen=True)
class Run:
    """One run: its settings, one row a round in order, and what could not be used of its file."""

    name: str
    settings: dict[str, Any]
    versions: dict[str, Any]
    rows: list[Row]
    problems: list[str] = field(default_factory=list)


def find(paths: Iterable[str | Path]) -> list[Path]:
    """Return the files that ``paths`` name: files as they are, directories by the .jsonl files in and under them.

    >>> find(["no-such-place"])
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: no-such-place: no such file or directory
    """
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise FedcontextError(f"{path}: no such file or directory")
        found |= dict.fromkeys(sorted(path.rglob("*.jsonl")) if path.is_dir() else [path])
    if not found:
        raise FedcontextError(f"no run (*.jsonl) in {', '.join(map(str, paths)) or 'nothing'}")
    return list(found)


def load(paths: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """Return the runs in ``paths``, and a sentence for each thing that could not be used."""
    runs, problems = [], []
    for path in find(list(paths)):
        try:
            runs.append(load_run(path))
            problems += runs[-1].problems
        except FedcontextError as error:
            problems.append(str(error))
    if not runs:
        raise FedcontextError(problems[0])
    return runs, problems


def load_run(path: Path) -> Run:
    """Return the run of one file; refuse a file whose first line is no manifest."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise FedcontextError(f"{path}: cannot be read ({error.strerror})") from None
    head = _parsed(lines[0])
    if head is None or "settings" not in head:
        raise FedcontextError(f"{path}: not a run of fedcontext (its first line is no manifest)")
    if head.get("schema") != SCHEMA:
        raise FedcontextError(f"{path}: schema must be {SCHEMA}, got {str(head.get('schema'))[:TEXT]}")
    rows, problems = _rows(_whole(path.name), lines[1:])
    return Run(_whole(path.stem), _mapping(head["settings"]), _mapping(head.get("versions")), rows, problems)


def started(experiment: Experiment) -> Run:
    """Return the run of an experiment that has no rounds yet, for `row_of` to grow.

    >>> started(Experiment(rounds=5)).settings["rounds"]
    5
    """
    head = json.loads(json.dumps(manifest(experiment)))
    return Run(experiment.name, head["settings"], head["versions"], [])


def row_of(record: RoundRecord) -> Row:
    """Return a record as `load` would give it back."""
    return clean(dataclasses.asdict(record), record.number)


def clean(fields: Row, number: int) -> Row:
    """Return a row with every field of its right type; what is missing, not finite or out of all bounds is None.

    >>> row = clean({"loss": float("nan"), "accuracy": 0.5, "seconds": "x", "devices": [3, "<b>"]}, 7)
    >>> row["number"], row["loss"], row["accuracy"], row["seconds"], row["devices"], row["weights"]
    (7, None, 0.5, 0.0, [3, '<b>'], [None, None])
    """
    given = fields.get("number")
    whole = isinstance(given, int) and not isinstance(given, bool) and 0 < given < 10**9
    row: Row = {"number": given if whole else number}
    row |= {name: number_or_none(fields.get(name)) for name in MEASURES}
    row |= {name: max(0.0, number_or_none(fields.get(name)) or 0.0) for name in COSTS}
    devices, weights = _list(fields.get("devices")), _list(fields.get("weights"))
    row["devices"] = [device_name(device) for device in devices]
    row["weights"] = [number_or_none(weight) for weight in (weights + [None] * len(devices))[: len(devices)]]
    row["excluded"] = {device_name(key): str(why)[:TEXT] for key, why in _mapping(fields.get("excluded")).items()}
    row["lost"] = fields.get("lost") is True
    return row


def number_or_none(value: Any) -> float | None:
    """Return a finite number of sensible size, or None.

    >>> number_or_none(2), number_or_none("2"), number_or_none(1e200), number_or_none(True)
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None  # which NaN and infinities are not


def device_name(value: Any) -> int | str:
    """Return a device's number, or whatever it is called as text.

    >>> device_name("12"), device_name(3), device_name("phone")
    (12, 3, 'phone')
    """
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**15:
        return value
    text = str(value)[:TEXT] if not isinstance(value, int) else hex(value)[:TEXT]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else text


def column(rows: Sequence[Row], name: str) -> list[Any]:
    """Return one field of all rounds."""
    return [row[name] for row in rows]


def _rows(name: str, lines: list[str]) -> tuple[list[Row], list[str]]:
    """Return the rounds in order, the last word on each, and what was passed over."""
    rows: dict[int, Row] = {}
    problems = []
    for position, line in _not_blank(lines):
        fields = _parsed(line)
        if fields is None:
            where = "last line, cut short" if position == len(lines) - 1 else f"line {position + 2}, not a record"
            problems.append(f"{name}: {where}, was passed over")
            continue
        row = clean(fields, len(rows) + 1)
        rows[row["number"]] = row
        odd = [key for key in MEASURES if fields.get(key) is not None and row[key] is None]
        problems += [f"{name}: round {row['number']} has no usable {key}" for key in odd]
    return [rows[number] for number in sorted(rows)], problems


def _not_blank(lines: list[str]) -> Iterator[tuple[int, str]]:
    return ((position, line) for position, line in enumerate(lines) if line.strip())


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
        if "\\u" in line:  # it may stand for half a character
            content = json.loads(_whole(json.dumps(content, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _whole(text: str) -> str:
    """Return text that any file can hold: no halves of characters (lone surrogates) in it."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
