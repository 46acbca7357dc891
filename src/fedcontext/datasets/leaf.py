"""Data sets in LEAF's JSON format: folders ``train`` and ``test`` of files with users, num_samples and user_data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcontext.datasets.arrays import check_arrays
from fedcontext.datasets.federated import FederatedData, Samples, join
from fedcontext.errors import FedcontextError, shortened, shown
from fedcontext.plan import IntArray

MAX_CLASSES = 1_000_000  # a larger label is a mistake, and its model would fill the memory
MAX_WEIGHTS = 2**24  # of a linear model, features times classes, for the same reason


def leaf(folder: str | Path) -> FederatedData:
    """Return the devices of ``folder/train/*.json`` and ``folder/test/*.json``, features flattened to rows.

    A device without training samples is left out; one without test samples stays.
    """
    root = Path(folder)
    train, test = _read_folder(root / "train"), _read_folder(root / "test")
    widths = {features.shape[1] for side in (train, test) for features, labels in side.values() if len(labels)}
    if len(widths) > 1:
        raise FedcontextError(f"{root}: users have different numbers of features: {str(sorted(widths))[:100]}")
    names = [name for name, (_, labels) in train.items() if len(labels)]
    if not names:
        raise FedcontextError(f"{root / 'train'}: no device has training samples")
    nothing = (train[names[0]][0][:0], train[names[0]][1][:0])
    tests = [test[name] if name in test and len(test[name][1]) else nothing for name in names]
    sides = join([train[name] for name in names]), join(tests)
    classes = 1 + max(int(side.labels.max(initial=0)) for side in sides)
    if (width := sides[0].features.shape[1]) * classes > MAX_WEIGHTS:
        raise FedcontextError(f"{root}: {width} features and labels up to {classes - 1} make too large a model")
    return FederatedData(f"leaf:{root}", *sides, classes)


def _read_folder(folder: Path) -> dict[str, Samples]:
    try:
        files = sorted(folder.glob("*.json"))
    except (OSError, ValueError):  # such as a name that is too long
        files = []
    if not files:
        raise FedcontextError(f"{folder}: no LEAF .json file found")
    users: dict[str, Samples] = {}
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            names, data = content["users"], content["user_data"]
            counts = content.get("num_samples", [len(data[name]["y"]) for name in names])
            for name, count in zip(names, counts, strict=True):
                if str(name) in users:
                    raise FedcontextError(f"user {shown(name)} occurs twice in {folder}")
                users[str(name)] = _samples(str(name), count, data[name])
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, OSError) as error:
            reason = f"not LEAF JSON ({type(error).__name__}: {shortened(str(error), 200)})"
            raise FedcontextError(f"{file}: {error if isinstance(error, FedcontextError) else reason}") from None
    return users


def _samples(name: str, count: int, data: dict[str, Any]) -> Samples:
    user = f"user {shown(name)}"
    labels = _labels(user, data["y"])
    if not len(labels) == len(data["x"]) == count:
        raise FedcontextError(f"{user} has {len(data['x'])} x and {len(labels)} y, but num_samples {shown(count)}")
    try:
        with np.errstate(over="ignore"):  # what does not fit into float32 becomes infinite and is reported below
            features = np.asarray(data["x"], dtype=np.float32).reshape(count, -1 if count else 0)
        if count:
            check_arrays(features, labels)
    except (ValueError, OverflowError) as error:  # text, or rows of different lengths
        lengths = _lengths(data["x"])
        ragged = f"samples must be of the same size, got lists of lengths {shown(lengths)}"
        raise FedcontextError(f"{user}: x: {ragged if len(lengths) > 1 else shortened(str(error), 200)}") from None
    return features, labels


def _lengths(rows: Sequence[Any]) -> list[int]:
    """Return the lengths of nested lists at the first depth where they differ, or at the last; 0 for a number."""
    lengths = sorted({len(row) if isinstance(row, list) else 0 for row in rows})
    return _lengths([each for row in rows for each in row]) if len(lengths) == 1 and lengths[0] else lengths


def _labels(user: str, given: list[Any]) -> IntArray:
    """Return labels as int64; JSON files may write them as floats, such as 3.0."""
    for label in given:
        if type(label) not in (int, float) or not 0 <= label < MAX_CLASSES or label != int(label):
            raise FedcontextError(f"{user}: y must be whole numbers from 0 to {MAX_CLASSES - 1}, got {shown(label)}")
    return np.array(given, np.int64)
