"""Write run files: start one, continue it after a crash, and replace the file of an earlier run at the end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from fedcontext.errors import FedcontextError, shown
from fedcontext.files.storage import check_target, clean, make_folder, naming, write_text
from fedcontext.records import (
    RoundRecord,
    Settings,
    manifest,
    parse_record,
    read_lines,
    read_run,
    stream_records,
    to_json,
)

LOG = logging.getLogger("fedcontext")
HOW_TO_RESTART = "; to start again at round 1, delete the run's checkpoint"


def write_records(path: str | Path, settings: Settings, records: Iterable[RoundRecord]) -> None:
    """Write a run file from your own training loop, for `load_runs`, ``fedcontext report`` and ``fedcontext export``.

    ``settings`` is an `Experiment` or any mapping; the report groups runs by its ``dataset``, ``algorithm`` and
    ``seed``. Each record is flushed as it comes, so ``records`` may be a generator over a running loop. An earlier file
    at ``path`` is replaced at the end; until then the records are in ``<path>.new``. Nothing is written if the settings
    or a record of a list cannot be read back; a generator's records before such a one stay.

    >>> import tempfile
    >>> records = [RoundRecord(number=1, loss=0.9, devices=[3, 7], weights=[0.5, 0.5]), RoundRecord(number=2, loss=0.7)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_records(f"{folder}/run.jsonl", {"dataset": "hospitals", "algorithm": "fedavg", "seed": 0}, records)
    ...     head, again = read_run(f"{folder}/run.jsonl")
    >>> head["settings"]["dataset"], again == records
    ('hospitals', True)
    """
    if not isinstance(records, Iterable):
        raise FedcontextError(f"records must be RoundRecord objects in a list or generator, got {shown(records)}")
    to_json(manifest(settings))  # raises an error for what cannot be written
    checked = list(_checked(records)) if isinstance(records, list | tuple) else _checked(records)
    with open_run(Path(path), settings) as (active, _):
        for _ in append_records(active, settings, checked):
            pass


def _checked(records: Iterable[RoundRecord]) -> Iterator[RoundRecord]:
    """Yield the records; raise an error for one that cannot be read back or whose number is not above the last."""
    last = 0
    for record in records:
        if not isinstance(record, RoundRecord):
            raise FedcontextError(f"records must be RoundRecord objects, got {shown(record)}")
        if not isinstance(record.number, int) or record.number <= last:
            raise FedcontextError(f"rounds count from 1 and go up: got number {shown(record.number)} after {last}")
        parse_record(to_json(asdict(record)), f"the record of round {record.number}")
        last = record.number
        yield record


def append_records(path: Path, settings: Settings, records: Iterable[RoundRecord]) -> Iterator[RoundRecord]:
    """Yield each record after writing it to the end of ``path``; an empty file gets the manifest first."""
    for batch in chain([[]], ([record] for record in records)):
        with naming(path), path.open("a", encoding="utf-8") as file:
            list(stream_records(settings, batch, file))
        yield from batch


@contextmanager
def open_run(path: Path, settings: Settings, done: int = 0) -> Iterator[tuple[Path, list[RoundRecord]]]:
    """Yield the file to which a run appends its records, and the first ``done`` records, which are already in it.

    A finished file is never shortened: where there is one, records go to ``<path>.new``, which replaces ``path`` at the
    end of the block. If the block fails with fewer rounds than ``path`` has, both are kept, so that the run can resume.
    """
    for file in (path, _new_file(path)):
        check_target(file)
    make_folder(path.parent)
    clean(path, _new_file(path))
    active, records = _continued(path, settings, done) if done else (_first_file(path), [])
    try:
        yield active, records
    except BaseException:
        _cut_incomplete_line(active)
        _replace_earlier(active, path, complete=False)
        raise
    _replace_earlier(active, path, complete=True)


def _replace_earlier(active: Path, path: Path, complete: bool) -> None:
    """Replace an earlier run's records by this run's, unless this run failed and those are finished or longer."""
    rounds = count_rounds(active)
    if not rounds and not complete:
        active.unlink(missing_ok=True)  # it has only the manifest
    elif active == path or not active.exists():
        return
    elif complete or (rounds >= count_rounds(path) and not _is_finished(path)):
        os.replace(active, path)
    else:
        LOG.warning("%s is of an earlier run that got further, and is kept; this run's rounds are in %s", path, active)


def _new_file(path: Path) -> Path:
    """Return where records go while an earlier file is at ``path``."""
    return path.with_name(f"{path.name}.new")


def _first_file(path: Path) -> Path:
    """Return the file for a run from its start: ``path`` if that is free."""
    with naming(path):
        _new_file(path).unlink(missing_ok=True)
    return _new_file(path) if path.exists() and path.stat().st_size else path


def _continued(path: Path, settings: Settings, done: int) -> tuple[Path, list[RoundRecord]]:
    """Return the file with the first ``done`` rounds of a run and nothing behind them, and those records."""
    source, records = _written(path, settings, done)
    active = _new_file(path) if len(records) > done and _is_finished(source) else source
    kept = "\n".join(read_lines(source)[: done + 1]) + "\n"
    if not active.exists() or active.read_bytes() != kept.encode():
        write_text(active, kept)  # on disk when it returns: the checkpoint must not be ahead of the records
    if active == path:
        _new_file(path).unlink(missing_ok=True)
    return active, records[:done]


def copy_rounds(source: Path, old: Settings, path: Path, new: Settings, done: int) -> None:
    """Begin the run file ``path`` of ``new`` settings with the first ``done`` rounds of a run of ``old`` ones."""
    written, _ = _written(source, old, done)
    lines = [to_json(manifest(new)), *read_lines(written)[1 : done + 1]]
    write_text(_first_file(path), "\n".join(lines) + "\n")


def _written(path: Path, settings: Settings, done: int) -> tuple[Path, list[RoundRecord]]:
    """Return the file to which a run wrote its first ``done`` rounds, ``path`` or the new one, and all its records."""
    source = _new_file(path) if _is_of_this_run(_new_file(path), settings, done) else path
    return source, _first_rounds(source, done)[1]


def _is_of_this_run(path: Path, settings: Settings, done: int) -> bool:
    """Return whether ``path`` has the first rounds of the run with these settings, whatever its number of rounds."""
    try:
        head, _ = _first_rounds(path, done)
    except FedcontextError:
        return False
    mine = json.loads(to_json(manifest(settings)))["settings"]
    return {**head["settings"], "rounds": None} == {**mine, "rounds": None}


def _first_rounds(path: Path, done: int) -> tuple[dict[str, Any], list[RoundRecord]]:
    """Return the manifest and the records of a run file, if it has the first ``done`` rounds."""
    if not path.exists():
        raise FedcontextError(f"{path}: cannot resume after round {done}: the file does not exist", HOW_TO_RESTART)
    try:
        head, records = read_run(path)
    except FedcontextError as error:
        raise FedcontextError(f"cannot resume after round {done}: {error}", HOW_TO_RESTART) from None
    if [record.number for record in records[:done]] != list(range(1, done + 1)):
        raise FedcontextError(
            f"{path}: cannot resume after round {done}: rounds 1 to {done} are not all in the file", HOW_TO_RESTART
        )
    return head, records


def _is_finished(path: Path) -> bool:
    """Return whether a run file has all the rounds that its settings ask for."""
    try:
        head, records = read_run(path)
    except FedcontextError:
        return False
    rounds = head["settings"].get("rounds")
    return isinstance(rounds, int) and len(records) >= rounds


def count_rounds(path: Path) -> int:
    """Return the number of complete lines after the manifest; 0 if there is no file."""
    return max(path.read_bytes().count(b"\n") - 1, 0) if path.exists() else 0


def _cut_incomplete_line(path: Path) -> None:
    """Remove the part of a line that a full disk or an interrupt left at the end."""
    with contextlib.suppress(OSError):
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
