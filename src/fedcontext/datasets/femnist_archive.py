"""The published federated EMNIST archive (two HDF5 files in a tar) as the one .npz that the loader reads."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcontext.errors import FedcontextError, require

MEMBERS = {"fed_emnist_train.h5": False, "fed_emnist_test.h5": True}


def unpack(archive: Path) -> Path:
    """Return ``femnist.npz`` beside ``archive``: x (n, 28, 28) bytes with paper 255, y, writer, is_test."""
    h5py = require("h5py", extra="femnist")
    columns: dict[str, list[npt.NDArray[Any]]] = {"x": [], "y": [], "writer": [], "is_test": []}
    writers: dict[str, int] = {}
    with tarfile.open(archive) as tar:
        for member, held_out in MEMBERS.items():
            try:
                tar.extract(member, archive.parent, filter="data")
            except KeyError:
                raise FedcontextError(f"{archive.name}: lacks {member}") from None
            with h5py.File(archive.parent / member, "r") as file:
                for name, group in file["examples"].items():
                    pixels = np.rint(255 * group["pixels"][()]).astype(np.uint8)
                    index = writers.setdefault(name, len(writers))
                    columns["x"].append(pixels)
                    columns["y"].append(group["label"][()].astype(np.uint8))
                    columns["writer"].append(np.full(len(pixels), index, np.int16))
                    columns["is_test"].append(np.full(len(pixels), held_out))
            (archive.parent / member).unlink()
    target = archive.parent / "femnist.npz"
    arrays: dict[str, Any] = {name: np.concatenate(parts) for name, parts in columns.items()}
    np.savez_compressed(target, **arrays)
    return target
