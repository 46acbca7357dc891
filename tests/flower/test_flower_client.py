"""The devices' side: gradients are the full local ones, and a stock app needs three changed lines."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from flower_grid import MemoryGrid
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import FedAvg

from fedcontext.errors import FedcontextError
from fedcontext.flower import ContextualStrategy, torch_client
from fedcontext.flower.protocol import arrays_of, record_of

HERE = Path(__file__).parent / "quickstart"
GUIDE = Path(__file__).parents[2] / "docs" / "deployment.md"
RUN_CONFIG = {
    "batch-size": 8,
    "local-epochs": 2,
    "fraction-train": 0.5,
    "learning-rate": 0.1,
    "num-server-rounds": 4,
}

START = record_of({"weight": np.zeros((2, 2), np.float32), "bias": np.zeros(2, np.float32)})


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.delitem(sys.modules, "task", raising=False)
    import task

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other
    yield task
    torch.set_num_threads(threads)


def changes() -> dict[str, list[tuple[str, str]]]:
    """Return the guide's diff: file -> pairs of a line taken away (or before) and the line put there."""
    diff = re.search(r"```diff\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    found: dict[str, list[tuple[str, str]]] = {}
    before = ""
    for line in diff[1].splitlines():
        if line.startswith("+++ "):
            found[name := line.split()[1]] = []
        elif line.startswith("+"):
            found[name].append((before, line[1:]))
        if line[:3] not in ("---", "+++"):
            before = line
    return found


def apply(source: str, edits: list[tuple[str, str]]) -> str:
    for before, line in edits:
        if before.startswith("-"):
            assert before[1:] in source
            source = source.replace(before[1:], line)
        else:
            source = f"{line}\n{source}" if line.startswith(("from", "import")) else f"{source}\n{line}\n"
    return source


def run(source: str, name: str) -> dict:
    space: dict = {"__name__": name}
    exec(compile(source, name, "exec"), space)
    return space


def test_three_changed_lines_give_the_stock_quickstart_the_rule_with_memory(task: ModuleType) -> None:
    edits = changes()
    assert sum(len(lines) for lines in edits.values()) == 3
    torch.manual_seed(0)
    results = {}
    for changed in (False, True):
        apps = {
            name: run(apply((HERE / name).read_text(), edits[name] if changed else []), name)["app"] for name in edits
        }
        grid = MemoryGrid(apps["client_app.py"], range(8), RUN_CONFIG, node_config={"num-partitions": 8})
        context = Context(1, 1, {}, RecordDict(), RUN_CONFIG)
        apps["server_app.py"](grid, context)
        results[changed] = context.result
    metrics = results[True].train_metrics_clientapp
    assert list(metrics) == [1, 2, 3, 4]
    assert all(len(m["fedcontext.weights"]) == 4 for m in metrics.values())
    assert metrics[4]["train_loss"] < metrics[1]["train_loss"]
    assert "fedcontext.weights" not in results[False].train_metrics_clientapp[1]
    assert results[True].arrays.keys() == results[False].arrays.keys()


def test_the_gradient_is_that_of_the_mean_loss_over_all_data(task: ModuleType) -> None:
    model = task.Net().eval()
    loader, _ = task.load_data(3, 8, batch_size=7)  # the last batch is smaller
    app = torch_client(_nothing, task.Net, lambda context: task.load_data(3, 8, 7)[0])
    message = Message(RecordDict({"arrays": record_of(_numpy(model.state_dict()))}), 1, "query.gradient")
    reply = app(message, Context(1, 1, {}, RecordDict(), {}))
    found = arrays_of(reply.content["fedcontext.gradient"])
    inputs, labels = loader.dataset.tensors
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, param in model.named_parameters():
        np.testing.assert_allclose(found[name], param.grad, rtol=1e-4, atol=1e-6)
    assert reply.content["metrics"]["num-examples"] == 30


def test_a_module_a_class_and_a_function_that_returns_one_module_give_the_same_gradients(task: ModuleType) -> None:
    net, found = task.Net(), []
    now, before = (record_of(_numpy(task.Net().state_dict())) for _ in range(2))
    for module in (net, task.Net, lambda: net):
        app = torch_client(_nothing, module, lambda context: task.load_data(3, 8, 7)[0])
        content = RecordDict({"arrays": now, "fedcontext.previous": before})
        reply = app(Message(content, 1, "query.gradient"), Context(1, 1, {}, RecordDict(), {}))
        found.append({key: arrays_of(record) for key, record in reply.content.array_records.items()})
    assert found[0].keys() == {"fedcontext.gradient", "fedcontext.difference"}
    assert any(leaf.any() for leaf in found[0]["fedcontext.difference"].values())
    for other in found[1:]:
        np.testing.assert_equal(other, found[0])


WRONG = [
    ({"app": None}, "app must be a ClientApp.*, got None"),
    ({"app": ClientApp}, "app must be a ClientApp.*, got <class"),
    ({"module": 5}, "module must be a torch.nn.Module or a function that returns one, got int"),
    ({"module": torch.nn.Linear}, "but Linear needs arguments"),
    ({"batches": []}, r"batches must be a function of the context .*, got \[\]"),
    ({"batches": lambda: []}, "batches must be a function of the context"),
    ({"loss": torch.nn.CrossEntropyLoss}, r"loss must be a function .* such as CrossEntropyLoss\(\), got <class"),
    ({"loss": "mse"}, "loss must be a function of outputs and labels, .* got 'mse'"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_client_that_could_not_reply_is_refused_when_it_is_made(wrong: dict, message: str) -> None:
    good = {"app": ClientApp(), "module": torch.nn.Flatten, "batches": lambda context: []}
    with pytest.raises(FedcontextError, match=message):
        torch_client(**{**good, **wrong})


@pytest.mark.parametrize("batch_size", [7, 15])  # 5 batches, and as many as a batch has parts
def test_two_loaders_in_place_of_one_are_named(task: ModuleType, batch_size: int) -> None:
    app = torch_client(_nothing, task.Net, lambda context: task.load_data(3, 8, batch_size))
    message = Message(RecordDict({"arrays": ArrayRecord(task.Net().state_dict())}), 1, "query.gradient")
    with pytest.raises(FedcontextError, match="got DataLoader: batches must return one loader") as error:
        app(message, Context(1, 1, {}, RecordDict(), {}))
    assert len(str(error.value)) < 150, "the server shortens what clients write"


def test_buffers_are_averaged_and_stay_out_of_the_geometry(task: ModuleType) -> None:
    """BatchNorm's running variance must stay positive, whatever the signs of the weights."""
    grid = MemoryGrid(_quickstart(task), range(6), RUN_CONFIG, node_config={"num-partitions": 6})
    strategy = ContextualStrategy(FedAvg(fraction_evaluate=0.0))
    start = ArrayRecord(task.Net().state_dict())
    arrays = arrays_of(strategy.start(grid, start, 3, train_config=ConfigRecord({"lr": 0.1})).arrays)
    assert (arrays["norm.running_var"] > 0).all()
    steps = RUN_CONFIG["local-epochs"] * 4  # 30 samples in batches of 8
    assert arrays["norm.num_batches_tracked"] == 3 * steps, "every device took as many steps"


def test_a_stock_strategy_gets_stock_answers_from_the_wrapped_app(task: ModuleType) -> None:
    config = ConfigRecord({"lr": 0.1})
    content = RecordDict({"arrays": ArrayRecord(task.Net().state_dict()), "config": config})
    context = Context(1, 1, {"partition-id": 0, "num-partitions": 8}, RecordDict(), RUN_CONFIG)
    reply = _quickstart(task)(Message(content, 1, "train"), context)
    assert set(reply.content) == {"arrays", "metrics"}


def test_flowers_local_privacy_treats_the_update_of_a_wrapped_app(task: ModuleType) -> None:
    stock = ClientApp(mods=[LocalDpMod(clipping_norm=1e-3, sensitivity=0.0, epsilon=1.0, delta=0.1)])
    moved = {name: tensor + 1 for name, tensor in task.Net().state_dict().items()}

    @stock.train()
    def train(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)

    app = torch_client(stock, task.Net, lambda context: task.load_data(0, 8, 8)[0])
    config = ConfigRecord({"fedcontext.request": "fedcontext.update fedcontext.gradient"})
    content = RecordDict({"arrays": ArrayRecord(task.Net().state_dict()), "config": config})
    reply = app(Message(content, 1, "train"), Context(1, 1, {}, RecordDict(), {}))
    update = arrays_of(reply.content["fedcontext.update"])
    assert (
        sum(float((array.astype(float) ** 2).sum()) for array in update.values() if array.dtype.kind == "f") ** 0.5
        < 2e-3
    )
    assert "fedcontext.gradient" in reply.content


def _quickstart(task: ModuleType):
    stock = run((HERE / "client_app.py").read_text(), "client_app.py")["app"]
    return torch_client(stock, task.Net, lambda c: task.load_data(c.node_config["partition-id"], 8, 8)[0])


def _nothing(message: Message, context: Context) -> Message:
    raise AssertionError("the user's app has no part in a gradient")


def _numpy(state: dict) -> dict:
    return {name: tensor.detach().numpy() for name, tensor in state.items()}


@pytest.mark.parametrize("module", [torch.nn.Linear(2, 2), lambda: torch.nn.Linear(2, 2)], ids=["instance", "function"])
def test_computing_gradients_leaves_the_random_numbers_of_training_as_they_are(module: object) -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.zeros(8, dtype=torch.int64))
    app = torch_client(ClientApp(), module, lambda context: torch.utils.data.DataLoader(data, shuffle=True))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    reply = app(Message(RecordDict({"arrays": START}), 1, "query.gradient"), Context(1, 1, {}, RecordDict(), {}))
    assert arrays_of(reply.content["fedcontext.gradient"])["bias"].any()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("samples", [0, 8])
def test_a_remaining_slope_is_reported_where_there_is_one_and_costs_no_update_where_not(samples: int) -> None:
    inner = ClientApp()

    @inner.train()
    def _train(message: Message, context: Context) -> Message:
        new = record_of({"weight": np.zeros((2, 2), np.float32), "bias": np.array([0.1, -0.1], np.float32)})
        return Message(RecordDict({"arrays": new, "metrics": MetricRecord({"num-examples": 8})}), reply_to=message)

    batch = (torch.ones(samples, 2), torch.zeros(samples, dtype=torch.int64))
    app = torch_client(inner, torch.nn.Linear(2, 2), lambda context: [batch] if samples else [])
    request = ConfigRecord({"fedcontext.request": "fedcontext.update fedcontext.remaining-slope"})
    reply = app(
        Message(RecordDict({"arrays": START, "config": request}), 1, "train"), Context(1, 1, {}, RecordDict(), {})
    )
    np.testing.assert_allclose(arrays_of(reply.content["fedcontext.update"])["bias"], [0.1, -0.1], rtol=1e-6)
    if samples:  # cross-entropy of two classes: the slope is that of log(1 + exp(-x)), from x = 0 to 0.2
        slope = reply.content["fedcontext.remaining-slope"]["share"]
        assert slope == pytest.approx(2 / (1 + np.exp(0.2)), rel=1e-5)
    else:
        assert "fedcontext.remaining-slope" not in reply.content
