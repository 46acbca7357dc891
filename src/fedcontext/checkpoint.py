"""Checkpoints: params, the rule's state and a few facts in one safetensors file, replaced atomically.

Arrays are tensors of the file, everything else is JSON in its metadata; loading executes no code. The file has a
checksum of all its bytes. The last two checkpoints are kept: whenever the writer is killed, and if the newest is
damaged later, there is one to resume from.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcontext.arrays.tree import (
    Array,
    Structure,
    all_finite,
    dtype_name,
    framework,
    kind_of,
    leaf_name,
    leaves,
    rebuild,
    to_numpy,
)
from fedcontext.errors import FedcontextError, require, shortened, shown
from fedcontext.files.storage import check_target, replacing, sync
from fedcontext.files.tensor_file import is_intact, write_tensors
from fedcontext.records import versions

LOG = logging.getLogger("fedcontext")
SCHEMA = 3  # 1 held the rule's state alone, 2 had no checksum
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # what metadata of any content raise
PARAMS, RULE = "params:", "rule:"  # prefixes of tensor names


@dataclass(frozen=True)
class Checkpoint:
    """The state from which a run resumes."""

    params: Structure
    rule: Any  # the rule's state
    facts: dict[str, Any]  # JSON values, such as the number of the round


def previous(path: Path) -> Path:
    """Return where the checkpoint before the one at ``path`` is kept."""
    return path.with_name(f"{path.name}.previous")


def exists(path: Path) -> bool:
    """Return whether there is a checkpoint to resume from: that at ``path``, or the one before it."""
    return path.exists() or previous(path).exists()


def save(path: Path | str, params: Structure, rule: Any, facts: Mapping[str, Any], after: Path | None = None) -> None:
    """Replace the checkpoint at ``path`` atomically; it is on disk when this returns. The last one stays `previous`.

    Params with NaN or infinite entries are refused. ``after`` is a file, such as the run's records, that is synced to
    disk before the checkpoint.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "run.safetensors"
    >>> save(path, {"w": np.ones(2)}, rule=(3, np.zeros(1)), facts={"number": 7})
    >>> saved = load(path, like={"w": np.zeros(2)})
    >>> saved.params, saved.rule, saved.facts
    ({'w': array([1., 1.])}, (3, array([0.])), {'number': 7})
    """
    path = Path(path)
    check_target(previous(path))
    tensors = {f"{PARAMS}{name}": _to_numpy(name, leaf) for name, leaf in leaves(params).items()}
    _check_finite(path, params)
    content = {"schema": SCHEMA, "versions": versions(), "facts": _plain(facts), "rule": _pack(rule, tensors)}
    if after is not None:
        sync(after)
    with replacing(path, keep=previous(path)) as temporary:
        write_tensors(temporary, tensors, {"fedcontext": json.dumps(content)})


def load(path: Path | str, like: Structure, identity: Mapping[str, Any] | None = None) -> Checkpoint:
    """Return the checkpoint at ``path``, with params in the structure, framework and device of ``like``.

    If it is damaged or missing, the one before it is put in its place and loaded, with a warning. Raises an error if a
    fact is not as in ``identity``, such as a digest of the data: the rounds after it would be those of another run.
    """
    path = Path(path)
    for file in (path, previous(path)):
        check_target(file)
    content, tensors = _read_newest(path)
    _check_identity(path, content, identity or {})
    params = {name: _like(path, name, leaf, tensors) for name, leaf in leaves(like).items()}
    if extra := [name for name in tensors if name.startswith(PARAMS) and name.removeprefix(PARAMS) not in params]:
        raise FedcontextError(f"{path}: the checkpoint is of a different model: it also has {', '.join(extra)}")
    try:
        state = _unpack(content["rule"], tensors, next(iter(params.values())))
    except MALFORMED as error:
        raise FedcontextError(f"{path}: the rule's state is malformed ({_reason(error)})") from None
    return Checkpoint(rebuild(like, params), state, content["facts"])


class _Damaged(FedcontextError):
    """The file is no checkpoint, or no longer the one that was written."""


def _read_newest(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content and the tensors of the checkpoint, or of the one before it."""
    earlier = previous(path)
    try:
        if not path.exists() and not earlier.exists():
            raise FedcontextError(f"{path}: no such checkpoint")
        if path.exists():
            return _read(path)
    except _Damaged as error:
        if not earlier.exists():
            raise FedcontextError(error, ": give another file, or delete it to start anew") from None
        LOG.warning("%s; trying the one before it", error)
    try:
        content = _read(earlier)
    except _Damaged as error:
        raise FedcontextError(error, f": delete it and {path.name} to start anew") from None
    os.replace(earlier, path)  # else the next save would put a damaged one in its place
    return content


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    safetensors = require("safetensors", extra="resume")
    try:
        if not is_intact(path):
            raise _Damaged(f"{path}: not a fedcontext checkpoint, or a damaged one (its checksum is missing or wrong)")
        with safetensors.safe_open(path, framework="numpy") as file:
            content = json.loads((file.metadata() or {})["fedcontext"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except _Damaged:
        raise
    except (OSError, safetensors.SafetensorError, *MALFORMED) as error:
        raise _Damaged(f"{path}: not a fedcontext checkpoint ({_reason(error)})") from None
    if not isinstance(content, dict):
        raise FedcontextError(f"{path}: metadata must be an object, got {shown(content)}")
    if content.get("schema") != SCHEMA:
        raise FedcontextError(f"{path}: schema must be {SCHEMA}, got {shown(content.get('schema'))}")
    if not isinstance(content.get("facts"), dict) or not {"rule", "versions"} <= content.keys():
        raise FedcontextError(f"{path}: metadata must have facts, rule and versions, got {shown(list(content))}")
    return content, tensors


def _reason(error: Exception) -> str:
    return shortened(f"{type(error).__name__}: {error}", 200)


def _check_identity(path: Path, content: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    expected = json.loads(json.dumps(identity))
    saved = {name: content["facts"].get(name) for name in expected}
    if saved != expected:
        name, value, got = _first_difference("", expected, saved)
        raise FedcontextError(
            f"{path}: {name} must be {value!r:.200} as in this run, got {got!r:.200}: "
            "use the data and settings of the checkpoint, or another file"
        )
    if (made := content["versions"]) != versions():
        LOG.warning("%s: made with %s, resumed with %s: rounds may differ in rounding", path, shown(made), versions())


def _first_difference(name: str, value: Any, other: Any) -> tuple[str, Any, Any]:
    """Return where two JSON values differ, and the two values there."""
    if isinstance(value, dict) and isinstance(other, dict):
        for key in (*value, *other):
            if value.get(key) != other.get(key):
                return _first_difference(f"{name}, {key}" if name else key, value.get(key), other.get(key))
    return name, value, other


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts as they come back from JSON; raise an error for what JSON does not have."""
    try:
        return dict(json.loads(json.dumps(dict(facts))))
    except (TypeError, ValueError) as error:
        raise FedcontextError(
            f"facts must be a mapping of JSON values such as numbers, text and lists, got {shown(facts)}: {error}"
        ) from None


def _check_finite(path: Path, params: Structure) -> None:
    for name, leaf in leaves(params).items():
        if kind_of(leaf) == "floating" and not all_finite(leaf):
            raise FedcontextError(f"{path}: {leaf_name(name)} has NaN or infinite entries: the last checkpoint is kept")


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
    if hasattr(value, "shape"):
        name, host = f"{RULE}{len(tensors)}", isinstance(value, np.ndarray | np.generic)
        tensors[name] = _to_numpy(name, np.asarray(value) if host else value)
        return {"array" if host else "bfloat16" if dtype_name(value) == "bfloat16" else "tensor": name}
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
    if kind in ("tensor", "bfloat16"):
        saved = tensors[content]
        return framework(like).from_numpy(saved, kind if kind == "bfloat16" else str(saved.dtype), like)
    if kind == "dict":
        return {key: _unpack(child, tensors, like) for key, child in content.items()}
    if kind == "by number":
        return {key: _unpack(child, tensors, like) for key, child in content}
    children = [_unpack(child, tensors, like) for child in content]
    return tuple(children) if kind == "tuple" else children


def _to_numpy(name: str, leaf: Array) -> Any:
    host = to_numpy(leaf, name)
    if host.dtype.kind not in "biuf":
        raise FedcontextError(f"{leaf_name(name)} must be real numbers to be saved, got {leaf.dtype}")
    return host


def _like(path: Path, name: str, leaf: Array, tensors: Mapping[str, Any]) -> Array:
    """Return the saved leaf in the framework and on the device of ``leaf``."""
    saved, dtype = tensors.get(f"{PARAMS}{name}"), dtype_name(leaf)
    kind = "float32" if dtype == "bfloat16" else dtype  # which represents every bfloat16 exactly
    expected = f"{kind} {tuple(leaf.shape)}"
    actual = "nothing" if saved is None else f"{saved.dtype} {saved.shape}"
    if saved is None or actual != expected:
        raise FedcontextError(f"{path}: {leaf_name(name)} must be {expected}, got {actual}")
    return framework(leaf).from_numpy(saved, dtype, leaf)
