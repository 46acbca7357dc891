"""Trained params in a file that NumPy or safetensors can read."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcontext.arrays.tree import Structure, leaves, to_numpy
from fedcontext.errors import FedcontextError
from fedcontext.files.storage import check_target, replacing
from fedcontext.files.tensor_file import write_tensors


def save_params(path: str | Path, params: Structure) -> None:
    """Write params to a .npz or .safetensors file by leaf name, atomically; a single array is called "params".

    Entries of bfloat16 become float32, which has all of them.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "model.npz"
    >>> save_params(path, {"layer": {"weight": np.ones(2)}})
    >>> dict(np.load(path))
    {'layer/weight': array([1., 1.])}
    """
    path = Path(path)
    check_format(path)
    arrays = {name or "params": to_numpy(leaf, name) for name, leaf in leaves(params).items()}
    with replacing(path) as temporary:
        if path.suffix == ".npz":
            _write_npz(temporary, arrays)
        else:
            write_tensors(temporary, arrays, {})


def check_format(path: Path) -> None:
    """Raise an error unless `save_params` can write a file with this name.

    >>> check_format(Path("model.pt"))
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: a model file must end in .npz or .safetensors, got model.pt
    """
    if path.suffix not in (".npz", ".safetensors"):
        raise FedcontextError(f"a model file must end in .npz or .safetensors, got {path}")
    check_target(path)


def _write_npz(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write what `numpy.savez` would, for any names: it reserves some for its own arguments."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
