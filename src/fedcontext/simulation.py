"""The loop over rounds: plan, train, report, aggregate, evaluate, record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fedcontext.aggregation.aggregate import aggregate
from fedcontext.aggregation.result import Aggregation
from fedcontext.algorithms import Algorithm
from fedcontext.arrays.tree import FloatArray, Leaves, Structure, all_finite, kind_of, leaves, rebuild, size_of
from fedcontext.datasets import FederatedData
from fedcontext.engines.base import Engine, Work
from fedcontext.errors import FedcontextError
from fedcontext.experiment import Experiment
from fedcontext.faults.disturbance import Answers, Disturbance, Request
from fedcontext.faults.reply import device_of
from fedcontext.fleet import NO_REPLIES, Fleet, Replies, replies
from fedcontext.local_sgd import Diverged
from fedcontext.measurement.defences import OFF, NoneUsable
from fedcontext.measurement.geometry import Name, Report, shares
from fedcontext.oracle import oracle_aggregation
from fedcontext.plan import IntArray, RoundPlan, plan_round
from fedcontext.probing import Coding, probe_answers
from fedcontext.records import RoundRecord, round_record
from fedcontext.rules.base import State as RuleState
from fedcontext.rules.server import ServerOptimizer, except_buffers
from fedcontext.rules.server import State as ServerState
from fedcontext.variates import VariateState, corrections, initial_state, next_state


@dataclass(frozen=True)
class State:
    """What a run carries from round to round."""

    number: int  # rounds done
    params: Structure
    rule: RuleState
    loss: float | None  # at params, where known
    previous: Structure | None = None  # the params before the last aggregation, where the rule needs them
    server: ServerState = None  # of the server optimiser, where there is one
    variates: VariateState | None = None  # of the server and of devices that took part, for control variates

    @property
    def carried(self) -> dict[str, Any]:
        """What a checkpoint holds beside number, params and loss."""
        return {"rule": self.rule, "previous": self.previous, "server": self.server, "variates": self.variates}


@dataclass(frozen=True)
class Simulation:
    """An experiment made ready: its data, engine, algorithm and fleet."""

    experiment: Experiment
    data: FederatedData
    engine: Engine
    algorithm: Algorithm
    fleet: Fleet
    smoothness: float  # β at which the bound is reported
    coding: Coding = Coding()  # of the probes' answers  # noqa: RUF009
    disturbance: Disturbance | None = None  # faults and attacks
    root: Engine | None = None  # on the server's own samples, as its one device

    def start(self) -> State:
        """Return the state before the first round."""
        params = self.engine.initial_params()
        return State(
            number=0,
            params=params,
            rule=self.algorithm.rule.init(params),
            loss=self.engine.evaluate(params)[0],
            server=self._optimizer.init(params) if self._optimizer else None,
            variates=initial_state(self._trained(params)) if self.algorithm.variates else None,
        )

    @np.errstate(over="ignore", invalid="ignore")  # of a run that diverges: `aggregate` refuses what is not finite
    def step(self, state: State) -> tuple[State, RoundRecord]:
        """Return the state after one more round, and the record of it."""
        plan = self.plan(state.number + 1)
        present, missing = self.disturbance.present(plan) if self.disturbance else (plan, {})
        received = self._replies(present, state) if len(present.devices) else NO_REPLIES
        enough = len(received.cohort) and (len(received.probes) or not len(plan.probes))
        report = self.report(state, present, received) if enough else None
        if report and self.disturbance and self.disturbance.active(plan.number):
            report, lost = self.disturbance.apply(report, self._request(state, present, received))
            missing = {**missing, **lost}
        if report and self.root:
            report = self._with_root(report, self.root, state, plan)
        result, unusable = self._aggregate(state, report) if report else (None, {})
        received = replace(received, excluded={**received.excluded, **missing, **unusable})
        after = self._after(state, report, result) if report and result else state
        loss, accuracy = self.engine.evaluate(after.params) if self._evaluates(plan.number) else (None, None)
        record = self._record(plan, received, result, state.loss, loss, accuracy)
        if self.disturbance and loss is not None:
            record = replace(record, backdoor=self.disturbance.backdoor(after.params))
        return replace(after, number=plan.number, loss=loss), record

    def run(self, state: State | None = None) -> Iterator[tuple[State, RoundRecord]]:
        """Yield the state and the record of every round, or of those after ``state``."""
        state = self.start() if state is None else state
        while state.number < self.experiment.rounds:
            state, record = self.step(state)
            yield state, record

    def plan(self, number: int) -> RoundPlan:
        """Return what round ``number`` asks of the devices."""
        experiment, needs = self.experiment, self.algorithm.rule.needs
        return plan_round(
            experiment.seed,
            number,
            self.data.population,
            devices_per_round=experiment.devices_per_round,
            epochs=experiment.epochs,
            probes=experiment.probes if "gradient" in needs else None,
            pool=experiment.pool if "pool" in needs else 0,
            over_select=experiment.over_select,
        )

    def report(self, state: State, plan: RoundPlan, received: Replies) -> Report:
        """Return what the devices of a round send: updates, and the gradients that the rule needs."""
        devices, pool, probes = plan.devices[received.cohort], plan.pool[received.pool], plan.probes[received.probes]
        needs, samples = self.algorithm.rule.needs, self.data.train.sizes[devices]
        cohort_probes = np.array_equal(np.sort(probes), np.sort(devices))
        probes = devices if cohort_probes else probes
        updates = self._train(state, plan, received)
        gradients = gradient = own = differences = None
        if "own gradients" in needs:
            own, _ = probe_answers(
                self.engine, state.params, None, devices, self.coding, (self.experiment.seed, plan.number)
            )
        disturbed = self.disturbance is not None and self.disturbance.active(plan.number)
        each = "differences" in needs or not self.coding.exact or cohort_probes or disturbed
        if "gradient" in needs and (each or self.experiment.defences != OFF):
            answers, differences = self._answers(self.engine, state, plan.number, probes)
            own, gradients = (
                (answers, None) if cohort_probes else (own, dict(zip(probes.tolist(), answers, strict=True)))
            )
        elif "gradient" in needs:  # the mean alone, in one pass where all devices probe
            gradient = self.engine.gradient(state.params, probes, self._probe_weights(probes))
        return Report(
            updates=dict(zip(devices.tolist(), updates[: len(devices)], strict=True)),
            samples=samples,
            gradient=gradient,
            gradients=gradients,
            probe_weights=self._probe_weights(probes) if gradients or (own and cohort_probes) else None,
            own_gradients=own,
            pool=dict(zip(pool.tolist(), updates[len(devices) :], strict=True)),
            differences=differences,
            population=self.data.population,
            distortions=self.coding.distortions,
            steps=self.algorithm.local.steps(samples, plan.epochs[received.cohort]).tolist(),
        )

    def _replies(self, plan: RoundPlan, state: State) -> Replies:
        model_bytes = sum(leaf.nbytes for leaf in leaves(state.params).values())
        size = sum(size_of(leaf) for leaf in self._trained(state.params).values())
        return replies(
            self.fleet,
            plan,
            self.data.train.sizes,
            model_bytes,
            probe=self.coding.cost(size, model_bytes, state.previous is not None and self._uses_differences),
            own_gradients="own gradients" in self.algorithm.rule.needs,
            state_bytes=self._state_bytes(state),
            deadline=self.experiment.deadline or None,
        )

    def _train(self, state: State, plan: RoundPlan, received: Replies) -> list[Structure]:
        """Return the updates of the cohort, then those of the pool."""
        work = self._work(state, plan, received.cohort, received.pool)
        try:
            updates = self.engine.train(state.params, work)
        except Diverged as error:
            if not error.updates:
                raise
            updates = list(error.updates)
        finite = np.array([_finite(update) for update in updates])
        parts = np.split(finite, [len(received.cohort)])  # if most devices of a part diverged, the run has
        if not finite.all() and (not self.experiment.outlier or any(2 * part.sum() < len(part) for part in parts)):
            raise work.local.divergence_error(work.devices[~finite].tolist())
        return updates

    def _work(self, state: State, plan: RoundPlan, cohort: IntArray, pool: IntArray) -> Work:
        """Return the work of devices at these positions of a plan."""
        devices = np.concatenate([plan.devices[cohort], plan.pool[pool]])
        epochs = np.concatenate([plan.epochs[cohort], plan.pool_epochs[pool]])
        variates, terms = self.algorithm.variates, None
        if variates and state.variates:
            terms = corrections(variates, state.variates, devices.tolist())
        return Work(self.experiment.seed, plan.number, devices, epochs, self.algorithm.local, terms)

    def _with_root(self, report: Report, root: Engine, state: State, plan: RoundPlan) -> Report:
        """Return the report with the server's own gradient, or its update after as many epochs as devices on average."""
        if "root gradient" in self.algorithm.rule.needs:
            return replace(report, root_gradient=root.gradients(state.params, np.zeros(1, np.int64))[0])
        server, epochs = np.zeros(1, np.int64), np.array([round(float(plan.epochs.mean()))])
        work = Work(self.experiment.seed, plan.number, server, epochs, self.algorithm.local)
        return replace(report, pool={"server": root.train(state.params, work)[0]})

    def _answers(self, engine: Engine, state: State, number: int, devices: IntArray) -> Answers:
        previous = state.previous if self._uses_differences else None
        return probe_answers(engine, state.params, previous, devices, self.coding, (self.experiment.seed, number))

    @property
    def _uses_differences(self) -> bool:
        return "differences" in self.algorithm.rule.needs

    def _request(self, state: State, plan: RoundPlan, received: Replies) -> Request:
        """Return what faults and attacks need to know of a round."""
        assert self.disturbance
        late = None
        if plan.number > 1 and self.disturbance.needs_previous:
            before, _ = self.disturbance.present(self.plan(plan.number - 1))
            late = self._work(state, before, self.disturbance.late(before), NO_REPLIES.pool)
        return Request(
            state.params,
            state.previous,
            list(self._trained(state.params)),
            self._work(state, plan, received.cohort, received.pool),
            late,
            lambda engine, devices: self._answers(engine, state, plan.number, devices),
        )

    def _aggregate(self, state: State, report: Report) -> tuple[Aggregation | None, dict[int, str]]:
        """Return the aggregation, None if no reply is usable, and whose replies are not."""
        try:
            result = aggregate(
                state.params,
                report,
                rule=self.algorithm.rule,
                buffers=self.engine.buffers,
                smoothness=self.smoothness,
                state=state.rule,
                defences=self.experiment.defences,
            )
        except NoneUsable as error:
            return None, _by_device(error.excluded)
        if self.algorithm.oracle:
            names, sizes = list(self._trained(state.params)), self.data.train.sizes
            result = oracle_aggregation(result, report, state.params, names, self.engine, sizes)
        return result, _by_device(result.excluded)

    def _after(self, state: State, report: Report, result: Aggregation) -> State:
        """Return the state with the rule's step applied, after control variates and the server optimiser."""
        keeps = self._uses_differences or (self.disturbance is not None and self.disturbance.needs_previous)
        previous = state.params if keeps else None
        after = replace(state, params=result.params, rule=result.state, previous=previous)
        if not self._changes_step:
            return after
        step = result.step
        if self.algorithm.variates:
            own = self._next_variates(state, report, result.screened.factors)
            moved = {
                name: self.algorithm.variates.step(leaf, own["server"][name])
                for name, leaf in self._trained(step).items()
            }
            step, after = rebuild(step, {**leaves(step), **moved}), replace(after, variates=own)
        if self._optimizer:
            step, server = self._optimizer.update(step, state.server, state.params)
            after = replace(after, server=server)
        base, trained = self._trained(state.params), self._trained(step)
        params = {**leaves(result.params), **{name: base[name] + trained[name] for name in base}}
        if not _finite(params):
            raise FedcontextError("the server's step overflowed; lower the server learning rate")
        return replace(after, params=rebuild(state.params, params))

    def _next_variates(self, state: State, report: Report, factors: FloatArray) -> VariateState:
        assert self.algorithm.variates
        assert state.variates
        assert isinstance(report.updates, dict)
        names = list(report.updates)
        first = [row for row in np.flatnonzero(factors).tolist() if isinstance(names[row], int)]  # not a second reply
        updates = {names[row]: self._clipped(report.updates[names[row]], float(factors[row])) for row in first}
        steps = list(report.steps or [])
        return next_state(
            self.algorithm.variates, state.variates, updates, [steps[row] for row in first], self.data.population
        )

    def _clipped(self, update: Structure, factor: float) -> Leaves:
        trained = self._trained(update)
        return trained if factor == 1 else {name: factor * leaf for name, leaf in trained.items()}

    @property
    def _changes_step(self) -> bool:
        return self.algorithm.server is not None or self.algorithm.variates is not None

    def _trained(self, structure: Structure) -> Leaves:
        """Return the floating-point leaves that gradients move: not the buffers, which are averaged."""
        return {
            name: leaf
            for name, leaf in leaves(structure).items()
            if name not in self.engine.buffers and kind_of(leaf) == "floating"
        }

    def _state_bytes(self, state: State) -> int:
        """Return what devices receive beside the params: the server's control variate, where it is needed."""
        if state.variates is None or self.algorithm.variates is None or not self.algorithm.variates.sends_state:
            return 0
        return sum(leaf.nbytes for leaf in state.variates["server"].values())

    @cached_property
    def _optimizer(self) -> ServerOptimizer | None:
        """The server optimiser; buffers are averaged, not optimised."""
        return self.algorithm.server and except_buffers(self.algorithm.server, self.engine.buffers)

    def _evaluates(self, number: int) -> bool:
        return number % self.experiment.eval_every == 0 or number == self.experiment.rounds

    def _probe_weights(self, devices: IntArray) -> FloatArray:
        counts = self.data.train.sizes[devices].astype(np.float64)
        return shares(counts if self.experiment.probe_averaging == "samples" else None, len(devices))

    def _record(
        self,
        plan: RoundPlan,
        received: Replies,
        result: Aggregation | None,
        before: float | None,
        loss: float | None,
        accuracy: float | None,
    ) -> RoundRecord:
        record = round_record(
            plan.number,
            result,
            loss,
            before,
            accuracy=accuracy,
            devices=[device_of(name) for name in result.applied] if result else [],
            smoothness=self.smoothness,
            seconds=received.seconds,
            bytes_down=received.bytes_down,
            bytes_up=received.bytes_up,
            excluded=received.excluded,
            clipped=_by_device(result.clipped) if result else {},
        )
        if self._changes_step:  # these are about the rule's own step
            record = replace(record, promised_change=None, curvature=None, step_norm=None)
        return record


def _by_device(reasons: Mapping[Name, str]) -> dict[int, str]:
    return {device_of(name): reason for name, reason in reasons.items()}


def _finite(update: Structure) -> bool:
    return all(all_finite(leaf) for leaf in leaves(update).values() if kind_of(leaf) == "floating")
