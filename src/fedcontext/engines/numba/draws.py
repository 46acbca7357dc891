"""The batch orders of `plan.orders`, compiled: the same draws without the price of making a NumPy generator.

NumPy's generator for one device and round costs as much as several local steps. This is the same arithmetic: the hash of
`SeedSequence`, the generator PCG64, and the shuffle of `Generator.permutation`. `plan.orders` stays the truth: where
a NumPy release draws otherwise, `compiled_orders` notices and hands the work back to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import numba
import numpy as np
import numpy.typing as npt
from numba import uint32, uint64

from fedcontext import plan
from fedcontext.jit import compiled, inner
from fedcontext.plan import IntArray, Stream, words

Words: TypeAlias = npt.NDArray[np.uint32]
Orders: TypeAlias = Callable[[int, int, int, int, int], IntArray]
POOL = 4  # words in SeedSequence's pool


@cache
def compiled_orders() -> Orders:
    """Return a function that gives what `plan.orders` gives, compiled if the two agree on a trial."""
    trial = (2**40 + 7, 3, 12, 1000, 2)
    return _orders if np.array_equal(_orders(*trial), plan.orders(*trial)) else plan.orders


def _orders(seed: int, number: int, device: int, samples: int, epochs: int) -> IntArray:
    return shuffles(entropy(seed, number, device), samples, epochs)


def entropy(seed: int, number: int, device: int = 0) -> Words:
    """Return the words that a device's draws of one round start from; the last is the device's own.

    >>> entropy(0, 7, device=12)
    array([ 0,  7,  3, 12], dtype=uint32)
    """
    return np.array(words(seed, number, Stream.BATCHES, device), np.uint32)


@compiled
def shuffles(entropy: Words, samples: int, epochs: int) -> IntArray:
    """Return (epochs, samples): the order in which a device visits its samples, in each epoch."""
    state = _seeded(entropy)
    orders = np.empty((epochs, samples), np.int64)
    half, has_half = uint32(0), False
    for epoch in range(epochs):
        order = orders[epoch]
        for position in range(samples):
            order[position] = position
        for last in range(samples - 1, 0, -1):
            mask = uint32(last)
            for shift in (1, 2, 4, 8, 16):
                mask |= mask >> uint32(shift)
            while True:
                if has_half:
                    word, has_half = half, False
                else:
                    drawn = _next(state)
                    word, half, has_half = uint32(drawn & uint64(0xFFFFFFFF)), uint32(drawn >> uint64(32)), True
                other = numba.int64(word & mask)
                if other <= last:
                    break
            order[last], order[other] = order[other], order[last]
    return orders


@inner
def _seeded(entropy: Words) -> npt.NDArray[np.uint64]:
    """Return PCG64's state as (high, low, increment high, increment low), as `default_rng(entropy)` would set it."""
    words = _state_words(_mixed_pool(entropy))
    parts = np.empty(4, np.uint64)
    for index in range(4):
        parts[index] = uint64(words[2 * index]) | (uint64(words[2 * index + 1]) << uint64(32))
    state = np.zeros(4, np.uint64)
    state[2] = (parts[2] << uint64(1)) | (parts[3] >> uint64(63))
    state[3] = (parts[3] << uint64(1)) | uint64(1)
    _next(state)
    low = state[1] + parts[1]
    state[0] += parts[0] + uint64(low < parts[1])
    state[1] = low
    _next(state)
    return state


@inner
def _mixed_pool(entropy: Words) -> Words:
    pool, factor = np.zeros(POOL, np.uint32), uint32(0x43B0D7E5)
    for index in range(POOL):
        word = entropy[index] if index < entropy.size else uint32(0)
        pool[index], factor = _hashed(word, factor, uint32(0x931E8875))
    for source in range(POOL):
        for target in range(POOL):
            if source != target:
                word, factor = _hashed(pool[source], factor, uint32(0x931E8875))
                pool[target] = _mixed(pool[target], word)
    for source in range(POOL, entropy.size):
        for target in range(POOL):
            word, factor = _hashed(entropy[source], factor, uint32(0x931E8875))
            pool[target] = _mixed(pool[target], word)
    return pool


@inner
def _state_words(pool: Words) -> Words:
    words, factor = np.empty(8, np.uint32), uint32(0x8B51F9DD)
    for index in range(8):
        words[index], factor = _hashed(pool[index % POOL], factor, uint32(0x58F38DED))
    return words


@inner
def _hashed(word: np.uint32, factor: np.uint32, step: np.uint32) -> tuple[np.uint32, np.uint32]:
    word = uint32(word ^ factor)
    factor = uint32(factor * step)
    word = uint32(word * factor)
    return uint32(word ^ (word >> uint32(16))), factor


@inner
def _mixed(left: np.uint32, right: np.uint32) -> np.uint32:
    word = uint32(uint32(left * uint32(0xCA01F9DD)) - uint32(right * uint32(0x4973F715)))
    return uint32(word ^ (word >> uint32(16)))


@inner
def _next(state: npt.NDArray[np.uint64]) -> np.uint64:
    """Advance PCG64 by one step of its 128-bit recurrence, and return its 64 bits (XSL-RR)."""
    high, low = uint64(2549297995355413924), uint64(4865540595714422341)
    product = _high_product(state[1], low) + state[0] * low + state[1] * high
    total = state[1] * low + state[3]
    state[0] = product + state[2] + uint64(total < state[3])
    state[1] = total
    turn = state[0] >> uint64(58)
    bits = state[0] ^ state[1]
    turned: np.uint64 = (bits >> turn) | (bits << ((uint64(64) - turn) & uint64(63)))
    return turned


@inner
def _high_product(left: np.uint64, right: np.uint64) -> np.uint64:
    """Return the upper 64 bits of a 128-bit product."""
    mask, shift = uint64(0xFFFFFFFF), uint64(32)
    low = (left & mask) * (right & mask)
    cross = (left >> shift) * (right & mask) + (low >> shift)
    other = (left & mask) * (right >> shift) + (cross & mask)
    return (left >> shift) * (right >> shift) + (cross >> shift) + (other >> shift)
