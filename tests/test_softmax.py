"""The paper's model: its gradient against finite differences and against autograd, its training against the formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcontext.engines.base import Work
from fedcontext.engines.softmax import SoftmaxReference, gradient, losses
from fedcontext.local_sgd import LocalSGD, proximal, sgd
from fedcontext.smoothness import curvature


def problem(seed, samples=7, features=4, classes=3):
    random = np.random.default_rng(seed)
    return (
        random.standard_normal((features + 1, classes)),
        random.standard_normal((samples, features)),
        random.integers(0, classes, samples),
    )


@given(st.integers(0, 10_000))
def test_gradient_matches_finite_differences(seed):
    params, x, y = problem(seed)
    direction = np.random.default_rng(seed + 1).standard_normal(params.shape)
    ahead, behind = (losses(params + s * 1e-6 * direction, x, y).mean() for s in (1, -1))
    assert (gradient(params, x, y) * direction).sum() == pytest.approx((ahead - behind) / 2e-6, rel=1e-5, abs=1e-7)


@given(st.integers(0, 10_000))
def test_loss_and_gradient_match_autograd(seed):
    torch = pytest.importorskip("torch")
    params, x, y = problem(seed)
    weights = torch.tensor(params, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(torch.tensor(x) @ weights[:-1] + weights[-1], torch.tensor(y))
    loss.backward()
    assert losses(params, x, y).mean() == pytest.approx(loss.item(), rel=1e-9)
    np.testing.assert_allclose(gradient(params, x, y), weights.grad.numpy(), rtol=1e-7, atol=1e-12)


def test_large_scores_do_not_overflow():
    params, x, y = problem(0)
    assert np.isfinite(losses(1e4 * params, x, y)).all()
    assert np.isfinite(gradient(1e4 * params, x, y)).all()


def test_one_full_batch_step_is_gradient_descent(small_data):
    engine = SoftmaxReference(small_data, np.float64)
    params = np.random.default_rng(0).standard_normal(engine.initial_params().shape)
    work = Work(0, 1, np.array([3]), np.array([1]), sgd(0.1, batch_size=10_000))
    np.testing.assert_allclose(engine.train(params, work)[0], -0.1 * engine.gradients(params, np.array([3]))[0])


def test_the_proximal_term_is_half_mu_times_the_squared_distance(small_data):
    """Two full-batch steps: the second adds μ (w - wᵗ), the gradient of (μ/2)‖w - wᵗ‖², to the slope."""
    engine, mu, rate = SoftmaxReference(small_data, np.float64), 0.7, 0.1
    params = engine.initial_params()
    first = -rate * engine.gradients(params, np.array([2]))[0]
    second = first - rate * (engine.gradients(params + first, np.array([2]))[0] + mu * first)
    work = Work(0, 1, np.array([2]), np.array([2]), proximal(mu, rate, batch_size=10_000))
    np.testing.assert_allclose(engine.train(params, work)[0], second)


def test_a_stronger_proximal_term_keeps_devices_closer(small_data):
    engine = SoftmaxReference(small_data)
    work = [Work(0, 1, np.arange(5), np.full(5, 10), LocalSGD(0.1, 10, mu)) for mu in (0.0, 1.0, 5.0)]
    lengths = [np.linalg.norm(engine.train(engine.initial_params(), each)) for each in work]
    assert lengths[0] > lengths[1] > lengths[2]


def test_the_gradient_over_all_devices_is_that_of_the_loss(small_data):
    engine = SoftmaxReference(small_data, np.float64)
    params = np.random.default_rng(0).standard_normal(engine.initial_params().shape)
    sizes = small_data.train.sizes / small_data.train.sizes.sum()
    all_devices = np.arange(small_data.population)
    whole = gradient(params, small_data.train.features, small_data.train.labels)
    np.testing.assert_allclose(engine.gradient(params, all_devices, sizes), whole)
    np.testing.assert_allclose(engine.gradient(params, all_devices[::-1], sizes[::-1]), whole)  # device by device
    mean = np.mean(engine.gradients(params, all_devices), axis=0)
    np.testing.assert_allclose(engine.gradient(params, all_devices, np.full(12, 1 / 12)), mean)


def test_single_and_double_precision_agree(small_data):
    work = Work(0, 1, np.arange(4), np.full(4, 3), sgd(0.1))
    pair = [SoftmaxReference(small_data, dtype) for dtype in (np.float32, np.float64)]
    for low, high in zip(*(engine.train(engine.initial_params(), work) for engine in pair), strict=True):
        np.testing.assert_allclose(low, high, rtol=1e-3, atol=1e-5)


def test_measured_curvature_is_the_top_eigenvalue_of_the_hessian(small_data):
    engine = SoftmaxReference(small_data, np.float64)
    x = np.hstack([small_data.train.features, np.ones((len(small_data.train.labels), 1))])
    top = np.linalg.eigvalsh(x.T @ x / len(x))[-1] / 3  # at zero params: (I/C - 1/C²) has top eigenvalue 1/C
    all_devices, sizes = np.arange(12), small_data.train.sizes / small_data.train.sizes.sum()
    assert curvature(lambda w: engine.gradient(w, all_devices, sizes), engine.initial_params()) == pytest.approx(
        top, rel=1e-3
    )


@pytest.mark.parametrize(
    "local", [{"learning_rate": 0}, {"learning_rate": 0.1, "batch_size": 0}, {"learning_rate": 0.1, "mu": -1}]
)
def test_invalid_hyperparameters_are_refused(local):
    with pytest.raises(ValueError, match="must be"):
        LocalSGD(**{"batch_size": 10, **local})
