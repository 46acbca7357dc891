"""The same rounds on a Ray cluster: devices shared out over workers, each of which was sent the data once.

A device's update depends on the plan alone, so results are those of one machine, whatever the number of workers and
whichever of them are lost on the way: another takes the place of a lost one, and its devices are run again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedcontext.arrays.tree import FloatArray
from fedcontext.datasets.federated import FederatedData, check_devices, full_participation
from fedcontext.engines.softmax import weighted_sum
from fedcontext.errors import FedcontextError, require
from fedcontext.plan import IntArray

if TYPE_CHECKING:
    from fedcontext.engines.base import Work

Matrix = npt.NDArray[Any]
RETRIES = 3  # of a task whose worker was lost


class SoftmaxRay:
    """Trains on a cluster's workers, one for each of its cores; evaluates here, where the data is at hand."""

    buffers = ()  # every parameter has a gradient
    supports_corrections = True

    def __init__(self, data: FederatedData, workers: int | None = None, engine: str | None = None) -> None:
        from fedcontext.engines.base import engine_named

        self.data, self.ray = data, _started()
        name = engine or ("numba" if find_spec("numba") else "reference")
        self.here = engine_named(name, data)
        count = workers or max(1, int(self.ray.cluster_resources().get("CPU", 1)))
        sent = self.ray.put(data)
        # A worker holds no core while it is idle, so that several engines can share a cluster.
        make = self.ray.remote(scheduling_strategy="SPREAD")(_Worker)
        self._new_worker: Callable[[], Any] = lambda: make.remote(sent, name)
        self.workers = [self._new_worker() for _ in range(count)]

    def initial_params(self) -> Matrix:
        """Return zeros: every class equally likely."""
        start: Matrix = self.here.initial_params()
        return start

    def train(self, params: Matrix, work: Work) -> list[Matrix]:
        """Return each device's update, from the workers."""
        work.local.check_supported("ray")
        check_devices(self.data.train, work.devices)
        sent, cost = self.ray.put(params), work.epochs * self.data.train.sizes[work.devices]

        def task(worker: Any, rows: IntArray) -> Any:
            return worker.train.remote(sent, work.rows(rows))

        return self._shared_out(task, cost)

    def gradients(self, params: Matrix, devices: IntArray) -> list[Matrix]:
        """Return ∇F_k(params) of each device, from the workers."""
        check_devices(self.data.train, devices)
        sent = self.ray.put(params)
        return self._shared_out(
            lambda worker, rows: worker.gradients.remote(sent, devices[rows]), self.data.train.sizes[devices]
        )

    def gradient(self, params: Matrix, devices: IntArray, weights: FloatArray) -> Matrix:
        """Return Σ weights ∇F_k(params)."""
        if not full_participation(self.data.train, devices):
            return weighted_sum(weights, self.gradients(params, devices))
        whole: Matrix = self.here.gradient(params, devices, weights)
        return whole

    def evaluate(self, params: Matrix) -> tuple[float, float]:
        """Return the mean loss over all training samples and the share of all test samples classified right."""
        return self.here.evaluate(params)

    def _shared_out(self, task: Callable[[Any, IntArray], Any], cost: IntArray) -> list[Matrix]:
        """Return what the workers answer for each row; costly rows are dealt out first, lost ones dealt out again."""
        found: dict[int, Matrix] = {}
        for _ in range(RETRIES + 1):
            left = np.array([row for row in np.argsort(-cost, kind="stable") if row not in found])
            hands = [left[place :: len(self.workers)] for place in range(len(self.workers))]
            asked = [(place, rows, task(self.workers[place], rows)) for place, rows in enumerate(hands) if len(rows)]
            for place, rows, answer in asked:
                try:
                    found |= zip(rows.tolist(), self.ray.get(answer), strict=True)
                except self.ray.exceptions.RayActorError:
                    self.workers[place] = self._new_worker()
            if len(found) == len(cost):
                return [found[row] for row in range(len(cost))]
        raise FedcontextError(f"a Ray worker was lost in each of {RETRIES + 1} tries at one task: see Ray's logs")


class _Worker:
    """An engine on a worker; the data is read where Ray keeps it, not copied."""

    def __init__(self, data: FederatedData, engine: str) -> None:
        from fedcontext.engines.base import engine_named

        os.environ["OMP_NUM_THREADS"] = "1"  # a worker for each core is threads enough
        self.engine = engine_named(engine, data)

    def train(self, params: Matrix, work: Work) -> list[Matrix]:
        return self.engine.train(params, work)

    def gradients(self, params: Matrix, devices: IntArray) -> list[Matrix]:
        return self.engine.gradients(params, devices)


def _started() -> Any:
    """Return Ray, connected to the cluster that RAY_ADDRESS names, or to one started on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = require("ray", extra="ray")
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    return ray
