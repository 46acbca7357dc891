"""Experiment trackers: TensorBoard, MLflow and Weights & Biases."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from fedcontext.console import warn
from fedcontext.errors import by_name, require
from fedcontext.experiment import Experiment
from fedcontext.records import RoundRecord
from fedcontext.results.reader import COSTS, METRICS
from fedcontext.runner import OnRound

Status: TypeAlias = Literal["FINISHED", "FAILED", "KILLED"]


class Tracker(Protocol):
    """One run in a tracker."""

    def log(self, number: int, metrics: dict[str, float]) -> None:
        """Log the metrics of round ``number``."""
        ...

    def close(self, status: Status) -> None:
        """End the run."""
        ...


def metrics_of(record: RoundRecord) -> dict[str, float]:
    """Return the metrics of a round that are known, and the number of excluded devices.

    >>> metrics_of(RoundRecord(1, loss=0.5, excluded={3: "missed the deadline"}))
    {'loss': 0.5, 'seconds': 0.0, 'bytes_down': 0.0, 'bytes_up': 0.0, 'excluded': 1.0}
    """
    values = {name: getattr(record, name) for name in (*METRICS, *COSTS)} | {"excluded": len(record.excluded)}
    return {name: float(value) for name, value in values.items() if value is not None and value == value}


class TensorBoard:
    """Event files under ``out/tensorboard``, one directory per run."""

    def __init__(self, experiment: Experiment, out: Path) -> None:
        writers = require("tensorboard.summary.writer.event_file_writer", extra="tensorboard")
        self.events = require("tensorboard.compat.proto.event_pb2", extra="tensorboard")
        self.summaries = require("tensorboard.compat.proto.summary_pb2", extra="tensorboard")
        self.writer = writers.EventFileWriter(str(out / "tensorboard" / experiment.name))

    def log(self, number: int, metrics: dict[str, float]) -> None:
        """Write one event with all metrics."""
        values = [self.summaries.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        summary = self.summaries.Summary(value=values)
        self.writer.add_event(self.events.Event(wall_time=time.time(), step=number, summary=summary))

    def close(self, status: Status) -> None:
        """Flush and close the event file."""
        self.writer.close()


class MLflow:
    """A run in the store of MLFLOW_TRACKING_URI, by default the SQLite file ``out/mlflow.db``."""

    def __init__(self, experiment: Experiment, out: Path) -> None:
        self.entities = require("mlflow.entities", extra="mlflow")
        out.mkdir(parents=True, exist_ok=True)
        store = tracked_to("mlflow", out)
        self.client: Any = require("mlflow.tracking", extra="mlflow").MlflowClient(tracking_uri=store)
        existing = self.client.get_experiment_by_name("fedcontext")
        artifacts = str((out / "mlflow").absolute())
        home = existing.experiment_id if existing else self.client.create_experiment("fedcontext", artifacts)
        self.run = self.client.create_run(home, run_name=experiment.name).info.run_id
        settings = dataclasses.asdict(experiment).items()
        self.client.log_batch(self.run, params=[self.entities.Param(name, str(value)) for name, value in settings])

    def log(self, number: int, metrics: dict[str, float]) -> None:
        """Log one batch with all metrics."""
        now = int(time.time() * 1000)
        batch = [self.entities.Metric(name, value, now, number) for name, value in metrics.items()]
        self.client.log_batch(self.run, metrics=batch)

    def close(self, status: Status) -> None:
        """Set the final status of the run."""
        self.client.set_terminated(self.run, status=status)


class WandB:
    """An offline run under ``out/wandb`` for `wandb sync`; WANDB_MODE=online uploads while it runs."""

    def __init__(self, experiment: Experiment, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        wandb = require("wandb", extra="wandb")
        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedcontext"),
            name=experiment.name,
            config=dataclasses.asdict(experiment),
            dir=str(out),
            mode=os.environ.get("WANDB_MODE", "offline"),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, number: int, metrics: dict[str, float]) -> None:
        """Log the metrics at this step."""
        self.run.log(metrics, step=number)

    def close(self, status: Status) -> None:
        """Finish the run, as failed unless it is complete."""
        self.run.finish(exit_code=0 if status == "FINISHED" else 1)


TRACKERS: dict[str, Callable[[Experiment, Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}


def tracked_to(name: str, out: Path) -> str:
    """Return where the tracker ``name`` keeps its runs, "" without one.

    >>> tracked_to("tensorboard", Path("runs")), tracked_to("", Path("runs"))
    ('runs/tensorboard', '')
    """
    if name == "mlflow":
        return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(out / 'mlflow.db').absolute()}"
    return str(out / name) if name else ""


@contextmanager
def track_runs(name: str, out: Path) -> Iterator[OnRound]:
    """Yield the callback that logs every round to the tracker ``name``, each experiment as a run of its own.

    A tracker that fails is reported once and disabled: the experiments continue without it.

    >>> with track_runs("no-such", Path("runs")): pass
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: track must be one of tensorboard, mlflow, wandb, got 'no-such'
    """
    tracker = by_name("track", name, TRACKERS)
    require(name, extra=name)  # fail before the first round, not after it
    runs = TrackedRuns(name, tracker, out)
    status: Status = "FAILED"
    try:
        yield runs.update
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        runs.close(status)


class TrackedRuns:
    """The open runs of one tracker."""

    def __init__(self, name: str, tracker: Callable[[Experiment, Path], Tracker], out: Path) -> None:
        self.name, self.tracker, self.out = name, tracker, out
        self.open: dict[str, Tracker] = {}
        self.failed = False

    def update(self, experiment: Experiment, record: RoundRecord) -> None:
        """Log one round, and close the run after its last."""
        if not self.failed:
            self._attempt(partial(self._log, experiment, record))

    def close(self, status: Status) -> None:
        """Close all open runs; a failure to close one does not keep the others open."""
        for run in self.open.values():
            self._attempt(partial(run.close, status))

    def _log(self, experiment: Experiment, record: RoundRecord) -> None:
        if experiment.name not in self.open:
            self.open[experiment.name] = self.tracker(experiment, self.out)
        self.open[experiment.name].log(record.number, metrics_of(record))
        if record.number == experiment.rounds:
            self.open.pop(experiment.name).close("FINISHED")

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a tracker may raise anything
            if not self.failed:
                warn(f"tracking to {self.name} failed and is disabled: {type(error).__name__}: {error}")
            self.failed = True
