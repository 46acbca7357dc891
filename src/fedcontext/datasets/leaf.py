"""Any data set in LEAF's JSON layout: folders ``train`` and ``test`` of files with users and user_data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fedcontext.datasets.federated import Features, FederatedData, check_arrays, join
from fedcontext.errors import FedcontextError
from fedcontext.plan import IntArray


def leaf(folder: str | Path) -> FederatedData:
    """Return the devices of ``folder/train/*.json`` and ``folder/test/*.json``, features flattened to rows.

    A device without training samples is left out; one without test samples stays.
    """
    root = Path(folder)
    train, test = _users(root / "train"), _users(root / "test")
    widths = {features.shape[1] for side in (train, test) for features, labels in side.values() if len(labels)}
    if len(widths) > 1:
        raise FedcontextError(f"{root}: users have different numbers of features: {sorted(widths)}")
    names = [name for name, (_, labels) in train.items() if len(labels)]
    if not names:
        raise FedcontextError(f"{root / 'train'}: no device has training samples")
    none = (train[names[0]][0][:0], train[names[0]][1][:0])
    tests = [test[name] if name in test and len(test[name][1]) else none for name in names]
    sides = join([train[name] for name in names]), join(tests)
    labels = np.concatenate([side.labels for side in sides])
    return FederatedData(f"leaf:{root}", *sides, classes=int(labels.max()) + 1)


def _users(folder: Path) -> dict[str, tuple[Features, IntArray]]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FedcontextError(f"{folder}: no LEAF .json file found")
    users: dict[str, tuple[Features, IntArray]] = {}
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            for name in content["users"]:
                users[str(name)] = _samples(f"{file}, user {name}", content["user_data"][name])
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise FedcontextError(f"{file}: not LEAF JSON ({type(error).__name__}: {error})") from None
    return users


def _samples(owner: str, data: dict[str, list[float]]) -> tuple[Features, IntArray]:
    try:
        labels = np.asarray(data["y"], dtype=np.int64)
        features = np.asarray(data["x"], dtype=np.float32).reshape(len(labels), -1 if len(labels) else 0)
        if len(labels):
            check_arrays(features, labels)
    except (ValueError, OverflowError) as error:
        raise FedcontextError(f"{owner}: {error}") from None
    return features, labels
