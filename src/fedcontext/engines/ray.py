"""Rounds on a Ray cluster: the devices of a round are distributed over workers, each of which holds the data.

A device's update depends on the plan alone, so results are those of one machine for any number of workers. A lost
worker is replaced and its devices are run again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcontext.arrays.tree import FloatArray
from fedcontext.datasets.federated import FederatedData, check_devices, full_participation
from fedcontext.engines.base import Work, engine_named
from fedcontext.engines.softmax import check_params, weighted_sum
from fedcontext.errors import FedcontextError, require
from fedcontext.plan import IntArray

Matrix = npt.NDArray[Any]
RETRIES = 3  # of devices whose worker was lost


class SoftmaxRay:
    """Trains on the workers of a cluster, one per core, and evaluates in this process."""

    buffers = ()  # every parameter has a gradient
    supports_corrections = True

    def __init__(self, data: FederatedData, workers: int | None = None, engine: str | None = None) -> None:
        self.data, self.ray = data, _connected()
        name = engine or ("numba" if find_spec("numba") else "reference")
        self.local_engine = engine_named(name, data)
        count = workers or max(1, int(self.ray.cluster_resources().get("CPU", 1)))
        data_reference = self.ray.put(data)
        # An idle worker reserves no core, so that several engines can share a cluster.
        actor = self.ray.remote(scheduling_strategy="SPREAD")(_Worker)
        self._new_worker: Callable[[], Any] = lambda: actor.remote(data_reference, name)
        self.workers = [self._new_worker() for _ in range(count)]

    def initial_params(self) -> Matrix:
        """Return zeros: every class equally likely."""
        params: Matrix = self.local_engine.initial_params()
        return params

    def train(self, params: Matrix, work: Work) -> list[Matrix]:
        """Return each device's update: mini-batch SGD on F_k(w) + (μ/2)‖w - wᵗ‖² from ``params``."""
        work.local.check_supported("ray")
        check_params(params, self.initial_params())
        check_devices(self.data.train, work.devices)
        reference, cost = self.ray.put(params), work.epochs * self.data.train.sizes[work.devices]

        def submit(worker: Any, rows: IntArray) -> Any:
            return worker.train.remote(reference, work.rows(rows))

        return self._distribute(submit, cost)

    def gradients(self, params: Matrix, devices: IntArray) -> list[Matrix]:
        """Return ∇F_k(params) of each device."""
        check_params(params, self.initial_params())
        check_devices(self.data.train, devices)
        reference, cost = self.ray.put(params), self.data.train.sizes[devices]
        return self._distribute(lambda worker, rows: worker.gradients.remote(reference, devices[rows]), cost)

    def gradient(self, params: Matrix, devices: IntArray, weights: FloatArray) -> Matrix:
        """Return Σ weights ∇F_k(params)."""
        check_params(params, self.initial_params())
        if not full_participation(self.data.train, devices):
            return weighted_sum(weights, self.gradients(params, devices))
        gradient: Matrix = self.local_engine.gradient(params, devices, weights)
        return gradient

    def evaluate(self, params: Matrix) -> tuple[float, float]:
        """Return the mean loss over all training samples and the accuracy over all test samples."""
        return self.local_engine.evaluate(params)

    def _distribute(self, submit: Callable[[Any, IntArray], Any], cost: IntArray) -> list[Matrix]:
        """Return the workers' results for each row. Costly rows are submitted first, those of lost workers again."""
        results: dict[int, Matrix] = {}
        for _ in range(RETRIES + 1):
            remaining = np.array([row for row in np.argsort(-cost, kind="stable").tolist() if row not in results], int)
            shares = [remaining[index :: len(self.workers)] for index in range(len(self.workers))]
            pending = [(i, rows, submit(self.workers[i], rows)) for i, rows in enumerate(shares) if len(rows)]
            for index, rows, reference in pending:
                try:
                    results |= zip(rows.tolist(), self.ray.get(reference), strict=True)
                except self.ray.exceptions.RayActorError:
                    self.workers[index] = self._new_worker()
                except self.ray.exceptions.RayTaskError as error:
                    if isinstance(error.cause, FedcontextError):
                        raise error.cause from None  # the error itself, without Ray's traceback around it
                    raise
            if len(results) == len(cost):
                return [results[row] for row in range(len(cost))]
        raise FedcontextError(f"a Ray worker was lost in each of {RETRIES + 1} attempts at a round: see Ray's logs")


class _Worker:
    """An engine in a process of the cluster; the data stays in Ray's shared memory."""

    def __init__(self, data: FederatedData, engine: str) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # there is a worker for each core
        self.engine = engine_named(engine, data)

    def train(self, params: Matrix, work: Work) -> list[Matrix]:
        return self.engine.train(params, work)

    def gradients(self, params: Matrix, devices: IntArray) -> list[Matrix]:
        return self.engine.gradients(params, devices)


def _connected() -> Any:
    """Return Ray, connected to the cluster that RAY_ADDRESS names, or to one started on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's future default; unset, it prints a warning
    ray = require("ray", extra="ray")
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    return ray
