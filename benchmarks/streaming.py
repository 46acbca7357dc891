"""Memory and time of folding 1,000 updates of 1,000,000 parameters into the sums of a round, and of the rule's step.

    python benchmarks/streaming.py    # on Linux

Every device also probes, which is the most that one can send. The updates are drawn as they arrive; the peak is what the
process held beyond what it held with the params alone.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import numpy as np

import fedcontext as fc

SIZE = 1_000_000
ROUNDS = (250, 500, 1000)  # devices of each; the first step of the rule does less than the others


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def held() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def fold(params: np.ndarray, devices: int, differences: bool) -> tuple[fc.StreamedRound, float]:
    """Return a round of ``devices``, and the seconds that folding them in took."""
    random, seconds = np.random.default_rng(devices), 0.0
    folded = fc.StreamedRound(params)
    for _ in range(devices):
        update, gradient, difference = random.standard_normal((3, SIZE), np.float32)
        start = time.perf_counter()
        folded.add_update(update)
        folded.add_probe(gradient, difference if differences else None)
        seconds += time.perf_counter() - start
    return folded, seconds


def warm_up() -> None:
    """Load the libraries (LAPACK, Numba), whose memory is not the round's."""
    small, large, state = np.ones(100), np.zeros(2**20, np.float32), None
    for _ in range(2):
        folded = fc.StreamedRound(small)
        folded.add_update(small)
        folded.add_probe(small, None if state is None else small)
        state = folded.aggregate(fc.contextual_memory(), state).state
    fc.aggregate(large, [large], rule=fc.mean())


def main() -> None:
    warm_up()
    params, rule, state = np.zeros(SIZE, np.float32), fc.contextual_memory(), None
    np.random.default_rng(0).standard_normal((3, SIZE), np.float32)  # what one device sends is not counted
    base = held()
    for devices in ROUNDS:
        folded, seconds = fold(params, devices, state is not None)
        start = time.perf_counter()
        result = folded.aggregate(rule, state, population=10_000)
        params, state = result.params, result.state
        print(
            f"{devices} devices: {1000 * seconds / devices:.1f} ms each to fold in, "
            f"{time.perf_counter() - start:.2f} s for the step, peak {peak() - base:.0f} MB beyond the params"
        )


if __name__ == "__main__":
    main()
