"""Flower's PyTorch quickstart with the guide's three changed lines: at least the accuracy of stock FedAvg."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import MemoryGrid
from flwr.app import Context, RecordDict
from test_flower_client import HERE, apply, changes, run

TOLERANCE = 0.005  # of the mean over the seeds: about what another order of the batches changes
SEEDS = (1, 2, 3)  # not those on which constants were chosen (100, 101)
SETTINGS = {
    "10 nodes, lr 0.02": (10, 1.0, 0.02, "momentum"),
    "10 nodes, lr 0.1": (10, 1.0, 0.1, "momentum"),
    "half of 10 nodes, lr 0.02": (10, 0.5, 0.02, "momentum"),
    "half of 10 nodes, lr 0.1": (10, 0.5, 0.1, "momentum"),
    "2 nodes, lr 0.02": (2, 1.0, 0.02, "momentum"),
    "2 nodes, lr 0.1": (2, 1.0, 0.1, "momentum"),
    "Adam, lr 0.001": (10, 1.0, 0.001, "adam"),
    "plain SGD, lr 0.1": (10, 1.0, 0.1, "sgd"),
}
QUICK = ("10 nodes, lr 0.02", "10 nodes, lr 0.1", "2 nodes, lr 0.02")
FEWER_SAMPLES = 3_000  # for settings whose accuracy the documentation does not quote


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(Path(__file__).parent / "quickstart_images")
    monkeypatch.delitem(sys.modules, "task", raising=False)
    import task

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield task
    torch.set_num_threads(threads)


def accuracy(images: ModuleType, changed: bool, nodes: int, fraction: float, lr: float, rounds: int = 6) -> float:
    """Return the test accuracy of the quickstart's server and client apps, with or without the guide's changes."""
    edits = changes()
    config = {"batch-size": 32, "local-epochs": 1, "fraction-train": fraction, "learning-rate": lr}
    config["num-server-rounds"] = rounds
    torch.manual_seed(images.SEED)
    random.seed(images.SEED)
    apps: dict[str, Any] = {
        name: run(apply((HERE / name).read_text(), edits[name] if changed else []), name)["app"] for name in edits
    }
    context = Context(1, 1, {}, RecordDict(), config)
    apps["server_app.py"](
        MemoryGrid(apps["client_app.py"], range(nodes), config, node_config={"num-partitions": nodes}), context
    )
    return images.accuracy(context.result.arrays.to_torch_state_dict())


@pytest.mark.parametrize("setting", [pytest.param(s, marks=[pytest.mark.slow] * (s not in QUICK)) for s in SETTINGS])
def test_three_lines_have_at_least_fedavgs_accuracy_after_six_rounds(
    setting: str,
    images: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING", "flwr")
    nodes, fraction, lr, optimizer = SETTINGS[setting]
    monkeypatch.setattr(images, "OPTIMIZER", optimizer)
    if setting not in QUICK:
        monkeypatch.setattr(images, "SAMPLES", FEWER_SAMPLES)
    results = {}
    for changed in (False, True):
        scores = []
        for seed in SEEDS:
            monkeypatch.setattr(images, "SEED", seed)
            scores.append(accuracy(images, changed, nodes, fraction, lr))
        results[changed] = float(np.mean(scores))
    with capsys.disabled():
        print(f"\n{setting}: FedAvg {results[False]:.3f}, three changed lines {results[True]:.3f}")
    assert results[True] >= results[False] - TOLERANCE
    assert not any(line.startswith("Diagnosis") for line in caplog.messages)
