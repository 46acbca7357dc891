"""Data generated on demand: the same samples, with memory and cost that do not grow with the number of devices."""

import tracemalloc

import numpy as np
import pytest

import fedcontext as fc
from fedcontext.datasets.synthetic import EVALUATION_DEVICES, synthetic
from fedcontext.engines.base import ENGINES, engine_named

LOCAL_ENGINES = ["reference", "numba"]


def test_every_device_has_the_same_samples_as_stored_data():
    whole, lazy = synthetic(1, 1, devices=20), synthetic(1, 1, devices=20, on_demand=True)
    assert np.array_equal(whole.train.sizes, lazy.train.sizes)
    for device in range(20):
        for own, other in zip(whole.train.device(device), lazy.train.device(device), strict=True):
            assert np.array_equal(own, other)
    assert np.array_equal(whole.train.features, lazy.evaluation_split.features)  # with few devices, all of them
    assert np.array_equal(whole.test.labels, lazy.test.labels)


@pytest.mark.parametrize("engine", LOCAL_ENGINES)
def test_a_run_has_the_same_records_as_on_stored_data(engine):
    settings = {"algorithm": "fedprox-contextual", "rounds": 3, "probes": 5, "engine": engine, "devices_per_round": 4}
    whole, lazy = (synthetic(1, 1, devices=20, on_demand=on_demand) for on_demand in (False, True))
    assert fc.train(data=whole, **settings).records == fc.train(data=lazy, **settings).records


def test_ten_rounds_over_a_million_devices_fit_in_little_memory():
    tracemalloc.start()
    records = [
        record for _, record in fc.simulate(dataset="synthetic-1-1-1000000", rounds=10, probes=10, epochs=(1, 1))
    ]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(records) == 10
    assert max(max(record.devices) for record in records) > 100_000
    assert peak < 300e6  # all devices' samples would take about 100 GB


@pytest.mark.parametrize("count", [1, 5, 20, EVALUATION_DEVICES])
def test_a_round_can_use_all_of_few_devices(count):
    data = fc.load_dataset(f"synthetic-1-1-{count}")
    assert data.name == f"synthetic-1-1-{count}"
    assert data.digest == synthetic(1, 1, devices=count, on_demand=True).digest
    settings = {"dataset": data.name, "rounds": 1, "probes": "all", "epochs": (1, 1)}
    assert len(fc.train(**settings).records[0].devices) == min(10, count)
    for name in ("fedavg-expected", "oracle-span"):  # which ask all devices in any case
        assert np.isfinite(fc.train(**settings, algorithm=name, devices_per_round=count).records[0].loss)


def test_models_are_evaluated_on_a_fixed_subset_of_devices():
    first, second = (fc.load_dataset.__wrapped__("synthetic-1-1-500", seed=3) for _ in range(2))
    assert len(first.evaluation_split.sizes) == len(first.test.sizes) == EVALUATION_DEVICES
    assert np.array_equal(first.test.features, second.test.features)
    assert first.population == 500


@pytest.mark.parametrize("engine", LOCAL_ENGINES)
def test_full_participation_is_refused(engine):
    assert engine in ENGINES
    lazy = engine_named(engine, synthetic(1, 1, devices=200, on_demand=True))
    with pytest.raises(fc.FedcontextError, match="cannot use all 200 devices: set probes to cohort or a number"):
        lazy.gradient(lazy.initial_params(), np.arange(200), np.full(200, 1 / 200))


def test_too_few_or_too_many_devices_are_refused():
    with pytest.raises(fc.FedcontextError, match="N from 1 to 10000000 devices, got 0"):
        fc.load_dataset("synthetic-1-1-0")
    with pytest.raises(fc.FedcontextError, match="got 3000000000"):
        fc.load_dataset("synthetic-1-1-3000000000")
    with pytest.raises(fc.FedcontextError, match="dataset must be one of"):
        fc.load_dataset("synthetic-1-1-" + 5000 * "9")


def test_a_pool_of_all_devices_is_refused():
    settings = {"dataset": "synthetic-1-1-200", "algorithm": "fedavg-expected", "rounds": 1, "probes": "cohort"}
    with pytest.raises(fc.FedcontextError, match="devices_per_round and pool to fewer together"):
        list(fc.simulate(**settings))
    assert len(list(fc.simulate(**settings, pool=3))) == 1
