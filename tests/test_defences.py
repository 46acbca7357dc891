"""How far one device can move the model: properties of the defences, for every rule."""

from __future__ import annotations

from dataclasses import asdict, fields

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import fedcontext as fc
from fedcontext.errors import FedcontextError
from fedcontext.measurement.defences import OFF, NoneUsable, lower_median

SIZE = 6
RULES = {
    "mean": fc.mean(),
    "by samples": fc.by_samples(),
    "folb": fc.folb(),
    "fednova": fc.fednova(),
    "fedexp": fc.fedexp(),
    "contextual": fc.contextual(2.0),
    "implied": fc.contextual("implied"),
    "memory": fc.contextual_memory(),
    "median": fc.coordinate_median(),
}
VALUES = st.sampled_from([0.0, 1e-30, -1e-3, 1.0, -50.0, 1e6, -1e30, 3e38, np.nan, np.inf, -np.inf])
COUNTS = st.sampled_from([0, 1e-9, 1, 30, 2.0**53, 1e308, -1, np.nan, np.inf])


def crowd(seed, count):
    random = np.random.default_rng(seed)
    updates, noise = random.standard_normal((2, count, SIZE)).astype(np.float32)
    return (
        list(updates),
        list(noise / 4 - updates),
        list(random.integers(5, 50, count)),
        list(random.integers(1, 9, count)),
    )


def norm(vector):
    return float(np.linalg.norm(np.asarray(vector, np.float64)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(
    rule=st.sampled_from(list(RULES)),
    seed=st.integers(0, 10**6),
    count=st.integers(3, 12),
    sent=st.tuples(VALUES, VALUES, COUNTS, COUNTS),
)
def test_no_reply_of_one_device_moves_the_model_further_than_a_multiple_of_the_others(rule, seed, count, sent):
    updates, gradients, samples, steps = crowd(seed, count)
    bad = seed % count
    updates[bad], gradients[bad] = np.full(SIZE, sent[0], np.float32), np.full(SIZE, sent[1], np.float32)
    samples[bad], steps[bad] = sent[2], sent[3]
    result = fc.aggregate(
        np.zeros(SIZE, np.float32), updates, own_gradients=gradients, samples=samples, steps=steps, rule=RULES[rule]
    )
    honest = [k for k in range(count) if k != bad]
    longest = max(norm(updates[k]) for k in honest)
    steepest = max(norm(gradients[k]) for k in honest)
    assert norm(result.params) <= max(10 * longest, 3 * steepest / 2.0) * (1 + 1e-5)
    assert set(result.excluded) <= {bad}
    assert all(result.weights[k] == 0 for k in result.excluded)


@given(st.integers(0, 10**6), st.integers(3, 12), st.sampled_from(list(RULES)))
def test_a_device_that_sends_nan_is_as_good_as_absent(seed, count, rule):
    updates, gradients, samples, steps = crowd(seed, count)
    bad = seed % count
    without = [[x for k, x in enumerate(given) if k != bad] for given in (updates, gradients, samples, steps)]
    updates[bad] = np.full(SIZE, np.nan, np.float32)

    def moved(updates, gradients, samples, steps):
        given = {"own_gradients": gradients, "samples": samples, "steps": steps}
        return fc.aggregate(np.zeros(SIZE, np.float32), updates, rule=RULES[rule], **given)

    found, expected = moved(updates, gradients, samples, steps), moved(*without)
    np.testing.assert_allclose(found.params, expected.params, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.delete(found.weights, bad), expected.weights, rtol=1e-5, atol=1e-6)
    assert list(found.excluded) == [bad]
    assert "has NaN or infinite entries" in found.excluded[bad]


@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from(list(RULES)))
@example(seed=0, count=6, rule="implied")
def test_devices_within_the_limits_are_used_as_they_are(seed, count, rule):
    updates, gradients, samples, steps = crowd(seed, count)
    given = {"own_gradients": gradients, "samples": samples, "steps": steps, "rule": RULES[rule]}
    wide = fc.Defences(100, 100, 100, max_step=0, outlier=1000)  # a singular Gram matrix gives steps of any length
    on, off = (fc.aggregate(np.zeros(SIZE, np.float32), updates, defences=d, **given) for d in (wide, None))
    np.testing.assert_array_equal(on.params, off.params)
    assert on.excluded == on.clipped == {}


def test_each_limit_names_the_device_and_what_was_clipped():
    updates = {name: np.full(4, 1.0) for name in "abcd"} | {"long": np.full(4, 20.0)}
    result = fc.aggregate(np.zeros(4), updates, rule=fc.by_samples(), samples=[1, 1, 1, 9, 1])
    assert result.clipped == {
        "long": "update: 20 times the median norm, clipped to 5",
        "d": "samples: 9 times the median, capped to 3",
    }
    np.testing.assert_allclose(result.params, (3 * 1 + 3 * 1 + 5) / 7)
    np.testing.assert_allclose(list(result.applied.values()), result.weights)


def test_a_gradient_out_of_proportion_costs_the_device_its_update_too():
    updates = {k: np.eye(5)[k] for k in range(5)}
    gradients = {k: -np.eye(5)[k] for k in range(5)} | {2: np.full(5, 1e12)}
    result = fc.aggregate(np.zeros(5), updates, gradients=gradients, rule=fc.contextual(1.0))
    assert list(result.excluded) == [2]
    assert result.params[2] == 0


def test_of_two_devices_neither_is_left_out_for_its_length():
    """A Byzantine device with a tiny reply must not cost the only other device its round."""
    updates = {"honest": np.array([1.0, 0.0]), "bad": np.array([0.0, 1e-30])}
    assert fc.aggregate(np.zeros(2), updates, rule=fc.mean()).excluded == {}
    three = {"a": np.array([1.0, 0.0]), "b": np.array([1.0, 1.0]), "bad": np.array([0.0, 1e30])}
    assert list(fc.aggregate(np.zeros(2), three, rule=fc.mean()).excluded) == ["bad"]


def test_two_short_vectors_of_four_do_not_make_the_others_outliers():
    lengths = {"a": 1e-4, "b": 1e-4, "c": 1.0, "d": 2.0}
    updates = {name: length * np.eye(4)[row] for row, (name, length) in enumerate(lengths.items())}
    result = fc.aggregate(np.zeros(4), updates, rule=fc.mean())
    assert (result.excluded, set(result.clipped)) == ({}, {"c", "d"})
    result = fc.aggregate(np.zeros(4), {**updates, "d": np.full(4, 1e30)}, rule=fc.mean())
    assert list(result.excluded) == ["d"]


def test_the_step_of_a_contextual_rule_does_not_feel_the_lengths_of_updates():
    random = np.random.default_rng(0)
    updates, gradient = random.standard_normal((10, 30)), random.standard_normal(30)
    attacked = updates * np.where(np.arange(10) < 3, -1e9, 1.0)[:, None]
    for rule in (fc.contextual(2.0), fc.fedmgda()):
        plain, other = (
            fc.aggregate(np.zeros(30), list(rows * (1 if rule.needs else abs(1))), gradient=gradient, rule=rule)
            for rows in (updates, attacked if rule.needs else abs(attacked / updates) * updates)
        )
        np.testing.assert_allclose(other.params, plain.params, rtol=1e-6, atol=1e-9)
        assert other.excluded == {}
        assert set(other.clipped) == {0, 1, 2}


@pytest.mark.parametrize("weight", [100.0, 1e160])  # the square of the second overflows
def test_a_step_is_cut_to_its_longest_length_however_large_the_weights(weight):
    rule = fc.stateless("long", lambda geometry: np.full(3, weight))
    result = fc.aggregate(np.zeros(2), [np.array([3.0, 4.0])] * 3, rule=rule)
    assert norm(result.params) == pytest.approx(10 * 5)


def test_buffers_and_leaves_outside_the_geometry_are_bounded_too():
    params = {"w": np.zeros(3), "mean": np.zeros(2), "count": np.zeros(1, np.int64)}
    updates = [{"w": np.ones(3), "mean": np.ones(2), "count": np.ones(1, np.int64)} for _ in range(9)]
    bad = {"w": np.ones(3), "mean": np.full(2, 500.0), "count": np.full(1, 400)}
    result = fc.aggregate(params, [*updates, bad], rule=fc.mean(), buffers=["mean"])
    assert (np.abs(result.params["mean"]) <= 2).all()
    assert int(result.params["count"][0]) <= 2
    layered = fc.aggregate(params, [*updates, {**bad, "w": np.full(3, 1e-9)}], rule=fc.mean(), layers=["w"])
    assert norm(layered.params["mean"]) <= 2 * norm(updates[0]["mean"])


@pytest.mark.parametrize("flatness", [1, 0.02])  # the one device's curvature in multiples of the others'
def test_a_reversed_gradient_is_not_used_by_the_rule_with_memory(flatness):
    random, sign = np.random.default_rng(0), np.where(np.arange(10) == 3, -flatness, 1)
    centres, scale = 1 + 0.3 * random.standard_normal((10, 40)), 10.0 ** random.uniform(-2, 0, 40)
    w, last, state = np.zeros(40), None, None
    for number in range(4):
        updates = {k: (1 - (1 - 0.3 * scale) ** 8) * (c - w) for k, c in enumerate(centres)}
        gradients = {k: scale * (w - c) * sign[k] for k, c in enumerate(centres)}
        differences = None if last is None else [scale * (w - last) * sign[k] for k in gradients]
        given = {"gradients": gradients, "differences": differences, "state": state}
        result = fc.aggregate(w, updates, rule=fc.contextual_memory(), **given)
        assert result.excluded == {}
        assert set(result.clipped) == {3}
        assert (result.weights[3] == 0) == (number == 0)  # in the first round the update may be the wrong one
        honest = np.mean([gradients[k] for k in gradients if k != 3], axis=0)
        assert np.allclose(result.state["gradient"], honest) is (number > 0)
        last, state, w = w, result.state, result.params


def one_round(reversed_updates=(), reversed_gradients=(), missing=(), devices=10, **given):
    """Return the first round of devices that train and probe on quadratic losses; those ``missing`` send NaN."""
    random = np.random.default_rng(0)
    centres, scale = 1 + 0.3 * random.standard_normal((devices, 40)), 10.0 ** random.uniform(-2, 0, 40)
    updates = {k: (1 - (1 - 0.3 * scale) ** 8) * c for k, c in enumerate(centres)}
    gradients = {k: -scale * c for k, c in enumerate(centres)}
    updates |= {k: -updates[k] for k in reversed_updates}
    gradients |= {k: -gradients[k] for k in reversed_gradients}
    updates |= {k: np.full(40, np.nan) for k in missing}
    return fc.aggregate(np.zeros(40), updates, gradients=gradients, rule=fc.contextual_memory(), **given)


@pytest.mark.parametrize("wrong", [{"reversed_updates": [2, 7]}, {"reversed_gradients": [2, 7]}])
def test_an_update_that_contradicts_the_gradient_of_its_device_is_not_used(wrong):
    result, honest = one_round(**wrong), one_round()
    assert set(result.clipped) == {2, 7}
    assert "update: not used, its cosine with the gradient of the same device is 0.9" in result.clipped[7]
    assert set(np.flatnonzero(result.weights == 0)) == {2, 7}
    assert result.excluded == honest.excluded == honest.clipped == {}
    assert norm(result.params - honest.params) < 0.15 * norm(honest.params)
    assert one_round(**wrong, defences=fc.Defences(max_uphill=0)).clipped == {}
    assert one_round(**wrong, defences=fc.Defences(outlier=0)).clipped == result.clipped


def test_half_of_the_updates_are_used_whatever_the_gradients_say():
    assert set(one_round(reversed_updates=range(4)).clipped) == {0, 1, 2, 3}
    assert one_round(reversed_updates=range(5)).clipped == {}
    assert one_round(reversed_updates=[0], devices=2).clipped == {}
    assert set(one_round(reversed_updates=range(4), missing=[9]).clipped) == {0, 1, 2, 3}  # of nine
    assert one_round(reversed_updates=range(4), missing=[8, 9]).clipped == {}


def test_who_reverses_update_and_gradient_is_not_found_by_comparing_them():
    assert one_round(reversed_updates=[2], reversed_gradients=[2]).clipped == {}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("update", "gradient"), [(0.0, 1e200), (1e200, 1e200), (0.0, 0.0), (1e-200, 1e-200)])
def test_lengths_that_are_no_numbers_contradict_nothing(update, gradient):
    updates, gradients = {k: np.ones(2) for k in range(5)}, {k: -np.ones(2) for k in range(5)}
    updates[0], gradients[0] = np.full(2, update), np.full(2, gradient)
    result = fc.aggregate(np.zeros(2), updates, gradients=gradients, rule=fc.contextual_memory())
    assert "cosine" not in result.clipped.get(0, "")


@pytest.mark.parametrize(("length", "excluded"), [(50.0, set()), (500.0, {"probe 9"})])
def test_a_difference_is_an_outlier_only_if_it_would_be_one_among_the_gradients(length, excluded):
    updates, gradients = [np.ones(4)] * 10, [-np.ones(4)] * 10
    first = fc.aggregate(np.zeros(4), updates, gradients=gradients, rule=fc.contextual_memory())
    differences = [np.full(4, 1e-3)] * 9 + [np.full(4, length)]  # most devices have converged
    given = {"gradients": gradients, "differences": differences, "state": first.state}
    result = fc.aggregate(first.params, updates, rule=fc.contextual_memory(), **given)
    assert set(result.excluded) == excluded
    assert set(result.clipped) == {"probe 9"} - excluded


def two_faced_run(byzantine, defences, rounds=25):
    """Return the distance to the honest devices' optimum, and who was named, where Byzantine devices pull elsewhere."""
    random = np.random.default_rng(1)
    centres, scale = 1 + 0.3 * random.standard_normal((20, 40)), 10.0 ** random.uniform(-2, 0, 40)
    target, honest = random.standard_normal(40) / np.sqrt(40), np.arange(byzantine, 20)
    w, last, state, named = np.zeros(40), None, None, set()
    for _ in range(rounds):
        updates, gradients = (1 - (1 - 0.3 * scale) ** 8) * (centres - w), scale * (w - centres)
        updates[:byzantine] = norm(updates[honest].mean(axis=0)) * target
        gradients[:byzantine] = -10 * norm(gradients[honest].mean(axis=0)) * target
        differences = None if last is None else [scale * (w - last)] * 20
        given = {"gradients": dict(enumerate(gradients)), "differences": differences, "state": state}
        result = fc.aggregate(w, dict(enumerate(updates)), rule=fc.contextual_memory(), defences=defences, **given)
        named |= {name for name, note in result.clipped.items() if "cosine with the last step" in note}
        last, state, w = w, result.state, result.params
    return norm(scale * (w - centres[honest].mean(axis=0))), named


def test_a_gradient_that_promises_far_more_than_the_others_along_the_last_step_is_not_used():
    assert two_faced_run(0, fc.Defences())[1] == set()
    pulled, unnamed = two_faced_run(2, fc.Defences(max_descent=0))
    bounded, named = two_faced_run(2, fc.Defences())
    assert (unnamed, named) == (set(), {0, 1})
    assert bounded < pulled / 2


def test_replies_that_are_not_finite_count_as_missing():
    updates = {"a": np.ones(2), "b": np.full(2, np.nan), "c": np.full(2, np.inf)}
    result = fc.aggregate(np.zeros(2), updates, rule=fc.mean())
    assert result.params.tolist() == [1, 1]
    assert set(result.excluded) == {"b", "c"}
    with pytest.raises(FedcontextError, match="device b: the array has NaN"):
        fc.aggregate(np.zeros(2), updates, rule=fc.mean(), defences=None)


def test_a_round_without_a_usable_reply_is_an_error_that_names_who_made_it_so():
    updates = {"b": np.full(2, np.nan), "c": np.full(2, np.inf)}
    with pytest.raises(NoneUsable, match="none of 2 updates is usable") as caught:
        fc.aggregate(np.zeros(2), updates, rule=fc.mean())
    assert set(caught.value.excluded) == {"b", "c"}
    assert "b: update: the array has NaN" in str(caught.value)


@given(st.lists(st.floats(1e-30, 1e30), min_size=3, max_size=20), st.floats(0, 1e300))
def test_one_value_cannot_move_the_lower_median_beyond_the_others(others, value):
    assert min(others) <= lower_median(np.array([*others, value])) <= max(others)


def test_the_preset_of_the_paper_has_no_defences():
    assert fc.presets.paper().defences == OFF
    assert fc.Experiment().defences == fc.Defences()


@pytest.mark.parametrize("name", [each.name for each in fields(fc.Defences)])
@pytest.mark.parametrize("value", [0.05, -1, float("nan"), float("inf"), True, "x"])
def test_limits_below_the_median_are_refused(name, value):
    with pytest.raises(FedcontextError, match=f"{name} must be"):
        fc.Defences(**{name: value})
    with pytest.raises(FedcontextError, match=f"{name} must be"):
        fc.Experiment(**{name: value})


@pytest.mark.parametrize("wrong", [{"max_update": 2}, False, 3])
def test_defences_of_another_type_are_refused(wrong):
    with pytest.raises(FedcontextError, match="defences must be"):
        fc.aggregate(np.zeros(2), [np.ones(2)], rule=fc.mean(), defences=wrong)


@pytest.mark.parametrize("chosen", [None, "none", fc.Defences(), fc.Defences(max_update=2, outlier=0)])
def test_all_limits_of_a_simulation_are_given_by_one_name(chosen, small_data):
    expected = chosen if isinstance(chosen, fc.Defences) else OFF
    settings = {"data": small_data, "rounds": 2, "devices_per_round": 4, "attack": "scaling=0.3"}
    by_name = fc.train(defences=chosen, **settings)
    assert by_name.records == fc.train(**asdict(expected), **settings).records
    assert fc.presets.paper(defences=chosen).defences == expected


def test_other_words_for_all_limits_are_refused(small_data):
    with pytest.raises(
        FedcontextError, match=r"defences must be none, or fc\.Defences\(\.\.\.\) .* got 'off'; .* max_step"
    ):
        fc.train(data=small_data, defences="off")
