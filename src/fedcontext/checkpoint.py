"""A run on disk: params, the rule's memory and a few facts in one safetensors file, replaced as a whole.

The arrays are tensors of the file, everything else is JSON in its header. A reader sees the old file or the new
one, never a mixture, whenever the writer is killed; and reading never executes anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcontext.arrays.tree import Array, Structure, framework, leaf_name, leaves, rebuild
from fedcontext.errors import FedcontextError, require

SCHEMA = 1
PARAMS, RULE = "params:", "rule:"  # how the names of tensors begin


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes on from."""

    params: Structure
    rule: Any  # the rule's memory
    facts: dict[str, Any]  # the round's number, the seed and whatever else the writer noted


def save(path: Path, params: Structure, rule: Any, facts: Mapping[str, Any], after: Path | None = None) -> None:
    """Write a checkpoint in place of the one at ``path``: durable when this returns, whole at any moment.

    ``after`` is a file, such as the run's records, that must be on the disk before the checkpoint is.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "run.safetensors"
    >>> save(path, {"w": np.ones(2)}, rule=(3, np.zeros(1)), facts={"number": 7})
    >>> found = load(path, like={"w": np.zeros(2)})
    >>> found.params, found.rule, found.facts
    ({'w': array([1., 1.])}, (3, array([0.])), {'number': 7})
    """
    tensors = {f"{PARAMS}{name}": _to_numpy(name, leaf) for name, leaf in leaves(params).items()}
    content = {"schema": SCHEMA, "facts": dict(facts), "rule": _pack(rule, tensors)}
    path.parent.mkdir(parents=True, exist_ok=True)
    if after is not None:
        _to_disk(after)
    fresh = path.with_name(f".{path.name}.part")  # one that a killed writer left is overwritten
    try:
        require("safetensors.numpy", extra="resume").save_file(
            tensors, fresh, metadata={"fedcontext": json.dumps(content)}
        )
        _to_disk(fresh)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    _to_disk(path.parent)


def load(path: Path, like: Structure) -> Checkpoint:
    """Return the checkpoint at ``path``, its params in the structure, library and place of ``like``."""
    safetensors = require("safetensors", extra="resume")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            content = json.loads((file.metadata() or {})["fedcontext"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError, KeyError, ValueError) as error:
        raise FedcontextError(f"{path}: not a checkpoint of fedcontext ({type(error).__name__}: {error})") from None
    if content.get("schema") != SCHEMA:
        raise FedcontextError(f"{path}: schema must be {SCHEMA}, got {content.get('schema')}")
    params = {name: _like(path, name, leaf, tensors) for name, leaf in leaves(like).items()}
    if extra := [name for name in tensors if name.startswith(PARAMS) and name.removeprefix(PARAMS) not in params]:
        raise FedcontextError(f"{path}: the checkpoint is of another model: it also has {', '.join(extra)}")
    return Checkpoint(rebuild(like, params), _unpack(content["rule"], tensors), content["facts"])


def _pack(value: Any, tensors: dict[str, Any]) -> Any:
    """Return ``value`` as JSON, its arrays moved to ``tensors`` and named by count; containers say what they are."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _pack(child, tensors) for key, child in value.items()}}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_pack(child, tensors) for child in value]}
    if isinstance(value, np.ndarray | np.generic):
        name = f"{RULE}{len(tensors)}"
        tensors[name] = _to_numpy(name, np.asarray(value))
        return {"array": name}
    raise FedcontextError(
        f"a rule's memory must be numbers, text, NumPy arrays, lists, tuples and dicts of these to be saved, "
        f"got {type(value).__name__}"
    )


def _unpack(value: Any, tensors: Mapping[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "array":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(child, tensors) for key, child in content.items()}
    children = [_unpack(child, tensors) for child in content]
    return tuple(children) if kind == "tuple" else children


def _to_numpy(name: str, leaf: Array) -> Any:
    try:
        host = leaf.detach().cpu().numpy() if framework(leaf, name).name == "PyTorch" else np.asarray(leaf)
    except TypeError:
        host = None
    if host is None or host.dtype.kind not in "biuf":
        raise FedcontextError(f"{leaf_name(name)} must have a dtype that NumPy knows to be saved, got {leaf.dtype}")
    return np.ascontiguousarray(host).reshape(host.shape)


def _like(path: Path, name: str, leaf: Array, tensors: Mapping[str, Any]) -> Array:
    """Return the saved leaf in the library and place of ``leaf``."""
    saved = tensors.get(f"{PARAMS}{name}")
    wanted = f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    found = "nothing" if saved is None else f"{saved.dtype} {saved.shape}"
    if saved is None or found != wanted:
        raise FedcontextError(f"{path}: {leaf_name(name)} must be {wanted}, got {found}")
    ways = framework(leaf).name
    if ways == "PyTorch":
        import torch

        return torch.from_numpy(saved.copy()).to(leaf.device)
    if ways == "JAX":
        import jax

        return jax.device_put(saved, leaf.sharding)
    return saved


def _to_disk(path: Path) -> None:
    """Wait until the file, or a directory's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
