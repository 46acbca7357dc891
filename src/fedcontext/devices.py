"""What devices send in a simulated round: updates after local training, and gradients as the server decodes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedcontext.algorithms import Algorithm
from fedcontext.arrays.tree import Structure, is_finite, leaves, rebuild
from fedcontext.coding import Coding
from fedcontext.compression.codec import IDENTITY, LARGEST_ENTRY, Codec
from fedcontext.compression.sketch import Sketch
from fedcontext.datasets import FederatedData
from fedcontext.engines.base import Engine, Work
from fedcontext.experiment import Experiment
from fedcontext.faults.disturbance import Answers
from fedcontext.fleet import Replies
from fedcontext.local_sgd import Diverged
from fedcontext.measurement.defences import OFF
from fedcontext.measurement.geometry import Report, shares
from fedcontext.measurement.sums import flat, remaining_slope, unflat
from fedcontext.plan import IntArray, RoundPlan, Stream
from fedcontext.rules.base import SumRule, asks_remaining_slopes
from fedcontext.state import State
from fedcontext.variates import corrections


@dataclass(frozen=True)
class Devices:
    """The devices of a simulation, and how they train and probe."""

    experiment: Experiment
    data: FederatedData
    engine: Engine
    algorithm: Algorithm
    coding: Coding

    def report(self, state: State, plan: RoundPlan, received: Replies, disturbed: bool) -> Report:
        """Return what the devices of a round send: updates, and the gradients that the rule needs.

        ``disturbed``: faults or attacks may change single gradients, so their mean alone does not suffice.
        """
        devices, pool, probes = plan.devices[received.cohort], plan.pool[received.pool], plan.probes[received.probes]
        samples = self.data.train.sizes[devices]
        updates = self._train(state, plan, received)
        report = Report(
            updates=dict(zip(devices.tolist(), updates[: len(devices)], strict=True)),
            samples=samples,
            pool=dict(zip(pool.tolist(), updates[len(devices) :], strict=True)),
            population=self.data.population,
            distortions=self.coding.distortions,
            steps=self.algorithm.local.steps(samples, plan.epochs[received.cohort]).tolist(),
        )
        if asks_remaining_slopes(self.algorithm.rule, state.rule):
            report = replace(report, remaining_slopes=self._remaining_slopes(state, devices, updates))
        return self._with_gradients(report, state, plan.number, devices, probes, disturbed)

    def _train(self, state: State, plan: RoundPlan, received: Replies) -> list[Structure]:
        """Return the updates of the cohort, then those of the pool."""
        work = self.work(state, plan, received.cohort, received.pool)
        try:
            updates = self.engine.train(state.params, work)
        except Diverged as error:
            if not error.updates:
                raise
            updates = list(error.updates)
        finite = np.array([is_finite(update) for update in updates])
        parts = np.split(finite, [len(received.cohort)])  # if most devices of a part diverged, the run has
        if not finite.all() and (not self.experiment.outlier or any(2 * part.sum() < len(part) for part in parts)):
            raise work.local.divergence_error(work.devices[~finite].tolist())
        return updates

    def _remaining_slopes(self, state: State, devices: IntArray, updates: Sequence[Structure]) -> list[float]:
        """Return the slope of each device's loss along its update after local training, as a share of that before."""
        params, slopes = leaves(state.params), []
        for row, before in enumerate(map(leaves, self.engine.gradients(state.params, devices))):
            update, names = leaves(updates[row]), list(before)
            trained = rebuild(state.params, {name: leaf + update[name] for name, leaf in params.items()})
            (after,) = self.engine.gradients(trained, devices[row : row + 1])
            slopes.append(remaining_slope(*(flat(each, names) for each in (update, before, leaves(after)))))
        return slopes

    def work(self, state: State, plan: RoundPlan, cohort: IntArray, pool: IntArray) -> Work:
        """Return the work of devices at these positions of a plan."""
        devices = np.concatenate([plan.devices[cohort], plan.pool[pool]])
        epochs = np.concatenate([plan.epochs[cohort], plan.pool_epochs[pool]])
        variates, terms = self.algorithm.variates, None
        if variates and state.variates:
            terms = corrections(variates, state.variates, devices.tolist())
        return Work(self.experiment.seed, plan.number, devices, epochs, self.algorithm.local, terms)

    def _with_gradients(
        self, report: Report, state: State, number: int, devices: IntArray, probes: IntArray, disturbed: bool
    ) -> Report:
        """Return the report with the gradients that the rule needs."""
        needs, own = self.algorithm.rule.needs, None
        if "own gradients" in needs:
            own, _ = self.answers(self.engine, state, number, devices)
        if "gradient" not in needs:
            return replace(report, own_gradients=own)
        cohort_probes = np.array_equal(np.sort(probes), np.sort(devices))
        probes = devices if cohort_probes else probes
        by_samples = self.experiment.probe_averaging == "samples"
        weights = shares(self.data.train.sizes[probes].astype(np.float64) if by_samples else None, len(probes))
        each = isinstance(self.algorithm.rule, SumRule) or not self.coding.exact or cohort_probes or disturbed
        if not each and self.experiment.defences == OFF:  # the mean alone, in one pass where all devices probe
            return replace(report, own_gradients=own, gradient=self.engine.gradient(state.params, probes, weights))
        answers, differences = self.answers(self.engine, state, number, probes)
        report = replace(report, differences=differences, probe_weights=weights)
        if cohort_probes:
            return replace(report, own_gradients=answers)
        return replace(report, own_gradients=own, gradients=dict(zip(probes.tolist(), answers, strict=True)))

    def answers(self, engine: Engine, state: State, number: int, devices: IntArray) -> Answers:
        """Return these devices' gradients on the data of ``engine``, and their differences if the rule needs them."""
        seed, gradients, differences = self.experiment.seed, engine.gradients(state.params, devices), None
        if "differences" in self.algorithm.rule.needs and state.previous is not None:
            before = engine.gradients(state.previous, devices)
            exact = [_difference(now, then) for now, then in zip(gradients, before, strict=True)]
            differences = _decoded(exact, self.coding.difference, devices, (seed, number, Stream.DIFFERENCE_CODE))
        return _decoded(gradients, self.coding.gradient, devices, (seed, number, Stream.GRADIENT_CODE)), differences

    def changes(
        self, engine: Engine, state: State, proposed: Structure, number: int, devices: IntArray
    ) -> list[Structure]:
        """Return how the gradients of these devices change from the params to the ``proposed`` ones, as decoded."""
        pairs = zip(engine.gradients(proposed, devices), engine.gradients(state.params, devices), strict=True)
        exact = [_difference(now, before) for now, before in pairs]
        return _decoded(exact, self.coding.difference, devices, (self.experiment.seed, number, Stream.CHANGE_CODE))


def _decoded(
    vectors: Sequence[Structure], codec: Codec | Sketch, devices: IntArray, key: tuple[int, int, int]
) -> list[Structure]:
    """Return what the server decodes; ``key`` and the device decide the random rotation of a code.

    What no code can hold, such as NaN, is returned as it is: `aggregate` names and excludes its device.
    """
    if codec == IDENTITY or not vectors:
        return list(vectors)
    like = leaves(vectors[0])
    names = list(like)
    rows = np.stack([flat(leaves(vector), names) for vector in vectors])
    coded = np.maximum(rows.max(axis=1), -rows.min(axis=1)) <= LARGEST_ENTRY  # which NaN is not
    rows[coded] = codec.roundtrip(rows[coded], [(*key, int(device)) for device in devices[coded]])
    return [rebuild(vectors[0], unflat(row, like, names)) for row in rows]


def _difference(now: Structure, before: Structure) -> Structure:
    then = leaves(before)
    return rebuild(now, {name: leaf - then[name] for name, leaf in leaves(now).items()})
