"""What is written down of a run: a manifest line, then one line of JSON a round."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedcontext.errors import FedcontextError
from fedcontext.experiment import Experiment
from fedcontext.version import __version__

SCHEMA = 1


@dataclass(frozen=True)
class RoundRecord:
    """What happened in one round. None: not evaluated, or not defined."""

    number: int  # from 1
    loss: float | None  # over all devices' training data, after the round
    accuracy: float | None  # over all devices' test data, after the round
    devices: list[int]  # whose updates were applied
    weights: list[float]  # of their updates
    promised_change: float | None  # the bound on the loss change at these weights
    measured_change: float | None  # the loss change that happened
    smoothness: float | None  # β of the bound
    curvature: float | None  # the β at which the bound would have been exact along the step
    condition: float | None  # of the Gram matrix of the normalised updates
    seconds: float  # simulated, of this round
    bytes_down: int
    bytes_up: int
    excluded: dict[int, str] = field(default_factory=dict)  # device: why it was left out
    lost: bool = False  # too few answers: the model was kept


def manifest(experiment: Experiment | Mapping[str, Any]) -> dict[str, Any]:
    """Return the first line of a run's file: its settings, and the versions that made it.

    A run outside the simulator gives its settings as a mapping.

    >>> manifest(Experiment())["settings"]["dataset"]
    'synthetic-1-1'
    """
    versions = {"fedcontext": __version__, "numpy": np.__version__, "python": platform.python_version()}
    settings = dataclasses.asdict(experiment) if isinstance(experiment, Experiment) else dict(experiment)
    return {"schema": SCHEMA, "settings": settings, "versions": versions}


def write(
    experiment: Experiment | Mapping[str, Any], records: Iterable[RoundRecord], file: IO[str]
) -> Iterator[RoundRecord]:
    """Yield ``records`` while writing the manifest and each of them to ``file`` as a complete line.

    A file that already holds rounds (see `keep`) has its manifest, and is only added to.

    >>> import io
    >>> file = io.StringIO()
    >>> list(write(Experiment(), [], file)), file.getvalue()[:12]
    ([], '{"schema": 1')
    """
    if file.tell() == 0:
        print(_line(manifest(experiment)), file=file, flush=True)
    for record in records:
        print(_line(dataclasses.asdict(record)), file=file, flush=True)
        yield record


def read_run(path: str | Path) -> tuple[dict[str, Any], list[RoundRecord]]:
    """Return the manifest and the rounds of a run's file; a last line cut short by a crash is passed over."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    try:
        head = json.loads(lines[0])
        if head["schema"] != SCHEMA:
            raise FedcontextError(f"{path}: schema must be {SCHEMA}, got {head['schema']}")
        return head, [_record(json.loads(line)) for line in lines[1:-1]]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise FedcontextError(f"{path}: not a run of fedcontext ({type(error).__name__}: {error})") from None


def keep(path: Path, rounds: int) -> list[RoundRecord]:
    """Return the first ``rounds`` records of a run's file, after cutting the file behind them: to go on from there."""
    if not path.exists():
        raise FedcontextError(f"{path}: rounds 1 to {rounds} are to be kept, but the file is not there")
    _, records = read_run(path)
    if [record.number for record in records[:rounds]] != list(range(1, rounds + 1)):
        raise FedcontextError(f"{path}: rounds 1 to {rounds} are to be kept, but it holds {len(records)} in all")
    lines = path.read_text(encoding="utf-8").split("\n")
    fresh = path.with_name(f".{path.name}.part")  # one that a killed writer left is overwritten
    with fresh.open("w", encoding="utf-8") as file:
        file.write("\n".join(lines[: rounds + 1]) + "\n")
        file.flush()
        os.fsync(file.fileno())  # a power cut must not leave the checkpoint ahead
    os.replace(fresh, path)
    return records[:rounds]


def _record(fields: dict[str, Any]) -> RoundRecord:
    excluded = {int(device): reason for device, reason in fields.pop("excluded").items()}
    return RoundRecord(**fields, excluded=excluded)


def _line(content: dict[str, Any]) -> str:
    return json.dumps(_plain(content), allow_nan=False)


def _plain(value: Any) -> Any:
    """Return ``value`` with NaN and infinities as null: JSON has no other word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(child) for key, child in value.items()}
    return [_plain(child) for child in value] if isinstance(value, list | tuple) else value
