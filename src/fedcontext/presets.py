"""Named groups of settings to start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fedcontext.experiment import Experiment, experiment_from, with_limits
from fedcontext.measurement.defences import OFF

PRESETS: dict[str, Mapping[str, Any]] = {
    "paper": {
        "dataset": "mnist",
        "algorithm": "fedavg-contextual",
        "devices_per_round": 10,
        "epochs": (1, 20),
        "smoothness": "1/lr",
        "probes": "all",
        "averaging": "mean",
        "probe_averaging": "mean",
        **asdict(OFF),  # the paper has no defences
    }
}


def paper(dataset: str = "mnist", **changes: Any) -> Experiment:
    """Return the setting that the paper prints: β = 1/lr, K2 = N, plain averages, K = 10, 1 to 20 local epochs.

    The defences against faulty devices, which the paper does not have, are off.

    >>> paper("synthetic-1-1", rounds=5).smoothness
    '1/lr'
    """
    return experiment_from({**PRESETS["paper"], "dataset": dataset, **with_limits(changes)})
