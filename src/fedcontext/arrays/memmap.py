"""Memory-mapped .npy and .safetensors files, so that the updates together can be larger than memory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from fedcontext.arrays.tree import Structure
from fedcontext.errors import FedcontextError, shortened

DTYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "BOOL": "b1"}  # NumPy's dtype by the name that safetensors gives it
DTYPES |= {f"{kind.upper()}{8 * size}": f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)}
# What we and NumPy raise for malformed headers; Python's parser raises MemoryError for some that are nested deeply.
MALFORMED = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    OverflowError,
    RecursionError,
    SyntaxError,
    TokenError,
    MemoryError,
)
HEADER_LIMIT = 100 * 2**20  # bytes; the limit of the safetensors library


def open_memmap(path: str | Path) -> Structure:
    """Return the array of a .npy file, or a mapping of a .safetensors file's arrays, without loading them.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "update.npy"
    >>> np.save(file, np.arange(3.0))
    >>> float(open_memmap(file).sum())
    3.0
    """
    path = Path(path)
    if path.suffix not in (".npy", ".safetensors"):
        raise FedcontextError(f"{path}: must be a .npy or .safetensors file")
    try:
        if path.suffix == ".npy":
            _check_header_length(path)
            return np.lib.format.open_memmap(path, mode="r")
        return _safetensors(path)
    except MALFORMED as error:
        raise FedcontextError(f"{path}: cannot be memory-mapped ({shortened(str(error), 200)})") from None


def _check_header_length(path: Path) -> None:
    """Raise ValueError for a .npy file that claims a header longer than itself: NumPy would allocate it."""
    with path.open("rb") as file:
        start = file.read(12)
    length = int.from_bytes(start[8:10] if start[6:7] == b"\x01" else start[8:12], "little")
    if length > path.stat().st_size:
        raise ValueError(f"the header cannot have {length} bytes")


def _safetensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a file that holds the length of a JSON header, the header, then the data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(HEADER_LIMIT, path.stat().st_size):
            raise ValueError(f"the header cannot have {length} bytes")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"the header must be a mapping, got {type(header).__name__}")
    content = np.memmap(path, np.uint8, "r", offset=8 + length)
    return {name: _tensor(content, entry) for name, entry in header.items() if name != "__metadata__"}


def _tensor(content: Any, entry: dict[str, Any]) -> Any:
    start, stop = entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {entry['dtype']}")
    dtype = np.dtype(f"<{DTYPES[entry['dtype']]}")
    if not 0 <= start <= stop <= content.size or stop - start != math.prod(entry["shape"]) * dtype.itemsize:
        raise ValueError(f"tensor of {entry['dtype']} {entry['shape']} at {start}..{stop} of {content.size} bytes")
    return content[start:stop].view(dtype).reshape(entry["shape"])
