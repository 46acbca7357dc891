"""A Ray cluster gives the results of one machine, for any number of workers and when workers are lost."""

import dataclasses
import os
import signal

import numpy as np
import pytest

import fedcontext as fc
from fedcontext.datasets.synthetic import synthetic
from fedcontext.engines.base import Work, engine_named
from fedcontext.engines.ray import SoftmaxRay
from fedcontext.local_sgd import LocalSGD

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("federation")]  # many processes: never two at a time


@pytest.fixture(scope="module")
def cluster():
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def data():
    return synthetic(1, 1, devices=12)


@pytest.fixture(scope="module")
def two(cluster, data):
    return SoftmaxRay(data, workers=2)


def work_of(devices, number=1):
    return Work(0, number, np.array(devices), np.arange(1, len(devices) + 1), LocalSGD(0.01, 10, 0.1))


def same(ours, theirs):
    return all(np.array_equal(own, other) for own, other in zip(ours, theirs, strict=True))


def test_workers_give_the_updates_and_gradients_of_one_machine(two, data):
    alone = engine_named("numba", data)
    params, devices = alone.initial_params() + np.float32(0.01), np.array([3, 11, 0, 7, 5])
    assert same(two.train(params, work_of(devices)), alone.train(params, work_of(devices)))
    assert same(two.gradients(params, devices), alone.gradients(params, devices))
    weights = np.full(5, 0.2)
    assert np.array_equal(two.gradient(params, devices, weights), alone.gradient(params, devices, weights))


def test_fewer_devices_than_workers(two, data):
    params = two.initial_params()
    assert same(two.train(params, work_of([4])), engine_named("numba", data).train(params, work_of([4])))


def test_the_number_of_workers_changes_nothing(two, data):
    one, params = SoftmaxRay(data, workers=1), two.initial_params()
    assert same(two.train(params, work_of(range(12))), one.train(params, work_of(range(12))))


def test_an_unknown_device_is_refused(two):
    for devices in ([0, 12], [-1]):
        with pytest.raises(fc.FedcontextError, match=f"device must be from 0 to 11, got {devices[-1]}"):
            two.train(two.initial_params(), work_of(devices))
        with pytest.raises(fc.FedcontextError, match=f"device must be from 0 to 11, got {devices[-1]}"):
            two.gradients(two.initial_params(), np.array(devices))


def test_devices_that_diverge_on_several_workers_are_named_in_one_error(two, data):
    experiment, messages = fc.Experiment(algorithm="folb", learning_rate=1e4, epochs=(1, 2), rounds=1, outlier=0), []
    for engine in (two, engine_named("reference", data)):
        with pytest.raises(fc.FedcontextError, match=r"^devices .*: the loss turned NaN") as error:
            list(fc.prepare(experiment, data=data, engine=engine).run())
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_the_devices_of_a_worker_lost_between_rounds_are_run_on_a_new_one(two, data):
    params = two.initial_params()
    ray.kill(two.workers[0])
    expected = engine_named("numba", data).train(params, work_of(range(12), 2))
    assert same(two.train(params, work_of(range(12), 2)), expected)


def test_the_devices_of_a_worker_lost_in_training_are_run_again(two, data):
    params, work, before = two.initial_params(), work_of(range(12), 3), pids_of(two)
    two.workers[1].__ray_call__.remote(lambda _: os.kill(os.getpid(), signal.SIGKILL))  # the training is queued behind
    assert same(two.train(params, work), engine_named("numba", data).train(params, work))
    assert before[1] not in pids_of(two)


def test_a_worker_lost_at_every_attempt_is_an_error(cluster):
    data = synthetic(1, 1, devices=5, on_demand=True)
    deadly = dataclasses.replace(data.train, generate=lambda device: os.kill(os.getpid(), signal.SIGKILL))
    engine = SoftmaxRay(dataclasses.replace(data, train=deadly), workers=1, engine="reference")
    with pytest.raises(fc.FedcontextError, match="lost in each of 4 attempts"):
        engine.gradients(engine.initial_params(), np.arange(2))


def test_an_error_in_a_worker_reaches_the_caller_as_it_is(two):
    negative_seed = dataclasses.replace(work_of([0, 1]), seed=-1)
    with pytest.raises(fc.FedcontextError, match=r"^seeds and numbers must be 0 or more, got -1$") as error:
        two.train(two.initial_params(), negative_seed)
    assert type(error.value) is fc.FedcontextError
    assert error.value.__cause__ is None


def test_params_of_another_shape_are_refused(two):
    for call in (lambda: two.train(np.zeros(2), work_of([0])), lambda: two.gradients(np.zeros(2), np.array([0]))):
        with pytest.raises(fc.FedcontextError, match=r"^params must be float32 \(61, 10\), got float64 \(2,\)$"):
            call()


def pids_of(engine):
    return ray.get([worker.__ray_call__.remote(lambda _: os.getpid()) for worker in engine.workers])


def test_whole_runs_are_those_of_one_machine(cluster, data):
    settings = {"algorithm": "fedprox-contextual", "rounds": 3, "probes": 4, "devices_per_round": 5}
    ours, theirs = (fc.train(data=data, engine=engine, **settings).records for engine in ("ray", "numba"))
    assert ours == theirs


def test_data_drawn_on_demand_is_drawn_on_the_workers(cluster):
    data = synthetic(1, 1, devices=500, on_demand=True)
    ours, alone = SoftmaxRay(data, workers=2), engine_named("numba", data)
    assert same(
        ours.train(ours.initial_params(), work_of([400, 2])), alone.train(ours.initial_params(), work_of([400, 2]))
    )
