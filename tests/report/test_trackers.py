from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fedcontext.errors import FedcontextError, MissingExtra
from fedcontext.rounds import rounds
from fedcontext.trackers import tracking, values_of
from fedcontext.watching import Standings, watching

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

        def finish(self) -> None:
            told.append(("finish", self.name))

    monkeypatch.delenv("WANDB_MODE", raising=False)
    wandb = type(sys)("wandb")
    wandb.init, wandb.Settings = Run, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    send("wandb", played, tmp_path)
    for experiment, records in played:
        mine = [entry for entry in told if entry[1] == experiment.name]
        assert mine[0] == ("init", experiment.name, "offline", "create_new")
        assert mine[1:-1] == [("log", experiment.name, record.number, values_of(record)) for record in records]
        assert mine[-1] == ("finish", experiment.name)


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
