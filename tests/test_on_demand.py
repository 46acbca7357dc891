"""Data made on demand: the same data, whose memory and cost do not grow with the number of devices."""

import tracemalloc

import numpy as np
import pytest

import fedcontext as fc
from fedcontext.datasets.synthetic import EVALUATION_DEVICES, synthetic
from fedcontext.engines.base import ENGINES, engine_named

LOCAL_ENGINES = ["reference", "numba"]


def test_every_device_has_the_samples_it_has_without():
    whole, drawn = synthetic(1, 1, devices=20), synthetic(1, 1, devices=20, on_demand=True)
    assert np.array_equal(whole.train.sizes, drawn.train.sizes)
    for device in range(20):
        for own, other in zip(whole.train.device(device), drawn.train.device(device), strict=True):
            assert np.array_equal(own, other)
    assert np.array_equal(whole.train.features, drawn.evaluation_split.features)  # with few devices all of them judge
    assert np.array_equal(whole.test.labels, drawn.test.labels)


@pytest.mark.parametrize("engine", LOCAL_ENGINES)
def test_a_run_has_the_records_it_has_without(engine):
    settings = {"algorithm": "fedprox-contextual", "rounds": 3, "probes": 5, "engine": engine, "devices_per_round": 4}
    whole, drawn = (synthetic(1, 1, devices=20, on_demand=on_demand) for on_demand in (False, True))
    assert list(fc.rounds(data=whole, **settings)) == list(fc.rounds(data=drawn, **settings))


def test_ten_rounds_over_a_million_devices_fit_in_little_memory():
    tracemalloc.start()
    records = list(fc.rounds(dataset="synthetic-1-1-1000000", rounds=10, probes=10, epochs=(1, 1)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(records) == 10
    assert max(max(record.devices) for record in records) > 100_000
    assert peak < 300e6  # all devices' samples would take about 100 GB


def test_models_are_judged_by_devices_that_stay_the_same():
    first, second = (fc.load_dataset.__wrapped__("synthetic-1-1-500", seed=3) for _ in range(2))
    assert len(first.evaluation_split.sizes) == len(first.test.sizes) == EVALUATION_DEVICES
    assert np.array_equal(first.test.features, second.test.features)
    assert first.population == 500


@pytest.mark.parametrize("engine", LOCAL_ENGINES)
def test_asking_all_devices_at_once_is_refused(engine):
    assert engine in ENGINES
    drawn = engine_named(engine, synthetic(1, 1, devices=200, on_demand=True))
    with pytest.raises(fc.FedcontextError, match="all its 200 devices at once: set probes to cohort or a number"):
        drawn.gradient(drawn.initial_params(), np.arange(200), np.full(200, 1 / 200))


def test_no_devices_are_refused():
    with pytest.raises(fc.FedcontextError, match="at least 1 device, got 0"):
        fc.load_dataset("synthetic-1-1-0")


def test_a_pool_of_everyone_is_refused():
    settings = {"dataset": "synthetic-1-1-200", "algorithm": "fedavg-expected", "rounds": 1, "probes": "cohort"}
    with pytest.raises(fc.FedcontextError, match="set probes to cohort or a number"):
        list(fc.rounds(**settings))
    assert len(list(fc.rounds(**settings, pool=3))) == 1
