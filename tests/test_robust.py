"""Robust rules: each by its paper's formula on small numbers, and what all must withstand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import fedcontext as fc
from fedcontext.errors import FedcontextError
from fedcontext.measurement.combination import COMBINATIONS, krum_scores

RULES = {
    "krum": fc.krum,
    "multi_krum": fc.multi_krum,
    "geometric_median": fc.geometric_median,
    "coordinate_median": fc.coordinate_median,
    "trimmed_mean": fc.trimmed_mean,
}


def step(rule, updates, **given):
    return fc.aggregate(np.zeros(updates.shape[1]), list(updates), rule=rule, **given).params


@st.composite
def honest_and_byzantine(draw, most=3):
    """Ten updates near a common vector, up to three of which are replaced by anything finite."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    updates = random.standard_normal(6) + 0.1 * random.standard_normal((10, 6))
    byzantine = draw(st.integers(0, most))
    updates[:byzantine] = draw(st.sampled_from([-1e6, -1.0, 0.0, 3.0, 1e12])) * random.standard_normal((byzantine, 6))
    return updates, byzantine


@given(honest_and_byzantine())
def test_no_minority_moves_a_robust_rule_out_of_the_honest_updates(case):
    updates, byzantine = case
    honest = updates[byzantine:]
    width = max(np.linalg.norm(a - b) for a in honest for b in honest)
    for name, make in RULES.items():
        away = np.linalg.norm(step(make(), updates) - honest.mean(axis=0))
        assert away <= 3 * width, name


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.1, 0.2, 0.3]))
def test_krum_by_the_papers_formula(seed, byzantine):
    updates = np.random.default_rng(seed).standard_normal((10, 4))
    f = int(byzantine * 10)
    scores = []
    for i in range(10):
        distances = sorted(np.sum((updates[i] - updates[j]) ** 2) for j in range(10) if j != i)
        scores.append(sum(distances[: 10 - f - 2]))
    np.testing.assert_allclose(step(fc.krum(byzantine), updates), updates[np.argmin(scores)], atol=1e-12)
    lowest = np.argsort(scores)[: 10 - f]
    np.testing.assert_allclose(step(fc.multi_krum(byzantine), updates), updates[lowest].mean(axis=0), atol=1e-12)
    squares = np.array([[np.sum((a - b) ** 2) for a in updates] for b in updates])
    np.testing.assert_allclose(krum_scores(squares, byzantine), scores)


@given(st.integers(0, 2**32 - 1))
def test_the_geometric_median_has_the_lowest_sum_of_distances(seed):
    random = np.random.default_rng(seed)
    updates = random.standard_normal((7, 3))
    found = step(fc.geometric_median(), updates)

    def total(point):
        return np.linalg.norm(updates - point, axis=1).sum()

    for _ in range(50):
        assert total(found) <= total(found + 0.05 * random.standard_normal(3)) + 1e-6


@pytest.mark.parametrize("scratch", [8, 2**20])
def test_coordinate_rules_are_entry_by_entry_in_blocks_of_any_size(scratch):
    random = np.random.default_rng(0)
    shapes = {"weight": (300, 3), "bias": (5,)}
    updates = [{name: random.standard_normal(shape) for name, shape in shapes.items()} for _ in range(10)]
    params = {name: np.ones(shape) for name, shape in shapes.items()}
    for rule, expected in (
        (fc.coordinate_median(), lambda rows: np.median(rows, axis=0)),
        (fc.trimmed_mean(0.2), lambda rows: np.sort(rows, axis=0)[2:8].mean(axis=0)),
    ):
        new = fc.aggregate(params, updates, rule=rule, scratch=scratch).params
        for name in shapes:
            np.testing.assert_allclose(new[name], 1 + expected([update[name] for update in updates]))


def test_coordinate_rules_take_torch_tensors_and_average_integers():
    torch = pytest.importorskip("torch")
    params = {"w": torch.zeros(2), "seen": torch.tensor(0)}
    updates = [{"w": torch.tensor([x, -x]), "seen": torch.tensor(4)} for x in (1.0, 2.0, 60.0)]
    new = fc.aggregate(params, updates, rule=fc.coordinate_median()).params
    assert new["w"].tolist() == [2.0, -2.0]
    assert new["seen"].item() == 4


def test_norm_clipping_by_its_formula():
    updates = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [30.0, 40.0]])
    np.testing.assert_allclose(step(fc.norm_clipping(1.0), updates), [(0.6 + 0.3 + 0.6) / 4, (0.8 + 0.4 + 0.8) / 4])
    clipped = [u * min(1, 2.75 / max(np.linalg.norm(u), 1e-300)) for u in updates]  # the median of 5, 0.5, 0 and 50
    np.testing.assert_allclose(step(fc.norm_clipping(), updates), np.mean(clipped, axis=0))


@given(st.integers(0, 2**32 - 1))
def test_fltrust_by_the_papers_formula(seed):
    random = np.random.default_rng(seed)
    updates, root = random.standard_normal((6, 4)), random.standard_normal(4)
    trust = [max(0, u @ root / np.linalg.norm(u) / np.linalg.norm(root)) for u in updates]
    scaled = [np.linalg.norm(root) / np.linalg.norm(u) * u for u in updates]
    expected = np.array(trust) @ scaled / sum(trust) if sum(trust) else np.zeros(4)
    np.testing.assert_allclose(step(fc.fltrust(), updates, pool=[root]), expected, atol=1e-12)


def test_fltrust_without_a_root_update_says_what_to_give():
    with pytest.raises(FedcontextError, match="give it as pool"):
        step(fc.fltrust(), np.ones((2, 2)))


@pytest.mark.parametrize("rule", [fc.krum, fc.multi_krum, fc.trimmed_mean])
@pytest.mark.parametrize("share", [0.5, -0.1, "a"])
def test_a_byzantine_share_that_is_none_or_a_majority_is_refused(rule, share):
    with pytest.raises(FedcontextError, match=f"byzantine must be a share from 0 to below 0.5, got {share!r}"):
        rule(share)


def test_the_server_of_fltrust_holds_samples_of_its_own(small_data):
    run = fc.prepare(fc.Experiment("small", "fltrust", rounds=1, devices_per_round=4), data=small_data)
    assert run.root is not None
    state, record = run.step(run.start())
    assert len(record.devices) == len(record.weights) == 4
    assert np.isfinite(state.params).all()


@pytest.mark.parametrize("algorithm", ["krum", "median", "trimmed-mean", "geometric-median", "fltrust"])
def test_robust_algorithms_learn_where_a_fifth_of_the_devices_scale_their_updates(small_data, algorithm):
    settings = {"rounds": 10, "devices_per_round": 10, "learning_rate": 0.1, "attack": "scaling=0.2", "epochs": 2}
    assert fc.train(data=small_data, algorithm=algorithm, **settings).records[-1].accuracy > 0.7


COMBINED = [how for how in COMBINATIONS if how != "mean"]


def estimate(gradients, how, **given):
    """The gradient that a rule sees: with β = 1 and updates along all axes, the step is its opposite."""
    size = gradients.shape[1]
    rule = fc.robust_gradients(fc.contextual(smoothness=1), how)
    return -fc.aggregate(np.zeros(size), list(np.eye(size)), gradients=list(gradients), rule=rule, **given).params


def estimate_from_sums(gradients, how, **given):
    """The same, seen by a rule that works on sums."""
    rule = fc.SumRule(
        "descent", lambda sums, state, population: (-sums.mean_gradient, state, {}), frozenset({"gradient"})
    )
    rule, size = fc.robust_gradients(rule, how), gradients.shape[1]
    return -fc.aggregate(np.zeros(size), list(np.eye(size)), gradients=list(gradients), rule=rule, **given).params


@pytest.mark.parametrize("how", COMBINATIONS)
@given(seed=st.integers(0, 2**32 - 1))
def test_both_kinds_of_rules_combine_gradients_in_the_same_way(how, seed):
    gradients = np.random.default_rng(seed).standard_normal((9, 4))
    both = [f(gradients, how, root_gradient=gradients[0]) for f in (estimate, estimate_from_sums)]
    np.testing.assert_allclose(*both, atol=1e-9)


@pytest.mark.parametrize("how", COMBINED)
@given(case=honest_and_byzantine(most=2))
def test_no_minority_of_probes_leads_the_estimate_out_of_the_honest_gradients(how, case):
    gradients, byzantine = case
    honest = gradients[byzantine:]
    width = max(np.linalg.norm(a - b) for a in honest for b in honest)
    found = estimate(gradients, how, root_gradient=honest.mean(axis=0), defences=None)
    assume(how != "trust" or (gradients[:byzantine] @ honest.mean(axis=0) <= 0).all())  # trust sees directions alone
    assert np.linalg.norm(found - honest.mean(axis=0)) <= 3 * width


@pytest.mark.parametrize("how", COMBINATIONS)
def test_equal_gradients_are_their_own_combination(how):
    gradients = np.tile([1.0, -2.0, 3.0], (7, 1))
    np.testing.assert_allclose(estimate(gradients, how, root_gradient=gradients[0]), gradients[0])


def test_the_median_of_means_needs_only_the_sums_of_its_groups():
    random = np.random.default_rng(0)
    gradients = random.standard_normal((10, 3))
    shifted = gradients.copy()
    shifted[0::2] += 1
    shifted[1::2] -= 1  # groups are pairs of neighbours: their sums stay
    np.testing.assert_allclose(estimate(gradients, "median-of-means"), estimate(shifted, "median-of-means"), atol=1e-12)


def test_trust_counts_probes_by_their_cosine_with_the_servers_gradient():
    gradients = np.array([[2.0, 0.0], [1.0, 1.0], [0.0, 5.0], [-1.0, 0.0]])
    weights = np.array([1, 0.5**0.5, 0, 0]) / (1 + 0.5**0.5)
    found = estimate(gradients, "trust", root_gradient=np.array([7.0, 0.0]), defences=None)
    np.testing.assert_allclose(found, weights @ gradients)


def test_robust_gradients_say_what_they_need():
    with pytest.raises(FedcontextError, match="give root_gradient"):
        estimate(np.ones((3, 2)), "trust")
    with pytest.raises(FedcontextError, match="uses no gradients to combine"):
        fc.robust_gradients(fc.mean(), "median")
    with pytest.raises(FedcontextError, match="gradients must be one of mean, median"):
        fc.robust_gradients(fc.contextual(1), "best")


@pytest.mark.parametrize("how", COMBINATIONS)
@pytest.mark.parametrize("algorithm", ["fedavg-contextual", "fedavg-expected", "fedavg-memory"])
def test_runs_with_robust_gradients_learn(small_data, how, algorithm):
    settings = {"rounds": 8, "devices_per_round": 6, "learning_rate": 0.1, "smoothness": 3.0, "probes": 8, "pool": 2}
    run = fc.train(data=small_data, algorithm=algorithm, gradient_averaging=how, **settings)
    assert run.records[-1].accuracy > 0.6
