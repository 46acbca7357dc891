"""Oracles: they look at all data, and so are never behind the rule whose directions they have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedcontext as fc
from fedcontext.engines.softmax import SoftmaxReference
from fedcontext.oracle import lowest_step, orthonormal

SETTINGS = {"devices_per_round": 4, "learning_rate": 0.1, "probes": 3, "engine": "reference"}


@given(st.integers(0, 10_000), st.integers(1, 8))
def test_on_a_quadratic_the_step_is_the_minimiser_in_the_span(seed, count):
    random = np.random.default_rng(seed)
    root = random.standard_normal((20, 20))
    hessian, b = root @ root.T / 20 + 0.1 * np.eye(20), random.standard_normal(20)
    directions = random.standard_normal((count, 20)) * 10.0 ** random.uniform(-3, 3, (count, 1))
    step = lowest_step(
        lambda x: float(b @ x + x @ hessian @ x / 2), lambda x: b + hessian @ x, directions, directions.mean(axis=0)
    )
    best = -directions.T @ np.linalg.solve(directions @ hessian @ directions.T, directions @ b)

    def loss(x):
        return b @ x + x @ hessian @ x / 2

    assert loss(step) <= loss(best) + 1e-3 * abs(loss(best))


@given(st.integers(0, 10_000))
def test_the_loss_is_never_above_that_of_the_first_step_or_of_standing_still(seed):
    random = np.random.default_rng(seed)
    directions, phase = random.standard_normal((3, 10)), random.standard_normal(10)

    def loss(x):
        return float(np.cos(3 * x + phase).sum() + 0.1 * x @ x)

    first = directions.T @ random.standard_normal(3)
    step = lowest_step(loss, lambda x: -3 * np.sin(3 * x + phase) + 0.2 * x, directions, first)
    assert loss(step) <= min(loss(first), loss(0 * first)) + 1e-9


def test_zero_and_repeated_directions_are_dropped():
    directions = np.array([[0.0, 0, 0], [1e-9, 0, 0], [2.0, 0, 0], [1.0, 1e3, 0]])
    basis = orthonormal(directions)
    np.testing.assert_allclose(basis @ basis.T, np.eye(2), atol=1e-12)
    assert len(orthonormal(np.zeros((2, 3)))) == 0
    assert not lowest_step(lambda x: 1.0, lambda x: x, np.zeros((2, 3)), np.zeros(3)).any()


@pytest.mark.parametrize("engine", ["reference", "torch"])
@pytest.mark.parametrize(("oracle", "rule"), [("oracle-span", "fedavg"), ("oracle-memory", "fedavg-memory")])
def test_a_round_of_an_oracle_ends_no_higher_than_its_rules(small_data, oracle, rule, engine):
    """From the same state: over whole runs a lower loss now can be a worse place to go on from."""
    pytest.importorskip("torch" if engine == "torch" else "numpy")
    settings = {**SETTINGS, "engine": engine, "rounds": 5, "dataset": "small"}
    plain, best = (fc.prepare(fc.Experiment(algorithm=name, **settings), data=small_data) for name in (rule, oracle))
    state = plain.start()
    for _ in range(5):
        after, record = plain.step(state)
        _, ruler = best.step(state)
        assert ruler.loss <= record.loss + 1e-6
        assert ruler.loss < state.loss
        state = after


def test_the_weights_of_the_span_oracle_are_those_of_its_step(small_data):
    class Recorder(SoftmaxReference):
        def train(self, params, work):
            self.updates = super().train(params, work)
            return self.updates

    engine = Recorder(small_data)
    settings = {**SETTINGS, "engine": engine, "rounds": 1}
    ((state, record),) = fc.simulate(data=small_data, algorithm="oracle-span", **settings)
    step = sum(weight * update for weight, update in zip(record.weights, engine.updates, strict=True))
    np.testing.assert_allclose(state.params, engine.initial_params() + step, atol=1e-5)


def test_the_paper_version_of_an_oracle_is_no_oracle():
    assert not fc.contextual_version("oracle-span", 5).oracle
    assert not fc.expected_version("oracle-memory", 5).oracle
