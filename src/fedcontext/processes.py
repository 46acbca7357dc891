"""Experiments in several processes: rounds reported as they finish, and no worker that outlives its parent."""

from __future__ import annotations

import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from fedcontext.console import show_warning
from fedcontext.errors import FedcontextError
from fedcontext.experiment import Experiment
from fedcontext.records import RoundRecord

LOG = logging.getLogger("fedcontext")
OnRound: TypeAlias = Callable[[Experiment, RoundRecord], None]
Run: TypeAlias = Callable[[Experiment, Path, OnRound], list[RoundRecord]]
PATIENCE = 5.0  # seconds in which a cancelled worker may finish its round
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def run_in_processes(
    experiments: Sequence[Experiment], out: Path, jobs: int, on_round: OnRound, run: Run
) -> list[list[RoundRecord]]:
    """Run experiments in ``jobs`` processes with ``run`` and return the records of each, in order.

    The workers end with this process, however it ends.
    """
    context = multiprocessing.get_context("spawn")
    messages, cancel = context.Queue(), context.Event()
    shared = messages, cancel, LOG.level, warnings.showwarning is show_warning
    with _one_thread_each(), ProcessPoolExecutor(jobs, context, _init_worker, shared) as pool:
        try:
            with _signals(blocked=True):  # while it imports modules, a worker would answer with a traceback
                futures = {pool.submit(_run_in_worker, run, experiment, out): experiment for experiment in experiments}
            for experiment, record in completed_rounds(futures, messages):
                on_round(experiment, record)
            return [future.result() for future in futures]
        except BaseException as error:
            cancel.set()
            with _signals(blocked=True):  # the workers still need what a second interrupt would release
                pool.shutdown(cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise FedcontextError(
                    f"a worker process was killed, perhaps for its memory: use fewer jobs than {jobs}"
                ) from None
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


def _init_worker(messages: Any, cancel: Any, log_level: int, plain_warnings: bool) -> None:
    global _messages, _cancel
    _messages, _cancel = messages, cancel
    LOG.setLevel(log_level)
    if plain_warnings:
        warnings.showwarning = show_warning
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when the process that started it is gone, or has cancelled the runs and waited long enough."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    cancelled = math.inf
    while not multiprocessing.connection.wait([parent.sentinel], timeout=0.2):
        if _cancel.is_set():
            cancelled = min(cancelled, time.monotonic())
        if time.monotonic() > cancelled + PATIENCE:
            break
    os._exit(1)


class Cancelled(Exception):
    """The run was cancelled by the process that started it."""


def _run_in_worker(run: Run, experiment: Experiment, out: Path) -> list[RoundRecord]:
    def on_round(experiment: Experiment, record: RoundRecord) -> None:
        _messages.put((experiment, record))
        if _cancel.is_set():
            raise Cancelled

    if _cancel.is_set():
        raise Cancelled
    with _signals(blocked=False):
        return run(experiment, out, on_round)


@contextmanager
def _signals(blocked: bool) -> Iterator[None]:
    """Block SIGINT and SIGTERM, in this process and those it starts meanwhile, or unblock them; nothing on Windows."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK if blocked else signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
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
