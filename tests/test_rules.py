"""The mathematics: what must hold of the rules, whatever the numbers."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import fedcontext as fc
from fedcontext.errors import FedcontextError
from fedcontext.measurement.geometry import Geometry
from fedcontext.paper.null_space import null_space_weights
from fedcontext.rules.base import Rule
from fedcontext.rules.contextual import expected_gram

ODDITIES = ("duplicated", "zero", "parallel", "opposite", "huge", "tiny", "none")


@st.composite
def problems(draw, most=12, largest=300):
    """A gradient and updates, some of them duplicated, zero, parallel or wildly scaled."""
    count, size = draw(st.integers(1, most)), draw(st.integers(1, largest))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    updates = random.standard_normal((count, size))
    for row in range(1, count):
        oddity = draw(st.sampled_from(ODDITIES))
        updates[row] = {
            "duplicated": updates[row - 1],
            "zero": np.zeros(size),
            "parallel": 3.7 * updates[0],
            "opposite": -0.2 * updates[row - 1],
            "huge": 1e9 * updates[row],
            "tiny": 1e-9 * updates[row],
            "none": updates[row],
        }[oddity]
    return updates, random.standard_normal(size), draw(st.floats(1e-3, 1e3))


def step(updates, gradient, rule, **options):
    return fc.aggregate(np.zeros(len(gradient)), list(updates), gradient=gradient, rule=rule, **options).params


def close(left, right, tolerance=1e-6):
    return np.linalg.norm(left - right) <= tolerance * max(np.linalg.norm(left), np.linalg.norm(right), 1e-300)


def test_one_need_can_be_given_as_a_word():
    assert fc.stateless("own", lambda geometry: geometry.samples, needs="gradient").needs == {"gradient"}


def resolved(updates):
    """Whether every direction of the updates is either redundant or above the 1e-8 from which `solve` is exact."""
    lengths = np.linalg.norm(updates, axis=1)
    unit = updates[lengths > 0] / lengths[lengths > 0, None]
    values = np.linalg.eigvalsh(unit @ unit.T) if len(unit) else np.ones(1)
    return not ((values > 1e-13 * values[-1]) & (values < 1e-8 * values[-1])).any()


@given(problems())
def test_null_space_and_gram_take_the_same_step(problem):
    updates, gradient, beta = problem
    assume(resolved(updates))
    by_gram = step(updates, gradient, fc.contextual(beta))
    assert close(by_gram, null_space_weights(updates, gradient, beta) @ updates)


@given(problems())
def test_the_step_is_the_projected_gradient(problem):
    updates, gradient, beta = problem
    norms = np.linalg.norm(updates, axis=1)
    _, singular, rows = np.linalg.svd(updates[norms > 0] / norms[norms > 0, None], full_matrices=False)
    basis = rows[singular > 1e-7]
    assert close(step(updates, gradient, fc.contextual(beta)), -(basis.T @ (basis @ gradient)) / beta)


@given(problems(), st.data())
def test_scaling_or_flipping_updates_leaves_the_step(problem, data):
    updates, gradient, beta = problem
    size = st.floats(1e-6, 1e6)
    factors = [data.draw(size) * data.draw(st.sampled_from((-1, 1))) for _ in updates]
    scaled = np.array(factors)[:, None] * updates
    assert close(step(scaled, gradient, fc.contextual(beta)), step(updates, gradient, fc.contextual(beta)))


@given(problems(), st.randoms(use_true_random=False))
def test_permuting_devices_permutes_the_weights(problem, random):
    updates, gradient, beta = problem
    order = list(range(len(updates)))
    random.shuffle(order)
    straight = fc.aggregate(np.zeros(len(gradient)), list(updates), gradient=gradient, rule=fc.contextual(beta))
    shuffled = fc.aggregate(np.zeros(len(gradient)), list(updates[order]), gradient=gradient, rule=fc.contextual(beta))
    contributions = straight.weights * np.linalg.norm(updates, axis=1)
    assert close(contributions[order], shuffled.weights * np.linalg.norm(updates[order], axis=1))


@given(problems(), st.data())
def test_duplicating_a_device_leaves_the_step(problem, data):
    updates, gradient, beta = problem
    twin = updates[data.draw(st.integers(0, len(updates) - 1))]
    doubled = np.vstack([updates, twin])
    assert close(step(doubled, gradient, fc.contextual(beta)), step(updates, gradient, fc.contextual(beta)))


@given(problems(most=8, largest=60), st.data())
def test_no_other_rule_promises_more(problem, data):
    updates, gradient, beta = problem
    own = list(np.random.default_rng(1).standard_normal(updates.shape))
    given_ = {"gradient": gradient, "own_gradients": own, "samples": np.arange(1, len(updates) + 1)}
    rules = [fc.mean(), fc.by_samples(), fc.folb(), fc.expected_contextual(beta)]
    best = fc.aggregate(np.zeros(len(gradient)), list(updates), rule=fc.contextual(beta), **given_)
    for rule in rules:
        other = fc.aggregate(np.zeros(len(gradient)), list(updates), rule=rule, smoothness=beta, **given_)
        assert best.promised_change <= other.promised_change + 1e-9 * max(1, abs(other.promised_change))
    nudged = best.weights + data.draw(st.floats(-1, 1)) / (1 + np.linalg.norm(updates, axis=1))
    assert best.promised_change <= fc.bound(best.geometry, nudged, beta) + 1e-9


@given(problems())
def test_the_promise_is_theorem_1(problem):
    updates, gradient, beta = problem
    result = fc.aggregate(np.zeros(len(gradient)), list(updates), gradient=gradient, rule=fc.contextual(beta))
    assert result.promised_change == pytest.approx(-beta / 2 * (result.params @ result.params), rel=1e-6)


@given(problems(), st.floats(0.1, 100))
def test_on_an_isotropic_quadratic_the_change_is_the_promise(problem, curvature):
    updates, target, _ = problem
    start = np.ones(len(target))

    def loss(w):
        return curvature / 2 * float((w - target) @ (w - target))

    gradient = curvature * (start - target)
    result = fc.aggregate(start, list(updates), gradient=gradient, rule=fc.contextual(curvature))
    assert loss(result.params) - loss(start) == pytest.approx(result.promised_change, rel=1e-6, abs=1e-9 * loss(start))


@given(st.integers(0, 10_000))
def test_on_any_quadratic_of_known_smoothness_every_round_keeps_its_promise(seed):
    random = np.random.default_rng(seed)
    root = random.standard_normal((20, 20))
    hessian = root @ root.T / 20
    beta = float(np.linalg.eigvalsh(hessian)[-1])
    target, w = random.standard_normal(20), random.standard_normal(20)

    def loss(w):
        return float((w - target) @ hessian @ (w - target)) / 2

    for _ in range(10):
        gradient = hessian @ (w - target)
        updates = [-0.3 * gradient + 0.5 * random.standard_normal(20) for _ in range(4)]
        result = fc.aggregate(w, updates, gradient=gradient, rule=fc.contextual(beta))
        assert result.promised_change <= 0
        assert loss(result.params) - loss(w) <= result.promised_change + 1e-9
        w = result.params


@given(problems(most=6, largest=40))
def test_expected_without_a_pool_is_contextual(problem):
    updates, gradient, beta = problem
    assert close(step(updates, gradient, fc.expected_contextual(beta)), step(updates, gradient, fc.contextual(beta)))


@given(problems(most=6, largest=40), st.integers(1, 6))
def test_expected_gram_is_the_expectation_over_subsets(problem, selected):
    updates, _, _ = problem
    assume(selected <= len(updates))
    gram = updates @ updates.T
    weights = np.random.default_rng(0).standard_normal(len(updates)) / (1e-12 + np.linalg.norm(updates, axis=1))
    values = [
        weights[list(rows)] @ gram[np.ix_(rows, rows)] @ weights[list(rows)]
        for rows in combinations(range(len(updates)), selected)
    ]
    exact = expected_gram(Geometry(gram=gram, samples=np.ones(selected)))
    share = selected / len(updates)
    assert share * weights @ exact @ weights == pytest.approx(np.mean(values), rel=1e-6, abs=1e-6)


def test_expected_weights_have_the_lowest_expected_bound():
    random = np.random.default_rng(5)
    updates, gradient = random.standard_normal((8, 30)), random.standard_normal(30)
    gram, slope = updates @ updates.T, updates @ gradient
    matrix = expected_gram(Geometry(gram=gram, samples=np.ones(3)))
    result = fc.aggregate(
        np.zeros(30), list(updates[:3]), pool=list(updates[3:]), gradient=gradient, rule=fc.expected_contextual(2.0)
    )
    best = -np.linalg.solve(2.0 * matrix, slope)
    np.testing.assert_allclose(result.weights, best[:3])
    for _ in range(50):
        other = best + 0.1 * random.standard_normal(8)
        assert slope @ best + best @ matrix @ best < slope @ other + other @ matrix @ other


def test_the_printed_expected_rule_is_contextual_scaled_by_one_over_rho():
    random = np.random.default_rng(5)
    updates, gradient = random.standard_normal((8, 30)), random.standard_normal(30)
    options = {"gradient": gradient, "pool": list(updates[3:])}
    printed = fc.aggregate(np.zeros(30), list(updates[:3]), rule=fc.expected_contextual(2.0, "printed"), **options)
    everyone = fc.aggregate(np.zeros(30), list(updates), gradient=gradient, rule=fc.contextual(2.0))
    np.testing.assert_allclose(printed.weights, everyone.weights[:3] / (2 / 7))


def test_folb_reverses_a_device_that_points_the_wrong_way():
    own = [np.array([1.0, 0.0]), np.array([1.0, 0.1]), np.array([-0.5, 0.0])]
    result = fc.aggregate(np.zeros(2), [-g for g in own], own_gradients=own, rule=fc.folb())
    assert result.weights[2] < 0
    assert np.abs(result.weights).sum() == pytest.approx(1)


def test_all_zero_updates_get_weights_that_move_nothing():
    result = fc.aggregate(np.ones(3), [np.zeros(3)] * 2, gradient=np.ones(3), rule=fc.contextual(1.0))
    np.testing.assert_array_equal(result.params, np.ones(3))
    assert result.promised_change == 0


@pytest.mark.parametrize("beta", [0, -1, float("nan"), float("inf"), "x", None])
@pytest.mark.parametrize("rule", [fc.contextual, fc.expected_contextual])
def test_smoothness_must_be_a_positive_number(rule, beta):
    with pytest.raises(FedcontextError, match="smoothness must be"):
        rule(beta)


def test_an_unknown_word_for_the_smoothness_is_answered_with_the_known_one():
    with pytest.raises(FedcontextError, match="smoothness must be a positive number or implied, got 'foo'"):
        fc.contextual("foo")


@pytest.mark.parametrize("kind", [Rule, fc.SumRule, fc.CoordinateRule])
def test_unknown_needs_are_named(kind):
    with pytest.raises(FedcontextError, match=r"needs must be among 'gradient', .*, got \['gradients'\]"):
        kind("mine", lambda *given: given, needs=frozenset({"gradients"}))


def test_the_state_of_a_rule_can_be_made_from_the_params():
    rule = Rule("counting", lambda geometry, state: (geometry.samples, state + 1), init=lambda params: params.size)
    result = fc.aggregate(np.zeros(7), [np.ones(7)], rule=rule)
    assert result.state == 8
    assert fc.aggregate(np.zeros(7), [np.ones(7)], rule=rule, state=result.state).state == 9


@given(problems())
def test_the_step_is_what_params_moved_by(problem):
    updates, gradient, beta = problem
    start = np.ones(len(gradient))
    result = fc.aggregate(start, list(updates), gradient=gradient, rule=fc.contextual(beta))
    np.testing.assert_allclose(start + result.step, result.params, rtol=1e-9, atol=1e-9 * np.abs(result.step).max())


def test_unknown_form_is_named():
    with pytest.raises(FedcontextError, match="'exact' or 'printed', got 'rough'"):
        fc.expected_contextual(1.0, form="rough")
    with pytest.raises(FedcontextError, match="use form='exact'"):
        step(np.eye(2)[:1], np.ones(2), fc.expected_contextual(1.0, "printed"), pool=[np.ones(2)])


@given(problems(), st.integers(0, 99))
@example((0.1257302210933933 * np.array([[1.0]] + [[-0.2]] * 5), np.ones(1), 1.0), 2)  # the mean is 3e-18
def test_at_the_implied_smoothness_averaging_is_the_minimiser_along_its_own_step(problem, seed):
    updates, _, _ = problem
    own = list(np.random.default_rng(seed).standard_normal(updates.shape))
    d, g = updates.mean(axis=0), np.mean(own, axis=0)
    given_ = {"own_gradients": own, "rule": fc.contextual("implied"), "defences": None}
    moved = fc.aggregate(np.zeros(len(d)), list(updates), **given_).params
    usual = np.linalg.norm(updates, axis=1).mean()
    assume(not 1e-7 * usual < np.linalg.norm(d) < 1e-4 * usual)  # where rounding decides
    if np.linalg.norm(d) <= 1e-7 * usual:  # the updates cancel
        assert np.linalg.norm(moved) <= 1e-6 * usual
    elif g @ d >= 0:
        assert close(moved, d)
    else:
        beta = -(g @ d) / (d @ d)
        assert close(moved, step(updates, g, fc.contextual(beta)))


def test_fednova_is_the_mean_of_normalised_updates_times_the_mean_number_of_steps():
    """Eq. 7 of Wang et al.: Σ pₖ τₖ · Σ pₖ Δₖ/τₖ."""
    updates = np.random.default_rng(0).standard_normal((3, 6))
    samples, steps = np.array([10.0, 30.0, 60.0]), np.array([2.0, 5.0, 40.0])
    for averaging, p in (("samples", samples / 100), ("mean", np.full(3, 1 / 3))):
        moved = fc.aggregate(np.zeros(6), list(updates), samples=samples, steps=steps, rule=fc.fednova(averaging))
        expected = (p * steps).sum() * sum(p[k] * updates[k] / steps[k] for k in range(3))
        np.testing.assert_allclose(moved.params, expected)
    with pytest.raises(FedcontextError, match="needs the number of local SGD steps of each device: give steps"):
        fc.aggregate(np.zeros(6), list(updates), samples=samples, rule=fc.fednova())
    with pytest.raises(FedcontextError, match=r"steps must be positive, got \[1.0, 0.0, 2.0\]"):
        fc.aggregate(np.zeros(6), list(updates), samples=samples, steps=[1, 0, 2], rule=fc.fednova(), defences=None)


def test_with_equal_steps_fednova_is_averaging():
    updates = list(np.random.default_rng(0).standard_normal((3, 6)))
    given_ = {"samples": [1, 2, 3], "steps": [7, 7, 7]}
    moved, averaged = (fc.aggregate(np.zeros(6), updates, rule=r, **given_) for r in (fc.fednova(), fc.by_samples()))
    np.testing.assert_allclose(moved.params, averaged.params)


@given(problems(), st.floats(1e-6, 1))
def test_fedexp_is_the_printed_formula(problem, epsilon):
    """Eq. 4 of Jhunjhunwala et al.: η = max(1, Σ‖Δₖ‖² / (2 M (‖mean Δ‖² + ε)))."""
    updates, _, _ = problem
    d = updates.mean(axis=0)
    rate = max(1, (updates**2).sum() / (2 * len(updates) * (d @ d + epsilon)))
    moved = fc.aggregate(np.zeros(len(d)), list(updates), rule=fc.fedexp(epsilon), defences=None).params
    np.testing.assert_allclose(moved, rate * d, rtol=1e-6, atol=1e-9 * np.abs(updates).max())


@given(problems(most=8, largest=40), st.sampled_from([0, 0.05, 0.2, 1]), st.integers(0, 99))
def test_no_feasible_combination_of_normalised_updates_is_shorter_than_fedmgdas(problem, epsilon, seed):
    updates, _, _ = problem
    lengths = np.linalg.norm(updates, axis=1)
    assume((lengths > 1e-9).all())
    count, unit = len(updates), updates / lengths[:, None]
    result = fc.aggregate(np.zeros(updates.shape[1]), list(updates), rule=fc.fedmgda(epsilon))
    shares = result.weights * lengths
    assert shares.sum() == pytest.approx(1)
    assert (shares >= -1e-9).all()
    assert np.abs(shares - 1 / count).max() <= epsilon + 1e-9
    random = np.random.default_rng(seed)
    for other in random.dirichlet(np.full(count, 0.5), 200):
        reach = np.abs(other - 1 / count).max()
        other = 1 / count + (other - 1 / count) * min(1, epsilon / max(reach, 1e-12))
        assert np.linalg.norm(result.params) <= np.linalg.norm(other @ unit) + 1e-6


def test_fedmgda_goes_uphill_for_no_device():
    """The min-norm point d has <d, Δₖ> >= ‖d‖² ‖Δₖ‖ for every device: to first order no device's loss rises."""
    for seed in range(20):
        updates = np.random.default_rng(seed).standard_normal((10, 30)) + 0.3
        d = fc.aggregate(np.zeros(30), list(updates), rule=fc.fedmgda()).params
        assert (updates @ d / np.linalg.norm(updates, axis=1) >= d @ d - 1e-6).all()


def test_fedmgda_leaves_out_devices_that_did_not_move():
    updates = [np.zeros(2), np.array([2.0, 0.0]), np.array([0.0, 0.5])]
    np.testing.assert_allclose(fc.aggregate(np.zeros(2), updates, rule=fc.fedmgda()).weights, [0, 0.25, 1])
    assert not fc.aggregate(np.zeros(2), [np.zeros(2)] * 2, rule=fc.fedmgda()).weights.any()
    with pytest.raises(FedcontextError, match="epsilon must be from 0 to 1, got 2"):
        fc.fedmgda(2)
