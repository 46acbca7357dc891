"""Trained params in a file that NumPy or safetensors can read."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcontext.arrays.tree import Structure, leaves
from fedcontext.errors import FedcontextError, require


def save_params(path: Path, params: Structure) -> None:
    """Write params to a .npz or .safetensors file by leaf name, atomically; a single array is called "params".

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "model.npz"
    >>> save_params(path, {"layer": {"weight": np.ones(2)}})
    >>> dict(np.load(path))
    {'layer/weight': array([1., 1.])}
    """
    check_format(path)
    arrays = {name or "params": _to_numpy(leaf) for name, leaf in leaves(params).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    try:
        if path.suffix == ".npz":
            _write_npz(temporary, arrays)
        else:
            require("safetensors.numpy", extra="resume").save_file(arrays, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_format(path: Path) -> None:
    """Raise an error unless `save_params` can write a file with this suffix.

    >>> check_format(Path("model.pt"))
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: a model file must end in .npz or .safetensors, got model.pt
    """
    if path.suffix not in (".npz", ".safetensors"):
        raise FedcontextError(f"a model file must end in .npz or .safetensors, got {path}")
    if path.suffix == ".safetensors":
        require("safetensors", extra="resume")


def _write_npz(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write what `numpy.savez` would, for any names: it reserves some for its own arguments."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def _to_numpy(leaf: Any) -> npt.NDArray[Any]:
    array = np.asarray(leaf.detach().cpu() if hasattr(leaf, "detach") else leaf)
    return np.ascontiguousarray(array).reshape(array.shape)  # which would otherwise lose a shape of ()
