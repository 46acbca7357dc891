"""Run files: a manifest line with the settings, then one line of JSON per round."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np

from fedcontext.aggregation.result import Aggregation
from fedcontext.errors import FedcontextError, shortened, shown
from fedcontext.experiment import Experiment
from fedcontext.version import __version__

Settings: TypeAlias = Experiment | Mapping[str, Any]

SCHEMA = 1
MAX_INTEGER = 2**64  # a larger one in a file is an error


def described(default: Any, about: str) -> Any:
    """Return a dataclass field with a description that exported tables show; a type as default is called each time."""
    made = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return field(**made, metadata={"about": about})


@dataclass(frozen=True)
class RoundRecord:
    """The metrics of one round; None where a metric was not evaluated or is not defined.

    A field is added at the end and filled in `round_record` (the fields of `Motion` are copied there); it is then read
    back, exported and tracked. One of type ``float | None`` is a metric, one of ``int`` or ``float`` a cost, at least 0
    and summed up in exported tables, and one of ``dict[int, str]`` a note by device; ``bool``, ``str`` and
    ``list[float]`` are exported as they are, and other types need a line in ``KINDS`` of `results.export`. Values about
    the rule's own step are cleared under a server optimiser, in `Simulation._record` and `flower.exclusion`. What is
    drawn is up to `report.page_data` and ``report/assets/charts.js``.
    """

    number: int = field(metadata={"about": "the round, from 1"})
    loss: float | None = described(None, "over all devices' training data, after the round")
    accuracy: float | None = described(None, "over all devices' test data, after the round")
    devices: list[int] = described(list, "whose updates were applied")
    weights: list[float] = described(list, "of their updates, in the same order")
    promised_change: float | None = described(None, "the bound on the loss change at these weights")
    measured_change: float | None = described(None, "measured change of the loss")
    smoothness: float | None = described(None, "β of the bound")
    curvature: float | None = described(None, "the β at which the bound would have been exact along the step")
    condition: float | None = described(None, "of the Gram matrix of the normalised updates")
    seconds: float = described(0.0, "of this round: simulated, or wall-clock in Flower")
    bytes_down: int = described(0, "sent to devices in this round")
    bytes_up: int = described(0, "sent by devices in this round")
    excluded: dict[int, str] = described(dict, "the reason why each excluded device's update was not applied")
    clipped: dict[int, str] = described(dict, "what was clipped, used in part or suspiciously short, by device")
    lost: bool = described(False, "too few replies, the model was kept")
    update_norm: float | None = described(None, "length of the plain mean of the updates")
    step_norm: float | None = described(None, "length of the step")
    slope: float | None = described(
        None, "of the loss along the mean update, by the gradient estimate; negative is downhill"
    )
    backdoor: float | None = described(None, "share of the test samples with a backdoor's trigger that get its label")


ANNOTATIONS = {each.name: str(each.type) for each in dataclasses.fields(RoundRecord)}
ABOUT = {each.name: each.metadata["about"] for each in dataclasses.fields(RoundRecord)}


def round_record(
    number: int, result: Aggregation | None, loss: float | None, loss_before: float | None, **fields: Any
) -> RoundRecord:
    """Return the record of a round from its aggregation, None if it was lost, and the losses after and before it."""
    change = None if loss is None or loss_before is None else loss - loss_before
    if result is not None:
        promised = result.promised_change
        fields |= {
            "weights": list(result.applied.values()),
            "promised_change": promised if math.isfinite(promised) else None,
            "curvature": None if change is None else result.curvature(change),
            "condition": result.condition,
            **vars(result.motion),
        }
    return RoundRecord(number, loss=loss, measured_change=change, lost=result is None, **fields)


def manifest(settings: Settings) -> dict[str, Any]:
    """Return the first line of a run file: the settings of the run, and the versions that produced it.

    >>> manifest(Experiment())["settings"]["dataset"]
    'synthetic-1-1'
    """
    if not isinstance(settings, Experiment | Mapping):
        raise FedcontextError(f"settings must be an Experiment or a mapping, got {shown(settings)}")
    plain = dataclasses.asdict(settings) if isinstance(settings, Experiment) else dict(settings)
    return {"schema": SCHEMA, "settings": plain, "versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions that decide what a run computes.

    >>> sorted(versions())
    ['fedcontext', 'numpy', 'python']
    """
    return {"fedcontext": __version__, "numpy": np.__version__, "python": platform.python_version()}


def stream_records(settings: Settings, records: Iterable[RoundRecord], file: IO[str]) -> Iterator[RoundRecord]:
    """Yield each record after writing it to ``file``; an empty file gets the manifest first."""
    if file.tell() == 0:
        print(to_json(manifest(settings)), file=file, flush=True)
    for record in records:
        print(to_json(dataclasses.asdict(record)), file=file, flush=True)
        yield record


def read_run(path: str | Path) -> tuple[dict[str, Any], list[RoundRecord]]:
    """Return the manifest and the records of a run file; raise `FedcontextError` if any part of it is broken.

    The one exception is a last line without a newline, which a killed process leaves behind: it is skipped.
    `load_runs` reads whatever a broken file still holds.
    """
    path = Path(path)
    lines = read_lines(path)
    head = parse_manifest(lines[0], path)
    if not isinstance(head["settings"], dict):
        raise FedcontextError(
            f"{path}: not a fedcontext run: settings must be an object, got {shown(head['settings'])}"
        )
    return head, [parse_record(line, f"{path}: line {number}") for number, line in enumerate(lines[1:-1], 2)]


def read_lines(path: Path, errors: str = "strict") -> list[str]:
    """Return the lines of a UTF-8 file; ``errors`` as for `str.encode`."""
    try:
        return path.read_text(encoding="utf-8", errors=errors).split("\n")
    except OSError as error:
        raise FedcontextError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise FedcontextError(f"{path}: not a fedcontext run: byte {error.start} is not valid UTF-8") from None


def parse_manifest(line: str, path: Path) -> dict[str, Any]:
    """Return the manifest in the first line of a run file, if it is one and its schema is ours."""
    head = parse_object(line)
    if head is None or "settings" not in head:
        raise FedcontextError(f"{path}: not a fedcontext run: the first line must be a manifest")
    if head.get("schema") != SCHEMA:
        raise FedcontextError(f"{path}: schema must be {SCHEMA}, got {shown(head.get('schema'))}")
    return head


def parse_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in ``text``, None if there is none.

    >>> parse_object('{"a": 1}'), parse_object("[1]"), parse_object("[" * 100_000)
    ({'a': 1}, None, None)
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def parse_record(line: str, where: str) -> RoundRecord:
    """Return the record in a line of a run file; ``where`` begins the message of an error.

    >>> parse_record('{"number": 1, "loss": 0.5}', "line 2").loss
    0.5
    """
    fields = parse_object(line)
    if fields is None:
        raise FedcontextError(f"{where} is not a JSON object")
    try:
        record = RoundRecord(**{name: _with_integer_keys(value, name) for name, value in fields.items()})
    except (TypeError, ValueError) as error:
        raise FedcontextError(f"{where} is not a round's record ({shortened(str(error), 200)})") from None
    for name, annotation in ANNOTATIONS.items():
        value = getattr(record, name)
        if not fits(value, annotation):
            raise FedcontextError(f"{where}: {name} must be {annotation}, got {shown(value)}")
    return record


def _with_integer_keys(value: Any, name: str) -> Any:
    """Return an object of JSON with the integer keys that it had before it was written."""
    if isinstance(value, dict) and ANNOTATIONS.get(name, "").startswith("dict[int, "):
        return {int(key): child for key, child in value.items()}
    return value


def fits(value: Any, annotation: str) -> bool:
    """Return whether a value from a file is of an annotated type; in lists, null stands for NaN.

    >>> fits([1, 2.5, None], "list[float]"), fits(True, "int"), fits({3: "late"}, "dict[int, str]")
    (True, False, True)
    """
    kind, _, inner = annotation.removesuffix(" | None").removesuffix("]").partition("[")
    if value is None:
        return annotation.endswith(" | None")
    if kind == "list":
        return isinstance(value, list) and all(each is None or fits(each, inner) for each in value)
    if kind == "dict":
        return isinstance(value, dict) and all(fits(each, inner.partition(", ")[2]) for each in value.values())
    if kind == "int":
        return type(value) is int and abs(value) < MAX_INTEGER
    return (kind == "float" and fits(value, "int")) or type(value).__name__ == kind


def to_json(value: dict[str, Any]) -> str:
    """Return one line of a run file; raise an error for a value that JSON does not have.

    >>> to_json({"loss": math.nan, "weights": np.ones(1)})
    '{"loss": null, "weights": [1.0]}'
    """
    try:
        return json.dumps(_to_plain(value), allow_nan=False)
    except TypeError as error:
        raise FedcontextError(f"run files have numbers, text, lists and mappings only: {error}") from None


def _to_plain(value: Any) -> Any:
    """Return ``value`` without NumPy types, and with NaN and infinities as None, since JSON has neither."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _to_plain(child) for key, child in value.items()}
    return [_to_plain(child) for child in value] if isinstance(value, list | tuple) else value
