"""Where data files are: a directory of the user's first, then the cache, which `fetch` fills with checked downloads."""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import numpy.typing as npt

from fedcontext.errors import FedcontextError

VARIABLE = "FEDCONTEXT_DATA"
LIMIT = 4 * 2**30  # bytes; nothing larger is downloaded or unpacked


@dataclass(frozen=True)
class Source:
    """A data file: the names it may have in a data directory, and where its publisher offers it."""

    names: tuple[str, ...]
    url: str
    sha256: str
    about: str

    @property
    def download(self) -> str:
        """Return the file name under which the download is kept."""
        return self.url.rsplit("/", 1)[-1]


SOURCES = {
    "mnist": Source(
        ("mnist.npz",),
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz",
        "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1",
        "70,000 handwritten digits, 11 MB",
    ),
    "femnist": Source(
        ("femnist_leaf_writers.npz", "femnist.npz"),
        "https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2",
        "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
        "749,068 handwritten characters of 3,400 writers, 170 MB; unpacking needs fedcontext[femnist]",
    ),
}


def cache() -> Path:
    """Return the directory that downloads go to."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedcontext"


def where(name: str) -> Path | None:
    """Return the file of a data set if it is at hand: in ``$FEDCONTEXT_DATA``, else in the cache."""
    folders = [Path(os.environ[VARIABLE])] if os.environ.get(VARIABLE) else []
    candidates = [folder / file for folder in [*folders, cache()] for file in source(name).names]
    return next((path for path in candidates if path.is_file()), None)


def find(name: str) -> Path:
    """Return the file of a data set, or say the three ways to get it."""
    found = where(name)
    if found is None:
        known = source(name)
        raise FedcontextError(
            f"the {name} data is not here. Either run `fedcontext data fetch {name}`, or set {VARIABLE} to a directory"
            f" that holds {known.names[0]}, or put that file into {cache()}"
        )
    return found


def source(name: str) -> Source:
    """Return where a data set comes from.

    >>> source("mnist").download
    'mnist.npz'
    """
    if name not in SOURCES:
        raise FedcontextError(f"there is no file for data set {name!r}, only for {', '.join(SOURCES)}")
    return SOURCES[name]


def fetch(name: str, progress: Callable[[int, int], None] = lambda done, total: None) -> Path:
    """Download a data set into the cache and return its file; nothing is kept unless its SHA-256 is right."""
    known, folder = source(name), cache()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        partial = Path(scratch) / known.download
        try:
            digest = _download(known.url, partial, progress)
        except FedcontextError as error:
            others = f"set {VARIABLE} to a directory that holds {known.names[0]}, or put that file into {folder}"
            raise FedcontextError(f"{error}. You can also {others}") from None
        if digest != known.sha256:
            raise FedcontextError(f"{known.url}: SHA-256 must be {known.sha256}, got {digest}; nothing was kept")
        if partial.suffix != ".npz":
            from fedcontext.datasets.femnist_archive import unpack

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
                if done > LIMIT:
                    raise FedcontextError(f"{url}: larger than {LIMIT} bytes, stopped")
                digest.update(chunk)
                file.write(chunk)
                progress(done, total)
    except (URLError, OSError) as error:
        raise FedcontextError(f"{url}: cannot be downloaded ({error})") from None
    return digest.hexdigest()


def read_arrays(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    optional: Set[str] = frozenset(),
) -> dict[str, npt.NDArray[np.uint8]]:
    """Return the named arrays of an .npz file, their headers checked before any memory is taken (-1: any length)."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name.removesuffix(".npy") for name in archive.namelist()}
            if missing := shapes.keys() - members:
                raise FedcontextError(f"{path}: lacks {', '.join(sorted(missing))}")
            wanted = {**shapes, **dict.fromkeys(optional & members, (-1,))}
            lengths = {_check_header(path, archive, name, shape) for name, shape in wanted.items() if shape[0] == -1}
            for name, shape in wanted.items():
                _check_header(path, archive, name, shape)
            if len(lengths) > 1:
                raise FedcontextError(f"{path}: its arrays have different lengths: {sorted(lengths)}")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in wanted}
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise (
            error if isinstance(error, FedcontextError) else FedcontextError(f"{path}: not readable ({error})")
        ) from None


def _check_header(path: Path, archive: zipfile.ZipFile, name: str, expected: tuple[int, ...]) -> int:
    with archive.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(member)
    fits = len(shape) == len(expected) and all(want in (-1, got) for want, got in zip(expected, shape, strict=True))
    if not fits or dtype.kind not in "buif" or int(np.prod(shape)) * dtype.itemsize > LIMIT:
        raise FedcontextError(f"{path}: {name} must be numbers of shape {expected}, got {dtype} {shape}")
    return int(shape[0])
