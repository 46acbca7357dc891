"""Sketches: slopes without bias, from a few numbers, and runs that are level with exact ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fedcontext as fc
from fedcontext.results.summary import summarise


def keys(count):
    return [(3, device) for device in range(count)]


@pytest.mark.parametrize("size", [50, 600, 7850])
@pytest.mark.parametrize("numbers", [16, 64])
def test_slopes_have_no_bias_and_the_error_that_is_stated(size, numbers):
    random = np.random.default_rng(size)
    gradient, update = random.standard_normal(size) * random.random(size) ** 4, random.standard_normal(size)
    slopes = fc.Sketch(numbers).roundtrip(np.tile(gradient, (2000, 1)), keys(2000)).astype(float) @ update
    unit = np.linalg.norm(gradient) * np.linalg.norm(update)
    assert slopes.mean() == pytest.approx(gradient @ update, abs=4 * slopes.std() / 2000**0.5)
    assert slopes.std() < 1.2 * unit / numbers**0.5


@given(
    hnp.arrays(np.float64, st.integers(1, 300), elements=st.floats(-1e3, 1e3)), st.integers(1, 600), st.integers(0, 99)
)
def test_what_is_sent_is_restored_as_the_simulator_does(vector, numbers, key):
    sketch = fc.Sketch(numbers)
    sent = sketch.encode(vector, (0, key))
    assert sent.nbytes == sketch.nbytes(len(vector)) <= 4 * numbers
    restored = sketch.decode(sent, (0, key), len(vector))
    np.testing.assert_array_equal(restored, sketch.roundtrip([vector], [(0, key)])[0])
    if numbers >= 512:  # as many numbers as the rotated vector has
        np.testing.assert_allclose(restored, vector, atol=1e-5 * np.abs(vector).max(initial=1))


def test_other_numbers_are_refused():
    with pytest.raises(fc.FedcontextError, match="at least 1 number, got 0"):
        fc.Sketch(0)
    for sent in (np.zeros(63), np.full(64, np.nan)):
        with pytest.raises(fc.FedcontextError, match="expected a sketch of 64 finite numbers"):
            fc.Sketch(64).decode(sent, (0,), 1000)


def outcome(seeds, **settings):
    summaries = [summarise(fc.train(seed=seed, **settings).records) for seed in seeds]
    return np.mean([summary.loss for summary in summaries]), summaries[0].bytes_up


@pytest.mark.parametrize(
    ("dataset", "devices", "seeds"),
    [("synthetic-1-1", 30, (0, 1, 2)), pytest.param("mnist", 1000, (0,), marks=pytest.mark.data("mnist"))],
)
def test_a_run_is_level_with_exact_slopes_at_a_fraction_of_the_uplink(dataset, devices, seeds):
    settings = {"algorithm": "fedavg-contextual", "probes": "all", "smoothness": 5.0, "rounds": 6, "epochs": (1, 5)}
    loss, bytes_up = outcome(seeds, dataset=dataset, **settings)
    sketched_loss, sketched_bytes = outcome(seeds, dataset=dataset, sketch=64, **settings)
    assert sketched_loss == pytest.approx(loss, rel=0.1)
    model = bytes_up / 6 / (10 + devices)
    assert sketched_bytes == 6 * (10 * model + devices * 64 * 4)


@pytest.mark.parametrize("algorithm", ["fedavg-memory", "folb"])
def test_rules_that_need_whole_gradients_are_refused(algorithm):
    with pytest.raises(fc.FedcontextError, match="needs whole gradients; use sketch 0"):
        fc.prepare(fc.Experiment(algorithm=algorithm, sketch=64))


def test_a_sketch_has_no_bits():
    with pytest.raises(fc.FedcontextError, match="sketch and gradient_bits cannot be combined"):
        fc.prepare(fc.Experiment(algorithm="fedavg-contextual", sketch=64, gradient_bits=2))
