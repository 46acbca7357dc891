"""The second exchange: the step is the one that `fc.correct` gives, and whatever a probe does there, the round stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flower_grid import Meddle, MemoryGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from test_flower_coding import APP, SIZE, START, coded, gradient, start
from test_flower_strategy import federation

import fedcontext as fc
from fedcontext.flower import ContextualStrategy
from fedcontext.flower.coding import LEAVES
from fedcontext.flower.protocol import DIFFERENCE, GRADIENT, PREVIOUS, REQUEST, arrays_of, record_of

BAD = 2  # the probe that misbehaves
NODES = 6


def second(message: Message) -> bool:
    """Return whether a message is of the second exchange."""
    return message.content.config_records["config"].get(REQUEST) == DIFFERENCE


def only(change: Callable[[Message, Message], list[Message]], devices: set[int] | None = None) -> Meddle:
    """Meddle with what these devices reply in the second exchange, the bad one by default."""
    chosen = {BAD} if devices is None else devices
    return lambda device, message, reply: change(message, reply) if device in chosen and second(message) else [reply]


def replaced(name: str, record: object) -> Meddle:
    def change(message: Message, reply: Message) -> list[Message]:
        reply.content[name] = record
        return [reply]

    return only(change)


def run(tmp_path: Path, meddle: Meddle | None = None, rounds: int = 1, **settings):
    """Return the model after some rounds, and the last record."""
    grid = MemoryGrid(APP, range(NODES), **({"meddle": meddle} if meddle else {}))
    settings = {"gradient_bits": 32, "records": tmp_path / "run.jsonl", **settings}
    result = start(grid, rounds, **settings).result
    return arrays_of(result.arrays), fc.read_run(tmp_path / "run.jsonl")[1][-1]


def same(one: dict, other: dict) -> bool:
    return all(one[name].tobytes() == other[name].tobytes() for name in START)


SILENT = only(lambda message, reply: [])
WHOLE = {"w": np.zeros(SIZE, np.float32)}


def vector(value: float) -> ArrayRecord:
    return record_of({"w": np.full(SIZE, value, np.float32)})


NOT_USED: dict[str, tuple[Meddle, str]] = {
    "silent": (SILENT, "no reply before the timeout"),
    "fails": (only(lambda m, r: [Message(Error(2, "Traceback\nIt: broke"), reply_to=m)]), "failed with code 2: It: b"),
    "dies": (only(lambda m, r: [Message(Error(5, ""), reply_to=m)]), "node unavailable"),
    "replies twice": (only(lambda m, r: [r, r]), "more than one reply"),
    "sends nothing": (only(lambda m, r: [Message(RecordDict(), reply_to=m)]), "no gradient difference"),
    "sends a gradient": (
        only(lambda m, r: [Message(RecordDict({GRADIENT: vector(1)}), reply_to=m)]),
        "no gradient difference",
    ),
    "NaN": (replaced(DIFFERENCE, vector(np.nan)), "leaf 'w' has NaN or infinite entries"),
    "infinite": (replaced(DIFFERENCE, vector(np.inf)), "leaf 'w' has NaN or infinite entries"),
    "another shape": (replaced(DIFFERENCE, record_of({"w": np.zeros(3, np.float32)})), "gradient difference: leaf 'w'"),
    "unknown leaf": (replaced(DIFFERENCE, record_of({**WHOLE, "x": np.zeros(1)})), "gradient difference: the struct"),
    "no array": (
        replaced(DIFFERENCE, ArrayRecord({"w": Array("float32", (SIZE,), "numpy.ndarray", b"?")})),
        "an array cannot be read",
    ),
    "no samples": (replaced("metrics", MetricRecord({"num-examples": 0})), "num-examples must be"),
    "reversed": (replaced(DIFFERENCE, vector(-1)), ""),
}


@pytest.mark.parametrize("fault", NOT_USED)
def test_a_change_that_cannot_be_used_is_noted_and_leaves_the_others_as_they_are(tmp_path: Path, fault: str) -> None:
    meddle, reason = NOT_USED[fault]
    found, record = run(tmp_path, meddle)
    silent, _ = run(tmp_path, SILENT)
    assert not record.lost
    assert not record.excluded
    assert record.clipped.keys() == {BAD}
    assert record.clipped[BAD].startswith(f"gradient change: {reason}")
    assert same(found, silent)
    assert not same(found, run(tmp_path)[0])
    assert not same(found, run(tmp_path, exchanges=1)[0])


@pytest.mark.parametrize("value", [1e3, 1e30, 3e38, -1e30])
def test_a_change_out_of_all_proportion_is_noted_and_limited(tmp_path: Path, value: float) -> None:
    found, record = run(tmp_path, replaced(DIFFERENCE, vector(value)), rounds=3)
    assert not record.lost
    assert record.clipped.keys() == {BAD}
    assert record.clipped[BAD].startswith("gradient change: ")
    assert np.abs(found["w"]).max() < 5  # the minima of the devices are between 1 and 1.5


FAILED: dict[str, Meddle] = {
    "silent": only(lambda message, reply: [], set(range(NODES))),
    "failing": only(lambda message, reply: [Message(Error(2, ""), reply_to=message)], set(range(NODES))),
}


@pytest.mark.parametrize("fault", FAILED)
def test_without_a_usable_change_the_proposed_step_stands_and_one_line_says_so(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    once, _ = run(tmp_path, rounds=3, exchanges=1)
    caplog.set_level("WARNING", "flwr")
    found, record = run(tmp_path, FAILED[fault], rounds=3)
    assert same(found, once)
    assert not record.lost
    assert sum("The step is not corrected: no usable change" in line for line in caplog.messages) == 3
    assert sum(f"Not in the correction: {NODES} devices" in line for line in caplog.messages) == 3


@pytest.mark.parametrize("error", [fc.FedcontextError("it overflows"), np.linalg.LinAlgError("it overflows")])
def test_a_correction_that_fails_leaves_the_proposed_step(tmp_path: Path, error: Exception, caplog) -> None:
    def fail(change, squared_error, state):
        raise error

    found, record = run(tmp_path, rule=replace(fc.contextual_memory(), correct=fail))
    assert same(found, run(tmp_path, exchanges=1)[0])
    assert not record.lost
    assert "\t> The step is not corrected: it overflows" in caplog.messages


@pytest.mark.parametrize("bits", [1, 8, "auto"])
def test_the_corrected_step_is_that_of_the_simulator_also_with_coded_changes(bits: int | str) -> None:
    settings = {"epochs": (1, 3), "learning_rate": 0.05, "engine": "reference", "seed": 3, "rounds": 2}
    experiment = fc.Experiment(algorithm="fedavg-memory", probes=5, gradient_bits=bits, **settings)
    expected = [state for state, _ in fc.prepare(experiment).run()][-1].params
    found = federation(algorithm="fedavg-memory", probes=5, gradient_bits=bits, rounds=2)
    np.testing.assert_allclose(arrays_of(found.arrays)["softmax"], expected, rtol=2e-4, atol=2e-6)


def test_the_second_exchange_goes_to_the_probes_with_both_models_and_asks_for_the_difference_alone() -> None:
    seen = []

    def note(message: Message, context: Context) -> Message:
        if message.metadata.message_type != "query.whoami" and second(message):
            models = {name: arrays_of(record)["w"] for name, record in message.content.array_records.items()}
            seen.append((context.node_config["partition-id"], message.metadata.message_type, models))
        return APP(message, context)

    made = start(MemoryGrid(note, range(NODES)), 1, fraction=0.5, probes=4)
    assert len({device for device, _, _ in seen}) == len(seen) == 4
    once = start(MemoryGrid(APP, range(NODES)), 1, fraction=0.5, probes=4, exchanges=1)
    for _, kind, models in seen:
        assert kind == "query.gradient"
        np.testing.assert_array_equal(models[PREVIOUS], START["w"])
        np.testing.assert_array_equal(models["arrays"], arrays_of(once.result.arrays)["w"])
    assert not np.array_equal(arrays_of(made.result.arrays)["w"], arrays_of(once.result.arrays)["w"])


@pytest.mark.parametrize(
    "settings", [{"exchanges": 1}, {"rule": fc.contextual(2)}, {"rule": replace(fc.contextual_memory(), correct=None)}]
)
def test_without_a_correction_nothing_more_is_sent(settings: dict) -> None:
    grid = MemoryGrid(APP, range(NODES))
    start(grid, 2, **settings)
    assert len(grid.sent) == 1 + 2  # who the nodes are, then two rounds


def test_a_lost_round_has_no_second_exchange(tmp_path: Path) -> None:
    grid = MemoryGrid(APP, range(NODES), meddle=lambda device, message, reply: [])
    start(grid, 2)
    assert len(grid.sent) == 1 + 2


def test_another_driver_gets_the_step_of_one_exchange() -> None:
    grid, strategy = MemoryGrid(APP, range(NODES)), ContextualStrategy(FedAvg(fraction_evaluate=0.0))
    messages = strategy.configure_train(1, record_of(START), ConfigRecord(), grid)
    arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    once = start(MemoryGrid(APP, range(NODES)), 1, exchanges=1).result
    assert same(arrays_of(arrays), arrays_of(once.arrays))


def test_the_record_and_the_metrics_are_those_of_the_corrected_step(tmp_path: Path) -> None:
    strategy = start(MemoryGrid(APP, range(NODES), meddle=SILENT), 1, records=tmp_path / "run.jsonl")
    (record,) = fc.read_run(tmp_path / "run.jsonl")[1]
    step = arrays_of(strategy.result.arrays)["w"] - START["w"]
    assert record.step_norm == pytest.approx(float(np.linalg.norm(step)), rel=1e-6)
    assert strategy.result.train_metrics_clientapp[1]["fedcontext.clipped"] == [BAD]


def test_a_code_of_another_length_is_not_used(tmp_path: Path) -> None:
    _, record = run(tmp_path, replaced(DIFFERENCE, coded(b"???")), gradient_bits="auto")
    assert record.clipped.keys() == {BAD}
    assert "400 entries at 1 bits are encoded in" in record.clipped[BAD]


def test_the_log_has_the_lines_of_the_exchange(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "flwr")
    failing = only(lambda message, reply: [Message(Error(2, "no"), reply_to=message)])
    start(MemoryGrid(APP, range(NODES), meddle=failing), 1)
    lines = caplog.messages
    assert lines.count(f"configure_correction: {NODES} nodes report the change of their gradients") == 1
    assert lines.count(f"aggregate_correction: Received {NODES - 1} results and 1 failures") == 1
    assert lines.count(f"\t> Not in the correction: device {BAD}: failed with code 2: no") == 1
    assert sum(line.startswith("\t> Correction: ") and "of the step's length" in line for line in lines) == 1


@pytest.mark.parametrize("request_", ["", DIFFERENCE, f"{GRADIENT} {DIFFERENCE}"])
def test_a_client_asked_for_the_difference_alone_sends_no_gradient(request_: str) -> None:
    now = {**START, "w": np.ones(SIZE, np.float32)}
    content = RecordDict({"arrays": record_of(now), PREVIOUS: record_of(START)})
    content["config"] = ConfigRecord({REQUEST: request_})
    context = Context(1, 1, {"partition-id": 3}, RecordDict(), {})
    reply = APP(Message(content, 1, "query.gradient"), context).content
    assert set(reply.array_records) == ({DIFFERENCE} if request_ == DIFFERENCE else {GRADIENT, DIFFERENCE})
    expected = gradient(now, context)[0]["w"] - gradient(START, context)[0]["w"]
    np.testing.assert_array_equal(arrays_of(reply[DIFFERENCE])["w"], expected)
    assert LEAVES not in reply
    assert reply["metrics"]["num-examples"] == 10
