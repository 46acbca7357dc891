"""A tolerant reader of run files: what cannot be used is skipped and reported.

`fedcontext.read_run` is the strict reader. This one accepts truncated lines, records of other programs and arbitrary
device names: every field of a row has the type it should have, or is None.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fedcontext.errors import FedcontextError
from fedcontext.experiment import Experiment
from fedcontext.records import ANNOTATIONS, RoundRecord, fits, manifest, parse_manifest, parse_object, read_lines

Row: TypeAlias = dict[str, Any]  # the fields of one round, by the names of `RoundRecord`

METRICS = tuple(name for name, kind in ANNOTATIONS.items() if kind == "float | None")
COSTS = tuple(name for name, kind in ANNOTATIONS.items() if kind in ("int", "float") and name != "number")
NOTES = tuple(name for name, kind in ANNOTATIONS.items() if kind == "dict[int, str]")  # text by device
OTHERS = tuple(name for name in ANNOTATIONS if name not in ("number", "devices", "weights", *METRICS, *COSTS, *NOTES))
DEFAULTS = vars(RoundRecord(0))
MAX_NUMBER = 1e100  # a larger value is an error, and would make every chart of it unreadable
MAX_TEXT = 200  # characters kept of a name or a reason
MAX_ROUNDS = 250_000  # used of a file
MAX_PROBLEMS = 20  # named of a file; the others are counted


@dataclass(frozen=True)
class Run:
    """One run: its settings, one row per round in order, and what had to be skipped in its file."""

    name: str
    settings: dict[str, Any]
    versions: dict[str, Any]
    rows: list[Row]
    problems: list[str] = field(default_factory=list)

    @property
    def records(self) -> list[RoundRecord]:
        """The rows as records."""
        return [RoundRecord(**row) for row in self.rows]


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the run files in ``paths``: files as given, and all .jsonl files in and below directories.

    >>> find_files(["no-such-place"])
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: no-such-place: no such file or directory
    """
    files: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise FedcontextError(f"{path}: no such file or directory")
        files |= dict.fromkeys(sorted(path.rglob("*.jsonl")) if path.is_dir() else [path])
    if not files:
        raise FedcontextError(f"no run files (*.jsonl) in {', '.join(map(str, paths)) or 'an empty list of paths'}")
    return list(files)


def read_runs(paths: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """Return the runs in ``paths``, and one message for everything that was skipped."""
    runs, problems = [], []
    for path in find_files(list(paths)):
        try:
            runs.append(read_file(path))
            problems += runs[-1].problems
        except FedcontextError as error:
            problems.append(str(error))
    if not runs:
        raise FedcontextError(problems[0])
    return runs, problems


def read_file(path: Path) -> Run:
    """Return the run in one file; raise `FedcontextError` if its first line is not a manifest."""
    first, *lines = map(_replace_surrogates, read_lines(path, errors="replace"))
    head = parse_manifest(first, path)
    rows, problems = _read_rows(_replace_surrogates(path.name), lines)
    name = _replace_surrogates(path.stem)
    return Run(name, _dict_or_empty(head["settings"]), _dict_or_empty(head.get("versions")), rows, problems)


def new_run(experiment: Experiment) -> Run:
    """Return the run of an experiment without any rounds yet.

    >>> new_run(Experiment(rounds=5)).settings["rounds"]
    5
    """
    head = json.loads(json.dumps(manifest(experiment)))  # tuples become lists, as in a file
    return Run(experiment.name, head["settings"], head["versions"], [])


def to_row(record: RoundRecord) -> Row:
    """Return a record as `read_runs` would read it back from a file."""
    return coerce_row(dataclasses.asdict(record), record.number)


def coerce_row(fields: Row, number: int) -> Row:
    """Return a row with every field of its right type; a missing, infinite or absurdly large value becomes None.

    >>> row = coerce_row({"loss": float("nan"), "accuracy": 0.5, "seconds": "x", "devices": [3, "<b>"]}, 7)
    >>> row["number"], row["loss"], row["accuracy"], row["seconds"], row["devices"], row["weights"]
    (7, None, 0.5, 0.0, [3, '<b>'], [None, None])
    """
    given = fields.get("number")
    is_round = isinstance(given, int) and not isinstance(given, bool) and 0 < given < 10**9
    row: Row = {"number": given if is_round else number}
    row |= {name: number_or_none(fields.get(name)) for name in METRICS}
    row |= {name: max(0.0, number_or_none(fields.get(name)) or 0.0) for name in COSTS}
    devices, weights = (value if isinstance(value := fields.get(key), list) else [] for key in ("devices", "weights"))
    row["devices"] = [device_id(device) for device in devices]
    row["weights"] = [number_or_none(weight) for weight in (weights + [None] * len(devices))[: len(devices)]]
    notes = {name: _dict_or_empty(fields.get(name)).items() for name in NOTES}
    row |= {name: {device_id(device): str(note)[:MAX_TEXT] for device, note in own} for name, own in notes.items()}
    return row | {name: _value_or_default(name, fields.get(name)) for name in OTHERS}


def _value_or_default(name: str, value: Any) -> Any:
    return value if fits(value, ANNOTATIONS[name]) else DEFAULTS[name]


def number_or_none(value: Any) -> float | None:
    """Return a finite number of plausible size, or None.

    >>> number_or_none(2), number_or_none("2"), number_or_none(1e200), number_or_none(True)
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= MAX_NUMBER else None  # False for NaN and infinities


def device_id(value: Any) -> int | str:
    """Return a device's number, or its name as text.

    >>> device_id("12"), device_id(3), device_id("phone")
    (12, 3, 'phone')
    """
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**15:
        return value
    text = (hex(value) if isinstance(value, int) else str(value))[:MAX_TEXT]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else text


def column(rows: Sequence[Row], name: str) -> list[Any]:
    """Return one field of all rows."""
    return [row[name] for row in rows]


def _read_rows(name: str, lines: Sequence[str]) -> tuple[list[Row], list[str]]:
    """Return the rounds in order, and what was skipped; of a round written twice, the later line counts."""
    rows: dict[int, Row] = {}
    problems = []
    for position, line in enumerate(lines):
        if not line.strip():
            continue
        if len(rows) == MAX_ROUNDS:
            problems.append(f"{name}: only the first {MAX_ROUNDS} rounds are used")
            break
        fields = parse_object(line)
        if fields is None:
            at_end = position == len(lines) - 1
            what = "last line is truncated" if at_end else f"line {position + 2} is not a record"
            problems.append(f"{name}: {what}; skipped")
            continue
        row = coerce_row(fields, len(rows) + 1)
        rows[row["number"]] = row
        unusable = [key for key in METRICS if fields.get(key) is not None and row[key] is None]
        problems += [f"{name}: round {row['number']} has no usable {key}" for key in unusable]
    more = len(problems) - MAX_PROBLEMS
    problems[MAX_PROBLEMS:] = [f"{name}: {more} more problems"] if more > 0 else []
    return [rows[number] for number in sorted(rows)], problems


def _replace_surrogates(text: str) -> str:
    """Return text that can be encoded: lone surrogates, also escaped ones in JSON, become question marks."""
    if "\\u" in text and (value := parse_object(text)) is not None:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except RecursionError:  # nested too deeply: reported as not a record
            return "null"
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _dict_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
