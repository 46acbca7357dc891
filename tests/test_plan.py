"""The plan: the same seed gives the same devices, epochs, batches and fleet to everyone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedcontext as fc
from fedcontext.errors import FedcontextError
from fedcontext.fleet import PROFILES, make_fleet, replies
from fedcontext.plan import Stream, batches, generator, orders, plan_round


@given(st.integers(0, 1000), st.integers(1, 50), st.integers(1, 40))
def test_a_plan_is_pure_and_its_draws_are_in_range(seed, number, wanted):
    make = {"seed": seed, "number": number, "population": 40, "devices_per_round": wanted, "epochs": (2, 5)}
    plan, again = plan_round(**make), plan_round(**make)
    np.testing.assert_array_equal(plan.devices, again.devices)
    assert len(set(plan.devices.tolist())) == wanted
    assert set(plan.devices.tolist()) <= set(range(40))
    assert ((plan.epochs >= 2) & (plan.epochs <= 5)).all()


@given(st.integers(0, 2**70), st.integers(0, 2**33), st.sampled_from(Stream), st.integers(0, 2**20))
def test_draws_are_those_of_numpys_own_generator(seed, number, stream, device):
    ours, numpys = generator(seed, number, stream, device), np.random.default_rng([seed, number, stream, device])
    assert ours.bit_generator.state == numpys.bit_generator.state


def test_a_negative_seed_is_refused():
    with pytest.raises(FedcontextError, match="must be 0 or more, got -1"):
        generator(-1, 0, Stream.DATA)


@given(st.integers(0, 100), st.sampled_from([None, 3, 30, 99, "cohort", "all"]), st.sampled_from([0, 7, 20]))
def test_probes_and_pool_do_not_change_the_cohort(seed, probes, pool):
    plain = plan_round(seed, 4, 30)
    other = plan_round(seed, 4, 30, probes=probes, pool=pool)
    np.testing.assert_array_equal(plain.devices, other.devices)
    np.testing.assert_array_equal(plain.epochs, other.epochs)
    assert len(other.probes) == {None: 0, "cohort": 10, "all": 30, 99: 30}.get(probes, probes)
    if probes == "cohort":
        np.testing.assert_array_equal(other.probes, other.devices)
    assert not set(other.pool.tolist()) & set(other.devices.tolist())
    assert len(other.pool) == pool


def test_selection_is_uniform_and_rounds_differ():
    counts = np.zeros(20)
    for number in range(1, 401):
        counts[plan_round(0, number, 20, devices_per_round=5).devices] += 1
    assert abs(counts - 100).max() < 40  # 4.6 standard deviations


@given(st.integers(0, 2**40), st.integers(1, 99), st.integers(0, 999), st.integers(1, 300), st.integers(1, 5))
def test_batch_orders_are_successive_permutations_of_one_generator(seed, number, device, samples, epochs):
    random = generator(seed, number, Stream.BATCHES, device)
    expected = [random.permutation(samples) for _ in range(epochs)]
    np.testing.assert_array_equal(orders(seed, number, device, samples, epochs), expected)


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 70))
def test_every_epoch_sees_every_sample_once(samples, epochs, size):
    order = np.concatenate(list(batches(1, 2, 3, samples, epochs, size)))
    for epoch in np.split(order, epochs):
        assert sorted(epoch) == list(range(samples))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices_per_round": 0}, "devices_per_round must be between 1 and 30"),
        ({"devices_per_round": 31}, "devices_per_round must be between 1 and 30"),
        ({"epochs": (0, 5)}, "epochs must be a range"),
        ({"epochs": (5, 2)}, "epochs must be a range"),
        ({"probes": 0}, "probes must be 'cohort', 'all' or a number of at least 1, got 0"),
        ({"probes": "N"}, "probes must be 'cohort', 'all' or a number of at least 1, got 'N'"),
        ({"pool": 21}, "pool must be between 0 and 20"),
        ({"over_select": -0.1}, "over-selection must be 0 or more"),
        ({"over_select": float("nan")}, "over-selection must be 0 or more"),
    ],
)
def test_impossible_plans_are_refused(change, message):
    with pytest.raises(FedcontextError, match=message):
        plan_round(0, 1, 30, **change)


def test_the_fleet_is_heterogeneous_and_seeded():
    one, same, other = (make_fleet(PROFILES["edge"], 1000, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.speeds, same.speeds)
    assert (one.speeds != other.speeds).any()
    assert np.log(one.bandwidths).std() == pytest.approx(PROFILES["edge"].bandwidth.sigma, rel=0.1)
    assert np.median(one.latencies) == pytest.approx(PROFILES["edge"].latency.median, rel=0.1)


def test_a_deadline_drops_late_devices_and_bounds_the_round():
    plan, fleet = plan_round(0, 1, 30), make_fleet(PROFILES["edge"], 30, seed=0)
    samples = np.full(30, 200)
    everyone = replies(fleet, plan, samples, 1000)
    assert len(everyone.cohort) == 10
    assert not everyone.excluded
    deadline = everyone.seconds / 2
    some = replies(fleet, plan, samples, 1000, deadline=deadline)
    assert some.seconds == deadline
    assert 0 < len(some.excluded) == 10 - len(some.cohort)
    assert set(some.excluded.values()) == {"missed the deadline"}


def test_a_late_gradient_is_recorded_too():
    plan, fleet = plan_round(0, 1, 30, probes=30), make_fleet(PROFILES["edge"], 30, seed=0)
    got = replies(fleet, plan, np.full(30, 200), 1000, deadline=0.4)
    missing = set(range(30)) - set(plan.probes[got.probes].tolist())
    assert missing
    assert missing <= set(got.excluded)


def test_a_device_that_trains_and_probes_sends_one_reply():
    plan, fleet = plan_round(0, 1, 30, probes="all"), make_fleet(PROFILES["even"], 30, seed=0)
    work, model = np.full(30, 200), 1000
    received = replies(fleet, plan, work, model)
    assert received.bytes_up == (10 + 30) * model
    slowest = fleet.seconds(plan.devices, (plan.epochs + 1) * 200, 3 * model).max()
    assert received.seconds == slowest
    late = replies(fleet, plan, work, model, deadline=slowest * 0.99)
    dropped = set(plan.devices.tolist()) - set(plan.devices[late.cohort].tolist())
    assert dropped
    assert not dropped & set(plan.probes[late.probes].tolist())


def test_a_pool_device_that_probes_sends_one_reply_too():
    plan, fleet = plan_round(0, 1, 30, probes="all", pool="all"), make_fleet(PROFILES["even"], 30, seed=0)
    work, model = np.full(30, 200), 1000
    received = replies(fleet, plan, work, model)
    assert received.bytes_up == (30 + 30) * model
    assert received.bytes_down == 30 * model
    everyone, epochs = np.concatenate([plan.devices, plan.pool]), np.concatenate([plan.epochs, plan.pool_epochs])
    assert received.seconds == fleet.seconds(everyone, (epochs + 1) * 200, 3 * model).max()
    late = replies(fleet, plan, work, model, deadline=received.seconds * 0.99)
    dropped = set(plan.pool.tolist()) - set(plan.pool[late.pool].tolist())
    assert dropped
    assert not dropped & set(plan.probes[late.probes].tolist())


def test_over_selection_keeps_the_first_replies_and_is_faster():
    fleet, samples = make_fleet(PROFILES["edge"], 30, seed=0), np.full(30, 200)
    over = plan_round(0, 1, 30, devices_per_round=5, over_select=1.0)
    got = replies(fleet, over, samples, 1000)
    when = fleet.seconds(over.devices, over.epochs * 200, 2000)
    assert len(got.cohort) == 5
    assert when[got.cohort].max() <= np.delete(when, got.cohort).min()
    assert got.seconds == when[got.cohort].max()


def test_slower_devices_and_larger_models_take_longer():
    fleet = make_fleet(PROFILES["even"], 3, seed=0)
    work = np.array([100, 200])
    assert np.diff(fleet.seconds(np.array([0, 1]), work, 10.0))[0] > 0
    assert (fleet.seconds(np.array([0, 1]), work, 1e6) > fleet.seconds(np.array([0, 1]), work, 10.0)).all()


def test_bytes_count_what_each_rule_needs(small_data):
    def up(algorithm, **settings):
        record = fc.train(data=small_data, algorithm=algorithm, rounds=1, devices_per_round=4, **settings).records[0]
        return record.bytes_up // (6 * 3 * 4)  # in models of (5 + 1) x 3 float32

    assert up("fedavg") == 4
    assert up("folb") == 8
    assert up("fedavg-contextual", probes="cohort") == 8
    assert up("fedavg-contextual", probes=5) == 9
    assert up("fedavg-contextual", probes="all") == 16
    assert up("fedavg-expected", probes="cohort", pool=2) == 10
