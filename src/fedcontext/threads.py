"""One task after another on all cores; the calling thread works too, so a busy machine costs no waiting."""

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
    """Return how many threads work at once: the cores this process may use, or OMP_NUM_THREADS where that is less."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, int(asked)) if asked.isdigit() and int(asked) else cores


@cache
def _helpers() -> ThreadPoolExecutor:
    """Return the other threads. From here on BLAS keeps to one: its own would spin on the cores these work on."""
    if find_spec("threadpoolctl"):
        import_module("threadpoolctl").threadpool_limits(1, user_api="blas")
    return ThreadPoolExecutor(max(1, workers() - 1), thread_name_prefix="fedcontext")


def on_all_cores(task: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the task's result for each item, in order; the first error is raised, when nobody is at work any more.

    >>> on_all_cores(abs, [-1, 2, -3])
    [1, 2, 3]
    """
    results: dict[int, Result] = {}
    left = iter(range(len(items)))

    def work() -> None:
        for index in left:
            results[index] = task(items[index])

    helpers = [_helpers().submit(work) for _ in range(min(workers(), len(items)) - 1)]
    try:
        work()
    finally:
        for _ in left:  # after an error here nobody begins another task
            pass
        errors = [helper.exception() for helper in helpers if not helper.cancel()]
    for error in filter(None, errors):
        raise error
    return [results[index] for index in range(len(items))]


def together(crew: Callable[[], bool], hands: int) -> None:
    """Call ``crew`` on as many cores at once; it returns whether all work is done, also that of the other calls.

    Then nobody is waited for: waking a thread that waits takes as long as training a small device.

    >>> together(lambda: True, hands=2)
    """
    helpers, done = [_helpers().submit(crew) for _ in range(min(workers(), hands) - 1)], False
    try:
        done = crew()
    finally:
        errors = [helper.exception() for helper in helpers if not helper.cancel() and not done]
    for error in filter(None, errors):
        raise error
