"""The fault table: whatever a device does, it is left out and named, and the rest is aggregated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flower_grid import Meddle, MemoryGrid
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, FedProx
from hypothesis import given
from hypothesis import strategies as st

import fedcontext as fc
from fedcontext.flower import ContextualStrategy, numpy_client
from fedcontext.flower.protocol import GRADIENT, UPDATE, arrays_of, record_of, view
from fedcontext.rules.server import fedadam

BAD = 2  # the device that misbehaves
START = {"w": np.zeros(4, np.float32), "b": np.ones((), np.float32), "running_mean": np.zeros(2, np.float32)}


def target(context) -> dict[str, np.ndarray]:
    k = context.node_config["partition-id"]
    return {"w": np.eye(4, dtype=np.float32)[k % 4] * (k + 1), "b": np.float32(k)}


def gradient(params, context):
    return {name: params[name] - goal for name, goal in target(context).items()}, 10


def train(params, config, context):
    slope, samples = gradient(params, context)
    moved = {name: (params[name] - 0.5 * slope[name]).astype(np.float32) for name in slope}
    return {**moved, "running_mean": params["running_mean"] + np.float32(samples)}, samples  # a buffer: no gradient


APP = numpy_client(train, gradient)


def only(*types: str):
    """Meddle with the bad device's answers of these types."""

    def decorate(change) -> Meddle:
        def meddle(partition, message, reply):
            asked = message.metadata.message_type in types
            return change(message, reply) if partition == BAD and asked else [reply]

        return meddle

    return decorate


def changed(key: str, **leaves) -> Meddle:
    """Deliver the bad device's record ``key`` with other leaves; None takes one away."""

    def change(message: Message, reply: Message) -> list[Message]:
        if key not in reply.content:
            return [reply]
        arrays = {**arrays_of(reply.content[key]), **leaves}
        reply.content[key] = record_of({name: array for name, array in arrays.items() if array is not None})
        return [reply]

    return only("train", "query.gradient")(change)


def replaced(content: RecordDict) -> Meddle:
    return only("train", "query.gradient")(lambda message, reply: [Message(content, reply_to=message)])


def without(key: str) -> Meddle:
    def change(message: Message, reply: Message) -> list[Message]:
        del reply.content[key]
        return [reply]

    return only("train")(change)


def with_samples(samples: float) -> Meddle:
    def change(message: Message, reply: Message) -> list[Message]:
        reply.content["metrics"] = MetricRecord({"num-examples": samples})
        return [reply]

    return only("train")(change)


def failed(code: int, reason: str, node: int | None = None) -> Meddle:
    def change(message: Message, reply: Message) -> list[Message]:
        error = Message(Error(code, reason), reply_to=message)
        if node is not None:
            error.metadata.__dict__["_src_node_id"] = node
        return [error]

    return only("train", "query.gradient")(change)


def corrupt(message: Message, reply: Message) -> list[Message]:
    record = {"w": Array("float32", (4,), "numpy.ndarray", b"\x93NUMPY not really"), "b": Array(np.zeros(()))}
    reply.content[UPDATE] = ArrayRecord(record)
    return [reply]


def bomb(message: Message, reply: Message) -> list[Message]:
    """Claim a petabyte in the header."""
    data = Array(np.zeros(4, np.float32)).data.replace(b"(4,)", b"(9999999999999,)")
    reply.content[UPDATE] = ArrayRecord({"w": Array("float32", (4,), "numpy.ndarray", data)})
    return [reply]


NAN = np.array([0, np.nan, 0, 0], np.float32)
FAULTS: dict[str, tuple[Meddle, str]] = {
    "fails": (failed(2, "Traceback\nZeroDivisionError: nothing"), "failed with code 2: ZeroDivisionError: nothing"),
    "times out": (only("train")(lambda message, reply: []), "no reply before the timeout"),
    "dies, its node unnamed": (failed(5, "Node Unavailable", node=1), "node unavailable"),
    "its message expires": (
        failed(3, "Error: Message Unavailable - It may have expired"),
        "no reply before the timeout",
    ),
    "its reply expires": (
        failed(4, "Error: Reply Message Unavailable - It has expired"),
        "no reply before the timeout",
    ),
    "worker dies": (failed(0, ""), "failed with code 0"),
    "answers twice": (only("train")(lambda message, reply: [reply, reply]), "more than one reply"),
    "wrong shape": (changed(UPDATE, w=np.zeros(3, np.float32)), "update: leaf 'w' must have shape (4,), got (3,)"),
    "wrong dtype": (changed(UPDATE, w=np.zeros(4)), "update: leaf 'w' must have dtype float32, got float64"),
    "leaf missing": (changed(UPDATE, w=None), "update: the structure differs from params: it lacks leaf 'w'"),
    "leaf unknown": (changed(UPDATE, x=np.zeros(1)), "update: the structure differs from params: it has leaf 'x'"),
    "NaN update": (changed(UPDATE, w=NAN), "update: leaf 'w' has NaN or infinite entries"),
    "infinite update": (changed(UPDATE, b=np.float32(np.inf)), "update: leaf 'b' has NaN or infinite entries"),
    "NaN gradient": (changed(GRADIENT, w=NAN), "gradient: leaf 'w' has NaN or infinite entries"),
    "gradient of 1e30": (changed(GRADIENT, w=np.full(4, 1e30, np.float32)), "gradient: its norm is"),
    "gradient of 3e38": (changed(GRADIENT, w=np.full(4, 3e38, np.float32)), "gradient: its norm is"),
    "gradient of wrong shape": (changed(GRADIENT, w=np.zeros((2, 2), np.float32)), "gradient: leaf 'w' must have"),
    "gradient of a buffer": (
        changed(GRADIENT, running_mean=np.zeros(3, np.float32)),
        "gradient: leaf 'running_mean' must have shape (2,), got (3,)",
    ),
    "zero samples": (with_samples(0), "num-examples must be between 1 and 2**53, got 0"),
    "NaN samples": (with_samples(float("nan")), "num-examples must be between 1 and 2**53, got nan"),
    "more samples than there are": (with_samples(1e300), "num-examples must be between 1 and 2**53, got 1e+300"),
    "words for a terminal": (failed(2, "\x1b[2Jgone\x07"), "failed with code 2: [2Jgone"),
    "gradient but no update": (without(UPDATE), "gradient but no update"),
    "update but no gradient": (without(GRADIENT), "update but no gradient"),
    "nothing at all": (replaced(RecordDict()), "no update"),
    "bytes that are no array": (only("train")(corrupt), "an array cannot be read"),
    "a false header": (only("train")(bomb), "an array cannot be read"),
}


def strategy(tmp_path: Path, inner: FedAvg | None = None, **settings) -> ContextualStrategy:
    settings = {"rule": fc.contextual(2), "records": tmp_path / "run.jsonl", **settings}
    return ContextualStrategy(inner or FedAvg(fraction_evaluate=0.0), **settings)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_device_is_left_out_and_named_and_the_rest_is_aggregated(tmp_path: Path, fault: str) -> None:
    meddle, reason = FAULTS[fault]
    found = strategy(tmp_path).start(MemoryGrid(APP, range(5), meddle=meddle), record_of(START), 1)
    (record,) = fc.read_run(tmp_path / "run.jsonl")[1]
    assert record.excluded.keys() == {BAD}
    assert record.excluded[BAD].startswith(reason)
    assert sorted(record.devices) == [0, 1, 3, 4]
    assert not record.lost
    without_it = MemoryGrid(APP, [0, 1, 3, 4])
    expected = ContextualStrategy(FedAvg(fraction_evaluate=0.0), fc.contextual(2)).start(
        without_it, record_of(START), 1
    )
    for name, array in arrays_of(expected.arrays).items():
        np.testing.assert_allclose(arrays_of(found.arrays)[name], array, rtol=1e-6)


@pytest.mark.parametrize("value", [1e30, 1e38])
@pytest.mark.parametrize("rule", [fc.mean(), fc.by_samples(), fc.contextual_memory()])
def test_an_update_out_of_all_proportion_is_left_out_and_named(tmp_path: Path, rule, value: float) -> None:
    grid = MemoryGrid(APP, range(5), meddle=changed(UPDATE, w=np.full(4, value, np.float32)))
    strategy(tmp_path, rule=rule, probes="cohort").start(grid, record_of(START), 3)
    for record in fc.read_run(tmp_path / "run.jsonl")[1]:
        assert record.excluded.keys() == {BAD}
        assert record.excluded[BAD].startswith("update: its norm is")
        assert not record.lost


def test_an_answer_to_another_devices_message_is_not_taken_for_its_reply(tmp_path: Path) -> None:
    seen: dict[int, Message] = {}

    def meddle(partition: int, message: Message, reply: Message) -> list[Message]:
        if partition != BAD:
            forged = Message(RecordDict(dict(reply.content)), reply_to=message)
            forged.metadata.__dict__["_src_node_id"] = bad_node
            seen[partition] = forged
            return [reply, forged]
        return [reply]

    grid = MemoryGrid(APP, range(5), meddle=meddle)
    (bad_node,) = [node for node, partition in grid.partitions.items() if partition == BAD]
    strategy(tmp_path).start(grid, record_of(START), 1)
    (record,) = fc.read_run(tmp_path / "run.jsonl")[1]
    assert len(seen) == 4
    assert sorted(record.devices) == [0, 1, 2, 3, 4]
    assert record.excluded == {}


@pytest.mark.parametrize(
    "meddle",
    [
        changed(GRADIENT, running_mean=np.ones(2, np.float32)),
        changed(GRADIENT, w=None),
        changed(GRADIENT, w=None, b=None),
        with_samples(2**53),
        changed(UPDATE, w=np.full(4, 1e38, np.float32)),
        changed(GRADIENT, w=np.full(4, -1e30, np.float32)),
    ],
    ids=["adds a leaf", "lacks a leaf", "lacks all leaves", "many samples", "long update", "long gradient"],
)
@pytest.mark.parametrize("devices", [2, 3, 10])
@pytest.mark.parametrize("rule", [fc.contextual(2), fc.contextual_memory(), fc.by_samples()], ids=lambda r: r.name)
def test_no_device_gets_another_one_excluded_or_a_round_lost(tmp_path: Path, rule, devices: int, meddle) -> None:
    bad = {0: BAD, BAD: 0}  # so that two devices are enough
    swapped = MemoryGrid(APP, range(devices), meddle=lambda k, message, reply: meddle(bad.get(k, k), message, reply))
    found = strategy(tmp_path, rule=rule, probes="cohort", gradient_bits=32).start(swapped, record_of(START), 3)
    for record in fc.read_run(tmp_path / "run.jsonl")[1]:
        assert set(record.excluded) <= {0}
        assert not record.lost
    assert all(np.abs(array).max() < 100 for array in arrays_of(found.arrays).values())


@pytest.mark.parametrize("metrics", [{"loss": float("nan")}, {"other": 1.0}, {"loss": [1.0, 2.0]}, {"loss": 9.0}])
def test_no_device_spoils_the_training_metrics(tmp_path: Path, metrics: dict) -> None:
    def meddle(partition: int, message: Message, reply: Message) -> list[Message]:
        claim = {"num-examples": 2**53, **metrics} if partition == BAD else {"num-examples": 10, "loss": 1.0}
        reply.content["metrics"] = MetricRecord(claim)
        return [reply]

    found = strategy(tmp_path).start(MemoryGrid(APP, range(10), meddle=meddle), record_of(START), 1)
    assert found.train_metrics_clientapp[1]["loss"] <= (9 * 1.0 + 3 * 9.0) / 12 + 1e-9


def test_a_leaf_that_one_gradient_has_alone_changes_nothing(tmp_path: Path) -> None:
    meddle = changed(GRADIENT, running_mean=np.ones(2, np.float32))
    models = [
        arrays_of(strategy(tmp_path).start(MemoryGrid(APP, range(5), **meddling), record_of(START), 1).arrays)
        for meddling in ({}, {"meddle": meddle})
    ]
    assert fc.read_run(tmp_path / "run.jsonl")[1][0].excluded == {}
    assert all(models[0][name].tobytes() == models[1][name].tobytes() for name in START)


@pytest.mark.parametrize("fault", ["fails", "NaN gradient", "gradient of wrong shape"])
@pytest.mark.parametrize("probes", ["all", 2])
def test_a_bad_probe_is_left_out_and_named(tmp_path: Path, fault: str, probes: str | int) -> None:
    inner = FedAvg(fraction_train=0.5, fraction_evaluate=0.0)
    grid = MemoryGrid(APP, range(4), meddle=FAULTS[fault][0])
    strategy(tmp_path, inner, probes=probes).start(grid, record_of(START), 6)
    records = fc.read_run(tmp_path / "run.jsonl")[1]
    probed = [record for record in records if BAD not in record.devices]
    assert all(record.excluded[BAD].startswith(FAULTS[fault][1]) for record in probed if record.excluded)
    assert any(record.excluded for record in probed)
    assert not any(record.lost for record in records)


def test_a_late_answer_is_not_taken_for_this_rounds(tmp_path: Path) -> None:
    kept: list[Message] = []

    @only("train")
    def late(message: Message, reply: Message) -> list[Message]:
        kept.append(reply)
        return kept[:-1][-1:]  # nothing in the first round, then always the answer of the round before

    strategy(tmp_path).start(MemoryGrid(APP, range(4), meddle=late), record_of(START), 2)
    first, second = fc.read_run(tmp_path / "run.jsonl")[1]
    assert first.excluded == {BAD: "no reply before the timeout"}
    assert second.excluded == {BAD: "no reply before the timeout"}


def test_a_late_answer_of_a_device_that_was_not_asked_is_named(tmp_path: Path) -> None:
    grid = MemoryGrid(APP, range(6))
    kept: dict[int, Message] = {}

    def meddle(partition: int, message: Message, reply: Message) -> list[Message]:
        if not kept:
            kept[partition] = reply
            return []
        return [reply, *kept.values()] if len(grid.sent) > 2 and partition not in kept else [reply]

    grid.meddle = meddle
    strategy(tmp_path, FedAvg(fraction_train=0.34, fraction_evaluate=0.0)).start(grid, record_of(START), 8)
    late = [r.excluded for r in fc.read_run(tmp_path / "run.jsonl")[1][1:] if not kept.keys() & set(r.devices)]
    assert late
    assert all(excluded == {device: "late or unsolicited reply"} for excluded in late for device in kept)


def test_too_few_answers_keep_the_model_and_lose_the_round(tmp_path: Path) -> None:
    run = strategy(tmp_path, min_replies=4, max_lost=9)
    meddle = FAULTS["fails"][0]
    found = run.start(MemoryGrid(APP, range(4), meddle=meddle), record_of(START), 2)
    for record in fc.read_run(tmp_path / "run.jsonl")[1]:
        assert (record.lost, record.devices, record.weights, record.promised_change) == (True, [], [], None)
        assert record.excluded.keys() == {BAD}
    assert arrays_of(found.arrays)["w"].tobytes() == START["w"].tobytes()
    assert found.train_metrics_clientapp[1]["fedcontext.lost"] == 1


def test_lost_rounds_in_a_row_end_the_run_and_one_good_round_starts_the_count_anew(tmp_path: Path) -> None:
    grid = MemoryGrid(APP, range(3))
    good = {3}

    def meddle(partition: int, message: Message, reply: Message) -> list[Message]:
        number = message.content["config"]["server-round"]
        return [reply] if number in good else [Message(Error(2, "no"), reply_to=message)]

    grid.meddle = meddle
    with pytest.raises(
        fc.FedcontextError, match=r"3 consecutive rounds were lost \(max_lost 3\), the last because at least 1"
    ):
        strategy(tmp_path, max_lost=3).start(grid, record_of(START), 20)
    assert [record.lost for record in fc.read_run(tmp_path / "run.jsonl")[1]] == [True, True, False, True, True, True]


def test_a_reason_that_many_nodes_share_is_given_once_a_round_and_in_full(tmp_path: Path, caplog) -> None:
    caplog.set_level("WARNING", "flwr")
    grid = MemoryGrid(APP.app, range(44))  # a stock client app: it sends no gradient
    grid.meddle = FAULTS["fails"][0]  # and one node fails
    with pytest.raises(fc.FedcontextError, match="3 consecutive rounds were lost") as error:
        strategy(tmp_path).start(grid, record_of(START), 9)
    excluded = [line for line in caplog.messages if "Excluded" in line and "no gradient" in line]
    for text in (str(error.value), *excluded):
        assert "43 devices (" in text
        assert "torch_client or numpy_client" in text
        assert " and 40 more)" in text
        assert "..." not in text
    assert str(error.value).endswith("; others for other reasons (see the log)")
    assert len(excluded) == 3
    assert len(fc.read_run(tmp_path / "run.jsonl")[1][0].excluded) == 44


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_step_that_overflows_is_not_taken(tmp_path: Path) -> None:
    def far(params, config, context):
        return {name: np.full_like(array, 3e38) for name, array in params.items()}, 1

    twice = fc.stateless("twice", lambda geometry: np.full(len(geometry.samples), 2.0))
    grid = MemoryGrid(numpy_client(far, gradient), range(3))
    found = strategy(tmp_path, rule=twice, max_lost=9).start(grid, record_of(START), 2)
    assert all(np.isfinite(array).all() for array in arrays_of(found.arrays).values())
    assert [record.lost for record in fc.read_run(tmp_path / "run.jsonl")[1]] == [True, True]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_update_too_long_to_measure_is_left_out(tmp_path: Path) -> None:
    start = {name: array.astype(np.float64) for name, array in START.items()}

    def train64(params, config, context):
        far = context.node_config["partition-id"] == BAD
        return {name: np.full_like(array, 1e200 if far else 1) for name, array in params.items()}, 1

    def gradient64(params, context):
        return {name: np.ones_like(array) for name, array in params.items()}, 1

    grid = MemoryGrid(numpy_client(train64, gradient64), range(3))
    strategy(tmp_path).start(grid, record_of(start), 1)
    (record,) = fc.read_run(tmp_path / "run.jsonl")[1]
    assert record.excluded == {BAD: "update: its squared norm overflows float64"}
    assert sorted(record.devices) == [0, 1]


def test_waiting_for_devices_has_a_time_out(tmp_path: Path) -> None:
    run = strategy(tmp_path, FedAvg(min_available_nodes=5), node_timeout=0.1)
    with pytest.raises(fc.FedcontextError, match=r"at least 5 nodes must be connected, got 2 after 0\.1 s"):
        run.start(MemoryGrid(APP, range(2)), record_of(START), 1)


def test_a_strategy_that_would_wait_for_ever_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Greedy(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            while len(list(grid.get_node_ids())) < 100:
                pass
            return []

    with pytest.raises(fc.FedcontextError, match="waits for more nodes than the 3 connected"):
        strategy(tmp_path, Greedy()).start(MemoryGrid(APP, range(3)), record_of(START), 1)


EVALUATIONS = [
    {"loss": float("nan"), "num-examples": 3},
    {"loss": 9.0, "num-examples": 0},
    {"loss": 9.0, "num-examples": 3, "more": 1},
    {"num-examples": 3},
    {},
]


@pytest.mark.parametrize("metrics", EVALUATIONS)
def test_a_bad_evaluation_is_left_out(tmp_path: Path, metrics: dict) -> None:
    def evaluate(params, context):
        return metrics if context.node_config["partition-id"] == BAD else {"loss": 1.0, "num-examples": 3}

    grid = MemoryGrid(numpy_client(train, gradient, evaluate), range(4))
    found = strategy(tmp_path, FedAvg()).start(grid, record_of(START), 1)
    assert found.evaluate_metrics_clientapp[1]["loss"] == 1.0


@pytest.mark.parametrize("samples", [2.0**53, 1e308])
def test_an_evaluator_that_claims_many_samples_counts_as_three(tmp_path: Path, samples: float) -> None:
    def evaluate(params, context):
        bad = context.node_config["partition-id"] == BAD
        return {"accuracy": 1.0, "num-examples": samples} if bad else {"accuracy": 0.5, "num-examples": 10.0}

    grid = MemoryGrid(numpy_client(train, gradient, evaluate), range(10))
    found = strategy(tmp_path, FedAvg()).start(grid, record_of(START), 1)
    assert found.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx((9 * 0.5 + 3 * 1.0) / 12)


def test_too_few_devices_to_evaluate_cost_the_evaluation_not_the_round(tmp_path: Path) -> None:
    strategy(tmp_path, FedAvg(min_evaluate_nodes=5)).start(MemoryGrid(APP, range(4)), record_of(START), 2)
    for record in fc.read_run(tmp_path / "run.jsonl")[1]:
        assert (len(record.devices), record.loss, record.lost) == (4, None, False)


def mute(grid: MemoryGrid, silent: set[int]) -> None:
    """Let these nodes never say who they are."""
    send = grid.send_and_receive

    def muted(messages, *, timeout=None):
        replies = send(messages, timeout=timeout)
        kind = {message.metadata.message_type for message in grid.sent[-1]}
        return [r for r in replies if kind != {"query.whoami"} or r.metadata.src_node_id not in silent]

    grid.send_and_receive = muted


def test_a_node_that_does_not_say_who_it_is_is_neither_in_the_cohort_nor_a_probe(tmp_path: Path) -> None:
    grid = MemoryGrid(APP, range(4))
    mute(grid, {next(iter(grid.partitions))})
    strategy(tmp_path, probes=4).start(grid, record_of(START), 3)
    assert [len(record.devices) for record in fc.read_run(tmp_path / "run.jsonl")[1]] == [3, 3, 4]
    training = [messages for messages in grid.sent if messages[0].metadata.message_type == "train"]
    assert [len(messages) for messages in training] == [3, 3, 4]


def test_a_number_of_probes_waits_for_as_many_nodes(tmp_path: Path) -> None:
    with pytest.raises(fc.FedcontextError, match="at least 5 nodes must be connected, got 4"):
        strategy(tmp_path, probes=5, node_timeout=0.1).start(MemoryGrid(APP, range(4)), record_of(START), 1)


def test_a_round_without_a_device_to_train_is_lost_and_the_run_goes_on(tmp_path: Path) -> None:
    grid = MemoryGrid(APP, range(3))
    mute(grid, set(grid.partitions))
    found = strategy(tmp_path).start(grid, record_of(START), 3)
    assert [record.lost for record in fc.read_run(tmp_path / "run.jsonl")[1]] == [True, True, False]
    assert arrays_of(found.arrays)["w"].any()
    with pytest.raises(
        fc.FedcontextError, match=r"2 consecutive rounds were lost .* at least 1 usable updates are needed, got 0"
    ):
        strategy(tmp_path, max_lost=2).start(grid, record_of(START), 3)


def test_the_question_who_a_node_is_waits_half_a_minute_at_most(tmp_path: Path) -> None:
    grid = MemoryGrid(APP, range(3))
    strategy(tmp_path).start(grid, record_of(START), 1, timeout=1000)
    whoami, training = grid.sent
    assert {message.metadata.ttl for message in whoami} == {30}
    assert {message.metadata.ttl for message in training} == {1000}


def test_a_node_that_never_says_who_it_is_goes_by_its_node_id(tmp_path: Path) -> None:
    grid = MemoryGrid(APP, range(3))
    silent = next(iter(grid.partitions))
    mute(grid, {silent})
    strategy(tmp_path).start(grid, record_of(START), 4)
    devices = [set(record.devices) for record in fc.read_run(tmp_path / "run.jsonl")[1]]
    others = set(grid.partitions.values()) - {grid.partitions[silent]}
    assert devices == [others, others, others | {silent}, others | {silent}]
    kinds = [messages[0].metadata.message_type for messages in grid.sent]
    assert kinds.count("query.whoami") == 3


def test_a_model_that_is_not_finite_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(fc.FedcontextError, match="the initial model has NaN or infinite entries in w"):
        strategy(tmp_path).start(MemoryGrid(APP, range(3)), record_of({**START, "w": NAN}), 1)


@pytest.mark.filterwarnings("ignore::UserWarning")  # NumPy's, about headers of old
@given(st.data())
def test_no_bytes_do_more_than_be_refused(data: st.DataObject) -> None:
    good = Array(np.arange(6, dtype=np.float32).reshape(2, 3)).data
    place = data.draw(st.integers(0, len(good)))
    data_sent = good[:place] + data.draw(st.binary(max_size=40)) + good[place + data.draw(st.integers(0, 40)) :]
    try:
        found = view(Array("float32", (2, 3), "numpy.ndarray", data_sent))
    except fc.FedcontextError:
        return
    assert isinstance(found, np.ndarray)
    assert found.nbytes <= len(data_sent)


INVALID = [("probes", 0), ("probes", "some"), ("min_replies", 0), ("max_lost", 0), ("probe_averaging", "banana")]
INVALID += [("epochs", (5, 1)), ("epochs", 0), ("epochs", "some"), ("rule", "banana"), ("rule", 3), ("pool", -5)]
INVALID += [("pool", "some"), ("seed", -1), ("seed", "x"), ("node_timeout", 0), ("gradient_bits", 12), ("defences", {})]
INVALID += [("rule", fc.mean), ("rule", fc.contextual), ("rule", lambda: fc.mean())]  # not called
INVALID += [("server", "fedadam"), ("server", fedadam), ("exchanges", 0), ("exchanges", 3), ("exchanges", "two")]


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_invalid_settings_are_refused_when_the_strategy_is_made(name: str, value: object) -> None:
    with pytest.raises(fc.FedcontextError, match=f"{name} must be"):
        ContextualStrategy(FedAvg(), **{name: value})


@pytest.mark.parametrize("name", ["records", "checkpoint"])
def test_a_folder_in_place_of_a_file_is_refused_when_the_strategy_is_made(name: str, tmp_path: Path) -> None:
    with pytest.raises(fc.FedcontextError, match="an output must be a regular file, and this is a directory"):
        ContextualStrategy(FedAvg(), **{name: tmp_path})


@pytest.mark.parametrize(
    ("inner", "line"), [(FedProx, "FedProx(...)"), (fc.mean(), "FedAvg(...), rule=...)"), ("fedavg", "FedAvg(...)")]
)
def test_what_is_no_strategy_is_refused_with_the_line_to_write(inner: object, line: str) -> None:
    with pytest.raises(fc.FedcontextError, match="inner must be a strategy of flwr") as refused:
        ContextualStrategy(inner)
    assert f"write ContextualStrategy({line}" in str(refused.value)


def test_a_function_that_returns_no_rule_is_named() -> None:
    made = ContextualStrategy(FedAvg(), rule=lambda config: "banana")
    with pytest.raises(fc.FedcontextError, match="the function given as rule must return a rule, got 'banana'"):
        made.start(MemoryGrid(APP, range(3)), record_of(START), 1)


@pytest.mark.parametrize("rule", [fc.fltrust(), fc.fednova()])
def test_a_rule_that_clients_cannot_serve_is_refused_before_the_first_round(rule: fc.Rule) -> None:
    grid = MemoryGrid(APP, range(3))
    with pytest.raises(fc.FedcontextError, match=f"rule '{rule.name}' needs .*, which clients do not send"):
        ContextualStrategy(FedAvg(), lambda config: rule).start(grid, record_of(START), 1)
    assert not grid.sent
