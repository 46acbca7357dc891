"""Rounds that are folded into sums: the steps of `aggregate`, in memory that does not grow with the devices."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedcontext as fc

VECTORS = 37  # 300 MB over 8 MB: float64 vectors that fit beside a model of 1,000,000 parameters
PARAMS = {"w": np.zeros((6, 1)), "b": np.zeros(2)}


def device(random, size):
    return {"w": random.standard_normal((size - 2, 1)), "b": random.standard_normal(2)}


def fold(rounds, random, size, number):
    """Fold one device into a round that is not the first one if ``number`` is above 0, as the cohort that probes."""
    update, gradient, difference = (device(random, size) for _ in range(3))
    rounds.add_update(update)
    rounds.add_probe(gradient, difference if number else None)
    return update, gradient, difference


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_streamed_rounds_take_the_steps_of_aggregate(seed, devices):
    random = np.random.default_rng(seed)
    rule, w = fc.contextual_memory(), device(random, 6)
    states, params = [None, None], [w, w]
    for number in range(3):
        folded = fc.StreamedRound(params[0])
        sent = [fold(folded, random, 6, number) for _ in range(devices)]
        streamed = folded.aggregate(rule, states[0], population=9)
        updates, gradients, differences = map(list, zip(*sent, strict=True))
        whole = fc.aggregate(
            params[1],
            updates,
            own_gradients=gradients,
            differences=differences if number else None,
            population=9,
            rule=rule,
            state=states[1],
            defences=None,
        )
        for name, leaf in whole.params.items():
            assert (streamed.params[name] == leaf).all()
            assert (streamed.step[name] == whole.step[name]).all()
        params, states = [streamed.params, whole.params], [streamed.state, whole.state]


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_arrays_of_other_libraries_can_be_streamed(library):
    module = pytest.importorskip(library)
    folded = fc.StreamedRound({"w": module.zeros(3)})
    folded.add_update({"w": module.ones(3)})
    folded.add_probe({"w": -module.ones(3)})
    result = folded.aggregate(fc.contextual_memory())
    assert type(result.params["w"]) is type(module.zeros(3))
    assert result.params["w"].tolist() == [1, 1, 1]


def test_edges_of_other_codes_or_models_are_not_added():
    edge = fc.StreamedRound(np.zeros(2), distortions=(0.1, 0.2))
    with pytest.raises(fc.FedcontextError, match=r"same distortions, got \(0\.1, 0\.2\) and \(0\.0, 0\.0\)"):
        edge + fc.StreamedRound(np.zeros(2))
    with pytest.raises(fc.FedcontextError, match="same size, got 2 and 3"):
        edge + fc.StreamedRound(np.zeros(3), distortions=(0.1, 0.2))


@given(st.integers(0, 10_000))
def test_edges_that_are_added_in_the_same_order_give_the_same_bits(seed):
    """Replies arrive at the edges in any interleaving; each edge has its own order."""
    steps = []
    for chance in (np.random.default_rng(seed), np.random.default_rng(seed + 1)):
        edges, sources = (
            [make(edge) for edge in range(3)] for make in (lambda _: fc.StreamedRound(PARAMS), np.random.default_rng)
        )
        for edge in chance.permutation(np.repeat(np.arange(3), 4)):
            fold(edges[edge], sources[edge], 8, 0)
        steps.append((edges[0] + edges[1] + edges[2]).aggregate(fc.contextual_memory()).step)
    assert steps[0]["w"].tobytes() == steps[1]["w"].tobytes()


def peak_in_models(devices, size):
    """The most memory that three rounds took, over that of a float64 model."""
    random, params, state = np.random.default_rng(0), device(np.random.default_rng(0), size), None
    tracemalloc.start()
    for number in range(3):
        folded = fc.StreamedRound(params)
        for _ in range(devices):
            fold(folded, random, size, number)
        result = folded.aggregate(fc.contextual_memory(), state)
        params, state = result.params, result.state
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / (8 * size)


def test_memory_is_that_of_a_few_models_whatever_the_number_of_devices():
    peak_in_models(devices=2, size=10)  # imports
    few, many = peak_in_models(devices=5, size=20_000), peak_in_models(devices=60, size=20_000)
    assert many < few + 1
    assert many < VECTORS


@pytest.mark.parametrize("bad", [np.full(3, np.nan), np.ones(2), np.ones(3, np.float32)])
def test_what_cannot_be_used_is_refused_and_changes_nothing(bad):
    folded = fc.StreamedRound(np.zeros(3))
    folded.add_update(np.ones(3))
    for add in (folded.add_update, folded.add_probe, lambda x, name: folded.add_probe(np.ones(3), x, name=name)):
        with pytest.raises(fc.FedcontextError, match="device 7"):
            add(bad, name="device 7")
    assert (folded.sums.devices, folded.sums.probes, folded.differences) == (1, 0, 0)
    assert folded.sums.update.tolist() == [1, 1, 1]
    assert not folded.sums.gradient.any()


def test_what_is_missing_is_named():
    folded, rule = fc.StreamedRound(np.zeros(2)), fc.contextual_memory()
    with pytest.raises(fc.FedcontextError, match="no updates"):
        folded.aggregate(rule)
    folded.add_update(np.ones(2))
    with pytest.raises(fc.FedcontextError, match="add_probe at least one"):
        folded.aggregate(rule)
    folded.add_probe(np.ones(2))
    state = folded.aggregate(rule).state
    with pytest.raises(fc.FedcontextError, match="got 0 of 1"):
        folded.aggregate(rule, state)
    with pytest.raises(fc.FedcontextError, match="must work on sums"):
        folded.aggregate(fc.mean())
    with pytest.raises(fc.FedcontextError, match="must be floating point"):
        fc.StreamedRound({"count": np.zeros(2, int)})
