"""The contextual step in floating point: whatever the dtype, the scale, the condition and the order of the updates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcontext as fc

BETA = 2.0


def conditioned(random, count, size, condition, scale=1.0, dtype=np.float64):
    """Return ``count`` updates whose Gram matrix has about this condition number, and a gradient."""
    rank = min(count, size)
    left = np.linalg.qr(random.standard_normal((count, rank)))[0]
    right = np.linalg.qr(random.standard_normal((size, rank)))[0].T
    singular = np.sort(np.sqrt(condition) ** -random.uniform(0, 1, rank))[::-1]
    return (scale * (left * singular) @ right).astype(dtype), (scale * random.standard_normal(size)).astype(dtype)


def step_of(updates, gradient):
    params = np.zeros(updates.shape[1], np.float64)
    wide = [update.astype(np.float64) for update in updates]
    result = fc.aggregate(params, wide, gradient=gradient.astype(np.float64), rule=fc.contextual(BETA), defences=None)
    return result.step


cases = {
    "seed": st.integers(0, 10**6),
    "count": st.integers(2, 30),
    "size": st.sampled_from([3, 8, 20, 100, 300]),
    "exponent": st.floats(0, 12),
    "scale": st.integers(-20, 20),
    "dtype": st.sampled_from([np.float32, np.float64]),
}


@given(**cases)
@settings(max_examples=300, deadline=None)
def test_the_order_of_devices_does_not_matter_and_no_step_exceeds_the_gradient_step(
    seed, count, size, exponent, scale, dtype
):
    random = np.random.default_rng(seed)
    scale = scale / 2 if dtype is np.float32 else scale  # squares of float32 must not underflow before they are widened
    updates, gradient = conditioned(random, count, size, 10.0**exponent, 10.0**scale, dtype)
    step = step_of(updates, gradient)
    other = step_of(updates[random.permutation(count)], gradient)
    assert np.linalg.norm(step - other) <= 1e-6 * np.linalg.norm(step)
    assert np.linalg.norm(step) <= (1 + 1e-6) * np.linalg.norm(gradient.astype(np.float64)) / BETA


@given(cases["seed"], cases["count"], cases["size"], st.floats(0, 6))
@settings(max_examples=100, deadline=None)
def test_the_step_is_the_projection_of_the_gradient_step_onto_the_updates(seed, count, size, exponent):
    updates, gradient = conditioned(np.random.default_rng(seed), count, size, 10.0**exponent)
    basis = np.linalg.svd(updates, full_matrices=False)[2]
    np.testing.assert_allclose(step_of(updates, gradient), -basis.T @ (basis @ gradient) / BETA, atol=1e-6)


@given(cases["seed"], st.integers(2, 10), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_copies_of_updates_change_nothing(seed, count, copies):
    updates, gradient = conditioned(np.random.default_rng(seed), count, 50, 1e4)
    again = step_of(np.concatenate([updates] * (1 + copies)), gradient)
    np.testing.assert_allclose(again, step_of(updates, gradient), atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_gradient_orthogonal_to_all_updates_moves_nothing(dtype):
    updates = np.eye(4, 1000, dtype=dtype) + np.eye(4, 1000, 1, dtype=dtype)
    gradient = np.zeros(1000, dtype)
    gradient[500:] = 1e6
    assert np.linalg.norm(step_of(updates, gradient)) <= 1e-9 * np.linalg.norm(gradient)
