"""FEMNIST by writer, and its published archive (two HDF5 files in a tar) as the one .npz file that is read here."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcontext.datasets.cache import prepared
from fedcontext.datasets.federated import Features, FederatedData, Pixels, gather
from fedcontext.datasets.files import find, read_arrays
from fedcontext.errors import FedcontextError, require

CLASSES = 62
SHAPES = {"x": (-1, 28, 28), "y": (-1,), "writer": (-1,), "is_test": (-1,)}
MEMBERS = {"fed_emnist_train.h5": False, "fed_emnist_test.h5": True}  # whether its samples are for test


def femnist() -> FederatedData:
    """Return FEMNIST: one device per writer, 62 classes, LEAF's own 90/10 split inside each writer, ink 1 and paper 0.

    The file with 328 writers is a subset of LEAF's 3,600: it under-represents the writers with most samples, and about
    70 % of its images are digits. Say so beside results on it.
    """
    path = find("femnist")
    return prepared("femnist", path, CLASSES, lambda: _build(path))


def _build(path: Path) -> FederatedData:
    arrays = read_arrays(path, SHAPES, {"is_dup"})
    labels, writers, is_test = arrays["y"].astype(np.int64), arrays["writer"], arrays["is_test"].astype(bool)
    kept = np.flatnonzero(~arrays["is_dup"].astype(bool)) if "is_dup" in arrays else np.arange(len(labels))
    order = kept[np.argsort(writers[kept], kind="stable")]
    groups = np.split(order, np.flatnonzero(np.diff(writers[order])) + 1)
    groups = [group for group in groups if not is_test[group].all()]
    if not groups or not 0 <= labels.min() <= labels.max() < CLASSES:
        raise FedcontextError(f"{path}: y must be from 0 to {CLASSES - 1}, with a training sample of some writer")
    pixels = arrays["x"].reshape(len(labels), -1)
    sides = ([group[is_test[group] == side] for group in groups] for side in (False, True))
    train, test = (gather(pixels, labels, side, _ink) for side in sides)
    return FederatedData("femnist", train, test, CLASSES)


def _ink(pixels: Pixels) -> Features:
    return np.divide(255 - pixels, 255, dtype=np.float32)


def unpack(archive: Path) -> Path:
    """Return ``femnist.npz`` beside ``archive``: x (n, 28, 28) uint8 with paper 255, y, writer, is_test."""
    h5py = require("h5py", extra="femnist")
    columns: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in SHAPES}
    writers: dict[str, int] = {}
    with tarfile.open(archive) as tar:
        for member, is_test in MEMBERS.items():
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
                    columns["is_test"].append(np.full(len(pixels), is_test))
            (archive.parent / member).unlink()
    target = archive.parent / "femnist.npz"
    arrays: dict[str, Any] = {name: np.concatenate(parts) for name, parts in columns.items()}
    np.savez_compressed(target, **arrays)
    return target
