"""The Hadamard transform, compiled with Numba: the same bits as `rotation.hadamard` in a third of the time.

A simulation codes and decodes the answers of 20 probes in one process, four transforms a vector. With NumPy's alone
that is two fifths of a round of the default algorithm on MNIST, and most of one on a CNN that trains on a GPU.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from fedcontext.compression.rotation import Vector
from fedcontext.jit import announced, compiled


def hadamard(blocks: Vector) -> Vector:
    """Return the orthonormal Hadamard transform of each row.

    >>> hadamard(np.array([[1, 0, 0, 0]], np.float32))
    array([[0.5, 0.5, 0.5, 0.5]], dtype=float32)
    """
    result = blocks.copy()
    with announced("the transform of coded gradients (a second)"):
        _transform(result)
    result *= np.float32(blocks.shape[1] ** -0.5)
    return result


@partial(compiled, exact=True)
def _transform(blocks: Vector) -> None:
    """Write the sums and differences of all stages in place, two stages at a time: half the passes over memory."""
    length = blocks.shape[1]
    for index in range(len(blocks)):
        row, half = blocks[index], 1
        while 4 * half <= length:
            for start in range(0, length, 4 * half):
                first, second = row[start : start + half], row[start + half : start + 2 * half]
                third, fourth = row[start + 2 * half : start + 3 * half], row[start + 3 * half : start + 4 * half]
                for j in range(half):
                    a, b = first[j] + second[j], first[j] - second[j]
                    c, d = third[j] + fourth[j], third[j] - fourth[j]
                    first[j] = a + c
                    second[j] = b + d
                    third[j] = a - c
                    fourth[j] = b - d
            half *= 4
        if half < length:
            first, second = row[:half], row[half:]
            for j in range(half):
                a, b = first[j], second[j]
                first[j] = a + b
                second[j] = a - b
