"""What contextual aggregation with memory promises, whatever devices send: the claims of docs/guide/concepts.md."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedcontext.measurement.geometry import Geometry
from fedcontext.measurement.sums import Sums
from fedcontext.oracle import lowest_step
from fedcontext.rules.contextual import bound, contextual
from fedcontext.rules.memory import memory_step
from fedcontext.rules.memory_state import MemorySettings

SETTINGS = MemorySettings()
seeds = st.integers(0, 2**32 - 1)


def sums_of(updates, gradients, differences=None):
    sums = Sums(updates.shape[1])
    for update in updates:
        sums.add_update(update)
    for row, gradient in enumerate(gradients):
        sums.add_probe(gradient, None if differences is None else differences[row])
    return sums


def arbitrary_rounds(seed, rounds, cohort_probes, size=5, zeros=False):
    """Updates, gradients and differences that have nothing to do with each other, of very different lengths."""
    random = np.random.default_rng(seed)
    for number in range(rounds):
        devices, probes = random.integers(1 if zeros else 2, 6, 2)
        counts = devices, *(2 * [devices if cohort_probes else probes])
        parts = [random.standard_normal((count, size)) * 10.0 ** random.uniform(-4, 4) for count in counts]
        if zeros:
            masks = random.random((3, size)) < random.choice([0, 0.5, 1], (3, 1), p=[0.1, 0.4, 0.5])
            parts = [part * mask for part, mask in zip(parts, masks, strict=True)]
        yield (*parts[:2], parts[2] if number else None)


@given(seeds, st.booleans())
def test_no_input_makes_a_step_longer_than_its_limits(seed, cohort_probes):
    memory, before, mean_length = None, None, None
    for updates, gradients, differences in arbitrary_rounds(seed, 8, cohort_probes, zeros=True):
        d = updates.mean(axis=0)
        if memory is not None and memory.length > 2e-30:
            d = d * min(1, 3 * memory.length / max(np.linalg.norm(d), 1e-300))
        length = np.linalg.norm(d)
        untried = memory is None or not memory.deviation.any()
        step, memory, info = memory_step(sums_of(updates, gradients, differences), memory, SETTINGS, 9)
        assert np.isfinite(step).all()
        if before is None:
            assert (step == d).all()
            mean_length = length
        else:
            mean_length = 0.9 * mean_length + 0.1 * length
            reference = max(length, mean_length)
            slack = 1 + 1e-9
            reach = min(3 * info["trust"] * reference, max(4 * before, length))
            assert np.linalg.norm(step) <= slack * max(reach, length) + 1e-25
            anchored = min(info["anchor"] * reference, 0.3 * 16 * length if untried else np.inf)
            assert np.linalg.norm(step - d) <= slack * anchored + 1e-25
        assert 0.05 <= info["trust"] <= 100
        assert 0.05 <= info["anchor"] <= 100
        before = np.linalg.norm(step)


class Bowl:
    """N devices whose losses are bowls of the same curvature around minima of their own: the model of the rule is exact."""

    def __init__(self, seed, size=6):
        self.random = np.random.default_rng(seed)
        self.curvature = 10.0 ** self.random.uniform(-2, 2)
        self.centres = self.random.standard_normal((self.random.integers(2, 8), size)) * 10.0 ** self.random.uniform(
            -1, 1
        )

    def loss(self, w):
        return self.curvature / 2 * float(((w - self.centres.mean(axis=0)) ** 2).sum())

    def rounds(self, step, rounds=8):
        """Yield (w, d, step) of rounds in which all devices report exact gradients and some send updates of any quality."""
        w, last = self.random.standard_normal(self.centres.shape[1]), None
        for _ in range(rounds):
            cohort = self.random.choice(
                len(self.centres), self.random.integers(1, len(self.centres) + 1), replace=False
            )
            updates = self.random.uniform(0, 2.5) * (self.centres[cohort] - w)
            updates += self.random.choice([0, 0.3, 1]) * self.random.standard_normal(updates.shape)
            differences = None if last is None else np.tile(self.curvature * (w - last), (len(self.centres), 1))
            taken = step(sums_of(updates, self.curvature * (w - self.centres), differences), len(self.centres))
            yield w, updates.mean(axis=0), taken
            last, w = w, w + taken


def with_memory():
    memory = None

    def step(sums, population):
        nonlocal memory
        taken, memory, _ = memory_step(sums, memory, SETTINGS, population)
        return taken

    return step


@given(seeds)
def test_where_the_model_is_exact_no_step_is_worse_than_fedavgs_and_none_at_all(seed):
    bowl = Bowl(seed)
    for w, d, step in bowl.rounds(with_memory()):
        worse = max(bowl.loss(w), bowl.loss(w + d))
        assert bowl.loss(w + step) <= worse * (1 + 1e-6) + 1e-12


def test_where_the_model_is_exact_the_loss_is_far_below_fedavgs_in_a_few_rounds():
    ratios = []
    for seed in range(20):
        losses = []
        for rule in (with_memory(), lambda sums, population: sums.mean_update):
            bowl = Bowl(seed)
            losses.append([bowl.loss(w + step) for w, _, step in bowl.rounds(rule)][-1])
        ratios.append(losses[0] / losses[1])
    assert np.median(ratios) < 0.2


def steps_of(seed, cohort_probes=False, w_scale=1.0, f_scale=1.0, change=lambda vectors: vectors):
    """The steps of some rounds, with the params measured in another unit, the loss too, and every vector changed."""
    memory, steps = None, []
    for updates, gradients, differences in arbitrary_rounds(seed, 6, cohort_probes):
        parts = change(updates) * w_scale, change(gradients) * f_scale / w_scale
        other = None if differences is None else change(differences) * f_scale / w_scale
        step, memory, _ = memory_step(sums_of(*parts, other), memory, SETTINGS, 9)
        steps.append(step)
    return np.array(steps)


def assert_equal_steps(left, right):
    lengths = np.linalg.norm(left, axis=1, keepdims=True)
    assert (np.abs(left - right) <= 1e-5 * lengths + 1e-25).all()


@given(seeds, st.booleans(), st.integers(-8, 8), st.integers(-8, 8))
def test_steps_do_not_depend_on_the_units_of_params_and_loss(seed, cohort_probes, params, loss):
    units = {"w_scale": 2.0**params, "f_scale": 2.0**loss}
    assert_equal_steps(steps_of(seed, cohort_probes) * 2.0**params, steps_of(seed, cohort_probes, **units))


@given(seeds, st.booleans())
def test_steps_do_not_depend_on_the_order_of_devices_or_the_order_and_signs_of_params(seed, cohort_probes):
    random = np.random.default_rng(seed)
    order, signs = random.permutation(5), random.choice([-1.0, 1.0], 5)
    steps = steps_of(seed, cohort_probes)
    assert_equal_steps(steps, steps_of(seed, cohort_probes, change=lambda vectors: vectors[::-1]))
    turned = steps_of(seed, cohort_probes, change=lambda vectors: (vectors * signs)[:, order])
    assert_equal_steps((steps * signs)[:, order], turned)


@given(seeds, st.integers(1, 4))
def test_the_oracle_is_never_above_the_contextual_bound_on_the_same_directions(seed, count):
    random = np.random.default_rng(seed)
    curvatures, minimum = 10.0 ** random.uniform(-2, 1, 6), random.standard_normal(6)
    directions = random.standard_normal((count, 6))

    def loss(v):
        return float(curvatures @ (v - minimum) ** 2) / 2

    def gradient(v):
        return curvatures * (v - minimum)

    geometry = Geometry(directions @ directions.T, np.ones(count), (directions @ gradient(np.zeros(6)))[None])
    beta = curvatures.max()
    weights, _ = contextual(beta).weigh(geometry, None)
    step = lowest_step(loss, gradient, directions, weights @ directions)
    assert loss(step) <= loss(weights @ directions) + 1e-9
    assert loss(step) <= loss(np.zeros(6)) + bound(geometry, weights, beta) + 1e-9
