"""The same rounds on a Ray cluster: devices shared out over workers, each of which was sent the data once.

A device's update depends on the plan alone, so results are those of one machine, whatever the number of workers and
whichever of them are lost on the way. Ray starts a lost worker again and repeats what it was doing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedcontext.arrays import FloatArray
from fedcontext.cohorts.softmax import weighted_sum
from fedcontext.datasets.federated import FederatedData, is_everyone
from fedcontext.errors import FedcontextError, require
from fedcontext.plan import IntArray

if TYPE_CHECKING:
    from fedcontext.cohorts import Work

Matrix = npt.NDArray[Any]
RETRIES = 3  # of a worker's task, each on a worker started again


class SoftmaxRay:
    """Trains on a cluster's workers, one for each of its cores; evaluates here, where the data is at hand."""

    def __init__(self, data: FederatedData, workers: int | None = None, engine: str | None = None) -> None:
        from fedcontext.cohorts import engine_named

        self.data, self.ray = data, _started()
        name = engine or ("fast" if find_spec("numba") else "reference")
        self.here = engine_named(name, data)
        count = workers or max(1, int(self.ray.cluster_resources().get("CPU", 1)))
        lasting = {"max_restarts": -1, "max_task_retries": RETRIES, "scheduling_strategy": "SPREAD"}
        make = self.ray.remote(**lasting)(_Worker)  # holds no core while idle, so that engines can share a cluster
        sent = self.ray.put(data)
        self.workers = [make.remote(sent, name) for _ in range(count)]

    def start(self) -> Matrix:
        """Return zeros: every class equally likely."""
        start: Matrix = self.here.start()
        return start

    def train(self, params: Matrix, work: Work) -> list[Matrix]:
        """Return each device's update, from the workers."""
        sent, cost = self.ray.put(params), work.epochs * self.data.train.sizes[work.devices]

        def task(worker: Any, rows: IntArray) -> Any:
            return worker.train.remote(sent, replace(work, devices=work.devices[rows], epochs=work.epochs[rows]))

        return self._shared_out(task, cost)

    def gradients(self, params: Matrix, devices: IntArray) -> list[Matrix]:
        """Return ∇F_k(params) of each device, from the workers."""
        sent = self.ray.put(params)
        return self._shared_out(
            lambda worker, rows: worker.gradients.remote(sent, devices[rows]), self.data.train.sizes[devices]
        )

    def gradient(self, params: Matrix, devices: IntArray, weights: FloatArray) -> Matrix:
        """Return Σ weights ∇F_k(params)."""
        if not is_everyone(self.data.train, devices):
            return weighted_sum(weights, self.gradients(params, devices))
        whole: Matrix = self.here.gradient(params, devices, weights)
        return whole

    def evaluate(self, params: Matrix) -> tuple[float, float]:
        """Return the mean loss over all training samples and the share of all test samples classified right."""
        return self.here.evaluate(params)

    def _shared_out(self, task: Callable[[Any, IntArray], Any], cost: IntArray) -> list[Matrix]:
        """Return what the workers answer for each row; the costly rows are dealt out first, so that shares are even."""
        longest = np.argsort(-cost, kind="stable")
        hands = [longest[place :: len(self.workers)] for place in range(len(self.workers))]
        asked = [(rows, task(worker, rows)) for worker, rows in zip(self.workers, hands, strict=True) if len(rows)]
        found: dict[int, Matrix] = {}
        for rows, answer in asked:
            try:
                found |= zip(rows.tolist(), self.ray.get(answer), strict=True)
            except self.ray.exceptions.RayActorError as error:
                raise FedcontextError(
                    f"a Ray worker was lost more than {RETRIES} times at one task: {error}"
                ) from error
        return [found[row] for row in range(len(cost))]


class _Worker:
    """An engine on a worker; the data is read where Ray keeps it, not copied."""

    def __init__(self, data: FederatedData, engine: str) -> None:
        from fedcontext.cohorts import engine_named

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
