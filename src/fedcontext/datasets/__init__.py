"""Data sets by name: synthetic, from files, or any LEAF folder."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from fedcontext.datasets.arrays import federate
from fedcontext.datasets.federated import FederatedData, Split, first_devices
from fedcontext.datasets.femnist import femnist
from fedcontext.datasets.leaf import leaf
from fedcontext.datasets.mnist import mnist
from fedcontext.datasets.partition import dirichlet, iid, power_law, shards
from fedcontext.datasets.synthetic import EVALUATION_DEVICES, synthetic
from fedcontext.errors import FedcontextError, unknown_value_error

NAMES = {
    "synthetic-iid": "synthetic: 30 devices with the same distribution",
    "synthetic-A-B": "synthetic: 30 devices that differ in model by A and in features by B, such as synthetic-1-1",
    "synthetic-A-B-N": "the same with N devices, samples generated on demand if N is above 100, such as synthetic-1-1-1000000",
    "mnist": "1,000 devices with 2 digits each, sizes by a power law (FedProx)",
    "mnist-N": "the first N devices of it, such as mnist-100",
    "femnist": "one device per writer, 62 classes (LEAF)",
    "leaf:PATH": "any folder with LEAF's train/*.json and test/*.json",
}
EXAMPLES = ("synthetic-iid", "synthetic-1-1", "synthetic-1-1-1000", "mnist", "femnist")  # suggested for a misspelt name

__all__ = ["NAMES", "FederatedData", "Split", "dirichlet", "federate", "iid", "load_dataset", "power_law", "shards"]


@lru_cache(maxsize=2)
def load_dataset(name: str, seed: int = 0) -> FederatedData:
    """Return a data set by name; ``seed`` determines the generated samples or the partition.

    >>> load_dataset("synthetic-iid").population
    30
    >>> load_dataset("no-such-data")
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: dataset must be one of synthetic-iid, synthetic-A-B, synthetic-A-B-N, mnist, mnist-N, femnist, leaf:PATH, got 'no-such-data'; your own data run from Python only, with data=...
    """  # noqa: W505
    if name == "synthetic-iid":
        return synthetic(0, 0, iid=True, seed=seed)
    if numbers := re.fullmatch(r"synthetic-(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)(?:-(\d{1,18}))?", name):
        count = int(numbers[3] or 30)
        on_demand = count > EVALUATION_DEVICES  # else all samples are kept, to evaluate on
        data = synthetic(float(numbers[1]), float(numbers[2]), devices=count, seed=seed, on_demand=on_demand)
        return replace(data, name=name)
    if name == "mnist":
        return mnist(seed)
    if numbers := re.fullmatch(r"mnist-(\d{1,18})", name):
        return first_devices(mnist(seed), int(numbers[1]), name)
    if name == "femnist":
        return femnist()
    if name == "leaf:":
        raise FedcontextError(
            "dataset 'leaf:' has no path: write leaf:PATH, a folder with train/*.json and test/*.json"
        )
    if name.startswith("leaf:"):
        return leaf(name.removeprefix("leaf:"))
    suggestion = f"leaf:{name}" if _is_leaf(name) else ""
    accepted = f"one of {', '.join(NAMES)}"
    error = unknown_value_error("dataset", name, EXAMPLES, accepted=accepted, suggestion=suggestion)
    raise FedcontextError(f"{error}; your own data run from Python only, with data=...")


def _is_leaf(name: str) -> bool:
    try:
        return Path(name, "train").is_dir()
    except (OSError, ValueError):  # no path at all
        return False
