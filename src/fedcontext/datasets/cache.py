"""On-disk cache of prepared data sets: a later process maps the partitioned arrays instead of computing them.

An entry is a folder of .npy files whose name has a digest of all that decides its content, and a file of their sizes,
times of change and digest: only arrays that have not changed since are used. ``FEDCONTEXT_CACHE=0`` turns
the cache off; deleting ``$XDG_CACHE_HOME/fedcontext/prepared`` clears it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcontext.datasets.federated import FederatedData, Split
from fedcontext.datasets.files import cache_folder
from fedcontext.errors import FileError
from fedcontext.files.storage import lock

SWITCH = "FEDCONTEXT_CACHE"
VERSION = 2  # increase it when any data set is prepared differently
MAX_ENTRIES = 4  # the least recently used are deleted; one of MNIST takes 220 MB
ARRAYS = ("features", "labels", "offsets")
SUMMARY = "summary.json"  # of an entry: the digest of the data, and size and time of change of each file


def prepared_folder() -> Path:
    """Return the directory of the cached entries."""
    return cache_folder() / "prepared"


def prepared(name: str, source: Path, classes: int, build: Callable[[], FederatedData], seed: int = 0) -> FederatedData:
    """Return ``build()`` or its cached copy; ``source`` is the file it is built from.

    The arrays are the same bit for bit. Cached features are mapped copy-on-write: writing to them changes no file.
    """
    if os.environ.get(SWITCH) == "0":
        return build()
    try:
        entry = prepared_folder() / f"{name}-{_digest(source, seed)}"
        if entry.is_dir():
            return _read(entry, name, classes)
    except OSError:  # source unreadable: `build` says so; entry unreadable or just deleted: it is built again
        return build()
    except (ValueError, OverflowError) as error:
        warnings.warn(f"{entry}: damaged cache entry is rebuilt ({error})", stacklevel=3)
        shutil.rmtree(entry, ignore_errors=True)
    data = build()
    _write(entry, data)
    return data


def _digest(source: Path, seed: int) -> str:
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(f"{VERSION} {np.__version__} {seed}".encode())  # NumPy may change what a seed draws
    return digest.hexdigest()[:32]


def _read(entry: Path, name: str, classes: int) -> FederatedData:
    train, test = (Split(*(_map(entry / f"{side}_{array}.npy") for array in ARRAYS)) for side in ("train", "test"))
    data = FederatedData(name, train, test, classes)
    digest, states = _summary(entry)
    if states != _states(entry) and data.digest != digest:  # a copy of the folder has other times
        raise ValueError("its arrays have changed")
    with contextlib.suppress(OSError):
        os.utime(entry)  # the time of its last use
    vars(data)["digest"] = digest  # the cached property's value: computing it would read all arrays
    return data


def _summary(entry: Path) -> tuple[str, Any]:
    """Return the digest of the data, and the states of the files when they were written."""
    path = entry / SUMMARY
    summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    if not isinstance(summary, dict) or not isinstance(summary.get("digest"), str):
        raise ValueError(f"{SUMMARY} is missing or damaged")
    return summary["digest"], summary.get("files")


def _states(entry: Path) -> dict[str, list[int]]:
    """Return size and time of change of every array file."""
    files = {path.name: path.stat() for path in sorted(entry.glob("*.npy"))}
    return {name: [state.st_size, state.st_mtime_ns] for name, state in files.items()}


def _map(path: Path) -> npt.NDArray[Any]:
    if not path.is_file():
        raise ValueError(f"{path.name} is missing")
    return np.asarray(np.lib.format.open_memmap(path, mode="c"))


def _write(entry: Path, data: FederatedData) -> None:
    """Add an entry: a complete folder or none.

    Without space or permission, or while another process writes one, none.
    """
    with contextlib.suppress(OSError, FileError), lock(entry.parent / "prepared"):
        for scrap in entry.parent.glob(".*.part"):  # of killed processes: who holds the lock writes alone
            shutil.rmtree(scrap, ignore_errors=True)
        folder = entry.with_name(f".{entry.name}.part")
        try:
            folder.mkdir()
            _write_arrays(folder, data)
            folder.rename(entry)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        entries = [path for path in entry.parent.iterdir() if path.is_dir()]
        newest_first = sorted(entries, key=lambda path: path.stat().st_mtime, reverse=True)
        for old in newest_first[MAX_ENTRIES:]:
            shutil.rmtree(old, ignore_errors=True)


def _write_arrays(folder: Path, data: FederatedData) -> None:
    for side, split in (("train", data.evaluation_split), ("test", data.test)):
        for array in ARRAYS:
            with (folder / f"{side}_{array}.npy").open("wb") as file:
                np.save(file, getattr(split, array), allow_pickle=False)
                os.fsync(file.fileno())  # before the rename, so that a power cut leaves no half-written entry
    summary = {"digest": data.digest, "files": _states(folder)}
    (folder / SUMMARY).write_text(json.dumps(summary), encoding="utf-8")
