"""The numbers of every round to the trackers that people already run: TensorBoard, MLflow, Weights & Biases."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from fedcontext.console import err
from fedcontext.errors import FedcontextError, require
from fedcontext.experiment import Experiment
from fedcontext.records import RoundRecord
from fedcontext.results.reader import COSTS, METRICS
from fedcontext.runner import OnRound

End: TypeAlias = Literal["FINISHED", "FAILED", "KILLED"]


class Log(Protocol):
    """One run in a tracker."""

    def send(self, number: int, values: dict[str, float]) -> None:
        """Send the values of round ``number``."""
        ...

    def close(self, end: End) -> None:
        """End the run: nothing more will come."""
        ...


def values_of(record: RoundRecord) -> dict[str, float]:
    """Return what a tracker gets of a round: every number that is known, and how many devices were left out.

    >>> import fedcontext as fc
    >>> values = values_of(next(fc.rounds(dataset="synthetic-iid", algorithm="fedavg", rounds=1)))
    >>> values["left_out"], "promised_change" in values
    (0.0, False)
    """
    fields = {name: getattr(record, name) for name in (*METRICS, *COSTS)} | {"left_out": len(record.excluded)}
    return {name: float(value) for name, value in fields.items() if value is not None and value == value}


class TensorBoard:
    """Event files under ``out/tensorboard``, one directory a run."""

    def __init__(self, experiment: Experiment, out: Path) -> None:
        writers = require("tensorboard.summary.writer.event_file_writer", extra="tensorboard")
        self.events = require("tensorboard.compat.proto.event_pb2", extra="tensorboard")
        self.summaries = require("tensorboard.compat.proto.summary_pb2", extra="tensorboard")
        self.writer = writers.EventFileWriter(str(out / "tensorboard" / experiment.name))

    def send(self, number: int, values: dict[str, float]) -> None:
        """Write one event with all values."""
        parts = [self.summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = self.events.Event(wall_time=time.time(), step=number, summary=self.summaries.Summary(value=parts))
        self.writer.add_event(event)

    def close(self, end: End) -> None:
        """Flush what is still in memory."""
        self.writer.close()


class MLflow:
    """A run in the store that MLFLOW_TRACKING_URI names, else in the SQLite file ``out/mlflow.db``."""

    def __init__(self, experiment: Experiment, out: Path) -> None:
        self.entities = require("mlflow.entities", extra="mlflow")
        store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(out / 'mlflow.db').absolute()}"
        out.mkdir(parents=True, exist_ok=True)
        self.client: Any = require("mlflow.tracking", extra="mlflow").MlflowClient(tracking_uri=store)
        home = self.client.get_experiment_by_name("fedcontext")
        where = (
            home.experiment_id
            if home
            else self.client.create_experiment("fedcontext", str((out / "mlflow").absolute()))
        )
        self.run = self.client.create_run(where, run_name=experiment.name).info.run_id
        settings = dataclasses.asdict(experiment).items()
        params = [self.entities.Param(name, str(value)) for name, value in settings]
        self.client.log_batch(self.run, params=params)

    def send(self, number: int, values: dict[str, float]) -> None:
        """Log one batch with all values."""
        now = int(time.time() * 1000)
        metrics = [self.entities.Metric(name, value, now, number) for name, value in values.items()]
        self.client.log_batch(self.run, metrics=metrics)

    def close(self, end: End) -> None:
        """Mark the run as ended, and how."""
        self.client.set_terminated(self.run, status=end)


class WandB:
    """An offline run under ``out/wandb``, for `wandb sync`; WANDB_MODE=online sends it at once."""

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

    def send(self, number: int, values: dict[str, float]) -> None:
        """Log the values at this step."""
        self.run.log(values, step=number)

    def close(self, end: End) -> None:
        """Finish the run; one that did not get to its end counts as failed."""
        self.run.finish(exit_code=0 if end == "FINISHED" else 1)


TRACKERS: dict[str, Callable[[Experiment, Path], Log]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


@contextmanager
def tracking(name: str, out: Path) -> Iterator[OnRound]:
    """Yield the function to call after every round; each experiment becomes one run of the tracker ``name``.

    A tracker that fails is told of once and gets nothing more: the experiments go on without it.

    >>> with tracking("no-such", Path("runs")): pass
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: track must be one of tensorboard, mlflow, wandb, got 'no-such'
    """
    if name not in TRACKERS:
        raise FedcontextError(f"track must be one of {', '.join(TRACKERS)}, got {name!r}")
    require(name, extra=name)  # a missing library shows before the work begins
    tracker = Tracker(name, out)
    end: End = "FAILED"
    try:
        yield tracker.add
        end = "FINISHED"
    except KeyboardInterrupt:
        end = "KILLED"
        raise
    finally:
        tracker.close(end)


class Tracker:
    """The runs that are open in one tracker."""

    def __init__(self, name: str, out: Path) -> None:
        self.name, self.out = name, out
        self.logs: dict[str, Log] = {}
        self.failed = False

    def add(self, experiment: Experiment, record: RoundRecord) -> None:
        """Send one more round; a run that has all its rounds is ended, whatever becomes of the others."""
        if not self.failed:
            self._try(partial(self._send, experiment, record))

    def close(self, end: End) -> None:
        """End the runs that are open; one that cannot be ended does not keep the others open."""
        for log in self.logs.values():
            self._try(partial(log.close, end))

    def _send(self, experiment: Experiment, record: RoundRecord) -> None:
        if experiment.name not in self.logs:
            self.logs[experiment.name] = TRACKERS[self.name](experiment, self.out)
        self.logs[experiment.name].send(record.number, values_of(record))
        if record.number == experiment.rounds:
            self.logs.pop(experiment.name).close("FINISHED")

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever another program or its server may raise
            if not self.failed:
                told = f"{self.name} failed and gets no more rounds: {type(error).__name__}: {error}"
                err.print(told, style="yellow", highlight=False, markup=False, soft_wrap=True)
            self.failed = True
