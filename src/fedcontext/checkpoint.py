"""Checkpoints: params, the rule's state and a few facts in one safetensors file, replaced atomically.

Arrays are tensors of the file, everything else is JSON in its metadata; loading executes no code. Whenever the
writer is killed, the file is the old checkpoint or the new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedcontext.arrays.tree import Array, Structure, framework, leaf_name, leaves, rebuild
from fedcontext.errors import FedcontextError, require

SCHEMA = 2  # 1 held the rule's state alone
PARAMS, RULE = "params:", "rule:"  # prefixes of tensor names


@dataclass(frozen=True)
class Checkpoint:
    """The state from which a run resumes."""

    params: Structure
    rule: Any  # the rule's state
    facts: dict[str, Any]  # JSON values, such as the number of the round


def save(path: Path, params: Structure, rule: Any, facts: Mapping[str, Any], after: Path | None = None) -> None:
    """Replace the checkpoint at ``path`` atomically; it is on disk when this returns.

    ``after`` is a file, such as the run's records, that is synced to disk before the checkpoint.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "run.safetensors"
    >>> save(path, {"w": np.ones(2)}, rule=(3, np.zeros(1)), facts={"number": 7})
    >>> saved = load(path, like={"w": np.zeros(2)})
    >>> saved.params, saved.rule, saved.facts
    ({'w': array([1., 1.])}, (3, array([0.])), {'number': 7})
    """
    tensors = {f"{PARAMS}{name}": _to_numpy(name, leaf) for name, leaf in leaves(params).items()}
    content = {"schema": SCHEMA, "facts": dict(facts), "rule": _pack(rule, tensors)}
    path.parent.mkdir(parents=True, exist_ok=True)
    if after is not None:
        _sync(after)
    temporary = path.with_name(f".{path.name}.part")  # overwrites what a killed writer left
    try:
        require("safetensors.numpy", extra="resume").save_file(
            tensors, temporary, metadata={"fedcontext": json.dumps(content)}
        )
        _sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def load(path: Path, like: Structure) -> Checkpoint:
    """Return the checkpoint at ``path``, with params in the structure, framework and device of ``like``."""
    safetensors = require("safetensors", extra="resume")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            content = json.loads((file.metadata() or {})["fedcontext"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError, KeyError, ValueError) as error:
        raise FedcontextError(f"{path}: not a fedcontext checkpoint ({type(error).__name__}: {error})") from None
    if content.get("schema") != SCHEMA:
        raise FedcontextError(f"{path}: schema must be {SCHEMA}, got {content.get('schema')}")
    params = {name: _like(path, name, leaf, tensors) for name, leaf in leaves(like).items()}
    if extra := [name for name in tensors if name.startswith(PARAMS) and name.removeprefix(PARAMS) not in params]:
        raise FedcontextError(f"{path}: the checkpoint is of a different model: it also has {', '.join(extra)}")
    state = _unpack(content["rule"], tensors, next(iter(params.values())))
    return Checkpoint(rebuild(like, params), state, content["facts"])


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the checkpoint at ``path`` for one run; `FedcontextError` names the process that already holds it.

    The lock is on the sibling file ``<path>.lock``, which holds the process id and is left empty afterwards: removing
    it could give two processes a lock each. The operating system releases the lock when the process ends.

    >>> import tempfile
    >>> with lock(Path(tempfile.mkdtemp()) / "run.safetensors"):
    ...     pass
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock_path = path.with_name(f"{path.name}.lock")
    with lock_path.open("a+", encoding="utf-8") as file:
        if not _acquire(file):
            file.seek(0)
            raise FedcontextError(
                f"{path}: process {file.read() or 'unknown'} is already running on this checkpoint: wait until it ends, "
                f"or use another file (if no such process exists, delete {lock_path})"
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _acquire(file: IO[str]) -> bool:
    try:
        import fcntl
    except ImportError:  # not POSIX: a process id in the file is the lock
        return file.tell() == 0
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pack(value: Any, tensors: dict[str, Any]) -> Any:
    """Return ``value`` as JSON that names the type of each container, with its arrays moved to ``tensors``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _pack(child, tensors) for key, child in value.items()}}
    if isinstance(value, dict) and all(type(key) is int for key in value):
        return {"by number": [[key, _pack(child, tensors)] for key, child in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_pack(child, tensors) for child in value]}
    if isinstance(value, np.ndarray | np.generic):
        name = f"{RULE}{len(tensors)}"
        tensors[name] = _to_numpy(name, np.asarray(value))
        return {"array": name}
    if hasattr(value, "shape"):
        name = f"{RULE}{len(tensors)}"
        tensors[name] = _to_numpy(name, value)
        return {"tensor": name}
    raise FedcontextError(
        "a rule's state must consist of numbers, strings, NumPy arrays, lists, tuples and dicts to be saved, "
        f"got {type(value).__name__}"
    )


def _unpack(value: Any, tensors: Mapping[str, Any], like: Array) -> Any:
    """Return what `_pack` packed; tensors in the framework and on the device of ``like``."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "array":
        return tensors[content]
    if kind == "tensor":
        return _in_framework(tensors[content], like)
    if kind == "dict":
        return {key: _unpack(child, tensors, like) for key, child in content.items()}
    if kind == "by number":
        return {key: _unpack(child, tensors, like) for key, child in content}
    children = [_unpack(child, tensors, like) for child in content]
    return tuple(children) if kind == "tuple" else children


def _to_numpy(name: str, leaf: Array) -> Any:
    try:
        host = leaf.detach().cpu().numpy() if framework(leaf, name).name == "PyTorch" else np.asarray(leaf)
    except TypeError:
        host = None
    if host is None or host.dtype.kind not in "biuf":
        raise FedcontextError(f"{leaf_name(name)} must have a NumPy dtype to be saved, got {leaf.dtype}")
    return np.ascontiguousarray(host).reshape(host.shape)


def _like(path: Path, name: str, leaf: Array, tensors: Mapping[str, Any]) -> Array:
    """Return the saved leaf in the framework and on the device of ``leaf``."""
    saved = tensors.get(f"{PARAMS}{name}")
    expected = f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    actual = "nothing" if saved is None else f"{saved.dtype} {saved.shape}"
    if saved is None or actual != expected:
        raise FedcontextError(f"{path}: {leaf_name(name)} must be {expected}, got {actual}")
    return _in_framework(saved, leaf)


def _in_framework(saved: Any, like: Array) -> Array:
    """Return a NumPy array in the framework and on the device of ``like``."""
    library = framework(like).name
    if library == "PyTorch":
        import torch

        return torch.from_numpy(saved.copy()).to(like.device)
    if library == "JAX":
        import jax

        return jax.device_put(saved, like.sharding)
    return saved


def _sync(path: Path) -> None:
    """Return once the file or directory is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
