"""Experiments into files: one after another, or on several cores, with word of every round that is done."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from fedcontext import checkpoint
from fedcontext.errors import require
from fedcontext.experiment import Experiment
from fedcontext.records import RoundRecord, keep, write
from fedcontext.simulation import Simulation, State, prepare
from fedcontext.toml import to_toml

OnRound: TypeAlias = Callable[[Experiment, RoundRecord], None]
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def run(
    experiment: Experiment,
    out: Path,
    on_round: OnRound = lambda experiment, record: None,
    *,
    resume: bool = False,
) -> list[RoundRecord]:
    """Run an experiment and return its records, written to ``out`` round by round beside the TOML that repeats it.

    Nothing is written before the settings and the data have been checked; an interrupt or an error leaves the rounds
    that were done, in complete lines, and no record where there were none.
    ``resume`` keeps a checkpoint of every round too, and goes on from the one that is there: a run killed at any
    moment and started again ends with the same params and records, to the bit.
    """
    if resume:
        require("safetensors", extra="resume")
    simulation = prepare(experiment)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{experiment.name}.toml").write_text(to_toml(asdict(experiment)), encoding="utf-8")
    path, saved = out / f"{experiment.name}.jsonl", out / f"{experiment.name}.safetensors"
    with checkpoint.lock(saved) if resume else nullcontext():
        state = _saved_state(simulation, saved) if resume and saved.exists() else None
        done = keep(path, state.number) if state else []
        for record in done:
            on_round(experiment, record)
        with _best_kept(path, new=state is None), path.open("a" if state else "w", encoding="utf-8") as file:
            for record in write(experiment, _played(simulation, state, saved if resume else None), file):
                done.append(record)
                on_round(experiment, record)
    return done


@contextmanager
def _best_kept(path: Path, new: bool) -> Iterator[None]:
    """Put an earlier record of the same settings back if what replaces it ends before it did; keep none without rounds."""
    aside = path.with_name(f"{path.name}.before")
    if new and path.exists():
        path.replace(aside)
    try:
        yield
    finally:
        if aside.exists() and aside.stat().st_size > path.stat().st_size:
            aside.replace(path)
        aside.unlink(missing_ok=True)
        if path.exists() and path.read_bytes().count(b"\n") < 2:  # a manifest alone
            path.unlink()


def _played(simulation: Simulation, state: State | None, saved: Path | None) -> Iterator[RoundRecord]:
    """Yield the rounds to come; each is checkpointed after its record has been written."""
    for after, record in simulation.play(state):
        yield record
        if saved is not None:
            facts = {"number": after.number, "loss": after.loss}
            checkpoint.save(saved, after.params, after.rule, facts, after=saved.with_suffix(".jsonl"))


def _saved_state(simulation: Simulation, saved: Path) -> State:
    found = checkpoint.load(saved, simulation.engine.initial_params())
    return State(found.facts["number"], found.params, found.rule, found.facts["loss"])


def run_all(
    experiments: Sequence[Experiment], out: Path, jobs: int, on_round: OnRound = lambda experiment, record: None
) -> list[list[RoundRecord]]:
    """Run experiments with ``jobs`` processes and return their records, in order."""
    for experiment in {each.algorithm: each for each in experiments}.values():
        prepare(experiment)  # a mistake in the settings shows here, before anything is written
    if jobs <= 1 or len(experiments) <= 1:
        return [run(experiment, out, on_round) for experiment in experiments]
    context = multiprocessing.get_context("spawn")
    words, stop = context.Queue(), context.Event()
    with _one_thread_each(), ProcessPoolExecutor(jobs, context, _listen, (words, stop)) as pool:
        try:
            with _interrupts(held=True):  # a worker that loads knows no way to end but a traceback
                futures = [pool.submit(_run_and_tell, experiment, out) for experiment in experiments]
            for experiment, record in _heard(futures, words):
                on_round(experiment, record)
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            with _interrupts(held=True):  # what is freed behind this the workers need
                pool.shutdown(cancel_futures=True)
            raise


def _heard(futures: list[Future[Any]], words: Any) -> Iterator[tuple[Experiment, RoundRecord]]:
    """Yield the rounds that the workers report, until all are done or one has failed."""
    pending, heard = set(futures), 0
    while pending:
        done, pending = wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
        while True:
            try:
                word = words.get(timeout=0.05)
            except queue.Empty:
                break
            heard += 1
            yield word
    for _ in range(sum(len(future.result()) for future in futures) - heard):  # a result may overtake its last words
        try:
            word = words.get(timeout=60)
        except queue.Empty:
            return
        yield word


_words: Any = None  # a worker's line to the process that started it
_stop: Any = None  # set there when the work is called off


def _listen(words: Any, stop: Any) -> None:
    global _words, _stop
    _words, _stop = words, stop


@contextmanager
def _interrupts(held: bool) -> Iterator[None]:
    """Hold interrupts back, here and in processes started meanwhile, or let them in again; where the system can."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK if held else signal.SIG_UNBLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_and_tell(experiment: Experiment, out: Path) -> list[RoundRecord]:
    def tell(experiment: Experiment, record: RoundRecord) -> None:
        _words.put((experiment, record))
        if _stop.is_set():
            raise CalledOff

    if _stop.is_set():
        raise CalledOff
    with _interrupts(held=False):
        return run(experiment, out, tell)


class CalledOff(Exception):
    """The work was interrupted where it was started."""


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Keep the workers' linear algebra to one thread each: more would fight over the same cores."""
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
