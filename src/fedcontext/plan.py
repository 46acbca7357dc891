"""Who trains, for how long, and who probes: a pure function of (seed, round), and the only source of its randomness.

Every draw has its own generator, keyed by its purpose, so that no draw can shift another: the same seed gives the same
devices, epochs and batches to every algorithm, whatever its rule, its probes, the engine or the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcontext.errors import FedcontextError

IntArray: TypeAlias = npt.NDArray[np.int64]
Probes: TypeAlias = int | Literal["cohort", "all"]  # the paper's K2: a number, 0 ("cohort") or N ("all")


class Stream(IntEnum):
    """One stream of random numbers per purpose; the numbers are part of every result and never change."""

    SELECTION = 0
    EPOCHS = 1
    PROBES = 2
    BATCHES = 3
    POOL = 4
    FLEET = 5
    DATA = 6
    DROPOUT = 7
    GRADIENT_CODE = 8
    DIFFERENCE_CODE = 9
    FAULTS = 10
    BYZANTINE = 11
    ATTACKS = 12
    ROOT = 13
    PARTIAL = 14
    CHANGE_CODE = 15
    SECOND_EXCHANGE = 16


def generator(seed: int, number: int, stream: Stream, device: int = 0) -> np.random.Generator:
    """Return the generator for one purpose in one round.

    >>> draws = [generator(7, 3, Stream.EPOCHS, device=5).integers(100) for _ in range(2)]
    >>> bool(draws[0] == draws[1])
    True
    """
    entropy = np.array(words(seed, number, stream, device), np.uint32)  # twice as fast as default_rng(list)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def words(*keys: int) -> list[int]:
    """Return the 32-bit words of whole numbers, lowest first, as NumPy's `SeedSequence` splits them.

    >>> words(7, 2**32 + 1)
    [7, 1, 1]
    """
    cut = []
    for key in keys:
        if key < 0:
            raise FedcontextError(f"seeds and numbers must be 0 or more, got {key}")
        cut.append(key & 0xFFFFFFFF)
        while key := key >> 32:  # almost never
            cut.append(key & 0xFFFFFFFF)
    return cut


@dataclass(frozen=True)
class RoundPlan:
    """What one round asks of the devices."""

    number: int  # from 1
    devices: IntArray  # (K,) the cohort, or more than wanted where the server over-selects
    epochs: IntArray  # (K,)
    probes: IntArray  # (P,) report their gradient at the round's params; may overlap with the cohort, or be the cohort
    pool: IntArray  # train too, and inform the weights without being applied
    pool_epochs: IntArray
    wanted: int  # how many of the devices the server waits for


def plan_round(
    seed: int,
    number: int,
    population: int,
    *,
    devices_per_round: int = 10,
    epochs: tuple[int, int] = (1, 20),
    probes: Probes | None = None,
    pool: int | Literal["all"] = 0,
    over_select: float = 0.0,
) -> RoundPlan:
    """Return the plan of round ``number``: a uniform draw without replacement, epochs uniform in a closed range.

    If probes is a number, that many devices are drawn independently of the cohort (all, if there are fewer). The pool
    is drawn from the devices outside the cohort.

    >>> plan = plan_round(seed=0, number=1, population=100, devices_per_round=3, probes=2)
    >>> len(plan.devices), len(plan.probes), bool((plan.epochs >= 1).all())
    (3, 2, True)
    """
    pooled = population - devices_per_round if pool == "all" else pool
    _check(population, devices_per_round, epochs, probes, pooled, over_select)
    selected = math.ceil(min(devices_per_round * (1 + over_select) - 1e-9, population))
    devices = generator(seed, number, Stream.SELECTION).choice(population, selected, replace=False)
    others = np.setdiff1d(np.arange(population), devices) if pooled else devices[:0]
    pool_devices = generator(seed, number, Stream.POOL).permutation(others)[:pooled]
    return RoundPlan(
        number=number,
        devices=devices,
        epochs=_epochs(seed, number, devices, epochs),
        probes=_probes(seed, number, population, devices, probes),
        pool=pool_devices,
        pool_epochs=_epochs(seed, number, pool_devices, epochs),
        wanted=devices_per_round,
    )


def _probes(seed: int, number: int, population: int, cohort: IntArray, probes: Probes | None) -> IntArray:
    if probes == "cohort":
        return cohort
    if probes == "all" or (isinstance(probes, int) and probes >= population):
        return np.arange(population)
    return generator(seed, number, Stream.PROBES).choice(population, probes or 0, replace=False)


def second_probes(seed: int, number: int, probes: Collection[int]) -> list[int]:
    """Return who is asked in the second exchange of a round, in ascending order.

    They are nine tenths, rounded up, of the ``probes``: those of the first exchange whose gradients were used.

    >>> len(second_probes(0, 1, range(20))), second_probes(0, 1, {7, 3, 5})
    (18, [3, 5, 7])
    """
    ordered, count = sorted(probes), -(-9 * len(probes) // 10)
    chosen = generator(seed, number, Stream.SECOND_EXCHANGE).choice(len(ordered), count, replace=False)
    return [ordered[row] for row in np.sort(chosen)]  # ids of nodes may exceed NumPy's integers


def batches(seed: int, number: int, device: int, samples: int, epochs: int, size: int) -> Iterator[IntArray]:
    """Yield the sample indices of each local step; the last batch of an epoch may be smaller.

    >>> [len(batch) for batch in batches(0, 1, device=4, samples=25, epochs=2, size=10)]
    [10, 10, 5, 10, 10, 5]
    """
    for order in orders(seed, number, device, samples, epochs):
        for start in range(0, samples, size):
            yield order[start : start + size]


def orders(seed: int, number: int, device: int, samples: int, epochs: int) -> IntArray:
    """Return (epochs, samples), the order in which each epoch of a device visits its samples: a shuffle per epoch.

    >>> orders(0, 1, device=4, samples=3, epochs=2).shape
    (2, 3)
    """
    random = generator(seed, number, Stream.BATCHES, device)
    return random.permuted(np.tile(np.arange(samples), (epochs, 1)), axis=1)


def _epochs(seed: int, number: int, devices: IntArray, bounds: tuple[int, int]) -> IntArray:
    if bounds[0] == bounds[1]:
        return np.full(len(devices), bounds[0], dtype=np.int64)
    draws = [generator(seed, number, Stream.EPOCHS, int(k)).integers(bounds[0], bounds[1] + 1) for k in devices]
    return np.array(draws, dtype=np.int64)


def _check(
    population: int, devices: int, epochs: tuple[int, int], probes: Probes | None, pool: int, over_select: float
) -> None:
    if not 1 <= devices <= population:
        raise FedcontextError(f"devices_per_round must be between 1 and {population} (all devices), got {devices}")
    if not 1 <= epochs[0] <= epochs[1]:
        raise FedcontextError(f"epochs must be a range like 1..20 with 1 <= low <= high, got {epochs[0]}..{epochs[1]}")
    known = probes in (None, "cohort", "all")
    if not known and not (isinstance(probes, int) and not isinstance(probes, bool) and probes >= 1):
        raise FedcontextError(f"probes must be 'cohort', 'all' or a number of at least 1, got {probes!r}")
    if not 0 <= pool <= population - devices:
        raise FedcontextError(f"pool must be between 0 and {population - devices} (the other devices), got {pool}")
    if not 0 <= over_select < math.inf:
        raise FedcontextError(f"over-selection must be 0 or more, got {over_select}")
