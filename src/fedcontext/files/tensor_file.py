"""Safetensors files with a checksum of all their bytes, in the metadata at a fixed place.

Any safetensors library can read them. They are written here, because the library's own writer copies all arrays and
leaves temporary files behind when it is killed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcontext.arrays.memmap import DTYPES
from fedcontext.errors import FedcontextError

NAMES = {numpy_name: name for name, numpy_name in DTYPES.items()}
START = b'{"__metadata__": {"sha256": "'  # of the header, which follows its length in eight bytes
PLACE = 8 + len(START)  # of the checksum in the file
ZEROS = "0" * 64  # in place of the checksum while it is computed


def write_tensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write arrays and metadata with their checksum.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> write_tensors(path, {"w": np.ones(2)}, {"about": "two ones"})
    >>> is_intact(path)
    True
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)  # stable; keeps every array aligned
    start = _header(ordered, metadata)
    digest = hashlib.sha256(start)
    with path.open("wb") as file:
        file.write(start)
        for _, array in ordered:
            content = array.astype(array.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8).data
            digest.update(content)
            file.write(content)
        file.seek(PLACE)
        file.write(digest.hexdigest().encode())


def _header(ordered: list[tuple[str, npt.NDArray[Any]]], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"sha256": ZEROS, **metadata}}
    offset = 0
    for name, array in ordered:
        if array.dtype.str[1:] not in NAMES:
            raise FedcontextError(f"{name} must have a dtype of safetensors, got {array.dtype}")
        place = [offset, offset := offset + array.nbytes]
        entries[name] = {"dtype": NAMES[array.dtype.str[1:]], "shape": list(array.shape), "data_offsets": place}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def is_intact(path: Path) -> bool:
    """Return whether a file of `write_tensors` has its checksum: False if a single bit of it has changed."""
    with path.open("rb") as file:
        start, checksum = file.read(PLACE), file.read(len(ZEROS))
        digest = hashlib.sha256(start + ZEROS.encode())
        while block := file.read(2**20):
            digest.update(block)
    return start[8:] == START and checksum == digest.hexdigest().encode()
