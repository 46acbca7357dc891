"""The loop over rounds: plan, train, report, aggregate, evaluate, record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedcontext.aggregation.aggregate import aggregate
from fedcontext.aggregation.correction import correct
from fedcontext.aggregation.result import Aggregation
from fedcontext.algorithms import Algorithm
from fedcontext.arrays.tree import FloatArray, Leaves, Structure, leaves, rebuild, size_of, trained_leaves
from fedcontext.coding import Coding
from fedcontext.datasets import FederatedData
from fedcontext.devices import Devices
from fedcontext.engines.base import Engine, Work
from fedcontext.errors import FedcontextError, shown
from fedcontext.experiment import Experiment
from fedcontext.faults.disturbance import Disturbance, Request
from fedcontext.faults.reply import device_of
from fedcontext.fleet import NO_REPLIES, Fleet, Replies, replies, second_replies
from fedcontext.measurement.defences import NoneUsable
from fedcontext.measurement.geometry import Name, Report
from fedcontext.measurement.screening import CHANGE, joined
from fedcontext.measurement.sums import flat, unflat
from fedcontext.oracle import oracle_aggregation
from fedcontext.plan import IntArray, RoundPlan, plan_round, second_probes
from fedcontext.records import RoundRecord, round_record
from fedcontext.rules.base import asks_remaining_slopes, corrects
from fedcontext.state import State, changes_step, server_step
from fedcontext.variates import initial_state


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
            server=self.algorithm.server.init(params) if self.algorithm.server else None,
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
        if result and self.corrects and result.probes:
            result, received = self._corrected(state, result, received, plan.number)
        received = replace(received, excluded={**received.excluded, **missing, **unusable})
        after = self._after(state, report, result) if report and result else state
        evaluates = plan.number % self.experiment.eval_every == 0 or plan.number == self.experiment.rounds
        loss, accuracy = self.engine.evaluate(after.params) if evaluates else (None, None)
        backdoor = self.disturbance.backdoor(after.params) if self.disturbance and evaluates else None
        after = replace(after, number=plan.number, loss=loss)
        return after, self._record(after, received, result, state.loss, accuracy=accuracy, backdoor=backdoor)

    def run(self, state: State | None = None) -> Iterator[tuple[State, RoundRecord]]:
        """Yield the state and the record of every round, or of those after ``state``.

        >>> import fedcontext as fc
        >>> simulation = fc.prepare(fc.Experiment("synthetic-iid", "fedavg", rounds=3))
        >>> (state, _), *rest = simulation.run()
        >>> [record for _, record in simulation.run(state)] == [record for _, record in rest]
        True
        """
        if not isinstance(state, State | None):
            raise FedcontextError(
                f"state must be that of a round, or None, got {shown(state)}; the number of rounds is in the settings"
            )
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

    @property
    def corrects(self) -> bool:
        """Whether a round has a second exchange, in which the step is corrected."""
        changed = self.algorithm.oracle or changes_step(self.algorithm)
        return corrects(self.algorithm.rule) and self.experiment.exchanges > 1 and not changed

    def report(self, state: State, plan: RoundPlan, received: Replies) -> Report:
        """Return what the devices of a round send: updates, and the gradients that the rule needs."""
        disturbed = self.disturbance is not None and self.disturbance.active(plan.number)
        return self._devices.report(state, plan, received, disturbed)

    @property
    def _devices(self) -> Devices:
        return Devices(self.experiment, self.data, self.engine, self.algorithm, self.coding)

    def _replies(self, plan: RoundPlan, state: State) -> Replies:
        """Return who replies in time; devices receive the params and, for some control variates, the server's state."""
        variates, needs = self.algorithm.variates, self.algorithm.rule.needs
        sent = state.variates["server"].values() if variates and variates.sends_state and state.variates else ()
        size, model_bytes = self._sizes(state.params)
        return replies(
            self.fleet,
            plan,
            self.data.train.sizes,
            model_bytes,
            probe=self.coding.cost(size, model_bytes, state.previous is not None and "differences" in needs),
            own_gradients="own gradients" in needs,
            state_bytes=sum(leaf.nbytes for leaf in sent),
            cohort_passes=2 * asks_remaining_slopes(self.algorithm.rule, state.rule),
            deadline=self.experiment.deadline or None,
        )

    def _with_root(self, report: Report, root: Engine, state: State, plan: RoundPlan) -> Report:
        """Return the report with the server's own gradient, or its update after the devices' mean number of epochs."""
        if "root gradient" in self.algorithm.rule.needs:
            return replace(report, root_gradient=root.gradients(state.params, np.zeros(1, np.int64))[0])
        server, epochs = np.zeros(1, np.int64), np.array([round(float(plan.epochs.mean()))])
        work = Work(self.experiment.seed, plan.number, server, epochs, self.algorithm.local)
        return replace(report, pool={"server": root.train(state.params, work)[0]})

    def _request(self, state: State, plan: RoundPlan, received: Replies) -> Request:
        """Return what faults and attacks need to know of a round."""
        assert self.disturbance
        late = None
        if plan.number > 1 and self.disturbance.needs_previous:
            before, _ = self.disturbance.present(self.plan(plan.number - 1))
            late = self._devices.work(state, before, self.disturbance.late(before), NO_REPLIES.pool)
        return Request(
            state.params,
            state.previous,
            list(self._trained(state.params)),
            self._devices.work(state, plan, received.cohort, received.pool),
            late,
            lambda engine, devices: self._devices.answers(engine, state, plan.number, devices),
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

    def _corrected(
        self, state: State, result: Aggregation, received: Replies, number: int
    ) -> tuple[Aggregation, Replies]:
        """Return the aggregation with its step corrected by probes that it used, and the replies with their costs."""
        devices = np.array(second_probes(self.experiment.seed, number, {device_of(name) for name in result.probes}))
        size, model_bytes = self._sizes(state.params)
        cost = self.coding.change_cost(size, model_bytes)
        samples, deadline = self.data.train.sizes, self.experiment.deadline or None
        in_time, received = second_replies(self.fleet, received, devices, samples, model_bytes, cost, deadline)
        changes = self._changes(state, result.params, number, devices[in_time])
        result = correct(result, changes)
        late = {int(device): f"{CHANGE}: missed the deadline" for device in devices[~in_time]}
        return replace(result, screened=result.screened.with_notes(late)), received

    def _changes(self, state: State, proposed: Structure, number: int, devices: IntArray) -> dict[int, Structure]:
        """Return the changes of the devices' gradients over the proposed step, as they arrive."""

        def on_engine(engine: Engine, chosen: IntArray) -> list[Structure]:
            return self._devices.changes(engine, state, proposed, number, chosen)

        if not len(devices):
            return {}
        changes = dict(zip(devices.tolist(), on_engine(self.engine, devices), strict=True))
        if not (self.disturbance and self.disturbance.active(number)):
            return changes
        like, base = next(iter(changes.values())), self._trained(state.params)
        names = list(leaves(like))

        def vectors(structures: Iterable[Structure]) -> list[FloatArray]:
            return [flat(leaves(each), names) for each in structures]

        rows = dict(zip(changes, vectors(changes.values()), strict=True))
        arrived = self.disturbance.changes(rows, number, lambda engine, chosen: vectors(on_engine(engine, chosen)))
        return {device: rebuild(like, unflat(row, base, names)) for device, row in arrived.items()}

    def _after(self, state: State, report: Report, result: Aggregation) -> State:
        """Return the state after the round: the rule's step is applied as it is, or as `server_step` changes it."""
        differences = "differences" in self.algorithm.rule.needs
        keeps = differences or (self.disturbance is not None and self.disturbance.needs_previous)
        if changes_step(self.algorithm):
            after = server_step(self.algorithm, self.engine.buffers, state, report, result)
        else:
            after = replace(state, params=result.params)
        return replace(after, rule=result.state, previous=state.params if keeps else None)

    def _sizes(self, params: Structure) -> tuple[int, int]:
        """Return the number of trained parameters, and the bytes of all params."""
        trained, everything = self._trained(params).values(), leaves(params).values()
        return sum(map(size_of, trained)), sum(leaf.nbytes for leaf in everything)

    def _trained(self, structure: Structure) -> Leaves:
        return trained_leaves(structure, self.engine.buffers)

    def _record(
        self,
        after: State,
        received: Replies,
        result: Aggregation | None,
        loss_before: float | None,
        **evaluation: float | None,
    ) -> RoundRecord:
        record = round_record(
            after.number,
            result,
            after.loss,
            loss_before,
            devices=[device_of(name) for name in result.applied] if result else [],
            smoothness=self.smoothness,
            seconds=received.seconds,
            bytes_down=received.bytes_down,
            bytes_up=received.bytes_up,
            excluded=received.excluded,
            clipped=_by_device(result.clipped) if result else {},
            **evaluation,
        )
        if changes_step(self.algorithm):  # these are about the rule's own step
            record = replace(record, promised_change=None, curvature=None, step_norm=None)
        return record


def _by_device(reasons: Mapping[Name, str]) -> dict[int, str]:
    """Return the reasons by device: its several replies, such as late ones, are one."""
    return joined((device_of(name), reason) for name, reason in reasons.items())
