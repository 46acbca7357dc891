"""Shared fixtures: real data where it is at hand, small problems everywhere."""

from __future__ import annotations

import gc
import logging
import os
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from fedcontext.datasets import FederatedData, federate, files, iid, load_dataset

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # PyTorch's threads would spin on the core of the other worker
collect_ignore_glob = ["flower/quickstart_images/*"]  # an app with a module of the same name as the other's

settings.register_profile("fedcontext", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fedcontext")


def pytest_configure(config: pytest.Config) -> None:
    """Compile before xdist starts its workers, which would all compile the same functions."""
    if not hasattr(config, "workerinput") and find_spec("numba"):
        from fedcontext.engines.numba.engine import SoftmaxNumba

        for dtype in (np.float32, np.float64):
            SoftmaxNumba(load_dataset("synthetic-iid"), dtype)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking through all modules and tests again and again: they stay to the end."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("data")
    for name in marker.args if marker else ():
        if files.where(name) is None:
            pytest.skip(f"the {name} file is not at hand: set {files.VARIABLE} to a directory that holds it")


@pytest.fixture(autouse=True)
def warnings_are_logged() -> None:
    """Undo what ``--quiet`` set in an earlier test of the command line."""
    logging.getLogger("fedcontext").setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def small_data() -> FederatedData:
    """Twelve devices, three classes, five features: learnable, and quick to train on."""
    random = np.random.default_rng(3)
    features = random.standard_normal((600, 5))
    labels = np.argmax(features @ random.standard_normal((5, 3)) + 0.3 * random.standard_normal((600, 3)), axis=1)
    return federate(features, labels, iid(labels, 12, random), name="small", classes=3)
