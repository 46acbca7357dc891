"""The diagnosis of runs: silent about healthy ones, with advice that helps about the others."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedcontext as fc
from commands import call
from fedcontext.records import RoundRecord
from fedcontext.report.page_data import page_data
from fedcontext.results.diagnosis import Monitor
from fedcontext.results.reader import COSTS, METRICS, coerce_row, read_runs

SLOW = ["--dataset", "synthetic-iid", "--algorithm", "fedavg-contextual", "--rounds", "6", "--epochs", "1..2"]


def found(experiment: fc.Experiment) -> set[str]:
    """All that is found in a run, at its end or before."""
    monitor = Monitor(vars(experiment))
    return {finding.what for record in fc.train(experiment).records for finding in monitor.add(record)}


@pytest.mark.parametrize(
    "dataset",
    [
        "synthetic-1-1",
        "synthetic-iid",
        pytest.param("mnist", marks=pytest.mark.data("mnist")),
        pytest.param("femnist", marks=pytest.mark.data("femnist")),
    ],
)
@pytest.mark.parametrize("algorithm", ["fedavg-memory", "fedavg"])
def test_nothing_is_found_in_a_healthy_run(dataset, algorithm):
    assert found(fc.Experiment(dataset, algorithm, rounds=14)) == set()


@pytest.fixture
def one_thread():
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_printed_rule_on_a_network_is_diagnosed_and_the_default_is_not(one_thread):
    network = {"model": "mlp", "rounds": 11, "epochs": 1}
    assert "the steps are too short" in found(fc.presets.paper("synthetic-1-1", **network))
    assert found(fc.Experiment("synthetic-1-1", **network)) == set()


def test_the_advice_on_the_smoothness_helps():
    settings = {"dataset": "synthetic-iid", "algorithm": "fedavg-contextual", "rounds": 12, "epochs": (1, 5)}
    before = fc.train(**settings).records
    (finding,) = fc.diagnose(before, settings)
    smoothness = float(re.search(r"set smoothness to ([\d.]+)", finding.advice)[1])
    after = fc.train(**settings, smoothness=smoothness).records
    assert before[-1].smoothness > 20 * smoothness
    assert fc.diagnose(after, settings) == []
    falls = [records[0].loss - records[-1].loss for records in (before, after)]
    assert falls[1] > 10 * falls[0]


@pytest.mark.parametrize(
    ("settings", "what", "advice"),
    [
        ({"deadline": 0.5}, "most replies are not used", "set deadline to 0 (now 0.5), and then to the seconds"),
        ({"deadline": 0.5, "faults": "dropout=0.1"}, "most replies are not used", "set deadline to 0 (now 0.5)"),
        (
            {"algorithm": "fedavg", "learning_rate": 1e-6},
            "the loss hardly falls",
            "set learning_rate to 0.01 (now 1e-06)",
        ),
        (
            {"algorithm": "fedavg", "server_learning_rate": 1e-6},
            "the loss hardly falls",
            "set server_learning_rate to default (now 1e-06)",
        ),
        ({"algorithm": "fedavg", "learning_rate": 2.0}, "the loss rises", "set learning_rate to 0.01 (now 2)"),
        (
            {"algorithm": "fedavg-contextual", "smoothness": 0.02, "probes": "all"},
            "the loss is unstable",
            "set smoothness to",
        ),
    ],
)
def test_a_setting_that_is_far_off_is_named(settings, what, advice):
    experiment = fc.Experiment(rounds=15, epochs=(1, 4), **settings)
    findings = fc.diagnose(fc.train(experiment).records, vars(experiment))
    assert {finding.what: finding.advice.startswith(advice) for finding in findings}[what]


def test_all_findings_of_a_run_give_the_same_advice_on_a_setting_that_is_far_off():
    experiment = fc.Experiment(learning_rate=1000, rounds=12)
    monitor = Monitor(vars(experiment))
    findings = [finding for record in fc.train(experiment).records for finding in monitor.add(record)]
    assert {finding.what for finding in findings} >= {"the loss exploded", "the loss rises"}
    assert {finding.advice for finding in findings} == {"set learning_rate to 0.01 (now 1000)"}


def test_the_advice_on_the_deadline_helps():
    waiting = fc.train(rounds=10, deadline=0).records
    experiment = fc.Experiment(rounds=10, deadline=median(record.seconds for record in waiting))
    assert fc.diagnose(fc.train(experiment).records, vars(experiment)) == []


@pytest.mark.parametrize(
    ("settings", "what", "advice"),
    [
        (
            {"attack": "sign-flip=0.5,scaling=0.6", "max_uphill": 0},
            "the loss exploded",
            "try it without attack (now sign-flip=0.5,scaling=0.6) first",
        ),
        ({"faults": "dropout=1"}, "most replies are not used", "try it without faults (now dropout=1) first"),
        (
            {"attack": "sign-flip=0.5,scaling=0.6", "faults": "dropout=0.1", "max_uphill": 0},
            "updates and gradients contradict each other",
            "try it without attack (now sign-flip=0.5,scaling=0.6) and faults (now dropout=0.1) first",
        ),
        (
            {"attack": "sign-flip=0.1", "learning_rate": 1e9},
            "the loss exploded",
            "set learning_rate to 0.01 (now 1e+09)",
        ),
    ],
)
def test_what_a_simulation_was_asked_to_do_to_devices_is_named_as_a_cause(settings, what, advice):
    experiment = fc.Experiment(rounds=5, epochs=(1, 4), **settings)
    findings = fc.diagnose(fc.train(experiment).records, vars(experiment))
    assert {finding.what: finding.advice for finding in findings}[what] == advice


def test_a_short_run_that_loses_every_round_is_diagnosed():
    assert "most replies are not used" in found(fc.Experiment(rounds=3, faults="dropout=1"))
    assert found(fc.Experiment(rounds=1, faults="dropout=1")) == set()


def test_a_learning_rate_far_too_large_is_named_within_three_rounds(tmp_path):
    given_ = ["--dataset", "synthetic-1-1", "--learning-rate", "1e9", "--rounds", "3", "--out", str(tmp_path)]
    done = call("run", *given_)
    assert "round 1: the loss exploded" in done.stderr
    assert done.stdout.count("the loss exploded") == 1
    assert "set learning_rate to 0.01 (now 1e+09)" in done.stdout.replace("\n", " ")


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 2301.0])
def test_a_loss_that_is_not_finite_or_huge_is_a_finding_after_one_round(loss):
    records = [RoundRecord(1, loss=2.3), RoundRecord(2, loss=loss)]
    assert [finding.what for finding in fc.diagnose(records)] == ["the loss exploded"]
    assert fc.diagnose([*records, RoundRecord(3, loss=2.0)]) == []


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"algorithm": "fedadam", "server_learning_rate": 1e6}, "set server_learning_rate to 0.1 (now 1e+06)"),
        (
            {"algorithm": "fedyogi", "learning_rate": 1.5, "server_learning_rate": 1e5},
            "set server_learning_rate to 0.1 (now 100000)",
        ),
        (
            {"algorithm": "fedavg", "learning_rate": 0.5, "server_learning_rate": 50},
            "set server_learning_rate to default (now 50)",
        ),
        ({"algorithm": "fedavg", "learning_rate": 1e9}, "set learning_rate to 0.01 (now 1e+09)"),
        ({"algorithm": "fedavg-contextual", "smoothness": 1e-6}, "set smoothness to measured (now 1e-06)"),
        ({"algorithm": "fedavg-expected", "smoothness": 1e-6}, "set smoothness to measured (now 1e-06)"),
    ],
)
def test_of_a_loss_that_exploded_the_setting_furthest_off_is_named_and_its_usual_value_helps(settings, advice):
    experiment = fc.Experiment(rounds=5, epochs=1, **settings)
    (finding,) = fc.diagnose(fc.train(experiment).records, vars(experiment))
    assert (finding.what, finding.advice) == ("the loss exploded", advice)
    _, name, _, value, *_ = advice.split()
    assert fc.diagnose(fc.train(fc.Experiment(**{**vars(experiment), name: value})).records) == []


def losses(*values):
    return [RoundRecord(number, loss=loss) for number, loss in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("rate", "advice"), [(0.002, "set learning_rate to 0.02"), (1e-5, "set learning_rate to 0.01")]
)
def test_a_learning_rate_that_is_a_little_small_is_raised_tenfold_and_one_far_off_to_the_usual_value(rate, advice):
    (finding,) = fc.diagnose(losses(*[2.3] * 12), {"learning_rate": rate})
    assert finding.advice.startswith(advice)


@pytest.mark.parametrize(
    ("rate", "advice"),
    [
        (0.1, "try it without attack (now scaling=0.6) first"),
        (0.3, "try it without attack (now scaling=0.6) first"),
        (1.0, "set learning_rate to 0.01 (now 1)"),
    ],
)
def test_an_attack_is_named_before_a_learning_rate_that_is_only_a_little_large(rate, advice):
    (finding,) = fc.diagnose(losses(2.3, math.nan), {"learning_rate": rate, "attack": "scaling=0.6"})
    assert finding.advice == advice


def test_a_negative_loss_does_not_hide_one_that_is_not_finite():
    (finding,) = fc.diagnose(losses(-1.0, math.nan))
    assert str(finding).startswith("the loss exploded: it was -1 at first and is nan now")
    assert str(*fc.diagnose(losses(math.nan))).startswith("the loss exploded: it is nan now")
    assert fc.diagnose(losses(0.001, -5.0, 2.0)) == []


@given(st.lists(st.floats(0.1, 10), min_size=11, max_size=30), st.lists(st.integers(0, 29), max_size=5))
def test_an_earlier_loss_that_is_not_finite_changes_no_finding(finite, places):
    given_ = finite[:-1]
    for place in places:
        given_.insert(place, math.nan)
    with_gaps = [RoundRecord(n, loss=loss) for n, loss in enumerate([*given_, finite[-1]], 1)]
    without = [replace(record, loss=record.loss if math.isfinite(record.loss) else None) for record in with_gaps]
    assert fc.diagnose(with_gaps) == fc.diagnose(without)


@given(st.integers(1, 400), st.sampled_from([math.nan, math.inf, 1e9]))
def test_a_loss_that_exploded_is_reported_in_that_round_and_once(count, loss):
    monitor = Monitor(records=losses(*[2.3] * count))
    found = [[finding.what for finding in monitor.add(RoundRecord(count + n, loss=loss))] for n in (1, 2, 3)]
    assert ["the loss exploded" in each for each in found] == [True, False, False]


def loop(sign=1.0, gradients=1.0, updates=1.0, rounds=12, rule=None):
    """Records of a hand-written loop on quadratics whose parts can be wrong by a factor."""
    random = np.random.default_rng(0)
    targets, w, rule = random.normal(size=(6, 4)), np.zeros(4), rule or fc.contextual(2)
    for number in range(1, rounds + 1):
        result = fc.aggregate(
            w,
            [sign * updates * 0.5 * (target - w) for target in targets],
            gradients=[gradients * (w - target) for target in targets],
            rule=rule,
        )
        w = result.params
        yield RoundRecord(number, smoothness=2.0, promised_change=result.promised_change, **vars(result.motion))


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({}, None),
        ({"sign": -1.0}, "updates and gradients contradict each other"),
        ({"gradients": 0.0}, "the gradients are zero"),
        ({"updates": 0.0}, "the devices do not train"),
    ],
)
def test_a_loop_with_a_mistake_is_told_which(wrong, what):
    assert [finding.what for finding in fc.diagnose(list(loop(**wrong)))] == ([what] if what else [])


numbers = st.none() | st.floats()
NUMBERS = (*METRICS, *COSTS)
rounds = st.lists(
    st.fixed_dictionaries(
        dict.fromkeys(NUMBERS, numbers)
        | {"excluded": st.dictionaries(st.integers(0, 9), st.text(max_size=9)), "lost": st.booleans()}
    ),
    max_size=15,
)
settings = st.dictionaries(
    st.sampled_from(
        ["deadline", "learning_rate", "server_learning_rate", "algorithm", "smoothness", "attack", "faults"]
    ),
    st.none()
    | st.floats()
    | st.text()
    | st.booleans()
    | st.lists(st.integers())
    | st.sampled_from(["fedadam", "x-contextual"]),
)


@given(rounds, settings)
def test_any_file_has_a_diagnosis(given_rounds, given_settings):
    rows = [coerce_row(row, number) for number, row in enumerate(given_rounds, 1)]
    assert all(str(finding) for finding in fc.diagnose([RoundRecord(**row) for row in rows], given_settings))


@pytest.mark.parametrize("name", ["learning_rate", "server_learning_rate", "smoothness"])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedadam", "fedavg-contextual"])
def test_a_setting_beyond_all_floats_is_not_in_the_way(name, algorithm):
    (finding,) = fc.diagnose(losses(2.3, math.nan), {"algorithm": algorithm, name: 10**400})
    assert finding.what == "the loss exploded"


@given(st.lists(st.floats(0.1, 10), min_size=11, max_size=30), st.floats(1e-3, 1e3))
def test_findings_about_the_loss_do_not_depend_on_its_unit(losses, unit):
    runs = [
        [RoundRecord(n, loss=scale * loss) for n, loss in enumerate(losses, 1)]
        for scale in (1, 2.0 ** round(np.log2(unit)))
    ]
    assert [f.what for f in fc.diagnose(runs[0])] == [f.what for f in fc.diagnose(runs[1])]


@given(st.floats(0, 0.99), st.integers(11, 40))
def test_a_loss_that_falls_steadily_by_a_hundredth_a_round_is_fine(factor, count):
    losses = 3 * min(factor, 0.99) ** np.arange(count)
    assert fc.diagnose([RoundRecord(n, loss=loss) for n, loss in enumerate(losses.tolist(), 1)]) == []


def test_a_good_model_that_has_nothing_left_to_learn_is_fine():
    records = [RoundRecord(n, loss=0.1, accuracy=0.95) for n in range(1, 30)]
    assert fc.diagnose(records) == []
    assert fc.diagnose([replace(record, accuracy=0.1) for record in records]) != []


def test_the_command_line_says_it_once_while_running_and_once_at_the_end(tmp_path):
    done = call("run", *SLOW, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the steps are too short") == 1
    assert "round 5: the steps are too short" in done.stderr
    assert done.stdout.count("fedavg-contextual: the steps are too short") == 1
    (run,) = page_data(*read_runs([tmp_path]))["datasets"]
    assert [text.split(":")[1] for text in run["findings"]] == [" the steps are too short"]


def test_json_has_the_findings_and_quiet_is_quiet(tmp_path):
    done = call("run", *SLOW, "--out", tmp_path, "--json", "--quiet")
    assert [text.split(":")[0] for text in json.loads(done.stdout)["findings"]] == ["the steps are too short"]
    assert done.stderr == ""


def test_a_comparison_names_the_seeds(tmp_path):
    options = ["--algorithms", "fedavg,fedavg-contextual", "--seeds", "0,1", "--jobs", "1", "--out", str(tmp_path)]
    command = ["compare", *SLOW[:2], *SLOW[4:], *options]
    done = call(*command)
    assert done.stderr.count("the steps are too short") == 1
    (line,) = (line for line in done.stdout.splitlines() if "the steps are too short" in line)
    assert line.startswith("fedavg-contextual: ")
    assert line.endswith("(seeds 0, 1)")
