from __future__ import annotations

import json
import queue
import struct
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from fedcontext.callbacks import follow, trackers
from fedcontext.callbacks.trackers import metrics_of, track_runs
from fedcontext.errors import FedcontextError, MissingExtra
from fedcontext.preparation import train
from fedcontext.processes import completed_rounds

from .conftest import experiments


@pytest.fixture(scope="module")
def finished() -> list:
    return [(experiment, train(experiment).records) for experiment in (experiments()[0], experiments()[-1])]


def log_all(name: str, finished: list, out: Path) -> None:
    with track_runs(name, out) as on_round:
        for pair in zip(*(records for _, records in finished), strict=True):
            for (experiment, _), record in zip(finished, pair, strict=True):
                on_round(experiment, record)


def expected(records: list, name: str) -> list[tuple[int, float]]:
    return [(record.number, metrics_of(record)[name]) for record in records if name in metrics_of(record)]


NUMBERS = ("loss", "accuracy", "promised_change", "seconds", "bytes_up", "excluded")


def test_tensorboard_received_every_number(finished: list, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_all("tensorboard", finished, tmp_path)
    for experiment, records in finished:
        stored = events.EventAccumulator(str(tmp_path / "tensorboard" / experiment.name)).Reload()
        for name in NUMBERS:
            wanted = expected(records, name)
            logged = [(event.step, event.value) for event in stored.Scalars(name)] if wanted else []
            assert logged == [(step, pytest.approx(value, rel=1e-6)) for step, value in wanted], name


def test_a_local_mlflow_store_received_every_number_and_setting(finished: list, tmp_path: Path, monkeypatch) -> None:
    mlflow = pytest.importorskip("mlflow.tracking")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_all("mlflow", finished, tmp_path)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    logged = {
        run.info.run_name: run
        for run in client.search_runs([client.get_experiment_by_name("fedcontext").experiment_id])
    }
    assert set(logged) == {experiment.name for experiment, _ in finished}
    for experiment, records in finished:
        run = logged[experiment.name]
        assert run.info.status == "FINISHED"
        assert run.data.params["algorithm"] == experiment.algorithm
        for name in NUMBERS:
            history = client.get_metric_history(run.info.run_id, name) if name in run.data.metrics else []
            assert [(metric.step, metric.value) for metric in history] == expected(records, name), name


def test_wandb_gets_every_round_offline(finished: list, tmp_path: Path, monkeypatch) -> None:
    """A stand-in takes the place of the library: the test checks the calls it receives."""
    calls: list[tuple] = []

    class Run:
        def __init__(self, **given: object) -> None:
            calls.append(("init", given["name"], given["mode"], given["reinit"]))
            self.name = given["name"]

        def log(self, values: dict, step: int) -> None:
            calls.append(("log", self.name, step, values))

        def finish(self, exit_code: int) -> None:
            calls.append(("finish", self.name, exit_code))

    monkeypatch.delenv("WANDB_MODE", raising=False)
    wandb = type(sys)("wandb")
    wandb.init, wandb.Settings = Run, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log_all("wandb", finished, tmp_path)
    for experiment, records in finished:
        mine = [entry for entry in calls if entry[1] == experiment.name]
        assert mine[0] == ("init", experiment.name, "offline", "create_new")
        assert mine[1:-1] == [("log", experiment.name, record.number, metrics_of(record)) for record in records]
        assert mine[-1] == ("finish", experiment.name, 0)


def test_wandb_writes_files_that_hold_every_round(finished: list, tmp_path: Path, monkeypatch) -> None:
    """The library itself, where it is installed: its offline files are read back."""
    entry_of = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record.FromString
    monkeypatch.delenv("WANDB_MODE", raising=False)
    log_all("wandb", finished, tmp_path)
    logged = {}
    for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb"):
        entries = [entry_of(text) for text in _logged(path.read_bytes())]
        logged[next(entry.run.display_name for entry in entries if entry.HasField("run"))] = entries
    assert set(logged) == {experiment.name for experiment, _ in finished}
    for experiment, records in finished:
        rows = [_row(entry) for entry in logged[experiment.name] if entry.HasField("history")]
        values = [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]
        assert [row["_step"] for row in rows] == [record.number for record in records]
        assert values == [metrics_of(record) for record in records]
        assert [entry.exit.exit_code for entry in logged[experiment.name] if entry.HasField("exit")] == [0]


def _logged(data: bytes) -> Iterator[bytes]:
    """Yield the entries of a log in LevelDB's format: blocks of 32 KiB, in which entries may be cut into parts."""
    at, entry = len(":W&B") + 3, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # too little for a part: the block ends with zeros
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        entry += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield entry
            entry = b""


def _row(entry) -> dict[str, float]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in entry.history.item}


class Stub:
    """A tracker whose methods may fail; it keeps the final status of its runs."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.logged: list[int] = []
        self.statuses: dict[str, str] = {}

    def __call__(self, experiment, out: Path):
        stub = self

        class Log:
            def log(self, number: int, metrics: dict) -> None:
                stub.logged.append(number)
                if stub.failing == "log":
                    raise ConnectionError("the server is gone")

            def close(self, status: str) -> None:
                stub.statuses[experiment.name] = status
                if stub.failing == "close":
                    raise ConnectionError("the server is gone")

        if stub.failing == "open":
            raise ConnectionError("the server is gone")
        return Log()


@pytest.fixture
def stub(monkeypatch):
    def install(failing: str = "") -> Stub:
        made = Stub(failing)
        monkeypatch.setitem(trackers.TRACKERS, "json", made)  # any module that is installed
        return made

    return install


@pytest.mark.parametrize("failing", ["open", "log", "close"])
def test_a_failing_tracker_is_reported_once_and_the_rounds_continue(stub, finished, tmp_path, capsys, failing) -> None:
    tracker = stub(failing)
    log_all("json", finished, tmp_path)
    assert capsys.readouterr().err.count("tracking to json failed and is disabled: ConnectionError: the server is") == 1
    assert len(tracker.logged) == {"open": 0, "log": 1, "close": 11}[failing]  # closed after its sixth round, the first


def test_one_run_that_cannot_be_ended_does_not_keep_the_others_open(stub, finished, tmp_path) -> None:
    tracker = stub("close")
    with track_runs("json", tmp_path) as on_round:
        for experiment, records in finished:
            on_round(experiment, records[0])
    assert tracker.statuses == {experiment.name: "FINISHED" for experiment, _ in finished}


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "KILLED"), (ValueError, "FAILED")])
def test_interrupted_runs_get_their_status(stub, finished, tmp_path, error, status) -> None:
    tracker = stub()
    (complete, records), (cut, others) = finished

    def play() -> None:
        with track_runs("json", tmp_path) as on_round:
            for record in records:
                on_round(complete, record)
            on_round(cut, others[0])
            raise error

    with pytest.raises(error):
        play()
    assert tracker.statuses == {complete.name: "FINISHED", cut.name: status}


@pytest.mark.parametrize("received", [0, 2])
def test_rounds_whose_messages_are_late_are_taken_from_the_finished_run(finished, received) -> None:
    experiment, records = finished[0]
    done: Future = Future()
    done.set_result(records)
    messages: queue.Queue = queue.Queue()
    for record in records[:received]:
        messages.put((experiment, record))
    assert list(completed_rounds({done: experiment}, messages)) == [(experiment, record) for record in records]


def test_an_unknown_tracker_and_a_missing_library_are_named(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(FedcontextError, match="track must be one of tensorboard, mlflow, wandb"):
        track_runs("excel", tmp_path).__enter__()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match=r"pip install 'fedcontext\[wandb\]'"):
        track_runs("wandb", tmp_path).__enter__()


def test_every_callback_gets_every_round(finished: list, tmp_path: Path) -> None:
    experiment, records = finished[0]
    pytest.importorskip("tensorboard")
    with follow([experiment], tmp_path, report=tmp_path / "page.html", track="tensorboard") as on_round:
        for record in records:
            on_round(experiment, record)
    assert "6 rounds" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert list((tmp_path / "tensorboard" / experiment.name).iterdir())
