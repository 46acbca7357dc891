"""SCAFFOLD and FedDyn: their papers' algorithms on every engine, and what devices keep."""

from __future__ import annotations

import numpy as np
import pytest

import fedcontext as fc
from fedcontext.algorithms import Hyperparameters, algorithm_named
from fedcontext.engines.softmax import SoftmaxReference, gradient
from fedcontext.errors import FedcontextError
from fedcontext.plan import batches, plan_round

SETTINGS = {"rounds": 4, "devices_per_round": 4, "epochs": (1, 3), "learning_rate": 0.1, "mu": 0.3}


def rounds_of(data):
    """Yield {device: batches of features and labels} of each round."""
    for number in range(1, SETTINGS["rounds"] + 1):
        plan = plan_round(0, number, data.population, devices_per_round=4, epochs=SETTINGS["epochs"])
        drawn = {}
        for device, epochs in zip(plan.devices.tolist(), plan.epochs.tolist(), strict=True):
            x, y = data.train.device(device)
            drawn[device] = [(x[b], y[b]) for b in batches(0, number, device, len(y), epochs, 10)]
        yield drawn


def scaffold(data, rate=0.1):
    """Algorithm 1 of Karimireddy et al., option II, global learning rate 1, line by line."""
    x, c = np.zeros((data.dimension + 1, data.classes)), 0.0
    c_i = {i: np.zeros_like(x) for i in range(data.population)}
    for drawn in rounds_of(data):
        delta_y, delta_c = [], []
        for i, steps in drawn.items():
            y = x.copy()
            for features, labels in steps:
                y = y - rate * (gradient(y, features, labels) - c_i[i] + c)
            c_plus = c_i[i] - c + (x - y) / (len(steps) * rate)
            delta_y.append(y - x)
            delta_c.append(c_plus - c_i[i])
            c_i[i] = c_plus
        x = x + np.mean(delta_y, axis=0)
        c = c + len(drawn) / data.population * np.mean(delta_c, axis=0)
    return x


def feddyn(data, rate=0.1, alpha=0.3):
    """Algorithm 1 of Acar et al., the local problem by SGD, line by line."""
    theta, h = np.zeros((data.dimension + 1, data.classes)), 0.0
    slopes = {k: np.zeros_like(theta) for k in range(data.population)}
    for drawn in rounds_of(data):
        local = {}
        for k, steps in drawn.items():
            w = theta.copy()
            for features, labels in steps:
                w = w - rate * (gradient(w, features, labels) - slopes[k] + alpha * (w - theta))
            slopes[k] = slopes[k] - alpha * (w - theta)
            local[k] = w
        h = h - alpha / data.population * sum(w - theta for w in local.values())
        theta = np.mean(list(local.values()), axis=0) - h / alpha
    return theta


def final_params(data, algorithm, engine):
    if engine == "vmapped":
        from fedcontext.engines.torch.engine import TorchEngine
        from fedcontext.engines.torch.models import model_named

        factory, shape = model_named("softmax", data.dimension, data.classes)
        engine = TorchEngine(data, factory, input_shape=shape, device="cpu", vectorize=True, chunk_size=3)
    params = fc.train(data=data, algorithm=algorithm, engine=engine, **SETTINGS).params
    if isinstance(params, dict):
        weight, bias = (leaf.numpy() for leaf in params.values())
        return np.vstack([weight.T, bias])
    return params


@pytest.mark.parametrize("engine", ["reference", "numba", "torch", "vmapped"])
@pytest.mark.parametrize(("algorithm", "paper"), [("scaffold", scaffold), ("feddyn", feddyn)])
def test_every_engine_does_what_the_paper_prints(small_data, algorithm, paper, engine):
    if engine != "reference":
        pytest.importorskip("numba" if engine == "numba" else "torch")
    params = final_params(small_data, algorithm, engine)
    np.testing.assert_allclose(params, paper(small_data), rtol=1e-3, atol=2e-5)


@pytest.fixture(scope="module")
def divided_data():
    """Six devices with few classes each, so that local training drifts."""
    random = np.random.default_rng(0)
    features = random.standard_normal((240, 4))
    labels = np.argmax(features @ random.standard_normal((4, 3)) + random.standard_normal((240, 3)), axis=1)
    return fc.federate(
        features, labels, np.array_split(np.argsort(labels, kind="stable"), 6), name="divided", classes=3
    )


@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])
def test_control_variates_remove_the_drift_that_stops_averaging(divided_data, algorithm):
    """With everyone taking part and full batches, FedAvg stops where local optima balance; these reach the optimum."""
    settings = {"rounds": 150, "devices_per_round": 6, "epochs": 8, "batch_size": 100, "learning_rate": 0.3}
    engine, devices = SoftmaxReference(divided_data, np.float64), np.arange(6)
    slopes = {}
    for name in ("fedavg", algorithm):
        params = fc.train(data=divided_data, algorithm=name, engine=engine, **settings).params
        slopes[name] = np.linalg.norm(engine.gradient(params, devices, np.full(6, 1 / 6)))
    assert slopes[algorithm] < 0.05 * slopes["fedavg"]


@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])
def test_only_devices_that_took_part_have_a_state(small_data, algorithm):
    seen: set[int] = set()
    for state, record in fc.simulate(data=small_data, algorithm=algorithm, **SETTINGS):
        seen |= set(record.devices)
        assert set(state.variates["devices"]) == seen
    assert len(seen) < small_data.population


def test_devices_receive_scaffolds_control_variate_beside_the_params(small_data):
    down = {}
    for name in ("fedavg", "scaffold", "feddyn"):
        down[name] = next(fc.simulate(data=small_data, algorithm=name, **SETTINGS))[1].bytes_down
    assert down["scaffold"] == 2 * down["fedavg"] == 2 * down["feddyn"]


def test_buffers_have_no_control_variate(small_data):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    for algorithm in ("scaffold", "feddyn", "fedadam"):
        (state, _), *_ = fc.simulate(
            data=small_data, algorithm=algorithm, model=model, **{**SETTINGS, "batch_size": 25}
        )
        assert state.params["1.num_batches_tracked"] > 0
        if state.variates:
            assert set(state.variates["server"]) == {f"{n}.{kind}" for n in range(3) for kind in ("weight", "bias")}


def test_an_engine_that_would_ignore_the_correction_is_refused(small_data):
    class Plain(SoftmaxReference):
        supports_corrections = False

    with pytest.raises(
        FedcontextError, match=r"engine Plain does not support the corrected gradients of .* 'scaffold'"
    ):
        fc.simulate(data=small_data, algorithm="scaffold", engine=Plain(small_data), **SETTINGS)


def test_scaffold_refuses_local_momentum(small_data):
    pytest.importorskip("torch")
    with pytest.raises(FedcontextError, match=r"'scaffold' does not support momentum \(got 0.9\)"):
        fc.simulate(data=small_data, algorithm="scaffold", engine="torch", momentum=0.9, **SETTINGS)


def test_feddyn_needs_a_positive_alpha():
    with pytest.raises(FedcontextError, match="alpha must be positive, got 0"):
        algorithm_named("feddyn", Hyperparameters(learning_rate=0.1, smoothness=1, mu=0))
