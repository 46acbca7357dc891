"""Server optimisers: the formulas of their papers, on every kind of array, and the contracts that all of them keep."""

from __future__ import annotations

import math
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcontext import checkpoint
from fedcontext.algorithms import Hyperparameters, algorithm_named
from fedcontext.arrays.tree import leaves
from fedcontext.errors import FedcontextError
from fedcontext.rules.server import chain, fedadagrad, fedadam, fedavgm, fedyogi, server_sgd

OPTIMIZERS = {
    "server_sgd": server_sgd(0.5),
    "fedavgm": fedavgm(),
    "fedadagrad": fedadagrad(),
    "fedadam": fedadam(),
    "fedyogi": fedyogi(),
    "chain": chain(fedavgm(momentum=0.5), fedadam()),
}
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
STEPS = st.lists(st.floats(-10, 10), min_size=1, max_size=6)


def numpy_arrays(values):
    return np.asarray(values, np.float32)


def torch_tensors(values):
    return pytest.importorskip("torch").tensor(np.asarray(values, np.float32))


def jax_arrays(values):
    return pytest.importorskip("jax").numpy.asarray(values, dtype="float32")


def model(array=numpy_arrays):
    return {"layer": {"weight": array([[1.0, 2.0]]), "bias": array([0.5])}, "scale": [array(3.0)]}


def steps(count, array=numpy_arrays, seed=0):
    random = np.random.default_rng(seed)
    return [
        {
            "layer": {"weight": array(random.standard_normal((1, 2))), "bias": array(random.standard_normal(1))},
            "scale": [array(random.standard_normal())],
        }
        for _ in range(count)
    ]


def run(optimizer, changes, params):
    state, applied = optimizer.init(params), []
    for change in changes:
        step, state = optimizer.update(change, state, params)
        applied.append(step)
    return applied, state


def scalars(optimizer, changes):
    """The steps applied to a model of one number."""
    return [float(step[0]) for step in run(optimizer, [np.array([change]) for change in changes], np.zeros(1))[0]]


@pytest.mark.parametrize("make", [fedavgm, fedadagrad, fedadam, fedyogi])
def test_an_algorithm_has_the_defaults_of_its_optimizer(make):
    named = algorithm_named(make.__name__, Hyperparameters(learning_rate=0.1, smoothness=10))
    assert scalars(named.server, [1.0, -0.5]) == scalars(make(), [1.0, -0.5])


def reddi(changes, lr, beta1, tau, second):
    """Algorithm 2 of "Adaptive Federated Optimization", line by line, for one number."""
    m, v, applied = 0.0, tau**2, []
    for delta in changes:
        m = beta1 * m + (1 - beta1) * delta
        v = second(v, delta)
        applied.append(lr * m / (math.sqrt(v) + tau))
    return applied


@given(STEPS)
def test_fedadagrad_is_algorithm_2(changes):
    expected = reddi(changes, 0.3, 0.2, 0.01, lambda v, d: v + d**2)
    assert scalars(fedadagrad(0.3, 0.2, 0.01), changes) == pytest.approx(expected)


@given(STEPS)
def test_fedadam_is_algorithm_2(changes):
    expected = reddi(changes, 0.3, 0.8, 0.01, lambda v, d: 0.95 * v + 0.05 * d**2)
    assert scalars(fedadam(0.3, 0.8, 0.95, 0.01), changes) == pytest.approx(expected)


@given(STEPS)
def test_fedyogi_is_algorithm_2(changes):
    expected = reddi(changes, 0.3, 0.8, 0.01, lambda v, d: v - 0.05 * d**2 * np.sign(v - d**2))
    assert scalars(fedyogi(0.3, 0.8, 0.95, 0.01), changes) == pytest.approx(expected)


def test_fedyogi_keeps_v_where_it_equals_the_square():
    assert scalars(fedyogi(lr=1.0, beta1=0.0, tau=0.5), [0.5, 0.5]) == pytest.approx([0.5, 0.5])


@given(STEPS)
def test_fedavgm_sums_the_steps_with_decay(changes):
    expected = [2 * sum(0.9 ** (t - s) * changes[s] for s in range(t + 1)) for t in range(len(changes))]
    assert scalars(fedavgm(lr=2, momentum=0.9), changes) == pytest.approx(expected)


def test_server_sgd_scales_the_step():
    assert scalars(server_sgd(lr=0.5), [2.0, -4.0]) == [1.0, -2.0]


@pytest.mark.parametrize("optimizer", [server_sgd(), fedavgm(momentum=0)], ids=["server_sgd", "fedavgm"])
def test_without_momentum_at_rate_1_the_step_is_fedavgs(optimizer):
    assert scalars(optimizer, [0.1, -0.7, 3.0]) == [0.1, -0.7, 3.0]


@pytest.mark.skipif(not find_spec("flwr"), reason="compares with Flower")
@pytest.mark.parametrize(("name", "ours"), [("FedAdam", fedadam), ("FedYogi", fedyogi), ("FedAdagrad", fedadagrad)])
def test_the_defaults_are_flowers_but_for_the_rate_of_fedyogi(name, ours):
    from inspect import signature

    from flwr.serverapp import strategy

    flower = getattr(strategy, name)(fraction_train=1.0)
    expected = {
        "lr": 0.1 if ours is fedyogi else flower.eta,
        "beta1": flower.beta_1,
        "beta2": flower.beta_2,
        "tau": flower.tau,
    }
    defaults = {key: parameter.default for key, parameter in signature(ours).parameters.items()}
    assert defaults == {key: expected[key] for key in defaults}


@every_optimizer
@pytest.mark.parametrize("array", [torch_tensors, jax_arrays])
def test_frameworks_agree(optimizer, array):
    expected, _ = run(optimizer, steps(4), model())
    applied, _ = run(optimizer, steps(4, array), model(array))
    for ours, theirs in zip(applied, expected, strict=True):
        for name, leaf in leaves(ours).items():
            assert type(leaf) is type(array([0.0]))
            np.testing.assert_allclose(np.asarray(leaf), leaves(theirs)[name], rtol=1e-5)


@every_optimizer
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_types_and_shapes_are_kept(optimizer, dtype):
    params = [np.ones((2, 1), dtype), np.array(1.0, dtype)]
    applied, state = run(optimizer, [params, params], params)
    for leaf in (*leaves(applied).values(), *leaves(state).values()):
        assert isinstance(leaf, np.ndarray)
        assert leaf.dtype == dtype
    assert [leaf.shape for leaf in applied[-1]] == [(2, 1), ()]


@every_optimizer
def test_what_is_passed_in_is_not_changed(optimizer):
    change, params = steps(1)[0], model()
    state = optimizer.init(params)
    before = [leaf.copy() for leaf in leaves([change, params, state]).values()]
    optimizer.update(change, state, params)
    for leaf, copy in zip(leaves([change, params, state]).values(), before, strict=True):
        np.testing.assert_array_equal(leaf, copy)


@every_optimizer
def test_leaves_that_are_not_floating_point_pass_unchanged(optimizer):
    params = {"layer": {"bias": np.ones(2)}, "count": np.array([5, 6]), "mask": np.array([True, False])}
    change = {"layer": {"bias": np.ones(2)}, "count": np.array([1, 2]), "mask": np.array([True, False])}
    for step in run(optimizer, [change, change], params)[0]:
        assert step["count"] is change["count"]
        assert step["mask"] is change["mask"]


@every_optimizer
def test_a_run_resumes_from_a_checkpoint_bit_for_bit(optimizer, tmp_path):
    pytest.importorskip("safetensors")
    params, changes = model(), steps(4)
    _, state = run(optimizer, changes[:2], params)
    checkpoint.save(tmp_path / "run.safetensors", params, state, {})
    loaded = checkpoint.load(tmp_path / "run.safetensors", like=params).rule
    for change in changes[2:]:
        expected, state = optimizer.update(change, state, params)
        step, loaded = optimizer.update(change, loaded, params)
        for name, leaf in leaves(step).items():
            np.testing.assert_array_equal(leaf, leaves(expected)[name])


@every_optimizer
def test_a_step_of_zero_at_the_start_moves_nothing(optimizer):
    assert not run(optimizer, [np.zeros(3)], np.ones(3))[0][0].any()


def test_a_chain_applies_its_optimizers_in_order():
    one, two = fedavgm(momentum=0.5), fedadam()
    first, _ = run(one, steps(3), model())
    second, _ = run(two, first, model())
    chained, _ = run(chain(one, two), steps(3), model())
    for name, leaf in leaves(chained).items():
        np.testing.assert_array_equal(leaf, leaves(second)[name])


def test_a_step_of_another_model_is_refused():
    optimizer = fedavgm()
    with pytest.raises(FedcontextError, match=r"leaves of the params, got \['b'\] and \['a'\]"):
        optimizer.update({"b": np.ones(1)}, optimizer.init({"a": np.ones(1)}), None)


@pytest.mark.parametrize("make", [server_sgd, fedavgm, fedadagrad, fedadam, fedyogi])
@pytest.mark.parametrize("lr", [0, -1, math.nan, math.inf, "fast"])
def test_learning_rates_are_positive(make, lr):
    with pytest.raises(FedcontextError, match="lr must be"):
        make(lr=lr)


@pytest.mark.parametrize("value", [-0.1, 1, 1.5, math.nan])
def test_decays_are_at_least_0_and_below_1(value):
    for make in (lambda: fedavgm(momentum=value), lambda: fedadam(beta1=value), lambda: fedyogi(beta2=value)):
        with pytest.raises(FedcontextError, match="must be at least 0 and below 1"):
            make()


@pytest.mark.parametrize("make", [fedadagrad, fedadam, fedyogi])
def test_tau_is_positive(make):
    with pytest.raises(FedcontextError, match="tau must be positive, got 0"):
        make(tau=0)
