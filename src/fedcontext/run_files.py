"""The files of a run, and the state it continues from: its own checkpoint or that of the same run with fewer rounds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedcontext import checkpoint
from fedcontext.errors import FedcontextError
from fedcontext.experiment import Experiment, experiment_from, settings_from_toml
from fedcontext.files.storage import check_folder, check_target, lock
from fedcontext.results.run_file import copy_rounds, count_rounds
from fedcontext.simulation import Simulation
from fedcontext.state import State

LOG = logging.getLogger("fedcontext")
locked_files: ContextVar[frozenset[Path]] = ContextVar("locked", default=frozenset())  # records of runs locked already


@dataclass(frozen=True)
class RunFiles:
    """The files of one run in the directory ``out``."""

    out: Path
    name: str

    @property
    def records(self) -> Path:
        """A line of JSON for every round."""
        return self.out / f"{self.name}.jsonl"

    @property
    def settings(self) -> Path:
        """The settings that repeat the run."""
        return self.out / f"{self.name}.toml"

    @property
    def checkpoint(self) -> Path:
        """The state from which it resumes."""
        return self.out / f"{self.name}.safetensors"

    def check(self) -> None:
        """Raise an error if something other than a regular file is in the place of one of the files."""
        check_folder(self.out)
        for path in (self.records, self.settings, self.checkpoint):
            check_target(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the files for this run; does nothing where `run_all` has locked them already."""
        with nullcontext() if self.records in locked_files.get() else lock(self.records):
            yield


def save_state(simulation: Simulation, state: State, path: Path, records: Path) -> None:
    """Write the checkpoint of a run after its records."""
    facts = {**_identity(simulation, simulation.experiment), "number": state.number, "loss": state.loss}
    checkpoint.save(path, state.params, state.carried, facts, after=records)


def resumed_state(simulation: Simulation, files: RunFiles) -> State | None:
    """Return the state of the checkpoint in ``files``, or else of the same run with fewer rounds.

    The rounds of the latter are copied to the records in ``files``. None, and a warning if there are such runs but none
    of use, starts at round 1.
    """
    if checkpoint.exists(files.checkpoint):
        own = _load_state(simulation, files, simulation.experiment)
        if own.number < simulation.experiment.rounds:
            LOG.warning("continuing after round %d of %s", own.number, files.records)
        return own
    shorter = _shorter_runs(simulation.experiment, files.out)
    for earlier, experiment in shorter:
        if checkpoint.exists(earlier.checkpoint) and (state := _continued(simulation, files, earlier, experiment)):
            return state
    bare = (each.records for each in (files, *(run for run, _ in shorter)) if not checkpoint.exists(each.checkpoint))
    if existing := next((records for records in bare if records.exists()), None):
        LOG.warning(
            "%s has no checkpoint, which a run writes only with --resume (resume=True): starting at round 1", existing
        )
    elif any(checkpoint.exists(run.checkpoint) for run, _ in shorter):
        LOG.warning("starting at round 1 of %s", files.records)
    return None


def _continued(simulation: Simulation, files: RunFiles, earlier: RunFiles, experiment: Experiment) -> State | None:
    """Return the state of a shorter run, its rounds copied to ``files``; None, and a warning, if it is of no use."""
    try:
        with earlier.locked():
            state = _load_state(simulation, earlier, experiment)
            if state.number == experiment.rounds and state.number % experiment.eval_every:
                raise FedcontextError(
                    f"it evaluated round {state.number}, its last, which a longer run with eval_every "
                    f"{experiment.eval_every} does not"
                )
            copy_rounds(earlier.records, experiment, files.records, simulation.experiment, state.number)
    except FedcontextError as error:
        LOG.warning("%s is not continued: %s", earlier.records, error.problem)
        return None
    LOG.warning("continuing after round %d of %s", state.number, earlier.records)
    return state


def _load_state(simulation: Simulation, files: RunFiles, experiment: Experiment) -> State:
    like = simulation.engine.initial_params()
    saved = checkpoint.load(files.checkpoint, like, _identity(simulation, experiment))
    return State(saved.facts["number"], saved.params, loss=saved.facts["loss"], **saved.rule)


def _identity(simulation: Simulation, experiment: Experiment) -> dict[str, Any]:
    """Return what a checkpoint must agree with to be resumed."""
    return {**asdict(experiment), "data digest": simulation.data.digest}


def _shorter_runs(experiment: Experiment, out: Path) -> list[tuple[RunFiles, Experiment]]:
    """Return the runs in ``out`` whose settings are those of ``experiment`` but for fewer rounds, the longest first."""
    shorter = []
    for path in sorted(out.glob(f"{experiment.name.rpartition('-')[0]}-*.toml")):
        try:
            other = experiment_from(settings_from_toml(path))
        except FedcontextError:
            continue
        same = replace(other, rounds=experiment.rounds) == experiment and other.name == path.stem
        if same and other.rounds < experiment.rounds:
            shorter.append((RunFiles(out, other.name), other))
    return sorted(shorter, key=lambda run: count_rounds(run[0].records), reverse=True)
