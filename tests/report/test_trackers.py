from __future__ import annotations

import io
import json
import queue
import struct
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from rich.console import Console

from fedcontext.callbacks import trackers
from fedcontext.callbacks.progress import Standings, watching
from fedcontext.callbacks.trackers import tracking, values_of
from fedcontext.errors import FedcontextError, MissingExtra
from fedcontext.runner import completed_rounds
from fedcontext.simulation import rounds

from .conftest import experiments


@pytest.fixture(scope="module")
def played() -> list:
    return [(experiment, list(rounds(experiment))) for experiment in (experiments()[0], experiments()[-1])]


def send(name: str, played: list, out: Path) -> None:
    with tracking(name, out) as on_round:
        for pair in zip(*(records for _, records in played), strict=True):
            for (experiment, _), record in zip(played, pair, strict=True):
                on_round(experiment, record)


def expected(records: list, name: str) -> list[tuple[int, float]]:
    return [(record.number, values_of(record)[name]) for record in records if name in values_of(record)]


NUMBERS = ("loss", "accuracy", "promised_change", "seconds", "bytes_up", "left_out")


def test_tensorboard_received_every_number(played: list, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    send("tensorboard", played, tmp_path)
    for experiment, records in played:
        stored = events.EventAccumulator(str(tmp_path / "tensorboard" / experiment.name)).Reload()
        for name in NUMBERS:
            wanted = expected(records, name)
            found = [(event.step, event.value) for event in stored.Scalars(name)] if wanted else []
            assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in wanted], name


def test_a_local_mlflow_store_received_every_number_and_setting(played: list, tmp_path: Path, monkeypatch) -> None:
    mlflow = pytest.importorskip("mlflow.tracking")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    send("mlflow", played, tmp_path)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    found = {
        run.info.run_name: run
        for run in client.search_runs([client.get_experiment_by_name("fedcontext").experiment_id])
    }
    assert set(found) == {experiment.name for experiment, _ in played}
    for experiment, records in played:
        run = found[experiment.name]
        assert run.info.status == "FINISHED"
        assert run.data.params["algorithm"] == experiment.algorithm
        for name in NUMBERS:
            history = client.get_metric_history(run.info.run_id, name) if name in run.data.metrics else []
            assert [(metric.step, metric.value) for metric in history] == expected(records, name), name


def test_wandb_gets_every_round_offline(played: list, tmp_path: Path, monkeypatch) -> None:
    """A stand-in takes the place of the library: what is tested is what it would be told."""
    told: list[tuple] = []

    class Run:
        def __init__(self, **given: object) -> None:
            told.append(("init", given["name"], given["mode"], given["reinit"]))
            self.name = given["name"]

        def log(self, values: dict, step: int) -> None:
            told.append(("log", self.name, step, values))

        def finish(self, exit_code: int) -> None:
            told.append(("finish", self.name, exit_code))

    monkeypatch.delenv("WANDB_MODE", raising=False)
    wandb = type(sys)("wandb")
    wandb.init, wandb.Settings = Run, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    send("wandb", played, tmp_path)
    for experiment, records in played:
        mine = [entry for entry in told if entry[1] == experiment.name]
        assert mine[0] == ("init", experiment.name, "offline", "create_new")
        assert mine[1:-1] == [("log", experiment.name, record.number, values_of(record)) for record in records]
        assert mine[-1] == ("finish", experiment.name, 0)


def test_wandb_writes_files_that_hold_every_round(played: list, tmp_path: Path, monkeypatch) -> None:
    """The library itself, where it is installed: its offline files are read back."""
    entry_of = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record.FromString
    monkeypatch.delenv("WANDB_MODE", raising=False)
    send("wandb", played, tmp_path)
    found = {}
    for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb"):
        entries = [entry_of(text) for text in _logged(path.read_bytes())]
        found[next(entry.run.display_name for entry in entries if entry.HasField("run"))] = entries
    assert set(found) == {experiment.name for experiment, _ in played}
    for experiment, records in played:
        rows = [_row(entry) for entry in found[experiment.name] if entry.HasField("history")]
        values = [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]
        assert [row["_step"] for row in rows] == [record.number for record in records]
        assert values == [values_of(record) for record in records]
        assert [entry.exit.exit_code for entry in found[experiment.name] if entry.HasField("exit")] == [0]


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
    """A tracker whose methods may fail, and what became of its runs."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.sent: list[int] = []
        self.ends: dict[str, str] = {}

    def __call__(self, experiment, out: Path):
        stub = self

        class Log:
            def send(self, number: int, values: dict) -> None:
                stub.sent.append(number)
                if stub.failing == "send":
                    raise ConnectionError("the server is gone")

            def close(self, end: str) -> None:
                stub.ends[experiment.name] = end
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


@pytest.mark.parametrize("failing", ["open", "send", "close"])
def test_a_failing_tracker_is_told_of_once_and_the_rounds_go_on(stub, played, tmp_path, capsys, failing) -> None:
    tracker = stub(failing)
    send("json", played, tmp_path)
    assert capsys.readouterr().err.count("json failed and gets no more rounds: ConnectionError: the server is") == 1
    assert len(tracker.sent) == {"open": 0, "send": 1, "close": 11}[failing]  # closed after its sixth round, the first


def test_one_run_that_cannot_be_ended_does_not_keep_the_others_open(stub, played, tmp_path) -> None:
    tracker = stub("close")
    with tracking("json", tmp_path) as on_round:
        for experiment, records in played:
            on_round(experiment, records[0])
    assert tracker.ends == {experiment.name: "FINISHED" for experiment, _ in played}


@pytest.mark.parametrize(("error", "end"), [(KeyboardInterrupt, "KILLED"), (ValueError, "FAILED")])
def test_runs_cut_short_end_as_what_they_are(stub, played, tmp_path, error, end) -> None:
    tracker = stub()
    (whole, records), (cut, others) = played

    def play() -> None:
        with tracking("json", tmp_path) as on_round:
            for record in records:
                on_round(whole, record)
            on_round(cut, others[0])
            raise error

    with pytest.raises(error):
        play()
    assert tracker.ends == {whole.name: "FINISHED", cut.name: end}


@pytest.mark.parametrize("received", [0, 2])
def test_rounds_whose_messages_are_late_are_taken_from_the_finished_run(played, received) -> None:
    experiment, records = played[0]
    done: Future = Future()
    done.set_result(records)
    messages: queue.Queue = queue.Queue()
    for record in records[:received]:
        messages.put((experiment, record))
    assert list(completed_rounds({done: experiment}, messages)) == [(experiment, record) for record in records]


def test_an_unknown_tracker_and_a_missing_library_are_named(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(FedcontextError, match="track must be one of tensorboard, mlflow, wandb"):
        tracking("excel", tmp_path).__enter__()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match=r"pip install 'fedcontext\[wandb\]'"):
        tracking("wandb", tmp_path).__enter__()


def test_the_live_table_has_a_line_an_algorithm_with_its_latest_values(played: list) -> None:
    standings = Standings([experiment for experiment, _ in played])
    for experiment, records in played:
        for record in records[:4]:
            standings.add(experiment, record)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(standings.table())
    text = console.export_text()
    for experiment, records in played:
        line = next(line for line in text.splitlines() if line.split()[:1] == [experiment.algorithm])
        assert line.split()[1:4] == ["4/6", f"{records[3].loss:.3f}", f"{records[3].accuracy:.3f}"]


def test_everyone_who_watches_hears_every_round(played: list, tmp_path: Path) -> None:
    experiment, records = played[0]
    pytest.importorskip("tensorboard")
    with watching([experiment], tmp_path, report=tmp_path / "page.html", track="tensorboard") as on_round:
        for record in records:
            on_round(experiment, record)
    assert "6 rounds" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert list((tmp_path / "tensorboard" / experiment.name).iterdir())
