"""The second exchange: a proposed step, corrected by how the probes' gradients change over it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcontext as fc

SIZE = 12


def quadratic(seed, devices=6, spread=0.3, condition=20.0):
    """Devices with losses (w - c_k)ᵀ A (w - c_k) / 2: the curvature, and each device's minimum."""
    rng = np.random.default_rng(seed)
    curvature = np.geomspace(1, condition, SIZE)
    return curvature, 1 + spread * rng.standard_normal((devices, SIZE))


def play(seed, rounds, exchanges, noise=0.0, rule=None):
    """Return the losses of a run in which each device takes a short gradient step, and all probe."""
    curvature, minima = quadratic(seed)
    rng, rule, w, before, state, losses = (
        np.random.default_rng(seed + 1),
        rule or fc.contextual_memory(),
        np.zeros(SIZE),
        None,
        None,
        [],
    )
    for _ in range(rounds):
        gradients = [curvature * (w - c) for c in minima]
        updates = [-0.01 * g for g in gradients]
        differences = None if before is None else [curvature * (w - before)] * len(minima)
        result = fc.aggregate(w, updates, gradients=gradients, differences=differences, rule=rule, state=state)
        if exchanges == 2:
            changes = [curvature * (result.params - w) + noise * rng.standard_normal(SIZE) for _ in minima]
            result = fc.correct(result, changes)
        before, w, state = w, result.params, result.state
        losses.append(float(np.mean([curvature @ (w - c) ** 2 for c in minima])) / 2)
    return losses


@pytest.mark.parametrize("seed", range(5))
def test_a_corrected_run_reaches_a_lower_loss(seed):
    lowest = (
        float(np.mean([quadratic(seed)[0] @ (quadratic(seed)[1].mean(axis=0) - c) ** 2 for c in quadratic(seed)[1]]))
        / 2
    )
    one, two = (play(seed, 6, exchanges)[-1] - lowest for exchanges in (1, 2))
    assert two < 0.7 * one


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.floats(1e-6, 1e30), st.integers(1, 5))
def test_no_change_corrects_the_step_by_more_than_the_anchor_allows(seed, scale, rounds):
    rng, rule, w, state = np.random.default_rng(seed), fc.contextual_memory(), np.zeros(SIZE), None
    for number in range(rounds):
        updates, gradients = rng.standard_normal((2, 3, SIZE))
        sent = {"gradients": gradients, "differences": None if state is None else rng.standard_normal((3, SIZE))}
        for defences in (None, fc.Defences()):
            result = fc.aggregate(w, updates, **sent, rule=rule, state=state, defences=defences)
            changes = [scale * rng.standard_normal(SIZE) for _ in result.probes]
            corrected = fc.correct(result, changes)
            proposed = np.linalg.norm(result.step)
            allowed = max(result.info["anchor"], 0.3) if number else 0.3
            longest = min(1, allowed) * proposed
            assert np.linalg.norm(corrected.step - result.step) <= longest * (1 + 1e-9)
            assert np.isfinite(corrected.params).all()
        w, state = corrected.params, corrected.state


@pytest.mark.parametrize("factor", [np.nan, np.inf, 1e30, 3e38, -1.0])
def test_one_byzantine_probe_of_six_is_named_and_changes_little(factor):
    curvature, minima = quadratic(0)
    w, rule = np.zeros(SIZE), fc.contextual_memory()
    gradients = {k: curvature * (w - c) for k, c in enumerate(minima)}
    result = fc.aggregate(w, {k: -0.01 * g for k, g in gradients.items()}, gradients=gradients, rule=rule)
    honest = dict.fromkeys(range(6), curvature * (result.params - w))
    changes = {**honest, 3: factor * honest[3]}
    corrected = fc.correct(result, changes)
    assert list(corrected.clipped) == [3]
    assert "gradient change" in corrected.clipped[3]
    assert corrected.excluded == {}
    assert np.linalg.norm(corrected.step - result.step) <= np.linalg.norm(result.step)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1.0, 1e3, 1e30]), st.integers(1, 4))
def test_a_false_reply_in_the_second_exchange_is_not_remembered(seed, scale, rounds):
    """Whatever a probe reports there, the next round knows the same of the gradient and the curvature."""
    rng, rule, w, state = np.random.default_rng(seed), fc.contextual_memory(), np.zeros(SIZE), None
    for _ in range(rounds):
        updates, gradients = rng.standard_normal((2, 3, SIZE))
        sent = {"gradients": gradients, "differences": None if state is None else rng.standard_normal((3, SIZE))}
        result = fc.aggregate(w, updates, **sent, rule=rule, state=state, defences=None)
        w, state = result.params, result.state
    honest, wrong = result.step, scale * rng.standard_normal(SIZE)
    after = [fc.correct(result, [*[honest] * (len(result.probes) - 1), last]).state for last in (honest, wrong)]
    moved = {"step", "deviation"}
    assert all(np.array_equal(after[0][name], after[1][name]) for name in state.keys() - moved)


def test_changes_are_not_clipped_where_the_step_went_too_far_and_most_say_so():
    rule, w, gradient = fc.contextual_memory(), np.zeros(SIZE), -np.ones(SIZE)
    result = fc.aggregate(w, [np.ones(SIZE)] * 4, gradients=[gradient] * 4, rule=rule)
    changes = [7 * result.step] * 4  # the gradient at the end of the step is 6 times as long, and points back
    corrected = fc.correct(result, changes)
    assert corrected.clipped == {}
    bare = fc.aggregate(w, [np.ones(SIZE)] * 4, gradients=[gradient] * 4, rule=rule, defences=None)
    np.testing.assert_array_equal(corrected.step, fc.correct(bare, changes).step)
    assert np.linalg.norm(corrected.step) < np.linalg.norm(result.step)
    scaled = fc.correct(result, [*changes[:3], 1e6 * changes[0]])
    assert list(scaled.clipped) == ["probe 3"]


def test_where_no_change_is_usable_the_proposed_step_stands():
    rule, w = fc.contextual_memory(), np.zeros(2)
    result = fc.aggregate(w, [np.array([1.0, 0.0])], gradients=[np.array([-1.0, -3.0])], rule=rule)
    assert fc.correct(result, []) is fc.correct(result, {}) is result
    corrected = fc.correct(result, [np.full(2, np.nan)])
    np.testing.assert_array_equal(corrected.params, result.params)
    assert "NaN" in corrected.clipped["probe 0"]
    bare = fc.aggregate(w, [np.array([1.0, 0.0])], gradients=[np.array([-1.0, -3.0])], rule=rule, defences=None)
    with pytest.raises(fc.FedcontextError, match=r"change of probe 0: .*NaN or infinite"):
        fc.correct(bare, [np.full(2, np.nan)])


def test_a_step_along_which_the_loss_is_not_convex_is_not_corrected():
    rule, w = fc.contextual_memory(), np.zeros(2)
    result = fc.aggregate(w, [np.array([1.0, 0.0])], gradients=[np.array([-1.0, -3.0])], rule=rule)
    corrected = fc.correct(result, [np.array([-1.0, 0.5])])
    np.testing.assert_array_equal(corrected.params, result.params)


def test_buffers_and_integers_are_those_of_the_aggregation():
    params = {"w": np.zeros(2, np.float32), "mean": np.ones(1, np.float32), "count": np.array([3])}
    update = {"w": np.array([1.0, 0.5], np.float32), "mean": np.ones(1, np.float32), "count": np.array([2])}
    rule = fc.contextual_memory()
    result = fc.aggregate(params, [update], gradients=[{"w": -update["w"]}], rule=rule, buffers=["mean"])
    corrected = fc.correct(result, [{"w": 0.5 * update["w"]}])
    assert corrected.params["mean"] == 2
    assert corrected.params["count"] == 5
    assert corrected.params["w"].dtype == np.float32
    np.testing.assert_allclose(corrected.params["w"], corrected.step["w"])
    assert corrected.motion.step_norm == pytest.approx(np.linalg.norm(corrected.step["w"]), rel=1e-6)


def test_what_cannot_be_corrected_is_refused():
    w, update = np.zeros(2), [np.ones(2)]
    mean = fc.aggregate(w, update, rule=fc.mean())
    rule = fc.contextual_memory(fc.MemorySettings(correction=0))
    result = fc.aggregate(w, update, gradients=[-np.ones(2)], rule=rule)
    with pytest.raises(fc.FedcontextError, match="does not correct"):
        fc.correct(result, update)
    robust = fc.aggregate(
        w, update, gradients=[-np.ones(2)], rule=fc.robust_gradients(fc.contextual_memory(), "median")
    )
    rule = fc.contextual_memory()
    result = fc.aggregate(w, update, gradients=[-np.ones(2)], rule=rule)
    corrected = fc.correct(result, update)
    written = fc.aggregate(w.copy(), update, gradients=[-np.ones(2)], rule=rule, out=np.zeros(2))
    for other in (corrected, mean, robust, written):
        with pytest.raises(
            fc.FedcontextError, match=r"does not correct steps .*, aggregate was given out, or it was corrected before"
        ):
            fc.correct(other, update)
    with pytest.raises(fc.FedcontextError, match=r"one for each of the 1 probes .*, got 2; .*: \['probe 0'\]"):
        fc.correct(result, [*update, *update])
    with pytest.raises(fc.FedcontextError, match="change of 'probe 0' is None: leave out"):
        fc.correct(result, [None])
    with pytest.raises(fc.FedcontextError, match="result must be what aggregate returned, got"):
        fc.correct(result.params, update)
    with pytest.raises(fc.FedcontextError, match=r"probes in result\.probes, \['probe 0'\], got \['stranger'\]"):
        fc.correct(result, {"stranger": update[0]})
    with pytest.raises(fc.FedcontextError, match="overflow float64"):
        fc.correct(fc.aggregate(w, update, gradients=[-np.ones(2)], rule=rule, defences=None), [np.full(2, 1e200)])
    with pytest.raises(fc.FedcontextError, match=r"change of probe 0: .* must have shape \(2,\), got \(3,\)"):
        fc.correct(result, [np.ones(3)])


@pytest.mark.parametrize("others", [lambda w, after: after, lambda w, after: w + 1, lambda w, after: 2 * after])
def test_params_that_were_changed_in_place_are_not_corrected(others):
    live, update = np.zeros(2), [np.ones(2)]
    proposed = fc.aggregate(live, update, gradients=[-np.ones(2)], rule=fc.contextual_memory())
    live[:] = others(live, proposed.params)
    with pytest.raises(fc.FedcontextError, match="changed in place since"):
        fc.correct(proposed, update)
    live[:] = 0
    proposed.params[:] = 7
    with pytest.raises(fc.FedcontextError, match="changed in place since"):
        fc.correct(proposed, update)


def test_a_simulation_counts_the_second_exchange_and_can_leave_it_out():
    one, two = (fc.train(dataset="synthetic-iid", rounds=2, exchanges=count).records for count in (1, 2))
    size, probes = 610, 18  # nine tenths of 20
    assert two[0].bytes_down - one[0].bytes_down == probes * 2 * 4 * size  # the params and the proposed ones
    assert probes * size / 8 <= two[0].bytes_up - one[0].bytes_up <= 1.6 * probes * size / 8  # one bit an entry
    assert two[0].seconds > one[0].seconds
    assert two[0].loss != one[0].loss
    fedavg = [
        fc.train(dataset="synthetic-iid", algorithm="fedavg", rounds=1, exchanges=count).records[0].loss
        for count in (1, 2)
    ]
    assert fedavg[0] == fedavg[1]


def test_a_probe_that_is_late_in_the_second_exchange_is_named():
    settings = {"dataset": "synthetic-1-1", "rounds": 1, "fleet": "edge"}
    waiting, late = (fc.train(**settings, deadline=deadline).records[0] for deadline in (0, 0.5))
    assert not any("missed" in note for note in waiting.clipped.values())
    named = {device for device, note in late.clipped.items() if "gradient change: missed the deadline" in note}
    assert named
    assert not named & late.excluded.keys()  # their gradients were used


def test_what_a_rule_reports_does_not_decide_whether_it_is_corrected():
    own = fc.SumRule(
        "mine",
        lambda sums, state, population: (sums.mean_update, None, {"correction": 1.0}),
        frozenset({"gradient"}),
        correct=lambda change, error, state: (-change, None, {}),
    )
    w = np.zeros(2)
    result = fc.aggregate(w, [np.ones(2)], gradients=[np.ones(2)], rule=own)
    corrected = fc.correct(result, {"probe 0": np.full(2, 0.5)})
    np.testing.assert_array_equal(corrected.params, [-0.5, -0.5])
    with pytest.raises(fc.FedcontextError, match="corrected before"):
        fc.correct(corrected, {"probe 0": np.ones(2)})
