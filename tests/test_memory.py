"""The rule with memory: the prototype's steps, what it may see, and what it promises."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcontext as fc
from fedcontext.compression.codec import Codec
from fedcontext.errors import FedcontextError
from fedcontext.measurement.sums import Sums
from fedcontext.rules.memory import memory_step
from fedcontext.rules.memory_state import MemorySettings
from fedcontext.rules.quadratic import minimise_in_box

PROTOTYPE = Path(__file__).parents[2] / "shared/research/unified.py"
PUBLISHED = MemorySettings(  # the prototype's directions and constants
    scaled_gradient=False,
    least_trust=0.1,
    anchor=0.3,
    near=0,
    growth=8,
    widening=np.inf,
    trust_growth=2,
    evidence_decay=0,
    stretch=2,
    power=1,
    largest=20,
    surge=np.inf,
    trial=np.inf,
    momentum=0.8,
    secant=0,
)


def summed(updates, gradients, differences, remaining=None):
    sums = Sums(updates.shape[1])
    for row, update in enumerate(updates):
        sums.add_update(update, 0.0 if remaining is None else remaining[row])
    for row, gradient in enumerate(gradients):
        sums.add_probe(gradient, None if differences is None else differences[row])
    return sums


class Quadratic:
    """Devices with different minimisers of quadratic losses, and their local training."""

    def __init__(self, seed, devices=40, size=60, indefinite=False):
        self.random = np.random.default_rng(seed)
        self.scale = 10.0 ** self.random.uniform(-2, 0, size)
        if indefinite:
            self.scale *= self.random.choice([-1, 1], size, p=[0.2, 0.8])
        self.centre = 1 + 0.5 * self.random.standard_normal((devices, size))

    def loss(self, w):
        return 0.5 * float(np.mean(self.scale * (w - self.centre) ** 2, axis=0).sum())

    def round(self, w, last, cohort=10, probes=20):
        order = self.random.permutation(len(self.centre))[:cohort]
        asked = order if probes == "cohort" else self.random.permutation(len(self.centre))[:probes]
        updates = (1 - (1 - 0.3 * np.abs(self.scale)) ** 8) * (self.centre[order] - w)
        gradients = self.scale * (w - self.centre[asked])
        return asked, updates, gradients, None if last is None else np.tile(self.scale * (w - last), (len(asked), 1))


def noisy(random, vectors, level):
    return vectors + level * random.standard_normal(vectors.shape) * np.abs(vectors).mean()


@pytest.mark.skipif(not PROTOTYPE.exists(), reason="the prototype of the study is not at hand")
@pytest.mark.parametrize("probes", ["cohort", 20, 3])
@pytest.mark.parametrize("indefinite", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_every_step_equals_the_prototypes(seed, probes, indefinite):
    spec = importlib.util.spec_from_file_location("unified", PROTOTYPE)
    unified = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unified)
    problem = Quadratic(seed, indefinite=indefinite)
    w, last, s, theirs, ours = np.zeros(60), None, None, None, None
    for _ in range(30):
        asked, updates, gradients, differences = problem.round(w, last, probes=probes)
        gradients = noisy(problem.random, gradients, 0.1)
        differences = None if differences is None else noisy(problem.random, differences, 0.3)
        sums = summed(updates, gradients, differences)
        mine, ours, _ = memory_step(sums, ours, PUBLISHED, population=40)
        if theirs is not None:
            theirs = {**theirs, "r": {}, "r_sum": np.zeros(60)}  # without offsets, as we ship it
            if "delta" in theirs and np.linalg.norm(theirs["delta"]) < 1e-12 * theirs["nd"]:
                theirs["delta"] = np.zeros(60)  # the prototype takes rounding errors for evidence
        s, theirs = unified.unified_step(theirs, asked.tolist(), updates, gradients, differences, s, 40, False)
        np.testing.assert_allclose(mine, s, rtol=1e-6, atol=1e-9 * np.linalg.norm(s))
        last, w = w, w + s


@pytest.mark.parametrize(
    ("probes", "lengths"), [("cohort", (3.30984, 1.523817, 0.127392)), (20, (3.30984, 1.245142, 0.19844))]
)
def test_the_steps_with_the_shipped_constants_stay_as_they_are(probes, lengths):
    """Lengths of steps 1, 4 and 7 on ``Quadratic(7)``, noted when the constants were chosen."""
    problem, w, last, memory, steps = Quadratic(7), np.zeros(60), None, None, []
    for _ in range(7):
        _, updates, gradients, differences = problem.round(w, last, probes=probes)
        sums = summed(updates, gradients, differences)
        step, memory, _ = memory_step(sums, memory, MemorySettings(), population=40)
        last, w = w, w + step
        steps.append(float(np.linalg.norm(step)))
    assert steps[::3] == pytest.approx(lengths, rel=1e-5)


def first_round(remaining, constants=MemorySettings()):  # noqa: B008
    """Return the first step of ten devices, as a multiple of their mean update, and the memory after it."""
    sums, random = Sums(3), np.random.default_rng(0)
    for share in remaining:
        sums.add_update(random.standard_normal(3), share)
    sums.add_probe(random.standard_normal(3))
    step, memory, _ = memory_step(sums, None, constants)
    return float(np.linalg.norm(step) / np.linalg.norm(sums.mean_update)), memory


@pytest.mark.parametrize(
    ("remaining", "multiple"),
    [
        ([0.5] * 10, 2),  # half of the slope is left: a parabola has its minimum twice as far away
        ([0.75] * 10, 4),
        ([0.999] * 10, 8),
        ([0.0, 0.8] * 5, 1 / 0.6),  # harmonic mean of 1 and 5
        ([0.3] * 10, 1),  # 1.43: within the anchor's first limit
        ([-0.5] * 10, 1),  # too far
        ([1.2] * 10, 1),  # steeper than before: not convex
        ([np.nan, np.inf, -np.inf] * 4, 1),
    ],
)
def test_the_first_step_goes_to_the_minimum_that_the_devices_slopes_show(remaining, multiple):
    taken, memory = first_round(remaining)
    assert taken == pytest.approx(multiple)
    assert memory.trust == pytest.approx(multiple)


@pytest.mark.parametrize(("byzantine", "others"), [(3, 0.0), (3, 0.2), (2, 0.3), (1, 0.37)])
def test_byzantine_devices_lengthen_the_first_step_by_no_more_than_is_stated(byzantine, others):
    taken = first_round([1 - 1e-12] * byzantine + [others] * (10 - byzantine))[0]
    bound = 10 / ((10 - byzantine) * (1 - others) + byzantine / 8)
    assert taken == pytest.approx(bound if bound > 1.6 else 1)


def test_partial_sums_add_up_to_the_same_first_step():
    parts = [Sums(2), Sums(2)]
    for part, share in zip(parts, (0.9, 0.7), strict=True):
        part.add_update(np.ones(2), share)
        part.add_probe(np.ones(2))
    total = parts[0] + parts[1]
    assert total.distance_to_minimum == pytest.approx(2 / (0.125 + 0.3))
    assert Sums(2, devices=3).distance_to_minimum == 1  # nothing reported


@pytest.mark.parametrize("value", [None, "0.5x", float("nan"), [0.5], 10**400])
def test_a_streamed_update_with_an_unusable_slope_counts_as_one_without(value):
    plain, odd = fc.StreamedRound(np.zeros(2)), fc.StreamedRound(np.zeros(2))
    plain.add_update(np.ones(2))
    odd.add_update(np.ones(2), remaining_slope=value)
    assert vars(odd.sums)["remaining"] == vars(plain.sums)["remaining"] == 0
    assert odd.sums.devices == 1


@pytest.mark.parametrize("seed", range(4))
def test_small_deviations_are_limited_relative_to_the_present_mean_update(seed):
    problem, w, last, memory, shorter = Quadratic(seed), np.zeros(60), None, None, 0
    for number in range(12):
        _, updates, gradients, differences = problem.round(w, last)
        sums = summed(updates * 0.7**number, gradients, differences)  # shorter than their running mean
        step, memory, info = memory_step(sums, memory, MemorySettings(largest=1), population=40)
        d = sums.mean_update
        assert np.linalg.norm(step - d) <= info["anchor"] * np.linalg.norm(d) * (1 + 1e-9)
        shorter += np.linalg.norm(d) < 0.8 * memory.length
        last, w = w, w + step
    assert shorter > 5


def test_the_first_step_is_fedavgs_where_no_deviation_is_allowed():
    assert first_round([0.9] * 10, MemorySettings(anchor=0))[0] == 1


@pytest.mark.parametrize("seed", range(4))
def test_short_updates_are_left_behind_faster_with_the_remaining_slopes(seed):
    losses = {}
    for known in (False, True):
        problem, w, last, memory = Quadratic(seed), np.zeros(60), None, None
        for _ in range(3):
            order, updates, gradients, differences = problem.round(w, last, probes="cohort")
            updates *= 0.05  # a twentieth of what serves best
            before = np.sum(gradients * updates, axis=1)
            after = np.sum(problem.scale * (w + updates - problem.centre[order]) * updates, axis=1)
            sums = summed(updates, gradients, differences, after / before if known else np.zeros(len(order)))
            step, memory, _ = memory_step(sums, memory, MemorySettings(), population=40)
            last, w = w, w + step
        losses[known] = problem.loss(w)
    assert losses[True] < 0.75 * losses[False]


@pytest.mark.parametrize(("rate", "least", "most"), [(0.01, 3, 8), (1.0, 1, 1)])
def test_the_first_step_of_a_simulation_is_longer_where_the_learning_rate_is_far_too_small(rate, least, most):
    settings = {"dataset": "synthetic-iid", "learning_rate": rate, "rounds": 1, "exchanges": 1}
    step, fedavgs = (fc.train(algorithm=name, **settings).params for name in ("fedavg-memory", "fedavg"))
    multiple = np.linalg.norm(step) / np.linalg.norm(fedavgs)
    assert least - 1e-5 <= multiple <= most + 1e-5
    np.testing.assert_allclose(step, multiple * fedavgs, rtol=1e-4, atol=1e-6 * multiple)


def test_remaining_slopes_are_one_number_a_device_and_none_can_do_harm():
    w, updates, gradients = np.zeros(2), {"a": np.ones(2), "b": -np.ones(2) / 2}, [np.ones(2)]
    rule = fc.contextual_memory()
    with pytest.raises(FedcontextError, match="remaining_slopes must hold 2 numbers, got 1"):
        fc.aggregate(w, updates, gradients=gradients, rule=rule, remaining_slopes=[0.5])
    with pytest.raises(FedcontextError, match="remaining_slopes: the names must be those of the devices"):
        fc.aggregate(w, updates, gradients=gradients, rule=rule, remaining_slopes={"a": 0.5, "c": 0.5})
    for value in (0.9, np.nan, 1e308, "text", None):
        result = fc.aggregate(w, updates, gradients=gradients, rule=rule, remaining_slopes={"b": value, "a": 0.0})
        np.testing.assert_allclose(result.params, [0.25, 0.25] if value != 0.9 else [0.25 * 2 / 1.125] * 2)


@pytest.mark.parametrize("seed", range(4))
def test_short_updates_are_left_behind_faster_with_the_secant(seed):
    losses = {}
    for secant in (0, MemorySettings().secant):
        problem, w, last, memory = Quadratic(seed), np.zeros(60), None, None
        for _ in range(3):
            _, updates, gradients, differences = problem.round(w, last)
            sums = summed(0.05 * updates, gradients, differences)  # a twentieth of what serves best
            step, memory, _ = memory_step(sums, memory, MemorySettings(secant=secant), population=40)
            last, w = w, w + step
        losses[secant] = problem.loss(w)
    assert losses[MemorySettings().secant] < 0.75 * losses[0]


@pytest.mark.parametrize("seed", range(4))
def test_the_anchor_waits_while_the_loss_is_not_convex(seed):
    problem, w, last, memory = Quadratic(seed), np.zeros(60), None, None
    for _ in range(4):
        _, updates, gradients, differences = problem.round(w, last)
        sums = summed(updates, gradients, None if last is None else -differences)  # steeper after every step
        step, memory, info = memory_step(sums, memory, MemorySettings(), population=40)
        np.testing.assert_allclose(step, updates.mean(axis=0))
        assert info["anchor"] == MemorySettings().anchor
        last, w = w, w + step


@pytest.mark.parametrize("constants", [{"anchor": 0}, {"trial": 0, "secant": 0}])
def test_every_step_is_fedavgs_where_no_deviation_is_allowed(constants):
    problem, w, last, memory = Quadratic(0), np.zeros(60), None, None
    for _ in range(5):
        _, updates, gradients, differences = problem.round(w, last)
        sums = summed(0.05 * updates, gradients, differences)
        step, memory, _ = memory_step(sums, memory, MemorySettings(**constants), population=40)
        np.testing.assert_allclose(step, 0.05 * updates.mean(axis=0))
        last, w = w, w + step


@given(seed=st.integers(0, 1000), parts=st.integers(2, 4))
@settings(max_examples=20, deadline=None)
def test_several_aggregators_take_the_step_of_one(seed, parts):
    problem, w, last, memory = Quadratic(seed, devices=20, size=12), np.zeros(12), None, None
    for _ in range(4):
        _, updates, gradients, differences = problem.round(w, last, cohort=8, probes="cohort")
        total = Sums(12)
        for rows in np.array_split(np.arange(8), parts):
            total = total + summed(updates[rows], gradients[rows], None if last is None else differences[rows])
        whole = summed(updates, gradients, differences)
        ours, _, _ = memory_step(total, memory, MemorySettings(), 20)
        step, memory, _ = memory_step(whole, memory, MemorySettings(), 20)
        np.testing.assert_allclose(ours, step, rtol=1e-7, atol=1e-12)
        last, w = w, w + step


@given(st.integers(0, 10_000))
def test_after_a_second_exchange_the_previous_step_counts_at_most_half(seed):
    problem, w, last, memory = Quadratic(seed), np.zeros(60), None, None
    for _ in range(5):
        _, updates, gradients, differences = problem.round(w, last)
        sums = summed(updates, gradients, differences)
        if memory is not None:
            corrected = memory_step(sums, replace(memory, second_exchange=True), MemorySettings(momentum=0.8), 40)[0]
            np.testing.assert_array_equal(corrected, memory_step(sums, memory, MemorySettings(momentum=0.4), 40)[0])
        step, memory, _ = memory_step(sums, memory, MemorySettings(), 40)
        last, w = w, w + step


def test_a_second_exchange_is_remembered_until_the_next_step():
    rule, w = fc.contextual_memory(), np.zeros(3)
    sent = {"gradients": [-np.ones(3)] * 4, "rule": rule}
    result = fc.aggregate(w, [np.ones(3)] * 4, **sent)
    corrected = fc.correct(result, [0.5 * result.step] * 4)
    unused = fc.correct(result, [-0.5 * result.step] * 4)  # not convex along the step
    after = fc.aggregate(w, [np.ones(3)] * 4, differences=[np.ones(3)] * 4, state=corrected.state, **sent)
    states = (result, corrected, unused, after)
    assert [each.state["second_exchange"] for each in states] == [False, True, True, False]


def test_probes_left_out_are_counted_over_all_aggregators():
    assert (Sums(2, contradicting=1) + Sums(2, contradicting=2)).contradicting == 3


def test_the_gradient_estimate_starts_again_when_reversed_gradients_are_first_found():
    """The first round cannot tell them; the second round that finds one must not keep the first round's gradients."""
    problem, w = Quadratic(3), np.zeros(60)
    _, updates, gradients, _ = problem.round(w, None)
    step, memory, _ = memory_step(summed(updates, -gradients, None), None, MemorySettings(), 40)
    for found, forgotten in ((1, True), (0, False)):
        _, updates, gradients, differences = problem.round(w + step, w)
        sums = summed(updates, gradients, differences)
        sums.contradicting = found
        _, after, _ = memory_step(sums, memory, MemorySettings(), 40)
        assert np.allclose(after.gradient, sums.mean_gradient) is forgotten
    sums.contradicting = 1  # found before: the memory is clean, and is kept
    again = memory_step(sums, replace(after, contradicting=1), MemorySettings(), 40)[1]
    assert not np.allclose(again.gradient, sums.mean_gradient)


def after_rounds(count):
    """Return the memory after some rounds on ``Quadratic(5)``, and what devices send in the next one."""
    problem, w, last, memory = Quadratic(5), np.zeros(60), None, None
    for _ in range(count):
        _, *sent = problem.round(w, last)
        step, memory, _ = memory_step(summed(*sent), memory, MemorySettings(), 40)
        last, w = w, w + step
    return memory, problem.round(w, last)


def test_one_round_against_many_shrinks_the_limits_less_than_one_alone():
    """A single round's evidence is noisy: what earlier rounds said counts too."""
    memory, (_, updates, gradients, differences) = after_rounds(6)
    for move, limit in ((memory.step, "trust"), (memory.deviation, "anchor")):
        against = summed(updates, gradients + 10 * move, differences)  # a loss that rises along the last move
        kept, shrunk = (memory_step(against, memory, MemorySettings(evidence_decay=d), 40)[1] for d in (0.5, 0))
        assert getattr(kept, limit) > getattr(shrunk, limit)


def test_rounds_without_a_step_leave_the_limits_as_they_are():
    memory, (_, updates, gradients, differences) = after_rounds(4)
    still = replace(memory, step=np.zeros(60), deviation=np.zeros(60))
    after = memory_step(summed(updates, gradients, 0 * differences), still, MemorySettings(), 40)[1]
    assert (after.trust, after.anchor) == (memory.trust, memory.anchor)


@given(seed=st.integers(0, 10_000), size=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_no_feasible_point_is_lower_than_the_minimum_in_the_box(seed, size):
    random = np.random.default_rng(seed)
    root = random.standard_normal((size, size))
    h, b = root @ root.T + 0.1 * np.eye(size), random.standard_normal(size)
    low = -random.random(size)
    high = np.where(random.random(size) < 0.5, np.inf, random.random(size))
    x = minimise_in_box(h, b, low, high)
    others = low + random.random((200, size)) * (np.minimum(high, low + 3) - low)
    values = others @ b + 0.5 * np.einsum("ij,jk,ik->i", others, h, others)
    assert b @ x + 0.5 * x @ h @ x <= values.min() + 1e-9


@pytest.mark.parametrize("probes", ["cohort", 20])
def test_it_is_faster_than_averaging_on_a_badly_scaled_quadratic(probes):
    losses = {}
    for rule in ("mean", "memory"):
        problem, w, last, memory = Quadratic(0), np.zeros(60), None, None
        for _ in range(40):
            _, updates, gradients, differences = problem.round(w, last, probes=probes)
            step, memory, _ = memory_step(summed(updates, gradients, differences), memory, MemorySettings(), 40)
            last, w = w, w + (step if rule == "memory" else updates.mean(axis=0))
        losses[rule] = problem.loss(w) - problem.loss(problem.centre.mean(axis=0))
    assert losses["memory"] < 0.2 * losses["mean"]


@pytest.mark.parametrize("probes", [5, 30])
@pytest.mark.parametrize("bits", [1, 4, 32])
def test_the_error_of_a_mean_gradient_is_the_one_expected_also_where_all_devices_send_codes(probes, bits):
    random, codec, size = np.random.default_rng(0), Codec(bits), 256
    gradients = 1 + random.standard_normal((30, size))
    expected, errors = [], []
    for trial in range(150):
        asked = random.permutation(30)[:probes]
        sums = Sums(size, distortions=(codec.distortion, 0.0))
        for device in asked:
            sums.add_probe(codec.roundtrip(gradients[device], (trial, int(device))).astype(float))
        expected.append(sums.gradient_error(30))
        errors.append(float(((sums.mean_gradient - gradients.mean(axis=0)) ** 2).sum()))
    assert np.mean(expected) == pytest.approx(np.mean(errors), rel=0.1, abs=1e-9)


@pytest.mark.parametrize("settings", [{"reach": -3.0}, {"decay": float("nan")}], ids=str)
def test_negative_constants_are_refused(settings):
    with pytest.raises(FedcontextError, match=f"{next(iter(settings))} must be a number that is not negative"):
        MemorySettings(**settings)


def test_settings_of_the_wrong_type_are_refused_at_once():
    with pytest.raises(FedcontextError, match=r"settings must be fc.MemorySettings\(...\) or None, got 3"):
        fc.contextual_memory(3)
    with pytest.raises(FedcontextError, match="decay must be a number that is not negative, got 'x'"):
        MemorySettings(decay="x")
    with pytest.raises(FedcontextError, match="decay is a share and must be at most 1, got 3"):
        MemorySettings(decay=3)


@pytest.mark.parametrize("population", [0, -1, True, 2.5, "8", np.nan])
def test_a_population_that_is_no_count_is_refused(population):
    with pytest.raises(FedcontextError, match="population must be the number of devices in all"):
        fc.aggregate(np.zeros(2), [np.ones(2)], rule=fc.mean(), population=population)
    with pytest.raises(FedcontextError, match="population must be the number of devices in all"):
        fc.StreamedRound(np.zeros(2)).aggregate(fc.contextual_memory(), population=population)
