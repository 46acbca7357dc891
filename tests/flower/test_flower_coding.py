"""What probes send for the rule with memory: gradients, differences, and how many bytes."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from flower_grid import MemoryGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from hypothesis import given
from hypothesis import strategies as st

import fedcontext as fc
from fedcontext.compression.codec import Codec
from fedcontext.flower import ContextualStrategy, numpy_client
from fedcontext.flower.coding import CODE, Code, read_vector
from fedcontext.flower.protocol import DIFFERENCE, GRADIENT, LEAVES, PREVIOUS, REMAINING, arrays_of, record_of

SIZE = 400
START = {"w": np.zeros(SIZE, np.float32), "steps": np.zeros((), np.int64), "mean": np.zeros(3, np.float32)}


def gradient(params, context):
    k = context.node_config["partition-id"]
    scale = np.linspace(0.1, 1, SIZE, dtype=np.float32)
    return {"w": scale * (params["w"] - np.float32(1 + k / 10))}, 10


def train(params, config, context):
    moved = params["w"] - np.float32(0.5) * gradient(params, context)[0]["w"]
    return {"w": moved, "steps": params["steps"] + 1, "mean": params["mean"] + 1}, 10


APP = numpy_client(train, gradient)


def start(grid: MemoryGrid, rounds: int, fraction: float = 1.0, **settings) -> ContextualStrategy:
    strategy = ContextualStrategy(FedAvg(fraction_train=fraction, fraction_evaluate=0.0), **settings)
    strategy.result = strategy.start(grid, record_of(START), rounds)
    return strategy


class Watching:
    """A client app that notes what it is sent and what it replies."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, list[str], dict]] = []

    def __call__(self, message, context):
        names = list(message.content.array_records)
        reply = APP(message, context)
        if message.metadata.message_type != "query.whoami":
            number = message.content["config"]["server-round"]
            sizes = {k: sum(len(a.data) for a in r.values()) for k, r in reply.content.array_records.items()}
            self.seen.append((number, message.metadata.message_type, names, sizes))
        return reply


@pytest.mark.parametrize(
    ("nodes", "fraction", "bits", "probes"), [(4, 1.0, (3, 1), 4), (30, 0.2, (2, 1), 20), (8, 0.5, (2, 1), 8)]
)
def test_by_default_few_bits_travel_and_previous_params_go_to_probes_from_the_second_round(
    nodes: int, fraction: float, bits: tuple[int, int], probes: int
) -> None:
    app = Watching()
    start(MemoryGrid(app, range(nodes)), 3, fraction)
    header = len(Array(np.zeros(1, np.uint8)).data) - 1
    for number in (1, 2, 3):
        probing = [(names, sizes) for n, _, names, sizes in app.seen if n == number and GRADIENT in sizes]
        assert len(probing) == probes
        for names, sizes in probing:
            assert (PREVIOUS in names) == (DIFFERENCE in sizes) == (number > 1)
            assert sizes[GRADIENT] == header + Codec(bits[0]).nbytes(SIZE)
            assert number == 1 or sizes[DIFFERENCE] == header + Codec(bits[1]).nbytes(SIZE)
        second = [(names, sizes) for n, _, names, sizes in app.seen if n == number and sizes.keys() == {DIFFERENCE}]
        assert second == [(["arrays", PREVIOUS], {DIFFERENCE: header + Codec(bits[1]).nbytes(SIZE)})] * len(second)
        most = -(-9 * probes // 10)  # nine tenths of those whose gradients were used
        assert len(second) == most if number == 1 else most / 2 < len(second) <= most
    assert not any(PREVIOUS in names for _, _, names, sizes in app.seen if not {GRADIENT, DIFFERENCE} & sizes.keys())


def test_bytes_in_the_records_are_those_of_the_arrays(tmp_path: Path) -> None:
    app = Watching()
    start(MemoryGrid(app, range(4)), 2, records=tmp_path / "run.jsonl")
    for record in fc.read_run(tmp_path / "run.jsonl")[1]:
        assert record.bytes_up == sum(sum(sizes.values()) for n, _, _, sizes in app.seen if n == record.number)
        models = 4 * (record.number + 2)  # the second exchange sends two to each of four probes
        assert record.bytes_down == models * sum(len(a.data) for a in record_of(START).values())


def test_uncoded_gradients_give_the_aggregation_of_exact_vectors() -> None:
    grid = MemoryGrid(APP, range(4))
    strategy = start(grid, 3, gradient_bits=32)
    contexts = [type("Context", (), {"node_config": {"partition-id": k}}) for k in range(4)]
    params, previous, state = START, None, None
    for _ in range(3):
        moved = [train(params, {}, context)[0] for context in contexts]
        own = [gradient(params, context)[0] for context in contexts]
        before = [gradient(previous, context)[0] for context in contexts] if previous else []
        after = [gradient(each, context)[0]["w"] for each, context in zip(moved, contexts, strict=True)]
        updates = [{name: each[name] - params[name] for name in params} for each in moved]
        slopes = [[np.vdot(g, u["w"]) for g in (now, g0["w"])] for now, g0, u in zip(after, own, updates, strict=True)]
        result = fc.aggregate(
            params,
            updates,
            remaining_slopes=[end / start for end, start in slopes],
            own_gradients=own,
            differences=[{"w": a["w"] - b["w"]} for a, b in zip(own, before, strict=True)] if before else None,
            samples=[10] * 4,
            population=4,
            buffers=["mean"],
            rule=fc.contextual_memory(),
            state=state,
        )
        changes = [{"w": gradient(result.params, c)[0]["w"] - g["w"]} for c, g in zip(contexts, own, strict=True)]
        result = fc.correct(result, changes)
        params, previous, state = result.params, params, result.state
        assert previous or min(end / start for end, start in slopes) > 0.375  # enough for a longer first step
    for name, array in arrays_of(strategy.result.arrays).items():
        np.testing.assert_allclose(array, params[name], rtol=1e-5)


class Claiming(ClientApp):
    """A client app whose replies claim a remaining slope, in the first round alone."""

    def __init__(self, claim: object) -> None:
        super().__init__()
        self.claim, self.asked = claim, []

    def __call__(self, message: Message, context: Context) -> Message:
        asked = REMAINING in str(message.content["config"]["fedcontext.request"]).split()
        self.asked.append(asked)
        reply = APP(message, context)
        if REMAINING in reply.content:
            del reply.content[REMAINING]
        if self.claim is not None:
            reply.content[REMAINING] = self.claim
        return reply


@pytest.mark.parametrize(
    "claim",
    [
        None,
        ConfigRecord({}),
        ConfigRecord({"share": "0.9"}),
        ConfigRecord({"share": [0.9]}),
        ConfigRecord({"share": 3}),
    ],
)
def test_a_remaining_slope_that_is_none_counts_as_not_known(claim: ConfigRecord | None) -> None:
    results = []
    for each in (ConfigRecord({"share": 0.0}), claim):
        app = Claiming(each)
        results.append(arrays_of(start(MemoryGrid(app, range(4)), 2).result.arrays))
        assert app.asked[-4:] == [False] * 4  # the second round does not ask
        assert sum(app.asked) == 4
    for name, array in results[0].items():
        np.testing.assert_array_equal(array, results[1][name])


def test_a_lost_round_keeps_the_previous_params(tmp_path: Path) -> None:
    sent: dict[int, list] = {}

    def note(message, context):
        if message.metadata.message_type != "query.whoami":
            records = message.content.array_records
            models = [arrays_of(records[name])["w"].copy() for name in ("arrays", PREVIOUS) if name in records]
            sent[message.content["config"]["server-round"]] = models
        return APP(message, context)

    def lose(partition, message, reply):
        lost = message.content["config"]["server-round"] == 3
        return [Message(Error(2, "no"), reply_to=message)] if lost else [reply]

    start(MemoryGrid(note, range(3), meddle=lose), 4, exchanges=1)
    assert len(sent[1]) == 1
    np.testing.assert_array_equal(sent[2][1], sent[1][0])
    np.testing.assert_array_equal(sent[4], sent[3])  # nothing moved in round 3


FAULTS = {
    "too short": (lambda c: c.update({GRADIENT: coded(b"???")}), "gradient: 400 entries at 3 bits are encoded in"),
    "not a code": (lambda c: c.update({GRADIENT: record_of({"w": START["w"]})}), "gradient: expected a code of 3 bits"),
    "unknown leaf": (lambda c: c.update({LEAVES: ConfigRecord({"names": ["x"]})}), "gradient: its leaves must be"),
    "integer leaf": (lambda c: c.update({LEAVES: ConfigRecord({"names": ["w", "steps"]})}), "gradient: its leaves"),
    "leaf twice": (lambda c: c.update({LEAVES: ConfigRecord({"names": ["w", "w"]})}), "gradient: its leaves must be"),
    "no leaves": (lambda c: c.pop(LEAVES), "gradient: its leaves must be"),
    "no difference": (lambda c: c.pop(DIFFERENCE, None), "no gradient difference: the client app must be made with"),
}


def coded(data: bytes) -> ArrayRecord:
    return ArrayRecord({CODE: Array(np.frombuffer(data, np.uint8))})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reply_that_cannot_be_decoded_is_excluded_and_named(tmp_path: Path, fault: str) -> None:
    change, reason = FAULTS[fault]

    def meddle(partition, message, reply):
        if partition == 2 and message.content["config"]["server-round"] == 2:
            change(reply.content)
        return [reply]

    start(MemoryGrid(APP, range(5), meddle=meddle), 2, records=tmp_path / "run.jsonl")
    first, second = fc.read_run(tmp_path / "run.jsonl")[1]
    assert not first.excluded
    assert second.excluded.keys() == {2}
    assert second.excluded[2].startswith(reason)
    assert not second.lost


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_stock_client_is_excluded_with_the_helper_to_use(fraction: float) -> None:
    with pytest.raises(fc.FedcontextError, match=r"no gradient: the client app must be made with .*torch_client"):
        start(MemoryGrid(APP.app, range(4)), 3, fraction)


@given(st.binary(max_size=80))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    content = RecordDict({GRADIENT: coded(data), LEAVES: ConfigRecord({"names": ["w"]})})
    with pytest.raises(fc.FedcontextError, match="gradient: "):
        read_vector(content, GRADIENT, START, Code(2, (0,)))


def test_the_debug_log_shows_trust_and_anchor(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "flwr")
    start(MemoryGrid(APP, range(3)), 2)
    assert sum("'trust'" in line and "'anchor'" in line for line in caplog.messages) == 2


@pytest.mark.parametrize("bits", [0, 9, 33, (2, 1), "many", None, True])
def test_invalid_bits_are_refused(bits: object) -> None:
    with pytest.raises(fc.FedcontextError, match="gradient_bits must be"):
        ContextualStrategy(FedAvg(), gradient_bits=bits)
