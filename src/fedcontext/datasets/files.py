"""Data files: searched in ``$FEDCONTEXT_DATA``, then in the cache, into which `fetch` downloads them."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import numpy.typing as npt

from fedcontext.arrays.memmap import MALFORMED
from fedcontext.errors import FedcontextError, by_name, shortened, shown

Header: TypeAlias = tuple[tuple[int, ...], np.dtype[Any]]  # what an array claims to be

VARIABLE = "FEDCONTEXT_DATA"
MAX_DOWNLOAD = 4 * 2**30  # bytes
MAX_RATIO = 25  # of unpacked to packed bytes; images compress by 5 to 10, and more is a mistake or an attack
UNREADABLE = (*MALFORMED, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)  # what a broken .npz file raises
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # NumPy writes no other


@dataclass(frozen=True)
class Source:
    """A data file: the names it may have, and where it is published."""

    names: tuple[str, ...]
    url: str
    sha256: str

    @property
    def download(self) -> str:
        """Return the file name of the download."""
        return self.url.rsplit("/", 1)[-1]


SOURCES = {
    "mnist": Source(
        ("mnist.npz",),
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz",
        "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1",
    ),
    "femnist": Source(
        ("femnist_leaf_writers.npz", "femnist.npz"),
        "https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2",
        "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
    ),
}


def cache_folder() -> Path:
    """Return the directory of downloads and prepared data."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedcontext"


def candidates(name: str) -> list[Path]:
    """Return the paths where the file of a data set may be: in ``$FEDCONTEXT_DATA``, then in the cache."""
    folders = [Path(os.environ[VARIABLE])] if os.environ.get(VARIABLE) else []
    return [folder / file for folder in [*folders, cache_folder()] for file in source(name).names]


def where(name: str) -> Path | None:
    """Return the file of a data set, or None if there is none."""
    return next((path for path in candidates(name) if path.is_file()), None)


def find(name: str) -> Path:
    """Return the file of a data set, or raise an error that says where it was searched and how to get it."""
    path = where(name)
    if path is None:
        searched, folder = ", ".join(map(str, candidates(name))), os.environ.get(VARIABLE)
        wrong = f" ({VARIABLE}={folder} is not a directory)" if folder and not Path(folder).is_dir() else ""
        raise FedcontextError(
            f"{name} data not found, searched {searched}{wrong}. Run `fedcontext data fetch {name}`, or set {VARIABLE} "
            f"to a directory that contains {source(name).names[0]}"
        )
    return path


def source(name: str) -> Source:
    """Return the source of a data set.

    >>> source("mnist").download
    'mnist.npz'
    """
    return by_name("data set with a file", name, SOURCES)


def fetch(name: str, progress: Callable[[int, int], None] = lambda done, total: None) -> Path:
    """Download a data set into the cache and return its path; a file with a wrong SHA-256 is deleted."""
    known, folder = source(name), cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        partial = Path(scratch) / known.download
        try:
            digest = _download(known.url, partial, progress)
        except FedcontextError as error:
            other = f"set {VARIABLE} to a directory that contains {known.names[0]}"
            raise FedcontextError(f"{error}. Or download it yourself and {other}") from None
        if digest != known.sha256:
            raise FedcontextError(
                f"{known.url}: SHA-256 must be {known.sha256}, got {digest}; the download was deleted"
            )
        if partial.suffix != ".npz":
            from fedcontext.datasets.femnist import unpack

            partial = unpack(partial)
        target = folder / (known.names[0] if partial.name == known.download else known.names[-1])
        return partial.replace(target)


def _download(url: str, target: Path, progress: Callable[[int, int], None]) -> str:
    digest, done = hashlib.sha256(), 0
    try:
        with urlopen(url, timeout=60) as response, target.open("wb") as file:
            total = int(response.headers.get("Content-Length") or 0)
            while chunk := response.read(2**20):
                done += len(chunk)
                if done > MAX_DOWNLOAD:
                    raise FedcontextError(f"{url}: larger than {MAX_DOWNLOAD} bytes; stopped")
                digest.update(chunk)
                file.write(chunk)
                progress(done, total)
    except (URLError, OSError) as error:
        raise FedcontextError(f"{url}: cannot be downloaded ({error})") from None
    return digest.hexdigest()


def read_arrays(
    path: Path, shapes: Mapping[str, tuple[int, ...]], optional: Set[str] = frozenset()
) -> dict[str, npt.NDArray[Any]]:
    """Return the named arrays of an .npz file: uint8 images and integer vectors of the given shapes (-1: any length).

    The headers are checked before memory is allocated: what they claim may be at most ``MAX_RATIO`` times the file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name.removesuffix(".npy") for name in archive.namelist()}
            if missing := shapes.keys() - members:
                raise FedcontextError(f"{path}: lacks {', '.join(sorted(missing))}")
            wanted = {**shapes, **dict.fromkeys(optional & members, (-1,))}
            headers = {name: _header(path, archive, name, shape) for name, shape in wanted.items()}
            _check_sizes(path, [headers[name][0][0] for name, shape in wanted.items() if shape[0] == -1], headers)
            return {name: _array(archive, name) for name in wanted}
    except FedcontextError:
        raise
    except UNREADABLE as error:
        reason = shortened(f"{type(error).__name__}: {error}", 200)
        raise FedcontextError(f"{path}: not readable ({reason})") from None


def _check_sizes(path: Path, lengths: Sequence[int], headers: Mapping[str, Header]) -> None:
    if len(set(lengths)) > 1:
        raise FedcontextError(f"{path}: its arrays have different lengths: {shown(sorted(set(lengths)))}")
    claimed, size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in headers.values()), path.stat().st_size
    if claimed > MAX_RATIO * size:
        raise FedcontextError(f"{path}: its headers claim {shown(claimed)} bytes, too many for a file of {size}")


def _array(archive: zipfile.ZipFile, name: str) -> npt.NDArray[Any]:
    with archive.open(f"{name}.npy") as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _header(path: Path, archive: zipfile.ZipFile, name: str, expected: tuple[int, ...]) -> Header:
    """Return the shape and dtype that the header of one array claims, if they are as expected."""
    if archive.getinfo(f"{name}.npy").compress_type not in COMPRESSIONS:
        raise FedcontextError(f"{path}: {name} must be deflated or not compressed, as by numpy.savez")
    with archive.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(member)
    fits = len(shape) == len(expected) and all(want in (-1, got) for want, got in zip(expected, shape, strict=True))
    is_type = dtype == np.uint8 if len(expected) == 3 else dtype.kind in "bui"
    if not fits or not is_type or min(shape) < 0:
        kind = "uint8" if len(expected) == 3 else "integers"
        raise FedcontextError(f"{path}: {name} must be {kind} of shape {expected}, got {dtype} {shown(shape)}")
    return shape, dtype
