"""Runs experiments and writes their records to files, one experiment after another or in several processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from fedcontext.datasets.federated import FederatedData
from fedcontext.engines.base import ENGINES, Engine
from fedcontext.errors import FedcontextError, FileError, require
from fedcontext.experiment import Experiment
from fedcontext.files.model_file import check_format, save_params
from fedcontext.files.storage import check_writable, clean, write_text
from fedcontext.files.toml import to_toml
from fedcontext.preparation import check_inputs, prepare
from fedcontext.processes import OnRound as OnRound
from fedcontext.processes import Run, run_in_processes
from fedcontext.records import RoundRecord, read_run
from fedcontext.results.run_file import append_records, open_run
from fedcontext.run_files import RunFiles, locked_files, resumed_state, save_state
from fedcontext.simulation import Simulation

MAX_LOCKED = 200  # runs whose files are locked before they start; each takes an open file


def run(
    experiment: Experiment,
    out: str | Path,
    on_round: OnRound = lambda experiment, record: None,
    *,
    data: FederatedData | None = None,
    engine: Engine | None = None,
    resume: bool = False,
    save: str | Path | None = None,
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
            any moment ends with the same params and records, to the bit. A run with more rounds than one in ``out``
            that is otherwise the same continues after its last round; the records of that one stay.
        save: file for the trained params, .npz or .safetensors.

    >>> import tempfile
    >>> import numpy as np
    >>> from fedcontext.datasets import federate
    >>> data = federate(np.eye(20), np.arange(20) % 2, [np.arange(10), np.arange(10, 20)], name="mine")
    >>> experiment = Experiment("mine", "fedavg", rounds=2, devices_per_round=2)
    >>> [record.number for record in run(experiment, tempfile.mkdtemp(), data=data)]
    [1, 2]
    """
    check_inputs(experiment, data)
    if data is not None and experiment.dataset != data.name:
        raise FedcontextError(f"dataset must be {data.name!r}, the name of the data given, got {experiment.dataset!r}")
    if resume:
        require("safetensors", extra="resume")
    save = None if save is None else Path(save)
    if save is not None:
        check_format(save)
        check_writable(save)
    files = RunFiles(Path(out), experiment.name)
    files.check()
    simulation = prepare(experiment, data=data, engine=engine)
    with files.locked(), _advice(files, resume):
        return _run(simulation, files, on_round, resume, save)


def _run(
    simulation: Simulation, files: RunFiles, on_round: OnRound, resume: bool, save: Path | None
) -> list[RoundRecord]:
    experiment = simulation.experiment
    clean(files.checkpoint, files.settings)
    write_text(files.settings, to_toml(asdict(experiment)))
    state = resumed_state(simulation, files) if resume else None
    done = state.number if state else 0
    with open_run(files.records, experiment, done) as (path, records):
        for record in records:
            on_round(experiment, record)

        def remaining_rounds() -> Iterator[RoundRecord]:
            nonlocal state
            for after, record in simulation.run(state):
                state = after
                yield record
                if resume:  # after the record has been written
                    save_state(simulation, state, files.checkpoint, path)

        for record in append_records(path, experiment, remaining_rounds()):
            records.append(record)
            on_round(experiment, record)
        if save is not None and state is not None:
            save_params(save, state.params)
    return records


@contextmanager
def _advice(files: RunFiles, resume: bool) -> Iterator[None]:
    """Add to the error of a file that cannot be written, for instance on a full disk, how the run continues."""
    try:
        yield
    except FileError as error:
        how = "the run resumes where it was" if resume else f"{files.records} has the rounds until now"
        raise FileError(f"{error}. When it can be written, start the same command again: {how}") from error


def complete_records(experiment: Experiment, out: Path) -> list[RoundRecord] | None:
    """Return the records of a complete run in ``out``, preferably with the engine asked for; None if there is none.

    All engines compute the same rounds.
    """
    for engine in dict.fromkeys((experiment.engine, *ENGINES)):
        path = out / f"{replace(experiment, engine=engine).name}.jsonl"
        if path.is_file() and len(records := read_run(path)[1]) == experiment.rounds:
            return records
    return None


def missing_experiments(experiments: Iterable[Experiment], out: Path) -> list[Experiment]:
    """Return the distinct experiments that have neither complete records in ``out`` nor diverged."""
    return [
        each
        for each in dict.fromkeys(experiments)
        if not error_path(each, out).exists() and complete_records(each, out) is None
    ]


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
    except FileError:  # which says nothing about the experiment
        raise
    except FedcontextError as error:
        write_text(failure, f"{error}\n")
        return records


def error_path(experiment: Experiment, out: Path) -> Path:
    """Return the file to which `run_until_error` writes the error that ended a run."""
    return out / f"{experiment.name}.error"


def run_all(
    experiments: Sequence[Experiment],
    out: str | Path,
    jobs: int,
    on_round: OnRound = lambda experiment, record: None,
    *,
    run: Run = run,
) -> list[list[RoundRecord]]:
    """Run experiments in ``jobs`` processes and return the records of each, in order.

    With ``run=run_until_error`` a run that diverges does not end the others.
    """
    out = Path(out)
    for each in experiments:
        check_inputs(each, None)
    if twice := [name for name, count in Counter(each.name for each in experiments).items() if count > 1]:
        raise FedcontextError(f"experiments must be distinct, as each has its own files, got {twice[0]} twice")
    by_algorithm = {each.algorithm: each for each in experiments}
    by_model = {(each.dataset, each.model): each for each in experiments}
    for experiment in dict.fromkeys((*by_algorithm.values(), *by_model.values())):
        prepare(experiment)  # an error in the settings is raised before anything is written
    with _locked_for(experiments, out):
        if jobs <= 1 or len(experiments) <= 1:
            return [run(experiment, out, on_round) for experiment in experiments]
        return run_in_processes(experiments, out, jobs, on_round, partial(_run_locked, run, locked_files.get()))


@contextmanager
def _locked_for(experiments: Sequence[Experiment], out: Path) -> Iterator[None]:
    """Lock the files of all experiments, so that no later run can take those of one that has not started."""
    files = [RunFiles(out, experiment.name) for experiment in experiments[:MAX_LOCKED]]
    with ExitStack() as stack:
        for each in files:
            each.check()
            stack.enter_context(each.locked())
        before = locked_files.set(locked_files.get() | {each.records for each in files})
        stack.callback(locked_files.reset, before)
        yield


def _run_locked(
    run: Run, locked: frozenset[Path], experiment: Experiment, out: Path, on_round: OnRound
) -> list[RoundRecord]:
    """Run an experiment in a worker process whose parent has locked the files."""
    locked_files.set(locked)
    return run(experiment, out, on_round)
