"""Faults and attacks: drawn from the plan's own streams, the same for every algorithm, each doing what its line says."""

from __future__ import annotations

import dataclasses
from statistics import NormalDist
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedcontext as fc
from fedcontext.errors import FedcontextError
from fedcontext.faults.attacks import (
    ATTACKS,
    Adversary,
    attacked_changes,
    byzantine_devices,
    random_direction,
    with_attacks,
)
from fedcontext.faults.faults import FAULTS, active, hit
from fedcontext.faults.reply import Reply, replies_of, report_of
from fedcontext.plan import plan_round
from fedcontext.settings import parse_shares

RULES = ("fedavg", "folb", "scaffold", "fedavg-expected", "fedavg-contextual", "fedavg-memory")
SMALL = {"rounds": 4, "devices_per_round": 6, "learning_rate": 0.1, "smoothness": 3.0, "probes": 5, "pool": 2}


def simulation(data, algorithm="fedavg", **settings):
    return fc.prepare(fc.Experiment("small", algorithm, **{**SMALL, **settings}), data=data)


def reports(data, algorithm="fedavg", number=2, **settings):
    """What devices sent in a round, and what arrived of it; the rounds before it are those of the run itself."""
    run, honest = simulation(data, algorithm, **settings), {**settings, "faults": "none", "attack": "none"}
    state = run.start()
    while state.number < number - 1:
        state, _ = run.step(state)
    return aggregated(simulation(data, algorithm, **honest), state), aggregated(run, state), run.plan(number)


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        ("sign-flip=0.2,untill=20", "'untill' is unknown, did you mean until?"),
        ("sign-flip=0.2, sign-flip=0.3", "sign-flip is given twice."),
        ("sign-flip=0.2,", "there is a comma without NAME=SHARE on one side."),
        ("sign-flip:0.3", "'sign-flip:0.3' must be NAME=SHARE."),
        ("sign-flip", "'sign-flip' has no share."),
        ("sign-flip=0.2,until=1.5", "until must be the number of a round, got '1.5'."),
    ],
)
def test_the_part_of_the_setting_that_is_wrong_is_named(attack, message):
    with pytest.raises(FedcontextError) as raised:
        fc.Experiment(attack=attack)
    assert str(raised.value).startswith(f"attack: {message} attack must be shares from 0 to 1 by name")


@given(st.floats(0, 1), st.integers(1, 10**9))
def test_the_setting_keeps_every_digit(share, until):
    made = fc.Experiment(attack=f"sign-flip={share},until={until}").attack
    assert parse_shares(made) == {"sign-flip": share, "until": until}
    assert (
        made == fc.Experiment(attack={"sign-flip": share, "until": until}).attack == fc.Experiment(attack=made).attack
    )
    assert made.endswith(f",until={until}")


def aggregated(run, state):
    """What is aggregated in the round after ``state``: None if the round is lost."""
    with mock.patch("fedcontext.simulation.aggregate", wraps=fc.aggregate) as spy:
        run.step(state)
    return spy.call_args.args[1] if spy.called else None


@pytest.mark.parametrize("algorithm", RULES)
@pytest.mark.parametrize("probes", [5, "cohort"])
def test_a_report_survives_as_replies(small_data, algorithm, probes):
    run = simulation(small_data, algorithm, probes=probes)
    state, _ = run.step(run.start())
    report = aggregated(run, state)
    replies = replies_of(report, small_data.train.sizes, [""])
    again = report_of(replies, report, state.params, [""], run.algorithm.rule.needs, by_samples=True)
    rule = run.algorithm.rule
    one, two = (fc.aggregate(state.params, each, rule=rule, state=state.rule).params for each in (report, again))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("algorithm", RULES)
def test_a_run_survives_every_fault_and_repeats_to_the_bit(small_data, algorithm, name):
    settings = {**SMALL, "data": small_data, "algorithm": algorithm, "faults": f"{name}=0.3"}
    one, two = fc.train(**settings), fc.train(**settings)
    np.testing.assert_array_equal(one.params, two.params)
    assert len(one.records) == 4
    assert np.isfinite(one.params).all()


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("algorithm", RULES)
@pytest.mark.parametrize("probes", [5, "cohort"])
def test_a_run_survives_every_attack_and_repeats_to_the_bit(small_data, algorithm, name, probes):
    settings = {**SMALL, "data": small_data, "algorithm": algorithm, "attack": {name: 0.3}, "probes": probes}
    one, two = fc.train(**settings), fc.train(**settings)
    np.testing.assert_array_equal(one.params, two.params)
    assert np.isfinite(one.params).all()


@pytest.mark.parametrize(
    "settings", [{"faults": "dropout=0.4,late=0.2,partial=0.3"}, {"attack": "sign-flip=0.3", "defences": None}]
)
def test_every_algorithm_meets_the_same_faults(small_data, settings):
    names = ("fedavg", "fedadam", "fedavg-memory")
    runs = [fc.train(data=small_data, algorithm=name, **{**SMALL, **settings}).records for name in names]
    for records in zip(*runs, strict=True):
        assert records[0].devices == records[1].devices == records[2].devices
        assert records[0].excluded == records[1].excluded


def test_until_ends_faults_and_attacks(small_data):
    assert active({"nan": 0.1, "until": 3}, 3)
    assert not active({"nan": 0.1, "until": 3}, 4)
    settings = {**SMALL, "data": small_data, "algorithm": "fedavg"}
    records = fc.train(**settings, faults="dropout=1,until=2").records
    assert [record.lost for record in records] == [True, True, False, False]
    clean = fc.train(**settings).records
    assert records[2].devices == clean[2].devices


@given(st.integers(0, 2**40), st.integers(1, 10**6), st.sampled_from(list(FAULTS)), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_chance_hits_at_least_the_same_devices(seed, number, name, one, two):
    low, high = sorted((one, two))
    for device in range(3):
        assert hit(seed, number, device, name, {name: low}) <= hit(seed, number, device, name, {name: high})


@given(st.integers(0, 2**40), st.integers(1, 300), st.floats(0, 1), st.floats(0, 1))
def test_byzantine_devices_are_a_fixed_set_that_grows_with_the_share(seed, population, one, two):
    low, high = sorted((one, two))
    assert byzantine_devices(seed, population, low) <= byzantine_devices(seed, population, high)
    assert len(byzantine_devices(seed, population, low)) == round(low * population)


def test_no_faults_at_all_is_the_run_without_the_setting(small_data):
    for algorithm in RULES:
        settings = {**SMALL, "data": small_data, "algorithm": algorithm}
        plain = fc.train(**settings).params
        np.testing.assert_allclose(fc.train(**settings, faults="dropout=0", attack="noise=0").params, plain, rtol=1e-4)


def test_dropout_leaves_out_devices_and_says_who(small_data):
    records = fc.train(data=small_data, algorithm="fedavg", faults="dropout=0.5", **SMALL).records
    for record in records:
        planned = set(plan_round(0, record.number, 12, devices_per_round=6).devices.tolist())
        assert set(record.devices) == planned - record.excluded.keys()
    assert {reason for record in records for reason in record.excluded.values()} == {"dropped out"}


def test_churn_and_outages_last_for_rounds():
    for name, rounds in (("churn", 10), ("outage", 5)):
        away = [hit(3, number, 4, name, {name: 0.5}) for number in range(1, 10 * rounds + 1)]
        blocks = np.reshape(away, (-1, rounds))
        assert (blocks == blocks[:, :1]).all()
        assert 0 < blocks[:, 0].sum() < 10
    assert [hit(3, 1, k, "outage", {"outage": 0.5}) for k in range(5)] == [
        hit(3, 1, k + 5, "outage", {"outage": 0.5}) for k in range(5)
    ]


def test_partial_work_is_fewer_epochs(small_data):
    sent, arrived, _ = reports(small_data, faults="partial=1", epochs=(4, 4))
    assert all(1 <= short < long for short, long in zip(arrived.steps, sent.steps, strict=True))


def test_stale_updates_start_from_the_last_params_and_late_ones_are_those_of_the_last_round(small_data):
    run = simulation(small_data, faults="stale=0")
    first = run.start()
    second, _ = run.step(first)
    _, stale, _ = reports(small_data, faults="stale=1")
    expected = aggregated(run, dataclasses.replace(second, params=first.params))
    for device, update in expected.updates.items():
        np.testing.assert_allclose(stale.updates[device], update, rtol=1e-5, atol=1e-7)
    sent = aggregated(run, first)
    late = [k for k in sent.updates if hit(0, 1, k, "late", {"late": 0.5})]
    assert late
    _, arrived, _ = reports(small_data, faults="late=0.5")
    for device in late:  # the params after round 1 differ, those it started from do not
        np.testing.assert_allclose(arrived.updates[f"{device} late"], sent.updates[device], rtol=1e-5, atol=1e-7)
    assert not any(hit(0, 2, k, "late", {"late": 0.5}) for k in arrived.updates if isinstance(k, int))


def test_duplicates_scale_and_lost_gradients(small_data):
    sent, arrived, _ = reports(small_data, faults="duplicate=1")
    assert list(arrived.updates) == [*sent.updates, *(f"{k} again" for k in sent.updates)]
    sent, arrived, _ = reports(small_data, "fedavg-memory", faults="scale=1")
    for part in ("updates", "gradients", "differences"):
        for one, two in zip(values(getattr(sent, part)), values(getattr(arrived, part)), strict=True):
            np.testing.assert_allclose(1000 * one, two, rtol=1e-5)
    sent, arrived, plan = reports(small_data, "fedavg-memory", faults="lost-gradient=0.5")
    left = [k for k in plan.probes.tolist() if not hit(0, 2, k, "lost-gradient", {"lost-gradient": 0.5})]
    assert 0 < len(left) < 5
    assert sorted(arrived.gradients) == sorted(left)
    assert len(arrived.differences) == len(left)


def test_without_any_gradient_a_round_is_lost(small_data):
    records = fc.train(data=small_data, algorithm="fedavg-contextual", faults="lost-gradient=1", **SMALL).records
    assert all(record.lost for record in records)


def test_an_old_gradient_is_that_of_the_last_params_with_no_difference(small_data):
    run = simulation(small_data, "fedavg-memory", gradient_bits=32)
    first = run.start()
    _, arrived, plan = reports(small_data, "fedavg-memory", faults="old-gradient=1", gradient_bits=32)
    expected = dict(zip(plan.probes.tolist(), run.engine.gradients(first.params, plan.probes), strict=True))
    for device, gradient in arrived.gradients.items():
        np.testing.assert_allclose(gradient, expected[device], rtol=1e-5, atol=1e-7)
    assert not any(np.any(each) for each in arrived.differences)


def values(structures):
    return list(structures.values()) if isinstance(structures, dict) else list(structures)


def crowd_of(updates, byzantine=1):
    replies = [
        Reply(k, np.asarray(update, float), gradient=np.asarray(update, float)) for k, update in enumerate(updates)
    ]
    return Adversary(replies, byzantine, seed=0, number=1, trained={})


def sent_by(name, updates, mine, byzantine=1):
    honest = Reply(99, np.asarray(mine, float), gradient=np.asarray(mine, float), difference=np.asarray(mine, float))
    return ATTACKS[name].first(honest, crowd_of(updates, byzantine))


def test_simple_attacks():
    mine, honest = np.array([1.0, -2.0]), [[1.0, 0.0], [3.0, 2.0]]
    np.testing.assert_array_equal(sent_by("sign-flip", honest, mine).update, -mine)
    np.testing.assert_array_equal(sent_by("scaling", honest, mine).update, 1e6 * mine)
    np.testing.assert_allclose(np.linalg.norm(sent_by("noise", honest, mine).update), 10 * np.linalg.norm(mine))
    np.testing.assert_array_equal(sent_by("inner-product", honest, mine).update, [-1.0, -0.5])
    assert sent_by("samples", honest, mine).samples == 2**53
    flipped = sent_by("gradient-flip", honest, mine)
    np.testing.assert_array_equal((flipped.update, flipped.gradient, flipped.difference), (mine, -mine, -mine))
    np.testing.assert_array_equal(sent_by("gradient-scaling", honest, mine).gradient, 1e6 * mine)


@pytest.mark.parametrize("name", ["change-flip", "change-scaling"])
def test_attackers_of_the_second_exchange_are_honest_in_the_first(small_data, name):
    settings, attack = {**SMALL, "data": small_data, "probes": 10, "seed": 1}, {"attack": f"{name}=0.4"}
    honest, attacked = (fc.train(**settings, **more) for more in ({}, attack))
    assert not np.array_equal(attacked.params, honest.params)
    one, two = (fc.train(**settings, **more, exchanges=1) for more in ({}, attack))
    np.testing.assert_array_equal(one.params, two.params)
    named = {device for record in attacked.records for device, note in record.clipped.items() if "change" in note}
    assert named & byzantine_devices(1, 12, 0.4)


def test_two_faced_devices_favour_their_direction_in_both_exchanges():
    target = random_direction(3, 4)
    (who,) = byzantine_devices(3, 10, 0.1)
    changed = attacked_changes({who: np.array([3.0, 0.0, 4.0, 0.0])}, 3, 10, {"two-faced": 0.1}, {})
    np.testing.assert_allclose(changed[who], -50 * target)


def test_colluding_devices_agree_on_direction_and_promise_descent():
    honest = [[3.0, 4.0], [3.0, 4.0]]
    one, two = (sent_by("collusion", honest, mine).update for mine in ([1.0, 0.0], [0.0, 9.0]))
    np.testing.assert_array_equal(one, two)
    np.testing.assert_allclose(np.linalg.norm(one), 5)
    sent = sent_by("two-faced", honest, [1.0, 0.0])
    np.testing.assert_allclose(sent.update @ sent.gradient, -5 * 50)


def test_a_little_is_enough_by_the_papers_formula():
    """50 devices, 12 of them Byzantine: s = 26 - 12 = 14 supporters, z = Φ⁻¹((38 - 14) / 38)."""
    updates = np.random.default_rng(0).standard_normal((38, 4))
    z = NormalDist().inv_cdf(24 / 38)
    np.testing.assert_allclose(
        sent_by("little", updates, np.zeros(4), byzantine=12).update, updates.mean(axis=0) - z * updates.std(axis=0)
    )


def test_min_max_stays_within_the_spread_of_honest_updates_and_at_its_edge():
    updates = np.random.default_rng(1).standard_normal((8, 5))
    sent = sent_by("min-max", updates, np.zeros(5)).update
    widest = max(np.linalg.norm(a - b) for a in updates for b in updates)
    np.testing.assert_allclose(np.linalg.norm(updates - sent, axis=1).max(), widest, rtol=1e-6)


def test_flipped_labels_and_backdoors_are_trained_on_poisoned_data(small_data):
    flipped = fc.FederatedData("small", small_data.train.map(lambda s: (s[0], 2 - s[1])), small_data.test, 3)
    sent, arrived, _ = reports(small_data, "fedavg-contextual", attack="label-flip=1", number=1)
    assert all(np.array_equal(arrived.updates[k], sent.updates[k]) for k in sent.updates)  # nobody honest: no attack
    who = byzantine_devices(0, 12, 0.5)
    sent, arrived, _ = reports(small_data, "fedavg-contextual", attack="label-flip=0.5", number=1)
    run = simulation(flipped, "fedavg-contextual")
    poisoned = aggregated(run, run.start())
    for device in sent.updates:
        source = poisoned if device in who else sent
        np.testing.assert_allclose(arrived.updates[device], source.updates[device], rtol=1e-5, atol=1e-7)


def test_a_backdoor_opens_where_the_mean_is_taken_and_is_measured():
    settings = {"dataset": "synthetic-1-1", "algorithm": "fedavg", "rounds": 10, "eval_every": 10}
    shares = [fc.train(**settings, attack=f"backdoor={share}").records[-1].backdoor for share in (0, 0.3)]
    assert shares[1] > shares[0] + 0.3
    assert fc.train(**settings).records[-1].backdoor is None


def test_attacks_combine_on_the_same_devices():
    replies = [Reply(k, np.ones(2), gradient=np.ones(2)) for k in range(10)]
    sent = with_attacks(replies, 0, 1, 10, {"sign-flip": 0.2, "gradient-flip": 0.2}, {})
    flipped = {reply.device for reply in sent if reply.update[0] < 0}
    assert flipped == {reply.device for reply in sent if reply.gradient[0] < 0} == byzantine_devices(0, 10, 0.2)


@pytest.mark.parametrize(
    "value", ["dropout", "dropout=2", "dropout=-1", "sleep=0.1", "nan=0.1,nan=0.2", 3, "until=0.5"]
)
def test_wrong_faults_are_refused_in_one_line(value):
    with pytest.raises(FedcontextError, match=r"faults must be shares from 0 to 1 by name"):
        fc.Experiment(faults=value)


def test_poisoned_data_needs_an_engine_by_name(small_data):
    engine = simulation(small_data).engine
    with pytest.raises(FedcontextError, match="use an engine by name"):
        fc.prepare(fc.Experiment("small", "fedavg", attack="label-flip=0.1"), data=small_data, engine=engine)
