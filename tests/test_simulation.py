"""Runs, over the table of all algorithms: fair, repeatable, recorded, and what the paper says of them."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial

import numpy as np
import pytest

import fedcontext as fc
from fedcontext import records
from fedcontext.algorithms import ALGORITHMS, Hyperparameters, contextual_version, fedavg
from fedcontext.arrays.tree import leaves
from fedcontext.engines.base import Work, engine_named
from fedcontext.engines.softmax import SoftmaxReference
from fedcontext.errors import FedcontextError
from fedcontext.experiment import settings_from_toml
from fedcontext.files.toml import to_toml
from fedcontext.local_sgd import LocalSGD
from fedcontext.results.summary import summarise
from fedcontext.rules.server import fedadam, server_sgd
from fedcontext.runner import run, run_all

SMALL = {"rounds": 4, "devices_per_round": 4, "learning_rate": 0.1, "smoothness": 3.0}


@pytest.fixture(params=ALGORITHMS)
def algorithm(request):
    return request.param


def play(data, algorithm, **settings):
    return list(fc.simulate(data=data, algorithm=algorithm, **{**SMALL, **settings}))


class Recorder(SoftmaxReference):
    """An engine that remembers what it was asked to train."""

    def train(self, params, work):
        self.works = [*getattr(self, "works", []), work]
        return super().train(params, work)


def test_the_same_seed_gives_every_algorithm_the_same_devices(small_data, algorithm):
    works = {}
    for name in (algorithm, "fedavg"):
        engine = Recorder(small_data)
        play(small_data, name, probes=3, engine=engine)
        works[name] = engine.works
    for mine, reference in zip(works[algorithm], works["fedavg"], strict=True):
        assert (mine.seed, mine.number) == (
            reference.seed,
            reference.number,
        )  # batches follow from these and the device
        np.testing.assert_array_equal(mine.devices[:4], reference.devices)
        np.testing.assert_array_equal(mine.epochs[:4], reference.epochs)


def test_a_run_repeats_bit_for_bit_and_another_seed_differs(small_data, algorithm):
    one, same, other = (play(small_data, algorithm, seed=seed)[-1][0].params for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_every_algorithm_learns(small_data, algorithm):
    start = SoftmaxReference(small_data)
    before = start.evaluate(start.initial_params())[0]
    history = [record for _, record in play(small_data, algorithm, rounds=8)]
    assert history[-1].loss < 0.9 * before
    assert history[-1].accuracy > 0.6  # three classes


def test_records_survive_the_file(small_data, algorithm, tmp_path):
    experiment = fc.Experiment(algorithm=algorithm, **SMALL)
    with (tmp_path / "run.jsonl").open("w") as file:
        done = list(records.stream_records(experiment, fc.train(experiment, data=small_data).records, file))
    head, read = fc.read_run(tmp_path / "run.jsonl")
    assert head["settings"]["algorithm"] == algorithm
    assert [record.number for record in read] == [1, 2, 3, 4]
    for before, after in zip(done, read, strict=True):
        nan = {name for name, value in vars(before).items() if isinstance(value, float) and np.isnan(value)}
        assert {**vars(before), **dict.fromkeys(nan)} == vars(after)  # JSON has no NaN: it comes back as None


def test_one_full_batch_step_with_its_own_gradients_is_fedavg_exactly(small_data):
    """β = 1/lr and K2 = 0: the projected gradient step is the average of the devices' gradient steps."""
    settings = {"epochs": (1, 1), "batch_size": 10_000, "probes": "cohort", "smoothness": "1/lr", "rounds": 5}
    for averaging in ("mean", "samples"):
        both = {"averaging": averaging, "probe_averaging": averaging}
        contextual = play(small_data, "fedavg-contextual", **settings, **both)[-1][0].params
        plain = play(small_data, "fedavg", **settings, **both)[-1][0].params
        np.testing.assert_allclose(contextual, plain, rtol=1e-4, atol=1e-6)


def test_with_everyones_gradient_and_enough_smoothness_every_round_keeps_its_promise(small_data):
    x = np.hstack([small_data.train.features, np.ones((len(small_data.train.labels), 1))])
    safe = float(np.linalg.eigvalsh(x.T @ x / len(x))[-1]) / 2  # softmax's Hessian is at most half of this
    for _, record in play(small_data, "fedavg-contextual", smoothness=safe, rounds=15):
        assert record.promised_change < 0
        assert record.measured_change <= record.promised_change + 1e-6
        assert record.curvature <= safe * 1.01


def test_the_contextual_version_of_anything_keeps_its_local_work():
    hyperparameters = Hyperparameters(learning_rate=0.1, smoothness=10)
    for make in ALGORITHMS.values():
        original = make(hyperparameters)
        version = contextual_version(original, smoothness=5)
        assert version.local == original.local
        assert version.name == f"{original.name}-contextual"
        assert version.rule.smoothness == 5


@pytest.mark.parametrize("version", [fc.contextual_version, fc.expected_version])
def test_a_version_by_name_is_that_of_the_algorithm_with_the_papers_learning_rate(version):
    for name, make in ALGORITHMS.items():
        made, named = version(make(Hyperparameters(learning_rate=0.2, smoothness=5)), 5), version(name, 5)
        assert (named.name, named.local, named.rule.name) == (made.name, made.local, made.rule.name)
    for wrong in ("fedsgd", None, fedavg):
        with pytest.raises(fc.FedcontextError, match="algorithm must be one of"):
            version(wrong, 5)
    with pytest.raises(fc.FedcontextError, match="smoothness must be positive"):
        version("fedavg", 0)


def test_a_missed_deadline_is_recorded_and_an_empty_round_keeps_the_model(small_data):
    slow = [record for _, record in play(small_data, "fedavg", deadline=0.6, rounds=6, devices_per_round=10)]
    assert any(record.excluded for record in slow)
    assert all(set(record.excluded.values()) <= {"missed the deadline"} for record in slow)
    assert all(record.seconds <= 0.6 for record in slow)
    states = play(small_data, "fedavg-contextual", deadline=1e-6)
    assert all(record.lost and record.weights == [] for _, record in states)
    assert (states[-1][0].params == 0).all()


def test_evaluation_every_nth_round_and_at_the_end(small_data):
    history = [record for _, record in play(small_data, "fedavg", rounds=5, eval_every=2)]
    assert [record.loss is not None for record in history] == [False, True, False, True, True]
    assert [record.measured_change is not None for record in history] == [False, False, False, False, True]


def test_objects_take_the_place_of_names(small_data):
    first = fc.stateless("first", lambda geometry: np.eye(len(geometry.samples))[0])
    mine = fc.Algorithm("mine", LocalSGD(0.1, 10), first)
    for algorithm in (first, mine):
        assert [record.weights for _, record in play(small_data, algorithm)] == [[1, 0, 0, 0]] * 4
    engine = Recorder(small_data)
    assert play(small_data, mine, engine=engine)[-1][0].number == 4
    assert len(engine.works) == 4


@pytest.mark.parametrize("rule", [fc.mean(), fc.contextual(3.0), fc.fedexp()])
@pytest.mark.parametrize("optimizer", [server_sgd(0.5), fedadam(0.2)])
def test_a_server_optimizer_acts_on_the_step_of_any_rule(small_data, rule, optimizer):
    plain = fc.Algorithm("plain", LocalSGD(0.1, 10), rule)
    optimized = dataclasses.replace(plain, server=optimizer)
    start = SoftmaxReference(small_data).initial_params()
    settings = {"rounds": 1, "engine": "reference", "probes": 3}
    ((step, _),), ((moved, record),) = (play(small_data, made, **settings) for made in (plain, optimized))
    expected, state = optimizer.update(step.params - start, optimizer.init(start), start)
    np.testing.assert_allclose(moved.params, start + expected, rtol=1e-5, atol=1e-7)
    assert leaves([moved.server]).keys() == leaves([state]).keys()
    assert record.promised_change is None  # the bound is about the rule's own step


def test_nothing_may_change_the_step_that_a_rule_with_memory_models(small_data):
    changed = dataclasses.replace(fedavg(Hyperparameters(0.1, 10)), rule=fc.contextual_memory(), server=fedadam(0.2))
    for given in ({"algorithm": changed}, {"algorithm": "fedavg-memory", "server_learning_rate": 0.5}):
        with pytest.raises(FedcontextError, match="it models its own step"):
            fc.train(data=small_data, **{**SMALL, **given})


def test_settings_of_local_training_reach_a_rule_object(small_data):
    pytest.importorskip("torch")
    settings = {"engine": "torch", "device": "cpu", "rounds": 1}
    plain, momentum = (play(small_data, fc.mean(), momentum=m, **settings)[0][1].loss for m in (0.0, 0.9))
    assert plain != momentum


@pytest.mark.parametrize(("algorithm", "got"), [(fc.mean, r"a function; call it: mean\(\)"), (3, "3")])
def test_what_is_no_algorithm_is_refused(small_data, algorithm, got):
    with pytest.raises(
        FedcontextError, match=rf"algorithm must be a name, an Algorithm or a rule such as .* got {got}$"
    ):
        fc.train(data=small_data, algorithm=algorithm, **SMALL)


def test_coded_own_gradients_change_the_result_and_the_bytes(small_data):
    exact, coded = (play(small_data, "folb", gradient_bits=bits)[-1][1] for bits in (32, 1))
    assert coded.bytes_up < exact.bytes_up
    assert coded.loss != exact.loss


def test_a_server_learning_rate_scales_the_step_of_any_algorithm(small_data, algorithm):
    if algorithm.endswith("-memory"):
        pytest.skip("refused: the rule models its own step")
    settings = {"rounds": 1, "engine": "reference", "probes": 3, "server_momentum": 0.0}
    rates = [play(small_data, algorithm, server_learning_rate=rate, **settings)[0][0].params for rate in (0.4, 0.8)]
    np.testing.assert_allclose(2 * rates[0], rates[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0.5}, "learning_rate is 0.5 in the settings, but the Algorithm 'fedavg' given has 0.1"),
        ({"batch_size": 3}, "batch_size is 3 in the settings, but the Algorithm 'fedavg' given has 10"),
        ({"momentum": 0.5}, "momentum is 0.5 in the settings, but the Algorithm 'fedavg' given has 0.0"),
        ({"server_learning_rate": 2.0}, "server_learning_rate is 2.0 in the settings, but .* does not use it"),
        ({"averaging": "samples"}, "averaging is samples in the settings, but .* does not use it"),
    ],
)
def test_a_setting_that_an_algorithm_object_overrules_is_refused(small_data, settings, message):
    algorithm = fedavg(Hyperparameters(learning_rate=0.1, smoothness=10))
    with pytest.raises(FedcontextError, match=message):
        fc.simulate(data=small_data, algorithm=algorithm, rounds=1, **settings)
    same = {"learning_rate": 0.1, "batch_size": 10, "momentum": 0}
    assert fc.train(data=small_data, algorithm=algorithm, rounds=1, **same).records[0].smoothness == pytest.approx(10)


def test_a_setting_that_a_rule_does_not_use_is_refused(small_data):
    with pytest.raises(FedcontextError, match=r"mu is 0\.7 in the settings, but the rule 'mean' given does not use it"):
        fc.simulate(data=small_data, algorithm=fc.mean(), rounds=1, mu=0.7)
    with pytest.raises(
        FedcontextError, match="gradient_averaging is median in the settings, but the rule 'contextual'"
    ):
        fc.simulate(data=small_data, algorithm=fc.contextual(10), rounds=1, gradient_averaging="median")
    fc.train(data=small_data, algorithm=fc.mean(), rounds=1, learning_rate=0.5, batch_size=3, server_learning_rate=2.0)


def test_an_engine_that_cannot_train_the_model_given_is_refused(small_data):
    nn = pytest.importorskip("torch").nn
    with pytest.raises(FedcontextError, match="engine 'numba' cannot train a PyTorch module; use engine 'torch'"):
        fc.simulate(data=small_data, model=nn.Linear(5, 3), engine="numba", rounds=1)
    with pytest.raises(FedcontextError, match=r"engine 'nummba' is unknown, did you mean numba\?"):
        fc.simulate(data=small_data, model=nn.Linear(5, 3), engine="nummba", rounds=1)
    with pytest.raises(FedcontextError, match="engine 'ray' cannot train a PyTorch module; use engine 'torch'"):
        fc.prepare(fc.Experiment("small", engine="ray"), data=small_data, model=nn.Linear(5, 3))
    with pytest.raises(FedcontextError, match="give an engine or a model, not both"):
        fc.simulate(data=small_data, model=nn.Linear(5, 3), engine=SoftmaxReference(small_data), rounds=1)
    assert fc.train(data=small_data, model=nn.Linear(5, 3), engine="torch", algorithm="fedavg", rounds=1).records


def test_averaging_without_effect_is_warned_about(small_data):
    with pytest.warns(UserWarning, match="averaging has no effect on rule 'contextual memory'"):
        fc.prepare(fc.Experiment("small", averaging="samples", devices_per_round=4), data=small_data)


def test_a_server_step_that_overflows_is_refused(small_data):
    with pytest.raises(FedcontextError, match="lower the server learning rate"):
        play(small_data, "fedavg", server_learning_rate=1e39)


def test_batch_statistics_are_averaged_whatever_the_server_optimizer(small_data):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    settings = {"model": model, "rounds": 1, "batch_size": 25}
    plain, adam = (play(small_data, name, **settings)[0][0].params for name in ("fedavg", "fedadam"))
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(plain[name], adam[name])
    assert not torch.equal(plain["2.weight"], adam["2.weight"])


def test_my_torch_module_trains_in_one_line(small_data):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    result = fc.train(data=small_data, model=model, algorithm="fedavg-memory", probes=3, **{**SMALL, "rounds": 6})
    assert list(result.params) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert result.records[-1].loss < result.records[0].loss


def test_settings_have_one_form_however_they_are_given():
    assert fc.Experiment(epochs=5).epochs == fc.Experiment(epochs="5").epochs == (5, 5)
    assert fc.Experiment(epochs="1..20") == fc.Experiment(epochs=[1, 20]) == fc.Experiment()
    assert fc.Experiment(mu=1).name == fc.Experiment(mu=1.0).name
    assert fc.Experiment(smoothness="3").name == fc.Experiment(smoothness=3.0).name
    assert fc.Experiment(probes="5").probes == 5


def test_rises_are_counted_between_evaluated_rounds():
    losses = [2.0, None, 2.5, None, 1.0]
    run = [
        fc.RoundRecord(n, loss, loss and 0.5, [], [], None, None, None, None, None, 1.0, 1, 1)
        for n, loss in enumerate(losses, 1)
    ]
    assert summarise(run).rises == 0.5


def test_summary_counts_what_it_says():
    def record(number, loss, accuracy, change):
        return fc.RoundRecord(number, loss, accuracy, [], [], None, change, None, None, None, 2.0, 10, 20)

    run = [
        record(1, 2.0, 0.4, -0.5),
        record(2, None, None, None),
        record(3, 1.0, 0.75, 0.1),
        record(4, 1.2, 0.65, 0.2),
    ]
    summary = summarise(run)
    assert (summary.loss, summary.accuracy) == (1.2, 0.65)
    assert summary.rounds_to == {0.5: 3, 0.6: 3, 0.7: 3, 0.8: None}
    assert summary.rises == pytest.approx(1 / 3)
    assert summary.swing == pytest.approx(np.std([0.4, 0.75, 0.65]))
    assert (summary.seconds, summary.bytes_down, summary.bytes_up) == (8.0, 40, 80)


def test_toml_repeats_an_experiment(tmp_path):
    experiment = fc.Experiment(dataset='leaf:a "b" \\c', probes=5, epochs=(2, 3), smoothness=2.5, deadline=1.5)
    (tmp_path / "run.toml").write_text(to_toml(dataclasses.asdict(experiment)))
    assert fc.Experiment(**settings_from_toml(tmp_path / "run.toml")) == experiment
    assert fc.Experiment().name != experiment.name != fc.Experiment(seed=1).name


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "fedsgd"},
        {"rounds": -1},
        {"rounds": 0},
        {"learning_rate": 0},
        {"mu": "much"},
        {"over_select": float("inf")},
        {"epochs": (1, 2, 3)},
        {"epochs": (1.5, 3)},
        {"epochs": "1-20"},
        {"dataset": 5},
        {"fleet": ["edge"]},
        {"seed": -1},
        {"seed": 1.5},
        {"probes": -2},
        {"probes": "N"},
        {"averaging": "median"},
        {"probe_averaging": "median"},
        {"learning_rate": -0.1},
        {"deadline": -1},
        {"eval_every": 0},
        {"batch_size": 0},
        {"devices_per_round": 0},
    ],
)
def test_impossible_experiments_are_refused_at_once(settings):
    with pytest.raises(FedcontextError, match=next(iter(settings))):
        fc.Experiment(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"smoothness": "steep"}, "smoothness must be"),
        ({"smoothness": -1.0}, "smoothness must be a positive number"),
        ({"fleet": "fast"}, "fleet must be even or edge"),
        ({"engine": "warp"}, "engine must be one of"),
        ({"mu": -1.0, "algorithm": "fedprox"}, "mu must be a number of at least 0"),
        ({"devices_per_round": 13}, "devices_per_round must be between 1 and 12"),
    ],
)
def test_impossible_settings_are_refused_before_the_first_round(small_data, settings, message):
    with pytest.raises(FedcontextError, match=message):
        list(fc.simulate(data=small_data, **{**SMALL, **settings}))


def test_data_must_be_data_and_has_its_own_name(small_data):
    with pytest.raises(FedcontextError, match="data must be FederatedData, such as federate\\(\\) makes, got int"):
        fc.train(data=1)
    with pytest.raises(FedcontextError, match="give data or a dataset, not both: data is 'small', got 'mnist'"):
        fc.train(data=small_data, dataset="mnist")
    assert fc.train(data=small_data, dataset="small", **{**SMALL, "rounds": 1}).records


def test_of_fewer_devices_than_train_by_default_all_do_and_more_are_refused_by_the_settings_name():
    data = fc.federate(np.eye(20), np.arange(20) % 2, [np.arange(10), np.arange(10, 20)])
    assert sorted(fc.train(data=data, rounds=1).records[0].devices) == [0, 1]
    with pytest.raises(FedcontextError, match=r"^devices_per_round must be between 1 and 2 \(all devices\), got 10"):
        fc.train(data=data, devices_per_round=10)


def test_an_interrupted_repetition_leaves_the_complete_record(tmp_path):
    experiment = fc.Experiment(algorithm="fedavg", engine="reference", **SMALL)
    complete = [record.loss for record in run(experiment, tmp_path)]

    def interrupt(experiment, record):
        if record.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path, interrupt)
    assert [record.loss for record in fc.read_run(tmp_path / f"{experiment.name}.jsonl")[1]] == complete
    assert [record.loss for record in run(experiment, tmp_path)] == complete
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl", ".toml"]


def test_an_own_rule_with_a_name_has_records_of_its_own_and_resumes(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    own = fc.stateless("halves", lambda geometry: np.full(len(geometry.samples), 0.5 / len(geometry.samples)))
    recipe = lambda h: dataclasses.replace(fedavg(h), name="halves", rule=own)  # noqa: E731
    monkeypatch.setitem(ALGORITHMS, "halves", recipe)
    experiment = fc.Experiment("synthetic-iid", "halves", rounds=3)
    run(dataclasses.replace(experiment, rounds=2), tmp_path, resume=True)
    continued = run(experiment, tmp_path, resume=True)
    assert continued == fc.train(dataset="synthetic-iid", algorithm=own, rounds=3).records
    assert fc.read_run(tmp_path / f"{experiment.name}.jsonl")[0]["settings"]["algorithm"] == "halves"


def test_a_run_that_fails_leaves_the_rounds_that_were_done_and_no_file_without_any(tmp_path, monkeypatch):
    experiment = fc.Experiment(algorithm="fedavg", engine="reference", **SMALL)
    path, real = tmp_path / f"{experiment.name}.jsonl", fc.Simulation.step
    for done in (0, 2):

        def step(simulation, state, last=done):
            if state.number == last:
                raise FedcontextError("out of luck")
            return real(simulation, state)

        monkeypatch.setattr(fc.Simulation, "step", step)
        with pytest.raises(FedcontextError, match="out of luck"):
            run(experiment, tmp_path)
        assert path.exists() == (done > 0)
    assert [record.number for record in fc.read_run(path)[1]] == [1, 2]


@pytest.mark.parametrize("engine", ["reference", "numba"])
@pytest.mark.parametrize("rate", [1e38, 1e300])
def test_a_run_that_diverges_ends_with_one_error_and_no_warnings(algorithm, engine, rate):
    settings = {**SMALL, "learning_rate": rate, "smoothness": "1/lr"}
    with warnings.catch_warnings(action="error"), pytest.raises(FedcontextError, match=r"NaN or infinite|too l"):
        list(fc.simulate(algorithm=algorithm, engine=engine, **settings))


DIVERGED = (
    "devices 13, 6, 7 and 3 more: the loss turned NaN or infinite in local training, and nothing was aggregated; "
    "lower the learning rate (10000.0) or clip gradients (engine 'torch')"
)


@pytest.mark.parametrize("engine", ["reference", "numba", "torch"])
def test_every_engine_names_the_devices_whose_training_diverged_and_the_learning_rate(engine):
    pytest.importorskip({"numba": "numba", "torch": "torch"}.get(engine, "numpy"))
    with pytest.raises(FedcontextError) as caught:
        list(fc.simulate(algorithm="folb", engine=engine, epochs=(1, 2), learning_rate=1e4, rounds=1))
    assert str(caught.value) == DIVERGED


@pytest.mark.parametrize("unknown", [-1, 12, 99])
@pytest.mark.parametrize("engine", ["reference", "numba", "torch"])
def test_every_engine_refuses_a_device_that_is_not_there(small_data, engine, unknown):
    pytest.importorskip({"numba": "numba", "torch": "torch"}.get(engine, "numpy"))
    made, devices = engine_named(engine, small_data), np.array([3, unknown, 5])
    params, work = made.initial_params(), Work(0, 1, devices, np.ones(3, int), LocalSGD(0.1, 10))
    asks = (
        lambda: made.train(params, work),
        lambda: made.gradients(params, devices),
        lambda: made.gradient(params, devices, np.full(3, 1 / 3)),
    )
    for ask in asks:
        with pytest.raises(FedcontextError, match=f"device must be from 0 to 11, got {unknown}"):
            ask()


@pytest.mark.parametrize("engine", ["reference", "numba", "torch"])
def test_every_engine_refuses_params_of_another_model_and_trains_nobody_for_nobody(small_data, engine):
    pytest.importorskip({"numba": "numba", "torch": "torch"}.get(engine, "numpy"))
    made, nobody = engine_named(engine, small_data), np.zeros(0, int)
    assert made.train(made.initial_params(), Work(0, 1, nobody, nobody, LocalSGD(0.1, 10))) == []
    other, two = np.zeros((3, 3)), np.arange(2)
    for ask in (
        lambda: made.train(other, Work(0, 1, two, np.ones(2, int), LocalSGD(0.1, 10))),
        lambda: made.gradients(other, two),
        lambda: made.gradient(other, np.arange(12), np.full(12, 1 / 12)),
        lambda: made.evaluate(other),
    ):
        with pytest.raises(FedcontextError, match="params must"):
            ask()


def test_pool_devices_that_diverge_are_named_too(small_data):
    class Diverging(SoftmaxReference):
        def train(self, params, work):
            return [
                np.full_like(move, np.inf if row > 3 else 0) for row, move in enumerate(super().train(params, work))
            ]

    experiment = fc.Experiment(algorithm="fedavg-expected", **{**SMALL, "pool": 2})
    with pytest.raises(FedcontextError, match=r"^devices \d+ and \d+: the loss turned NaN .*learning rate \(0\.1\)"):
        fc.train(experiment, data=small_data, engine=Diverging(small_data))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e36])
@pytest.mark.parametrize("settings", [{}, {"probes": "cohort"}, {"algorithm": "fedavg-contextual", "sketch": 64}])
def test_a_device_whose_gradients_no_code_can_hold_is_excluded_by_name(small_data, settings, value):
    class Broken(SoftmaxReference):
        def gradients(self, params, devices):
            found = super().gradients(params, devices)
            return [np.full_like(g, value) if device == 3 else g for device, g in zip(devices, found, strict=True)]

    experiment = fc.Experiment("small", **{**SMALL, "devices_per_round": 12, **settings})
    for record in fc.train(experiment, data=small_data, engine=Broken(small_data)).records:
        assert list(record.excluded) == [3]
        assert "gradient" in record.excluded[3]
        assert np.isfinite(record.loss)


def test_a_number_in_place_of_a_state_is_refused(small_data):
    with pytest.raises(FedcontextError, match="state must be that of a round, or None, got 3; the number of rounds is"):
        next(fc.prepare(fc.Experiment("small", **SMALL), data=small_data).run(3))


def test_a_truncated_last_line_is_skipped_and_other_files_are_refused(small_data, tmp_path):
    experiment = fc.Experiment(**SMALL)
    path = tmp_path / "run.jsonl"
    with path.open("w") as file:
        done = list(records.stream_records(experiment, fc.train(experiment, data=small_data).records, file))
    assert fc.read_run(path)[1] == done
    text = path.read_text()
    path.write_text(text[:-30])
    assert fc.read_run(path)[1] == done[:-1]
    for bad in ("", "{}\n", "[1]\n", '{"schema": 99}\n', "not json\n"):
        path.write_text(bad)
        with pytest.raises(FedcontextError, match=r"run\.jsonl"):
            fc.read_run(path)


@pytest.mark.parametrize(
    "start",
    [
        lambda out: fc.prepare("mnist"),
        lambda out: fc.train("mnist"),
        lambda out: run("mnist", out),
        lambda out: run_all(["mnist"], out, jobs=1),
    ],
)
def test_a_name_in_place_of_an_experiment_is_refused(start, tmp_path):
    with pytest.raises(FedcontextError, match=r"must be an Experiment, such as fc\.Experiment\(.*\), got 'mnist'"):
        start(tmp_path)
    assert not list(tmp_path.iterdir())


def test_arrays_in_place_of_data_are_refused_also_by_runs_into_files(tmp_path):
    with pytest.raises(FedcontextError, match="data must be FederatedData, such as federate"):
        run(fc.Experiment("mine"), tmp_path, data=np.eye(3))


def test_data_without_test_samples_are_announced_at_the_users_line(tmp_path):
    data = fc.federate(np.eye(8), np.arange(8) % 2, [np.arange(4), np.arange(4, 8)], test_share=0)
    experiment = fc.Experiment("custom", rounds=1, devices_per_round=2)
    for start in (fc.prepare, fc.train, partial(run, out=tmp_path)):
        with pytest.warns(
            UserWarning, match="data 'custom' has no test samples: records have an accuracy of 0"
        ) as seen:
            start(experiment, data=data)
        assert {warning.filename for warning in seen} == {__file__}  # the user's line, not one of ours
