"""The strategy on a grid in memory: it is the simulator, whatever order nodes and replies come in."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fedcontext_app import task
from flower_grid import MemoryGrid
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.serverapp import strategy as stock
from flwr.serverapp.strategy import FedAvg, FedProx, Result

import fedcontext as fc
from fedcontext.algorithms import ALGORITHMS
from fedcontext.flower import ContextualStrategy, contextual_fedavg, numpy_client
from fedcontext.flower.messages import plan_tasks
from fedcontext.flower.protocol import arrays_of, record_of
from fedcontext.plan import plan_round
from fedcontext.rules import server

SETTINGS = {
    "dataset": "synthetic-1-1",
    "algorithm": "fedavg-contextual",
    "batch-size": 10,
    "learning-rate": 0.05,
    "smoothness": 0.0,
    "mu": 0.1,
    "seed": 3,
}
APP = numpy_client(task.train, task.gradient, task.evaluate)
STEADY = numpy_client(lambda p, config, context: task.train(p, {**config, "local-epochs": 1}, context), task.gradient)


SIMULATED_ONLY = {  # need state or steps of devices, or samples on the server
    *("scaffold", "feddyn", "fednova", "oracle-span", "oracle-memory", "fltrust"),
}
IN_FLOWER = [name for name in ALGORITHMS if name not in SIMULATED_ONLY]


def federation(shuffle: int = 0, algorithm: str = "fedavg-contextual", rounds: int = 3, **settings) -> Result:
    config = {**SETTINGS, "algorithm": algorithm}
    grid = MemoryGrid(APP, range(30), config, shuffle=shuffle)
    inner = FedAvg(fraction_train=1 / 3, fraction_evaluate=0.0)
    chosen = task.algorithm(config)
    strategy = ContextualStrategy(inner, chosen.rule, seed=3, epochs=(1, 3), server=chosen.server, **settings)
    return strategy.start(grid, record_of(task.initial_params(config)), num_rounds=rounds)


def simulation(algorithm: str, probes: int | str) -> np.ndarray:
    settings = {
        "devices_per_round": 10,
        "rounds": 3,
        "seed": 3,
        "epochs": (1, 3),
        "learning_rate": 0.05,
        "engine": "reference",
    }
    experiment = fc.Experiment(algorithm=algorithm, probes=probes, gradient_bits=32, **settings)
    return [state for state, _ in fc.prepare(experiment).run()][-1].params


@pytest.mark.parametrize("algorithm", IN_FLOWER)
@pytest.mark.parametrize("probes", ["cohort", "all", 5])
def test_a_federation_gives_the_simulators_model(algorithm: str, probes: str | int) -> None:
    result = federation(algorithm=algorithm, probes=probes, gradient_bits=32).arrays
    np.testing.assert_allclose(arrays_of(result)["softmax"], simulation(algorithm, probes), rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("probes", ["cohort", "all", 5])
def test_the_order_of_nodes_and_replies_changes_no_bit(probes: str | int) -> None:
    first, second = (arrays_of(federation(shuffle, probes=probes).arrays)["softmax"] for shuffle in (1, 2))
    assert first.tobytes() == second.tobytes()


def test_a_round_is_one_exchange_with_one_message_a_device() -> None:
    grid = MemoryGrid(APP, range(12), SETTINGS)
    inner = FedAvg(fraction_train=0.34, fraction_evaluate=0.0)
    strategy = ContextualStrategy(inner, fc.contextual(20), probes="all", epochs=(1, 1))
    strategy.start(grid, record_of(task.initial_params(SETTINGS)), num_rounds=2)
    whoami, *rounds = grid.sent
    assert {message.metadata.message_type for message in whoami} == {"query.whoami"}
    assert len(rounds) == 2
    for messages in rounds:
        assert sorted(m.metadata.message_type for m in messages) == ["query.gradient"] * 8 + ["train"] * 4
        assert len({message.metadata.dst_node_id for message in messages}) == 12


def test_a_number_of_probes_is_drawn_as_in_the_simulator() -> None:
    both = 0
    for number in range(1, 30):
        tasks = plan_tasks(0, number, range(20), 6, {"gradient"}, probes=7)
        plan = plan_round(0, number, 20, devices_per_round=6, probes=7)
        assert [task.device for task in tasks if task.group == "cohort"] == plan.devices.tolist()
        assert {task.device for task in tasks if task.probe} == set(plan.probes.tolist())
        assert len({task.device for task in tasks}) == len(tasks)
        both += sum(task.probe for task in tasks if task.group == "cohort")
    assert both, "a device can be in the cohort and a probe"


def test_a_device_in_the_cohort_and_a_probe_gets_one_message_that_requests_both() -> None:
    grid = MemoryGrid(APP, range(6), SETTINGS)
    strategy = ContextualStrategy(FedAvg(fraction_train=0.5, fraction_evaluate=0.0), fc.contextual(20), probes=5)
    messages = strategy.configure_train(1, record_of(task.initial_params(SETTINGS)), ConfigRecord(), grid)
    requests = Counter((m.metadata.message_type, m.content["config"]["fedcontext.request"]) for m in messages)
    plan = plan_round(0, 1, 6, devices_per_round=3, probes=5)
    shared = len(set(plan.devices.tolist()) & set(plan.probes.tolist()))
    assert requests["train", "fedcontext.update fedcontext.gradient"] == shared
    assert requests["query.gradient", "fedcontext.gradient"] == 5 - shared
    assert sum(requests.values()) == 3 + 5 - shared


def test_devices_get_their_own_epochs_and_the_inner_strategys_settings() -> None:
    seen = {}

    def train(params, config, context):
        seen[context.node_config["partition-id"]] = config
        return params, 1

    app = numpy_client(train, task.gradient)
    strategy = ContextualStrategy(FedProx(proximal_mu=0.5), fc.contextual(20), epochs=(1, 9))
    config = ConfigRecord({"lr": 0.1})
    strategy.start(
        MemoryGrid(app, range(8), SETTINGS), record_of(task.initial_params(SETTINGS)), 1, train_config=config
    )
    assert {config["proximal-mu"] for config in seen.values()} == {0.5}
    assert len({config["local-epochs"] for config in seen.values()}) > 1
    planned = {task.device: task.epochs for task in plan_tasks(0, 1, range(8), 8, {"gradient"}, epochs=(1, 9))}
    assert {device: config["local-epochs"] for device, config in seen.items()} == planned
    assert "local-epochs" not in config, "the caller's config is not ours to change"


@pytest.mark.data("mnist")
def test_the_example_app_learns_mnist() -> None:
    config = {**SETTINGS, "dataset": "mnist", "learning-rate": 0.3}
    strategy = ContextualStrategy(FedAvg(), task.algorithm(config).rule, probes="all", epochs=(1, 3))
    result = strategy.start(MemoryGrid(APP, range(10), config), record_of(task.initial_params(config)), 3)
    judged = result.evaluate_metrics_clientapp
    assert judged[3]["accuracy"] > 0.6
    assert judged[3]["loss"] < judged[2]["loss"] < judged[1]["loss"]


STRATEGIES = [kind for kind in vars(stock).values() if isinstance(kind, type) and issubclass(kind, FedAvg)]
OWN_AGGREGATION = [kind for kind in STRATEGIES if kind not in (FedAvg, FedProx)]


class Scheduled(FedAvg):
    """A user's strategy that changes the config and keeps FedAvg's aggregation."""

    def configure_train(self, server_round, arrays, config, grid):
        config["lr"] = 1 / server_round
        return super().configure_train(server_round, arrays, config, grid)


@pytest.mark.parametrize("inner", [FedProx, Scheduled])
def test_a_strategy_that_keeps_fedavgs_aggregation_gives_the_rules_model(inner: type[FedAvg]) -> None:
    models = []
    for kind in (FedAvg, inner):
        strategy = ContextualStrategy(kind(fraction_evaluate=0.0), fc.contextual(20), epochs=(1, 1))
        grid = MemoryGrid(APP, range(4), SETTINGS)
        models.append(arrays_of(strategy.start(grid, record_of(task.initial_params(SETTINGS)), 2).arrays)["softmax"])
    assert models[0].tobytes() == models[1].tobytes()


ROBUST = {
    "Krum": "krum(byzantine=0)",
    "MultiKrum": "multi_krum(byzantine=0)",
    "Bulyan": "multi_krum(byzantine=0)",
    "FedMedian": "coordinate_median()",
    "FedTrimmedAvg": "trimmed_mean(byzantine=0.2)",
}


@pytest.mark.parametrize("kind", OWN_AGGREGATION, ids=lambda kind: kind.__name__)
def test_a_strategy_with_its_own_aggregation_is_refused(kind: type[FedAvg]) -> None:
    inner = kind(client_learning_rate=0.1) if kind is stock.QFedAvg else kind()
    with pytest.raises(fc.FedcontextError, match=rf"{kind.__name__} cannot be wrapped.* own aggregation") as refused:
        ContextualStrategy(inner, fc.mean())
    optimizer = kind.__name__.lower() if kind in (stock.FedAdam, stock.FedYogi, stock.FedAdagrad, stock.FedAvgM) else ""
    line = f"FedAvg(...), rule=by_samples(), server={optimizer}())" if optimizer else "FedAvg(...)) instead"
    line = f"FedAvg(...), rule={ROBUST[kind.__name__]})" if kind.__name__ in ROBUST else line
    assert f"ContextualStrategy({line}" in str(refused.value)


@pytest.mark.parametrize("text", [*ROBUST.values(), "geometric_median()", "norm_clipping()"])
def test_the_robust_rules_run_in_a_strategy(text: str) -> None:
    rule = eval(f"fc.{text}")
    strategy = ContextualStrategy(FedAvg(fraction_evaluate=0.0), rule, epochs=(1, 1))
    start = record_of(task.initial_params(SETTINGS))
    result = strategy.start(MemoryGrid(APP, range(5), SETTINGS), start, 2)
    assert not np.allclose(arrays_of(result.arrays)["softmax"], arrays_of(start)["softmax"])


@pytest.mark.parametrize("rule", [fc.fltrust(), fc.robust_gradients(fc.contextual(10), "trust")])
def test_a_rule_that_needs_samples_on_the_server_is_refused(rule: fc.Rule) -> None:
    with pytest.raises(fc.FedcontextError, match="server's own samples, which clients do not send"):
        ContextualStrategy(FedAvg(), rule)


@pytest.mark.parametrize("optimizer", [server.fedadam(), server.fedavgm()], ids=lambda optimizer: optimizer.name)
def test_a_server_optimizer_acts_on_the_rules_step(optimizer: server.ServerOptimizer) -> None:
    def params_after(rounds: int, **settings) -> np.ndarray:
        strategy = ContextualStrategy(FedAvg(fraction_evaluate=0.0), fc.by_samples(), epochs=(1, 1), **settings)
        grid = MemoryGrid(APP, range(4), SETTINGS)
        result = strategy.start(grid, record_of(task.initial_params(SETTINGS)), rounds)
        return arrays_of(result.arrays)["softmax"]

    start = task.initial_params(SETTINGS)["softmax"]
    step, _ = optimizer.update(params_after(1) - start, optimizer.init(start), start)
    np.testing.assert_allclose(params_after(1, server=optimizer), start + step, rtol=1e-5, atol=1e-7)
    assert not np.allclose(params_after(2, server=optimizer), params_after(2))


def test_a_server_optimizer_after_the_rule_with_memory_is_refused() -> None:
    with pytest.raises(fc.FedcontextError, match=r"rule=by_samples\(\), server=fedadam\(\)"):
        ContextualStrategy(FedAvg(), server=server.fedadam())


def test_a_strategy_whose_noise_would_be_lost_is_refused() -> None:
    private = stock.DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 4)
    with pytest.raises(fc.FedcontextError, match=r"FixedClipping cannot be wrapped.* clipping and noise"):
        ContextualStrategy(private, fc.mean())


def test_another_driver_can_run_the_rounds() -> None:
    grid, arrays = MemoryGrid(APP, range(6), SETTINGS), record_of(task.initial_params(SETTINGS))
    strategy = ContextualStrategy(FedAvg(fraction_evaluate=0.0), fc.contextual(20), epochs=(1, 1))
    for number in (1, 2):
        messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        arrays, metrics = strategy.aggregate_train(number, grid.send_and_receive(messages))
        assert len(metrics["fedcontext.weights"]) == 6
    start = ContextualStrategy(FedAvg(fraction_evaluate=0.0), fc.contextual(20), epochs=(1, 1)).start
    expected = start(MemoryGrid(APP, range(6), SETTINGS), record_of(task.initial_params(SETTINGS)), 2).arrays
    assert arrays_of(arrays)["softmax"].tobytes() == arrays_of(expected)["softmax"].tobytes()


def test_aggregation_without_configuration_is_refused() -> None:
    strategy = ContextualStrategy(FedAvg(), fc.contextual(20))
    with pytest.raises(fc.FedcontextError, match=r"call configure_train\(1, \.\.\.\) first"):
        strategy.aggregate_train(1, [])
    grid = MemoryGrid(APP, range(3), SETTINGS)
    messages = strategy.configure_train(1, record_of(task.initial_params(SETTINGS)), ConfigRecord(), grid)
    with pytest.raises(fc.FedcontextError, match="round 2 without configure_train"):
        strategy.aggregate_train(2, grid.send_and_receive(messages))


def test_a_strategy_that_trains_nobody_only_evaluates(tmp_path: Path) -> None:
    strategy = ContextualStrategy(FedAvg(fraction_train=0.0), fc.contextual(20), checkpoint=tmp_path / "run")
    result = strategy.start(MemoryGrid(APP, range(3), SETTINGS), record_of(task.initial_params(SETTINGS)), 4)
    assert list(result.evaluate_metrics_clientapp) == [1, 2, 3, 4]
    assert not result.train_metrics_clientapp


def test_the_log_has_flowers_lines(caplog: pytest.LogCaptureFixture) -> None:
    def fail(partition, message, reply):
        failed = partition == 2 and message.metadata.message_type == "train"
        return [Message(Error(2, "no"), reply_to=message)] if failed else [reply]

    caplog.set_level("INFO", "flwr")
    strategy = ContextualStrategy(FedAvg(fraction_train=0.5), fc.contextual(20), epochs=(1, 1), probes="all")
    strategy.start(MemoryGrid(APP, range(4), SETTINGS, fail), record_of(task.initial_params(SETTINGS)), 2)
    lines = caplog.messages
    assert lines.count("configure_train: Sampled 2 nodes (out of 4)") == 2
    assert lines.count("configure_train: 4 nodes report gradients") == 2
    trained = [line for line in lines if line.startswith("aggregate_train: Received")]
    assert len(trained) == 2
    assert sum("1 failures" in line for line in trained) == sum("Excluded device 2" in line for line in lines)
    assert lines.count("aggregate_evaluate: Received 4 results and 0 failures") == 2
    reported = [line for line in lines if "Aggregated MetricRecord" in line]
    assert sum("fedcontext.weights" in line for line in reported) == 2
    assert sum("'loss'" in line and "'accuracy'" in line for line in reported) == 2


@pytest.mark.parametrize(("rule", "told"), [(fc.contextual(1e4), 2), (fc.contextual_memory(), 0)])
def test_the_log_says_what_is_wrong_when_first_seen_and_at_the_end(rule, told, caplog) -> None:
    caplog.set_level("WARNING", "flwr")
    strategy = ContextualStrategy(FedAvg(fraction_train=0.5), rule, epochs=(1, 1), probes="all")
    strategy.start(MemoryGrid(APP, range(6), SETTINGS), record_of(task.initial_params(SETTINGS)), 8)
    assert sum("the steps are too short" in line for line in caplog.messages) == told == len(caplog.messages)


def test_contextual_fedavg_has_smoothness_one_over_lr() -> None:
    strategy = contextual_fedavg(fraction_evaluate=0.0)
    grid, start = MemoryGrid(STEADY, range(4), SETTINGS), record_of(task.initial_params(SETTINGS))
    strategy.start(grid, start, 1, train_config=ConfigRecord({"lr": 0.25}))
    assert strategy.rule.smoothness == 4.0
    with pytest.raises(fc.FedcontextError, match="contextual_fedavg needs the learning rate"):
        contextual_fedavg().start(grid, start, 1)


def test_records_and_metrics_tell_the_round(tmp_path: Path) -> None:
    grid = MemoryGrid(APP, range(6), SETTINGS)
    strategy = ContextualStrategy(FedAvg(), fc.contextual(20), epochs=(1, 1), records=tmp_path / "run.jsonl")

    def judge(number: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"loss": 2.0 - number / 10, "accuracy": number / 10})

    result = strategy.start(grid, record_of(task.initial_params(SETTINGS)), 2, evaluate_fn=judge)
    head, records = fc.read_run(tmp_path / "run.jsonl")
    assert head["settings"]["algorithm"] == "FedAvg, contextual"
    for number, record in enumerate(records, 1):
        metrics = result.train_metrics_clientapp[number]
        assert (record.number, record.accuracy, len(record.devices)) == (number, number / 10, 6)
        assert record.measured_change == pytest.approx(-0.1)
        assert metrics["fedcontext.weights"] == record.weights
        assert metrics["fedcontext.promised-change"] == record.promised_change
        assert record.promised_change < 0
        assert record.curvature is not None
        assert metrics["fedcontext.devices"] == record.devices
        assert record.bytes_up == 2 * record.bytes_down
        assert not record.lost
    assert set(result.evaluate_metrics_clientapp[1]) == {"loss", "accuracy"}
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])["settings"]["dataset"] == "federation"


def test_a_federations_records_make_the_page_and_table_that_simulations_make(tmp_path: Path) -> None:
    federation(records=tmp_path / "run.jsonl")
    for command, file in (("report", "page.html"), ("export", "table.csv")):
        program = [sys.executable, "-c", "from fedcontext.cli import main; main()"]
        subprocess.run([*program, command, tmp_path / "run.jsonl", "-o", tmp_path / file], check=True)
        assert "FedAvg, contextual" in (tmp_path / file).read_text(encoding="utf-8")


def test_a_stock_client_that_answers_with_weights_gives_the_same_model() -> None:
    def untouched(message, context):
        return (APP.app if message.metadata.message_type == "train" else APP)(message, context)

    models = []
    for app in (APP, untouched):
        strategy = ContextualStrategy(FedAvg(fraction_evaluate=0.0), fc.by_samples(), epochs=(1, 2))
        result = strategy.start(MemoryGrid(app, range(6), SETTINGS), record_of(task.initial_params(SETTINGS)), 2)
        models.append(arrays_of(result.arrays)["softmax"])
    np.testing.assert_allclose(models[0], models[1], rtol=1e-6, atol=1e-8)


def test_devices_that_cannot_say_who_they_are_go_by_their_node() -> None:
    grid = MemoryGrid(APP.app, range(4), SETTINGS)  # a stock app: it knows neither whoami nor gradients
    strategy = ContextualStrategy(FedAvg(fraction_evaluate=0.0), fc.mean(), epochs=(1, 1))
    result = strategy.start(grid, record_of(task.initial_params(SETTINGS)), 1)
    assert sorted(result.train_metrics_clientapp[1]["fedcontext.devices"]) == sorted(grid.partitions)
