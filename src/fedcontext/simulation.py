"""The loop: plan, work, answers, aggregation, evaluation, record; one round, one way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcontext.aggregation import Aggregation, aggregate
from fedcontext.algorithms import Algorithm, Hyperparameters, algorithm_named
from fedcontext.arrays.tree import FloatArray, Structure, all_finite, kind_of, leaves
from fedcontext.datasets import FederatedData, load_dataset
from fedcontext.datasets.federated import is_everyone
from fedcontext.engines.base import Engine, Work, engine_named
from fedcontext.errors import FedcontextError
from fedcontext.experiment import Experiment, experiment_from
from fedcontext.fleet import Answers, Fleet, answers, make_fleet, profile_named
from fedcontext.geometry import shares
from fedcontext.plan import IntArray, RoundPlan, plan_round
from fedcontext.records import RoundRecord
from fedcontext.rules import State as RuleState
from fedcontext.smoothness import as_vector, curvature, smoothness_of


@dataclass(frozen=True)
class State:
    """What a run carries from round to round."""

    number: int  # rounds done
    params: Structure
    rule: RuleState
    loss: float | None  # at params, where known


@dataclass(frozen=True)
class Simulation:
    """An experiment made ready: its data, engine, algorithm and fleet."""

    experiment: Experiment
    data: FederatedData
    engine: Engine
    algorithm: Algorithm
    fleet: Fleet

    def start(self) -> State:
        """Return the state before the first round."""
        params = self.engine.initial_params()
        return State(0, params, self.algorithm.rule.init(), self.engine.evaluate(params)[0])

    @np.errstate(over="ignore", invalid="ignore")  # of a run that diverges: the door refuses what is not finite
    def step(self, state: State) -> tuple[State, RoundRecord]:
        """Return the state after one more round, and the record of it."""
        plan = self.plan(state.number + 1)
        own = "own gradients" in self.algorithm.rule.needs or self._cohort_probes
        sizes = self.data.train.sizes
        got = answers(
            self.fleet,
            plan,
            sizes,
            sum(leaf.nbytes for leaf in leaves(state.params).values()),
            own_gradients=own,
            deadline=self.experiment.deadline or None,
        )
        enough = len(got.cohort) and (len(got.probes) or not len(plan.probes))
        result = self._aggregate(state, plan, got, own) if enough else None
        params = state.params if result is None else result.params
        evaluated = plan.number % self.experiment.eval_every == 0 or plan.number == self.experiment.rounds
        loss, accuracy = self.engine.evaluate(params) if evaluated else (None, None)
        after = State(plan.number, params, state.rule if result is None else result.state, loss)
        return after, self._record(plan, got, result, state.loss, loss, accuracy)

    def play(self, state: State | None = None) -> Iterator[tuple[State, RoundRecord]]:
        """Yield the state and the record of every round, or of those after ``state``."""
        state = self.start() if state is None else state
        while state.number < self.experiment.rounds:
            state, record = self.step(state)
            yield state, record

    @property
    def _cohort_probes(self) -> bool:
        return "gradient" in self.algorithm.rule.needs and self.experiment.probes == "cohort"

    def plan(self, number: int) -> RoundPlan:
        """Return what round ``number`` asks of the devices."""
        experiment, needs = self.experiment, self.algorithm.rule.needs
        everyone = self.data.population
        outside = everyone - min(experiment.devices_per_round, everyone)
        if "pool" in needs and experiment.pool == "all":
            is_everyone(self.data.train, np.arange(everyone))  # refuses what is made on demand
        plan = plan_round(
            experiment.seed,
            number,
            everyone,
            devices_per_round=experiment.devices_per_round,
            epochs=experiment.epochs,
            probes=everyone
            if experiment.probes == "all"
            else 0
            if experiment.probes == "cohort"
            else experiment.probes,
            pool=(outside if experiment.pool == "all" else experiment.pool) if "pool" in needs else 0,
            over_select=experiment.over_select,
        )
        return plan if "gradient" in needs else replace(plan, probes=plan.probes[:0])

    def _aggregate(self, state: State, plan: RoundPlan, got: Answers, own: bool) -> Aggregation:
        devices, pool = plan.devices[got.cohort], plan.pool[got.pool]
        everyone, epochs = (
            np.concatenate([devices, pool]),
            np.concatenate([plan.epochs[got.cohort], plan.pool_epochs[got.pool]]),
        )
        work = Work(self.experiment.seed, plan.number, everyone, epochs, self.algorithm.local)
        updates = self.engine.train(state.params, work)
        probes = plan.probes[got.probes]
        slope = self.engine.gradient(state.params, probes, self._probe_weights(probes)) if len(probes) else None
        try:
            return aggregate(
                state.params,
                dict(zip(devices.tolist(), updates[: len(devices)], strict=True)),
                rule=self.algorithm.rule,
                gradient=slope,
                own_gradients=self.engine.gradients(state.params, devices) if own else None,
                probe_weights=self._probe_weights(devices) if self._cohort_probes else None,
                samples=self.data.train.sizes[devices],
                pool=dict(zip(pool.tolist(), updates[len(devices) :], strict=True)),
                state=state.rule,
                buffers=getattr(self.engine, "buffers", ()),
            )
        except FedcontextError:
            bad = [device for device, move in zip(everyone.tolist(), updates, strict=True) if not _finite(move)]
            if bad:
                raise work.local.divergence_error(bad) from None
            raise

    def _probe_weights(self, devices: IntArray) -> FloatArray:
        counts = self.data.train.sizes[devices].astype(np.float64)
        return shares(counts if self.experiment.probe_averaging == "samples" else None, len(devices))

    def _record(
        self,
        plan: RoundPlan,
        got: Answers,
        result: Aggregation | None,
        before: float | None,
        loss: float | None,
        accuracy: float | None,
    ) -> RoundRecord:
        change = None if loss is None or before is None else loss - before
        return RoundRecord(
            number=plan.number,
            loss=loss,
            accuracy=accuracy,
            devices=plan.devices[got.cohort].tolist() if result else [],
            weights=result.weights.tolist() if result else [],
            promised_change=result.promised_change if result else None,
            measured_change=change,
            smoothness=self.algorithm.rule.smoothness,
            curvature=curvature_along(result, change) if result and change is not None else None,
            condition=result.geometry.condition if result else None,
            seconds=got.seconds,
            bytes_down=got.bytes_down,
            bytes_up=got.bytes_up,
            excluded=got.excluded,
            lost=result is None,
        )


def _finite(update: Structure) -> bool:
    return all(all_finite(leaf) for leaf in leaves(update).values() if kind_of(leaf) == "floating")


def prepare(experiment: Experiment, data: FederatedData | None = None, engine: Engine | None = None) -> Simulation:
    """Return ``experiment`` ready to run, on its data set or on the ``data`` given, with its engine or the one given."""
    data, given = data or load_dataset(experiment.dataset, experiment.data_seed), engine
    start = experiment.seed if experiment.engine == "torch" else 0  # of random weights
    named = (experiment.engine, experiment.model, experiment.device, start)
    engine = given or engine_named(named[0], data, *named[1:])

    def measured() -> float:
        return measured_smoothness(data, *named) if given is None else _measured(given, data)

    beta = smoothness_of(experiment.smoothness, experiment.learning_rate, measured)
    hyperparameters = Hyperparameters(
        learning_rate=experiment.learning_rate,
        smoothness=beta,
        batch_size=experiment.batch_size,
        mu=experiment.mu,
        averaging=experiment.averaging,
    )
    fleet = make_fleet(profile_named(experiment.fleet), data.population, experiment.seed)
    algorithm = algorithm_named(experiment.algorithm, hyperparameters)
    more = {name: getattr(experiment, name) for name in ("momentum", "weight_decay", "clip")}
    algorithm = replace(algorithm, local=replace(algorithm.local, **more))
    if given is None and experiment.engine != "torch":
        algorithm.local.check_supported(experiment.engine)
    simulation = Simulation(experiment, data, engine, algorithm, fleet)
    is_everyone(data.train, simulation.plan(1).probes)  # what cannot be planned is refused before anything is written
    return simulation


def rounds(
    experiment: Experiment | None = None, *, data: FederatedData | None = None, **settings: Any
) -> Iterator[RoundRecord]:
    """Yield the record of every round of an `Experiment`, or of the one that ``settings`` describe.

    >>> import fedcontext as fc
    >>> records = list(fc.rounds(dataset="synthetic-iid", algorithm="fedavg-contextual", rounds=3))
    >>> [record.number for record in records], records[-1].loss < records[0].loss
    ([1, 2, 3], True)
    """
    if experiment is not None and settings:
        raise FedcontextError("give an Experiment or settings, not both")
    if data is not None:
        settings.setdefault("dataset", data.name)  # what the records will say it is
    simulation = prepare(experiment or experiment_from(settings), data)
    return (record for _, record in simulation.play())


@lru_cache(maxsize=4)
def measured_smoothness(
    data: FederatedData, engine: str = "reference", model: str = "softmax", device: str = "auto", seed: int = 0
) -> float:
    """Return the largest curvature of the loss over all devices, at the start and one gradient step on.

    The first step away from zero params is where softmax regression bends most. It takes everyone's gradient some
    forty times: a figure for studies, where a federation would tune β or estimate it from probes.
    """
    return _measured(engine_named(engine, data, model, device, seed), data)


def _measured(engine: Engine, data: FederatedData) -> float:
    everyone, weights = np.arange(data.population), shares(data.train.sizes.astype(np.float64), data.population)
    start, params_at = as_vector(engine.initial_params(), getattr(engine, "buffers", ()))

    def slope(vector: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return as_vector(engine.gradient(params_at(vector), everyone, weights))[0]

    beta = curvature(slope, start)
    return max(beta, curvature(slope, start - slope(start) / beta))


def curvature_along(result: Aggregation, change: float) -> float | None:
    """Return the β with which the bound would have met the change: 2 (change - b·α) / αᵀ G α."""
    geometry, count = result.geometry, len(result.weights)
    square = float(result.weights @ geometry.gram[:count, :count] @ result.weights)
    if geometry.slopes is None or square <= 0:
        return None
    return 2 * (change - float(geometry.slope[:count] @ result.weights)) / square
