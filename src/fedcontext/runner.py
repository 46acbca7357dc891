"""Runs experiments and writes their records to files, one experiment after another or in several processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from fedcontext import checkpoint
from fedcontext.datasets.federated import FederatedData
from fedcontext.engines.base import ENGINES, Engine
from fedcontext.errors import FedcontextError, require
from fedcontext.experiment import Experiment
from fedcontext.model_file import check_format, save_params
from fedcontext.preparation import prepare
from fedcontext.records import RoundRecord, read_run, stream_records, truncate_run
from fedcontext.simulation import Simulation, State
from fedcontext.toml import to_toml

LOG = logging.getLogger("fedcontext")
OnRound: TypeAlias = Callable[[Experiment, RoundRecord], None]
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def run(
    experiment: Experiment,
    out: Path,
    on_round: OnRound = lambda experiment, record: None,
    *,
    data: FederatedData | None = None,
    engine: Engine | None = None,
    resume: bool = False,
    save: Path | None = None,
) -> list[RoundRecord]:
    """Run an experiment and return its records.

    They are also written to ``out`` as rounds finish, beside a TOML file with the settings. Nothing is written before
    settings and data have been checked; an interrupt or an error leaves the completed rounds, in complete lines.

    Args:
        experiment: the settings of the run.
        out: the directory of the files, which are called ``experiment.name``.
        on_round: called with the experiment and each record.
        data: your own data in place of a data set by name; ``experiment.dataset`` must be its name.
        engine: your own engine in place of one by name.
        resume: write a checkpoint after every round, and continue from the one in ``out``. A run that was killed at
            any moment ends with the same params and records, to the bit.
        save: file for the trained params, .npz or .safetensors.

    >>> import tempfile
    >>> import numpy as np
    >>> from fedcontext.datasets import federate
    >>> data = federate(np.eye(20), np.arange(20) % 2, [np.arange(10), np.arange(10, 20)], name="mine")
    >>> experiment = Experiment("mine", "fedavg", rounds=2, devices_per_round=2)
    >>> [record.number for record in run(experiment, Path(tempfile.mkdtemp()), data=data)]
    [1, 2]
    """
    if data is not None and experiment.dataset != data.name:
        raise FedcontextError(f"dataset must be {data.name!r}, the name of the data given, got {experiment.dataset!r}")
    if resume:
        require("safetensors", extra="resume")
    if save is not None:
        check_format(save)
    simulation = prepare(experiment, data=data, engine=engine)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{experiment.name}.toml").write_text(to_toml(asdict(experiment)), encoding="utf-8")
    path, saved = out / f"{experiment.name}.jsonl", out / f"{experiment.name}.safetensors"
    with checkpoint.lock(saved) if resume else nullcontext():
        state = _load_state(simulation, saved) if resume and saved.exists() else None
        records = truncate_run(path, state.number) if state else []
        for record in records:
            on_round(experiment, record)

        def remaining_rounds() -> Iterator[RoundRecord]:
            nonlocal state
            for after, record in simulation.run(state):
                state = after
                yield record
                if resume:  # after the record has been written
                    _save_state(state, saved)

        with _restore_longer(path, new=state is None), path.open("a" if state else "w", encoding="utf-8") as file:
            for record in stream_records(experiment, remaining_rounds(), file):
                records.append(record)
                on_round(experiment, record)
    if save is not None and state is not None:
        save_params(save, state.params)
    return records


@contextmanager
def _restore_longer(path: Path, new: bool) -> Iterator[None]:
    """Restore the earlier file of the same settings if its successor ends up shorter; remove one without rounds."""
    earlier = path.with_name(f"{path.name}.before")
    if new and path.exists():
        path.replace(earlier)
    try:
        yield
    finally:
        if earlier.exists() and (not path.exists() or earlier.stat().st_size > path.stat().st_size):
            earlier.replace(path)
        earlier.unlink(missing_ok=True)
        if path.exists() and path.read_bytes().count(b"\n") < 2:  # only the manifest
            path.unlink()


def _save_state(state: State, path: Path) -> None:
    facts = {"number": state.number, "loss": state.loss}
    checkpoint.save(path, state.params, state.carried, facts, after=path.with_suffix(".jsonl"))


def _load_state(simulation: Simulation, path: Path) -> State:
    saved = checkpoint.load(path, simulation.engine.initial_params())
    return State(saved.facts["number"], saved.params, loss=saved.facts["loss"], **saved.rule)


def complete_records(experiment: Experiment, out: Path) -> list[RoundRecord] | None:
    """Return the records of a complete run in ``out``, preferably with the engine asked for; None if there is none.

    All engines compute the same rounds.
    """
    for engine in dict.fromkeys((experiment.engine, *ENGINES)):
        path = out / f"{replace(experiment, engine=engine).name}.jsonl"
        if path.is_file() and len(records := read_run(path)[1]) == experiment.rounds:
            return records
    return None


def run_until_error(
    experiment: Experiment, out: Path, on_round: OnRound = lambda experiment, record: None
) -> list[RoundRecord]:
    """Run an experiment and return its records, those before the error if it diverges.

    The error is written to a file ``experiment.name`` with the suffix .error.
    """
    records: list[RoundRecord] = []

    def collect(experiment: Experiment, record: RoundRecord) -> None:
        records.append(record)
        on_round(experiment, record)

    failure = error_path(experiment, out)
    failure.unlink(missing_ok=True)
    try:
        return run(experiment, out, collect)
    except FedcontextError as error:
        failure.parent.mkdir(parents=True, exist_ok=True)
        failure.write_text(f"{error}\n", encoding="utf-8")
        return records


def error_path(experiment: Experiment, out: Path) -> Path:
    """Return the file to which `run_until_error` writes the error that ended a run."""
    return out / f"{experiment.name}.error"


def run_all(
    experiments: Sequence[Experiment],
    out: Path,
    jobs: int,
    on_round: OnRound = lambda experiment, record: None,
    *,
    run: Callable[[Experiment, Path, OnRound], list[RoundRecord]] = run,
) -> list[list[RoundRecord]]:
    """Run experiments in ``jobs`` processes and return the records of each, in order.

    With ``run=run_until_error`` a run that diverges does not end the others.
    """
    by_algorithm = {each.algorithm: each for each in experiments}
    by_model = {(each.dataset, each.model): each for each in experiments}
    for experiment in dict.fromkeys((*by_algorithm.values(), *by_model.values())):
        prepare(experiment)  # an error in the settings is raised before anything is written
    if jobs <= 1 or len(experiments) <= 1:
        return [run(experiment, out, on_round) for experiment in experiments]
    context = multiprocessing.get_context("spawn")
    messages, cancel = context.Queue(), context.Event()
    shared = messages, cancel, LOG.level
    with _one_thread_each(), ProcessPoolExecutor(jobs, context, _init_worker, shared) as pool:
        try:
            with _interrupts(blocked=True):  # while it imports modules, a worker would answer with a traceback
                futures = {pool.submit(_run_in_worker, run, experiment, out): experiment for experiment in experiments}
            for experiment, record in completed_rounds(futures, messages):
                on_round(experiment, record)
            return [future.result() for future in futures]
        except BaseException:
            cancel.set()
            with _interrupts(blocked=True):  # the workers still need what a second interrupt would release
                pool.shutdown(cancel_futures=True)
            raise


def completed_rounds(
    futures: Mapping[Future[list[RoundRecord]], Experiment], messages: Any
) -> Iterator[tuple[Experiment, RoundRecord]]:
    """Yield each round once, from the workers' messages or, where its message is late, from the finished run.

    Raises the error of the first run that fails.
    """
    pending, seen = set(futures), dict.fromkeys(futures.values(), 0)  # rounds yielded so far
    while pending:
        done, pending = wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
        finished = [(futures[each], record) for each in done for record in each.result()]
        for experiment, record in chain(_received(messages), finished):
            if record.number > seen[experiment]:
                seen[experiment] = record.number
                yield experiment, record


def _received(messages: Any) -> Iterator[Any]:
    while True:
        try:
            yield messages.get(timeout=0.05)
        except queue.Empty:
            return


_messages: Any = None  # in a worker: the queue of completed rounds
_cancel: Any = None  # in a worker: the event that ends its runs


def _init_worker(messages: Any, cancel: Any, log_level: int) -> None:
    global _messages, _cancel
    _messages, _cancel = messages, cancel
    LOG.setLevel(log_level)


class Cancelled(Exception):
    """The run was cancelled by the process that started it."""


def _run_in_worker(
    run: Callable[[Experiment, Path, OnRound], list[RoundRecord]], experiment: Experiment, out: Path
) -> list[RoundRecord]:
    def on_round(experiment: Experiment, record: RoundRecord) -> None:
        _messages.put((experiment, record))
        if _cancel.is_set():
            raise Cancelled

    if _cancel.is_set():
        raise Cancelled
    with _interrupts(blocked=False):
        return run(experiment, out, on_round)


@contextmanager
def _interrupts(blocked: bool) -> Iterator[None]:
    """Block SIGINT, in this process and those it starts meanwhile, or unblock it; does nothing on Windows."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK if blocked else signal.SIG_UNBLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Limit the workers' linear algebra to one thread each, for they share the cores."""
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
