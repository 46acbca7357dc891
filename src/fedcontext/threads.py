"""Run a task on each item in threads on all cores; the calling thread works too, so it never waits for a free core."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@cache
def workers() -> int:
    """Return the number of threads: the cores this process may use, or OMP_NUM_THREADS if that is smaller."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, int(limit)) if limit.isdigit() and int(limit) else cores


@cache
def _pool() -> ThreadPoolExecutor:
    """Return the other threads. BLAS is limited to one from here on: its idle threads spin on the cores of these."""
    if find_spec("threadpoolctl"):
        import_module("threadpoolctl").threadpool_limits(1, user_api="blas")
    return ThreadPoolExecutor(max(1, workers() - 1), thread_name_prefix="fedcontext")


def on_all_cores(task: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the task's result for each item, in order. The first error is raised once all threads have stopped.

    >>> on_all_cores(abs, [-1, 2, -3])
    [1, 2, 3]
    """
    results: dict[int, Result] = {}
    remaining = iter(range(len(items)))

    def work() -> None:
        for index in remaining:
            results[index] = task(items[index])

    pool = _pool()
    futures = [pool.submit(work) for _ in range(min(workers(), len(items)) - 1)]
    try:
        work()
    finally:
        for _ in remaining:  # after an error no thread starts another item
            pass
        errors = [future.exception() for future in futures if not future.cancel()]
    for error in filter(None, errors):
        raise error
    return [results[index] for index in range(len(items))]
