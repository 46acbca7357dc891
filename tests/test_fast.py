"""The fast engine does the reference engine's work: same draws, same updates, same records."""

import dataclasses
import math
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcontext as fc
from fedcontext import jit, plan, threads
from fedcontext.datasets.federated import FederatedData, join
from fedcontext.engines.base import Work, engine_named
from fedcontext.engines.numba import engine as fast
from fedcontext.engines.numba import sparse
from fedcontext.engines.numba.draws import compiled_orders
from fedcontext.engines.numba.engine import SoftmaxNumba
from fedcontext.engines.softmax import SoftmaxReference
from fedcontext.local_sgd import LocalSGD

TOLERANCE = {np.float32: 2e-4, np.float64: 1e-10}


def data_of(sizes=(1, 7, 30, 12), dimension=6, classes=3, seed=0, dtype=np.float64):
    random = np.random.default_rng(seed)
    sides = [
        join(
            [
                (random.standard_normal((size, dimension)).astype(dtype), random.integers(0, classes, size))
                for size in counts
            ]
        )
        for counts in (sizes, [2] * len(sizes))
    ]
    return FederatedData("drawn", sides[0], sides[1], classes)


def speckled(sizes=(1, 7, 30, 12), dimension=40, classes=3, seed=0, share=0.2):
    """Return data that is background but for a share of its entries, with another background in each column."""
    data, random = data_of(sizes, dimension, classes, seed), np.random.default_rng(seed)
    background = random.standard_normal(dimension) * (random.random(dimension) < 0.7)
    for side in (data.train, data.test):
        side.features[:] = np.where(random.random(side.features.shape) < share, side.features, background)
    return data


def work_of(devices, epochs, local, seed=0, number=1):
    return Work(seed, number, np.array(devices), np.array(epochs), local)


def somewhere(engine, seed=0, scale=0.1):
    start = engine.initial_params()
    return (scale * np.random.default_rng(seed).standard_normal(start.shape)).astype(start.dtype)


def agree(ours, theirs, tolerance):
    for own, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=tolerance * max(1e-3, np.abs(other).max()))


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**70),
    number=st.integers(0, 2**33),
    device=st.integers(0, 2**20),
    samples=st.integers(1, 300),
    epochs=st.integers(1, 4),
)
def test_compiled_draws_are_the_plans_own(seed, number, device, samples, epochs):
    drawn = compiled_orders()
    assert drawn is not plan.orders
    given = (seed, number, device, samples, epochs)
    assert np.array_equal(drawn(*given), plan.orders(*given))


@pytest.mark.parametrize("make", [data_of, speckled], ids=["dense", "on a background"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@settings(deadline=None, max_examples=40)
@given(
    classes=st.integers(2, 100),
    dimension=st.integers(1, 60),
    batch=st.integers(1, 40),
    epochs=st.lists(st.integers(1, 6), min_size=4, max_size=4),
    mu=st.sampled_from([0, 0.0, 0.1, 1.0]),
    seed=st.integers(0, 5),
)
def test_every_update_and_gradient_is_the_references(make, dtype, classes, dimension, batch, epochs, mu, seed):
    data = make(dimension=dimension, classes=classes, seed=seed)
    ours, theirs = SoftmaxNumba(data, dtype), SoftmaxReference(data, dtype)
    assert make is data_of or dimension < 10 or ours.train_side.found.leans.size
    params, work = somewhere(ours, seed), work_of([2, 0, 3, 1], epochs, LocalSGD(0.1, batch, mu), seed)
    agree(ours.train(params, work), theirs.train(params, work), TOLERANCE[dtype])
    agree(ours.gradients(params, np.arange(4)), theirs.gradients(params, np.arange(4)), TOLERANCE[dtype])


@pytest.mark.parametrize("spans", [True, False])
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_the_span_of_the_samples_and_the_features_give_the_same_steps(spans, mu, monkeypatch):
    data = data_of()
    ours, theirs = SoftmaxNumba(data, np.float64), SoftmaxReference(data, np.float64)
    monkeypatch.setattr(ours, "_spans", lambda found, counts, epochs: np.full(len(counts), spans))
    params, work = somewhere(ours), work_of([0, 1, 2, 3], [5, 5, 5, 5], LocalSGD(0.2, 4, mu))
    for _ in range(2):  # the second time with the inner products kept
        agree(ours.train(params, work), theirs.train(params, work), 1e-10)
    assert bool(ours._known) == spans


def test_code_that_cannot_be_kept_is_compiled_all_the_same(monkeypatch):
    made = jit._njit

    def nowhere(cache=False, **how):
        def decorate(function):
            if cache:
                raise RuntimeError(f"cannot cache function {function.__name__!r}: no locator available")
            return made(**how)(function)

        return decorate

    monkeypatch.setattr(jit, "_njit", nowhere)
    monkeypatch.setattr(jit._Word, "how_often", "once")
    assert jit.compiled(lambda x: x + 1)(2) == 3
    assert "NUMBA_CACHE_DIR" in jit._Word.how_often


def test_both_ways_are_taken_where_they_pay():
    engine, counts, epochs = SoftmaxNumba(data_of(dimension=200)), np.array([30, 30, 10_000]), np.array([20, 1, 20])
    assert engine._spans(engine._nothing, counts, epochs).tolist() == [True, False, False]


def test_inner_products_are_kept_within_their_bound(monkeypatch):
    monkeypatch.setattr(fast, "GRAM_BYTES", 30 * 30 * 8)
    engine = SoftmaxNumba(data_of(), np.float64)
    monkeypatch.setattr(engine, "_spans", lambda found, counts, epochs: counts > 0)
    engine.train(engine.initial_params(), work_of([2, 1, 3, 0], [2, 2, 2, 2], LocalSGD(0.1, 5)))
    assert engine._known == {2}
    assert engine._inner.nbytes == 30 * 30 * 8


@settings(deadline=None)
@given(share=st.floats(0, 1), seed=st.integers(0, 20))
def test_samples_are_their_background_and_what_differs_from_it(share, seed):
    features = speckled(sizes=(25,), dimension=30, seed=seed, share=share).train.features
    found = sparse.sparse(features)
    if found.leans.size == 0:
        assert (features != found.background).mean() > sparse.WORTHWHILE or (features == features[0]).all()
        return
    rows = np.zeros((26, 30))
    for row, own in enumerate(rows):
        entries = slice(found.starts[row], found.starts[row + 1])
        np.add.at(own, found.columns[entries], found.values[entries])
    np.testing.assert_allclose(rows[:-1] + found.background, features, rtol=0, atol=1e-15)
    assert np.array_equal(rows[-1], found.background)
    np.testing.assert_allclose(found.leans, rows @ found.background, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("make", [data_of, speckled])
def test_gradients_losses_and_accuracy_are_the_references(dtype, make, monkeypatch):
    monkeypatch.setattr(fast, "ROWS", 16)
    data, devices, everyone = make(classes=5), np.array([3, 0]), np.arange(4)
    ours, theirs = SoftmaxNumba(data, dtype), SoftmaxReference(data, dtype)
    params, tolerance = somewhere(ours, scale=1.0), TOLERANCE[dtype]
    agree(ours.gradients(params, devices), theirs.gradients(params, devices), tolerance)
    for chosen, weights in ((devices, [0.3, 0.7]), (everyone, [0.1, 0.2, 0.3, 0.4]), (everyone, [0.25] * 4)):
        given = (params, chosen, np.array(weights))
        agree([ours.gradient(*given)], [theirs.gradient(*given)], tolerance)
    loss, accuracy = ours.evaluate(params)
    assert (loss, accuracy) == (pytest.approx(theirs.evaluate(params)[0], rel=tolerance), theirs.evaluate(params)[1])


def test_a_gradient_taken_along_by_evaluation_is_the_one_asked_for(monkeypatch):
    data, everyone, even = data_of(), np.arange(4), np.full(4, 0.25)
    ours, theirs = SoftmaxNumba(data, np.float64), SoftmaxReference(data, np.float64)
    passes, sweep = [], fast._sweep
    monkeypatch.setattr(fast, "_sweep", lambda side, *rest: passes.append(side) or sweep(side, *rest))
    for seed in range(3):
        params = somewhere(ours, seed)
        assert ours.evaluate(params)[0] == pytest.approx(theirs.evaluate(params)[0])
        agree([ours.gradient(params, everyone, even)], [theirs.gradient(params, everyone, even)], 1e-10)
    assert sum(side is ours.train_side for side in passes) == 4  # one pass a round, and one to learn the habit
    params += 1  # a change in place is noticed
    agree([ours.gradient(params, everyone, even)], [theirs.gradient(params, everyone, even)], 1e-10)
    other = np.array([0.7, 0.1, 0.1, 0.1])
    agree([ours.gradient(params, everyone, other)], [theirs.gradient(params, everyone, other)], 1e-10)


def test_a_gradient_nobody_asks_for_is_no_longer_taken_along():
    engine = SoftmaxNumba(data_of())
    engine.gradient(engine.initial_params(), np.arange(4), np.full(4, 0.25))
    engine.evaluate(engine.initial_params())
    assert engine._factors is not None
    engine.evaluate(engine.initial_params())
    assert engine._factors is None


@pytest.mark.parametrize("algorithm", fc.ALGORITHMS)
@pytest.mark.parametrize("probes", ["cohort", 7, "all"])
def test_every_algorithm_has_the_references_records(algorithm, probes):
    made = fc.prepare(fc.Experiment(algorithm=algorithm, rounds=4, probes=probes, pool=5))
    engines = [kind(made.data, np.float64) for kind in (SoftmaxReference, SoftmaxNumba)]
    theirs, ours = (list(dataclasses.replace(made, engine=engine).play()) for engine in engines)
    for (_, expected), (_, record) in zip(theirs, ours, strict=True):
        for name, value in dataclasses.asdict(expected).items():
            same = pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True) if _numeric(value) else value
            assert getattr(record, name) == same, name


@pytest.mark.parametrize("engine", ["reference", "numba"])
def test_the_engine_is_one_word(engine):
    records = list(fc.rounds(dataset="synthetic-iid", algorithm="fedavg-contextual", rounds=3, engine=engine))
    assert records[-1].loss == pytest.approx(list(fc.rounds(dataset="synthetic-iid", rounds=3))[-1].loss, rel=1e-4)


def _numeric(value):
    return isinstance(value, float) or (isinstance(value, list) and any(isinstance(each, float) for each in value))


@pytest.mark.parametrize("make", [data_of, speckled])
def test_results_do_not_depend_on_the_number_of_threads(make, monkeypatch):
    data, local = make(sizes=(40, 3, 9, 25, 60, 1)), LocalSGD(0.1, 4, 0.1)
    engine = SoftmaxNumba(data)
    params, work = somewhere(engine), work_of(range(6), [3, 1, 9, 2, 4, 5], local)
    many = engine.train(params, work), engine.evaluate(params)
    monkeypatch.setattr(threads, "workers", lambda: 1)
    alone = SoftmaxNumba(data)
    assert all(np.array_equal(a, b) for a, b in zip(many[0], alone.train(params, work), strict=True))
    assert many[1] == alone.evaluate(params)


def test_a_caller_that_loses_patience_waits_for_the_others(monkeypatch):
    monkeypatch.setattr(threads, "workers", lambda: 2)
    begun, left, finished = threading.Event(), threading.Event(), []

    def crew():
        if threading.current_thread() is threading.main_thread():
            begun.wait(10)
            left.set()
            return False
        begun.set()
        finished.append(left.wait(10))
        return True

    threads.together(crew, hands=2)
    assert finished == [True]


def test_nobody_is_at_work_any_more_when_the_callers_error_is_raised(monkeypatch):
    monkeypatch.setattr(threads, "workers", lambda: 2)
    begun, finished = threading.Event(), []

    def crew():
        if threading.current_thread() is threading.main_thread():
            begun.wait(10)
            raise KeyboardInterrupt
        begun.set()
        time.sleep(0.05)
        finished.append(True)
        return True

    with pytest.raises(KeyboardInterrupt):
        threads.together(crew, hands=2)
    assert finished == [True]


@pytest.mark.parametrize("make", [data_of, speckled])
def test_an_update_does_not_depend_on_who_else_trains(make):
    data = make(dimension=60, classes=2)
    engine = SoftmaxNumba(data)
    params = somewhere(engine)
    alone = [engine.train(params, work_of([k], [e], LocalSGD(0.1, 5)))[0] for k, e in ((0, 1), (1, 1), (2, 1), (3, 9))]
    company = engine.train(params, work_of([0, 1, 2, 3], [1, 1, 1, 9], LocalSGD(0.1, 5)))
    assert all(map(np.array_equal, alone, company))


def test_a_device_that_trains_twice_in_a_round_gets_the_same_update_twice(monkeypatch):
    data = data_of(sizes=(60, 3), dimension=200)
    monkeypatch.setattr(SoftmaxNumba, "_spans", lambda self, found, counts, epochs: counts > 0)
    params, work = somewhere(SoftmaxNumba(data, np.float64)), work_of([0, 0, 0], [9, 9, 9], LocalSGD(0.1, 5))
    theirs = SoftmaxReference(data, np.float64).train(params, work)
    for _ in range(5):
        engine = SoftmaxNumba(data, np.float64)
        agree(engine.train(params, work), theirs, 1e-10)
        agree(engine.train(params, work), theirs, 1e-10)
        assert engine._known == {0}


def test_inner_products_are_known_only_once_they_were_computed(monkeypatch):
    data = data_of(dimension=200)
    engine, local = SoftmaxNumba(data, np.float64), LocalSGD(0.1, 5)
    monkeypatch.setattr(engine, "_spans", lambda found, counts, epochs: epochs > 1)
    params, spanning = somewhere(engine), work_of([2], [9], local)
    with pytest.raises(fc.FedcontextError, match="must be 0 or more"):
        engine.train(params, dataclasses.replace(spanning, seed=-1))
    engine.train(params, work_of([2], [1], local))
    agree(engine.train(params, spanning), SoftmaxReference(data, np.float64).train(params, spanning), 1e-10)


@pytest.mark.parametrize("height", [1, 100, 10_000])
def test_a_large_background_costs_no_accuracy(height):
    data = speckled(classes=5, share=0.1)
    for side in (data.train, data.test):
        side.features[:] += height
    engines = [SoftmaxReference(data, np.float64), SoftmaxReference(data, np.float32), SoftmaxNumba(data)]
    assert engines[2].train_side.stored
    params, work = somewhere(engines[2]), work_of([2, 3], [1, 1], LocalSGD(0.01 / height, 5))
    moves = [engine.train(params.astype(engine.initial_params().dtype), work) for engine in engines]
    for exact, theirs, ours in zip(*moves, strict=True):
        assert np.linalg.norm(ours - exact) < 5 * np.linalg.norm(theirs - exact) + 1e-5 * np.linalg.norm(exact)


def test_what_is_infinite_on_one_device_stays_there():
    data = speckled(share=0.1)
    data.train.features[data.train.rows(2), 4] = np.inf
    engine = SoftmaxNumba(data)
    with np.errstate(all="ignore"):
        moves = engine.train(engine.initial_params(), work_of(range(4), [1] * 4, LocalSGD(0.1, 5)))
    assert [bool(np.isfinite(move).all()) for move in moves] == [True, True, False, True]


@pytest.mark.parametrize(("dimension", "stored"), [(65_536, True), (65_537, False)])
def test_only_columns_that_have_a_number_are_stored(dimension, stored):
    features = np.zeros((3, dimension), np.float32)
    features[1, -1] = 5
    found = sparse.sparse(features)
    assert (found.leans.size > 0) == stored
    assert not stored or found.columns[found.values == 5].tolist() == [dimension - 1]


def test_without_compiled_draws_the_plans_own_are_taken():
    data = data_of()
    usual, other = SoftmaxNumba(data, np.float64), SoftmaxNumba(data, np.float64)
    other._drawn = False
    params, work = somewhere(usual), work_of([2, 0, 3, 1], [2, 1, 3, 2], LocalSGD(0.1, 5))
    assert all(map(np.array_equal, usual.train(params, work), other.train(params, work)))


def test_nothing_is_compiled_for_arrays_of_another_kind():
    engine = SoftmaxNumba(data_of())
    params, work = somewhere(engine), work_of([2, 0], [2, 1], LocalSGD(0.1, 5))
    usual, known = engine.train(params, work), [len(f.signatures) for f in (fast.descend_all, fast.sweep)]
    params.flags.writeable = work.devices.flags.writeable = work.epochs.flags.writeable = False
    strided = dataclasses.replace(work, devices=np.array([[2, 9], [0, 9]])[:, 0], epochs=np.array([2, 1], np.int32))
    for other in (work, strided):
        assert all(map(np.array_equal, engine.train(np.asfortranarray(params), other), usual))
    engine.gradients(params, work.devices)
    engine.evaluate(params)
    assert [len(f.signatures) for f in (fast.descend_all, fast.sweep)] == known


def test_nobody_trains_in_an_empty_cohort():
    engine = SoftmaxNumba(data_of())
    assert engine.train(engine.initial_params(), work_of(np.zeros(0, int), np.zeros(0, int), LocalSGD(0.1, 5))) == []


def test_an_error_in_a_task_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        threads.on_all_cores(lambda number: 1 / number, [1, 2, 0, 4])


def test_when_an_error_reaches_the_caller_nobody_is_at_work_any_more(monkeypatch):
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
    rounds = fc.rounds(data=data, algorithm="fedavg", devices_per_round=3, learning_rate=1e10, rounds=1, engine=engine)
    with pytest.raises(fc.FedcontextError, match=r"device 1: .* NaN"), np.errstate(all="ignore"):
        list(rounds)


@pytest.mark.parametrize("engine", ["reference", "numba"])
def test_data_that_cannot_be_trained_on_is_refused_at_the_door(engine):
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
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    with pytest.raises(fc.MissingExtra, match=r"fedcontext\[numba\]"):
        engine_named("numba", data_of())


def test_a_device_with_an_empty_test_side_counts_for_nothing():
    data = data_of()
    bare = dataclasses.replace(data, test=join([(np.zeros((0, 6)), np.zeros(0, int))] * 4))
    loss, accuracy = engine_named("numba", bare).evaluate(np.zeros((7, 3), np.float32))
    assert (loss, accuracy) == (pytest.approx(math.log(3)), 0)
