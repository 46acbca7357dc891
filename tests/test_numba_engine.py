"""The numba engine gives the reference engine's updates, gradients and records, on any number of threads."""

import dataclasses
import math
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core import event

import fedcontext as fc
from fedcontext import threads
from fedcontext.datasets.federated import FederatedData, LazySplit, join
from fedcontext.engines.base import Work, engine_named
from fedcontext.engines.numba.engine import SoftmaxNumba
from fedcontext.engines.softmax import SoftmaxReference
from fedcontext.local_sgd import LocalSGD

TOLERANCE = {np.float32: 2e-4, np.float64: 1e-10}
EVERYONE = np.arange(4)


def data_of(sizes=(1, 7, 30, 12), dimension=6, classes=3, seed=0, dtype=np.float64):
    random = np.random.default_rng(seed)
    train, test = (
        join(
            [
                (random.standard_normal((size, dimension)).astype(dtype), random.integers(0, classes, size))
                for size in counts
            ]
        )
        for counts in (sizes, [2] * len(sizes))
    )
    return FederatedData("random", train, test, classes)


def work_of(devices, epochs, local, seed=0, number=1):
    return Work(seed, number, np.array(devices), np.array(epochs), local)


def random_params(engine, seed=0, scale=0.1):
    zeros = engine.initial_params()
    return (scale * np.random.default_rng(seed).standard_normal(zeros.shape)).astype(zeros.dtype)


def assert_close(ours, theirs, tolerance):
    for own, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=tolerance * max(1e-3, np.abs(other).max()))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@settings(deadline=None, max_examples=60)
@given(
    classes=st.integers(2, 100),
    dimension=st.integers(1, 60),
    batch=st.integers(1, 40),
    epochs=st.lists(st.integers(1, 6), min_size=4, max_size=4),
    mu=st.sampled_from([0, 0.0, 0.1, 1.0]),
    seed=st.integers(0, 5),
)
def test_every_update_and_gradient_is_the_references(dtype, classes, dimension, batch, epochs, mu, seed):
    data = data_of(dimension=dimension, classes=classes, seed=seed)
    ours, theirs = SoftmaxNumba(data, dtype), SoftmaxReference(data, dtype)
    params, work = random_params(ours, seed), work_of([2, 0, 3, 1], epochs, LocalSGD(0.1, batch, mu), seed)
    assert_close(ours.train(params, work), theirs.train(params, work), TOLERANCE[dtype])
    assert_close(ours.gradients(params, EVERYONE), theirs.gradients(params, EVERYONE), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [0.0, 1.0, 300.0])
def test_gradients_losses_and_accuracy_are_the_references(dtype, scale):
    data, devices = data_of(classes=5, sizes=(3, 4000, 200, 5000)), np.array([3, 0])
    ours, theirs = SoftmaxNumba(data, dtype), SoftmaxReference(data, dtype)
    params, tolerance = random_params(ours, scale=scale), TOLERANCE[dtype]
    for chosen, weights in ((devices, [0.3, 0.7]), (EVERYONE, [0.1, 0.2, 0.3, 0.4]), (EVERYONE, [0.25] * 4)):
        arguments = (params, chosen, np.array(weights))
        assert_close([ours.gradient(*arguments)], [theirs.gradient(*arguments)], tolerance)
    (loss, accuracy), expected = ours.evaluate(params), theirs.evaluate(params)
    assert (loss, accuracy) == (pytest.approx(expected[0], rel=tolerance), expected[1])


def test_the_full_gradient_does_not_depend_on_what_was_evaluated_before():
    data, even, uneven = data_of(), np.full(4, 0.25), np.array([0.7, 0.1, 0.1, 0.1])
    engine, params = SoftmaxNumba(data), random_params(SoftmaxNumba(data))
    fresh = [SoftmaxNumba(data).gradient(params, EVERYONE, weights) for weights in (even, uneven)]
    for _ in range(3):
        loss = engine.evaluate(params)
        assert np.array_equal(engine.gradient(params, EVERYONE, even), fresh[0])
        assert np.array_equal(engine.gradient(params, EVERYONE, uneven), fresh[1])
        assert engine.evaluate(params) == loss
    engine.gradient(params, EVERYONE, even)[:] = 0  # the caller's copy
    assert np.array_equal(engine.gradient(params, EVERYONE, even), fresh[0])
    params += 1  # a change in place is noticed
    assert np.array_equal(engine.gradient(params, EVERYONE, even), SoftmaxNumba(data).gradient(params, EVERYONE, even))


# The server of FLTrust trains with an engine of its own, in float32.
@pytest.mark.parametrize("algorithm", [name for name in fc.ALGORITHMS if name != "fltrust"])
@pytest.mark.parametrize("probes", ["cohort", 7, "all"])
def test_every_algorithm_has_the_references_records(algorithm, probes):
    made = fc.prepare(fc.Experiment(algorithm=algorithm, rounds=4, epochs=(1, 5), probes=probes, pool=5))
    engines = [kind(made.data, np.float64) for kind in (SoftmaxReference, SoftmaxNumba)]
    theirs, ours = (list(dataclasses.replace(made, engine=engine).run()) for engine in engines)
    for (_, expected), (_, record) in zip(theirs, ours, strict=True):
        if algorithm.startswith("oracle"):  # its line search stops at a tolerance, where other weights do as well
            assert record.loss == pytest.approx(expected.loss, rel=1e-2)
            continue
        for name, value in dataclasses.asdict(expected).items():
            if (algorithm, name) == ("krum", "accuracy"):
                continue  # one device's update leaves classes with equal scores, where rounding decides
            same = pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True) if _numeric(value) else value
            assert getattr(record, name) == same, name


def _numeric(value):
    return isinstance(value, float) or (isinstance(value, list) and any(isinstance(each, float) for each in value))


@pytest.mark.parametrize("engine", ["reference", "numba"])
def test_the_engine_is_chosen_by_name(engine):
    settings = {"dataset": "synthetic-iid", "algorithm": "fedavg-contextual", "rounds": 3}
    default, chosen = fc.train(**settings).records, fc.train(**settings, engine=engine).records
    assert chosen[-1].loss == pytest.approx(default[-1].loss, rel=1e-4)


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch):
    data, devices = data_of(sizes=(40, 3, 9, 25, 60, 9000)), np.arange(6)
    params, work = random_params(SoftmaxNumba(data)), work_of(devices, [3, 1, 9, 2, 4, 1], LocalSGD(0.1, 4, 0.1))

    def results():
        engine = SoftmaxNumba(data)
        gradient = engine.gradient(params, devices, np.full(6, 1 / 6))
        return [*engine.train(params, work), *engine.gradients(params, devices), gradient], engine.evaluate(params)

    (arrays, evaluation), _ = results(), monkeypatch.setattr(threads, "workers", lambda: 1)
    single, single_evaluation = results()
    assert all(map(np.array_equal, arrays, single))
    assert evaluation == single_evaluation


def in_a_process(cache, program, *arguments):
    environment = {**os.environ, "NO_COLOR": "1", "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


TRAIN = """
import fedcontext as fc
print([record.loss for record in fc.train(dataset="synthetic-iid", rounds=2, engine="numba").records])
"""


@pytest.fixture(scope="module")
def compilation(tmp_path_factory):
    """A cache, and the process that filled it."""
    cache = tmp_path_factory.mktemp("cache")
    return cache, in_a_process(cache, TRAIN)


@pytest.mark.xdist_group("compilation")
def test_a_process_that_compiles_and_one_that_loads_the_cache_agree_to_the_bit(compilation):
    cache, first = compilation
    second = in_a_process(cache, TRAIN)
    assert first.stdout == second.stdout
    assert first.stderr.splitlines() == ["compiling the numba engine for this machine, once ..."]
    assert second.stderr == ""


@pytest.mark.xdist_group("compilation")
@pytest.mark.parametrize("command", ["run", "compare --algorithms fedavg,folb --seeds 0"])
def test_quiet_prints_nothing_while_the_engine_compiles(compilation, tmp_path, command):
    cache, _ = compilation
    function = sorted(cache.rglob("*.nbi"))[1]
    function.unlink()  # one is compiled anew: all would take seconds
    options = ("--rounds", 1, "--dataset", "synthetic-iid", "--engine", "numba", "--quiet", "--out", tmp_path)
    done = in_a_process(cache, "from fedcontext.cli import main; main()", *command.split(), *options)
    assert (done.stdout, done.stderr) == ("", "")
    assert function.exists()
    assert list(tmp_path.glob("*.jsonl"))


def test_a_function_without_a_source_file_is_compiled_but_not_cached():
    program = "from fedcontext.jit import compiled; print(compiled(lambda x: x + 1)(2))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"


def test_an_update_does_not_depend_on_who_else_trains():
    engine, local, epochs = SoftmaxNumba(data_of(dimension=60, classes=2)), LocalSGD(0.1, 5), [1, 1, 1, 9]
    params = random_params(engine)
    alone = [engine.train(params, work_of([k], [epochs[k]], local))[0] for k in range(4)]
    assert all(map(np.array_equal, alone, engine.train(params, work_of(EVERYONE, epochs, local))))


def test_a_device_that_trains_twice_in_a_round_gets_the_same_update_twice():
    engine = SoftmaxNumba(data_of(sizes=(60, 3)))
    first, second = engine.train(random_params(engine), work_of([0, 0], [9, 9], LocalSGD(0.1, 5)))
    assert np.array_equal(first, second)


def test_devices_drawn_on_demand_have_the_same_updates_and_gradients():
    data, local = data_of(), LocalSGD(0.1, 5)
    drawn = dataclasses.replace(data, train=LazySplit(data.train.sizes, data.train.device, data.train))
    whole, on_demand = SoftmaxNumba(data), SoftmaxNumba(drawn)
    params, work = random_params(whole), work_of([3, 1], [2, 3], local)
    assert all(map(np.array_equal, whole.train(params, work), on_demand.train(params, work)))
    assert all(map(np.array_equal, whole.gradients(params, work.devices), on_demand.gradients(params, work.devices)))


def test_an_infinite_feature_affects_its_own_device_only():
    data = data_of()
    data.train.features[data.train.rows(2), 4] = np.inf
    engine = SoftmaxNumba(data)
    updates = engine.train(engine.initial_params(), work_of(EVERYONE, [1] * 4, LocalSGD(0.1, 5)))
    assert [bool(np.isfinite(update).all()) for update in updates] == [True, True, False, True]
    assert math.isnan(engine.evaluate(random_params(engine))[0])


def test_read_only_strided_and_fortran_arrays_are_accepted_without_compiling_again():
    engine = SoftmaxNumba(data_of())
    params, work = random_params(engine), work_of([2, 0], [2, 1], LocalSGD(0.1, 5))
    expected = engine.train(params, work)
    params.flags.writeable = work.devices.flags.writeable = work.epochs.flags.writeable = False
    strided = dataclasses.replace(work, devices=np.array([[2, 9], [0, 9]])[:, 0], epochs=np.array([2, 1], np.int32))
    with event.install_recorder("numba:compile") as compilations:
        for other in (work, strided):
            assert all(map(np.array_equal, engine.train(np.asfortranarray(params), other), expected))
        engine.gradients(params, work.devices)
        engine.evaluate(params)
    assert compilations.buffer == []


def test_an_empty_cohort_has_no_updates():
    engine = SoftmaxNumba(data_of())
    assert engine.train(engine.initial_params(), work_of(np.zeros(0, int), np.zeros(0, int), LocalSGD(0.1, 5))) == []


def test_an_error_in_a_task_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        threads.on_all_cores(lambda number: 1 / number, [1, 2, 0, 4])


def test_all_threads_have_stopped_when_an_error_reaches_the_caller(monkeypatch):
    monkeypatch.setattr(threads, "workers", lambda: 2)
    caller, both, begun, ended = threading.current_thread(), threading.Barrier(2), [], []

    def task(number):
        begun.append(number)
        both.wait(timeout=60)
        if threading.current_thread() is caller:
            raise ZeroDivisionError
        time.sleep(0.05)
        ended.append(number)

    with pytest.raises(ZeroDivisionError):
        threads.on_all_cores(task, range(10))
    assert (len(begun), len(ended)) == (2, 1)


@pytest.mark.parametrize("engine", ["reference", "numba"])
def test_a_device_whose_loss_turns_nan_is_named_and_nothing_is_aggregated(engine):
    data = data_of(sizes=(20, 20, 20), dtype=np.float32)
    data.train.features[data.train.rows(1)] *= np.float32(1e30)
    settings = {
        "algorithm": "fedavg",
        "devices_per_round": 3,
        "learning_rate": 1e10,
        "rounds": 1,
        "engine": engine,
        "outlier": 0,
    }
    with pytest.raises(fc.FedcontextError, match=r"device 1: .* NaN"), np.errstate(all="ignore"):
        fc.train(data=data, **settings)


@pytest.mark.parametrize("engine", ["reference", "numba"])
def test_data_that_cannot_be_trained_on_is_refused(engine):
    whole = data_of()
    holed = dataclasses.replace(whole, train=dataclasses.replace(whole.train, offsets=np.array([0, 1, 1, 38, 50])))
    with pytest.raises(fc.FedcontextError, match="device 1 has no training samples"):
        engine_named(engine, holed)
    with pytest.raises(fc.FedcontextError, match="train labels must be from 0 to 1, got 0 to 2"):
        engine_named(engine, dataclasses.replace(whole, classes=2))
    narrow = dataclasses.replace(whole.test, features=whole.test.features[:, :3])
    with pytest.raises(fc.FedcontextError, match=r"test features must be \(8, 6\), got \(8, 3\)"):
        engine_named(engine, dataclasses.replace(whole, test=narrow))


def test_params_of_another_shape_are_refused():
    engine = SoftmaxNumba(data_of())
    with pytest.raises(fc.FedcontextError, match=r"params must be float32 \(7, 3\), got float64 \(2,\)"):
        engine.evaluate(np.zeros(2))


def test_a_missing_numba_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(fc.MissingExtra, match=r"fedcontext\[numba\]"):
        engine_named("numba", data_of())


def test_accuracy_is_zero_without_test_samples():
    data = data_of()
    bare = dataclasses.replace(data, test=join([(np.zeros((0, 6)), np.zeros(0, int))] * 4))
    loss, accuracy = engine_named("numba", bare).evaluate(np.zeros((7, 3), np.float32))
    assert (loss, accuracy) == (pytest.approx(math.log(3)), 0)
