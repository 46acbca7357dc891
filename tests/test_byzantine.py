"""One Byzantine device of ten, whatever it sends: the model keeps its accuracy, no round is lost, and it is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedcontext.arrays.tree import leaves, rebuild
from fedcontext.datasets import dirichlet, federate
from fedcontext.experiment import Experiment
from fedcontext.preparation import prepare
from fedcontext.simulation import Simulation

BYZANTINE = 3
HUGE = float(np.finfo(np.float32).max) / 4
SETTINGS = {
    "dataset": "ten",
    "rounds": 10,
    "epochs": (1, 5),
    "learning_rate": 0.05,
    "probes": "cohort",
    "engine": "reference",
    "gradient_bits": 32,
}


def ten_devices():
    random = np.random.default_rng(0)
    labels = random.integers(0, 5, 2500)
    features = random.standard_normal((2500, 20)) + 2.5 * np.eye(5, 20)[labels]
    return federate(features, labels, dirichlet(labels, 10, random, alpha=0.5), name="ten")


DATA = ten_devices()


def filled(structure, value):
    return rebuild(structure, {name: np.full_like(leaf, value) for name, leaf in leaves(structure).items()})


def scaled(structure, factor):
    return rebuild(structure, {name: leaf * np.asarray(factor, leaf.dtype) for name, leaf in leaves(structure).items()})


REPLIES = {
    "gradient 1e30": lambda update, gradient, count: (update, filled(gradient, 1e30), count),
    "gradient 3e38": lambda update, gradient, count: (update, filled(gradient, 3e38), count),
    "gradient 1e-30": lambda update, gradient, count: (update, filled(gradient, 1e-30), count),
    "gradient NaN": lambda update, gradient, count: (update, filled(gradient, np.nan), count),
    "update 1e30": lambda update, gradient, count: (filled(update, 1e30), gradient, count),
    "update 3e38": lambda update, gradient, count: (filled(update, HUGE), gradient, count),
    "update 1e-30": lambda update, gradient, count: (filled(update, 1e-30), gradient, count),
    "update NaN": lambda update, gradient, count: (filled(update, np.nan), gradient, count),
    "2^53 samples": lambda update, gradient, count: (update, gradient, 2.0**53),
    "all at once": lambda update, gradient, count: (filled(update, 1e30), filled(gradient, -1e30), 2.0**53),
}
HARMLESS = {"gradient 1e-30", "update 1e-30"}


class Attacked(Simulation):
    """A simulation in which one device changes what it sends."""

    attack = staticmethod(lambda update, gradient, count: (update, gradient, count))

    def report(self, state, plan, received, *more):
        report = super().report(state, plan, received, *more)
        devices = list(report.updates)
        row = devices.index(BYZANTINE)
        own = list(report.own_gradients) if report.own_gradients else None
        samples, weights = list(report.samples), report.probe_weights
        update, gradient, count = self.attack(report.updates[BYZANTINE], own[row] if own else None, samples[row])
        if own:
            own[row] = gradient
        samples[row] = count
        if weights is not None and count > 1e9:
            weights = [count if index == row else weight for index, weight in enumerate(weights)]
        return replace(
            report,
            updates={**report.updates, BYZANTINE: update},
            own_gradients=own,
            samples=samples,
            probe_weights=weights,
        )


def run(algorithm, attack=None, **changes):
    experiment = Experiment(**{**SETTINGS, **changes}, algorithm=algorithm)
    simulation = Attacked(**vars(prepare(experiment, data=DATA)))
    object.__setattr__(simulation, "attack", REPLIES[attack] if attack else Attacked.attack)
    return [record for _, record in simulation.run()]


@pytest.fixture(scope="module")
def honest():
    return {
        name: run(name, **changes)[-1].accuracy
        for name, changes in (("fedavg-memory", {}), ("fedavg-contextual", {"smoothness": 6.0}))
    }


@pytest.mark.parametrize("attack", REPLIES)
@pytest.mark.parametrize(("algorithm", "changes"), [("fedavg-memory", {}), ("fedavg-contextual", {"smoothness": 6.0})])
def test_one_byzantine_device_of_ten_costs_at_most_three_points(algorithm, changes, attack, honest):
    records = run(algorithm, attack, **changes)
    assert not any(record.lost for record in records)
    assert records[-1].accuracy >= honest[algorithm] - 0.03
    named = {*(device for r in records for device in r.excluded), *(device for r in records for device in r.clipped)}
    assert attack in HARMLESS or str(BYZANTINE) in map(str, named)
    assert all(set(map(str, record.excluded)) <= {str(BYZANTINE)} for record in records)
