"""Random rotations of long vectors, block by block: random signs and Hadamard transforms, from a key.

They spread a vector's energy evenly over its entries, for codes with few bits and for sketches. Sender and receiver
derive them from the same key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from operator import index
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcontext.errors import FedcontextError

Vector: TypeAlias = npt.NDArray[np.float32]
Transform: TypeAlias = Callable[[Vector], Vector]
Key: TypeAlias = Sequence[int]  # such as (seed, round, stream, device): whole numbers, 0 or more

SMALLEST, LARGEST = 2**7, 2**15  # entries of a block: smaller ones are biased, larger ones no better and slower
COMPILED_FROM = 2**16  # entries from which the compiled transform pays for being loaded
CHUNK = 2**18  # entries processed at once, which bounds the memory; part of the format, as are the constants above


def groups(size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first entry, number of blocks, entries per block), largest blocks first; only the last one is padded.

    >>> list(groups(600))
    [(0, 1, 512), (512, 1, 128)]
    """
    start = 0
    while (left := size - start) > 0:
        length = max(SMALLEST, min(LARGEST, 1 << left.bit_length() - 1))
        count = max(1, min(left, CHUNK) // length)
        yield start, count, length
        start += count * length


def blocks_of(values: npt.NDArray[Any], start: int, count: int, length: int) -> npt.NDArray[np.float64]:
    """Return (rows · count, length) one group of blocks of each row, padded with zeros.

    >>> blocks_of(np.ones((1, 600)), 512, 1, 128).sum()
    np.float64(88.0)
    """
    part = values[:, start : start + count * length].astype(float)
    return np.pad(part, ((0, 0), (0, count * length - part.shape[1]))).reshape(-1, length)


def sources_of(keys: Sequence[Key]) -> list[np.random.PCG64]:
    """Return the random bits of each key.

    >>> len(sources_of([(0, 1), (0, 2)]))
    2
    """
    try:
        return [np.random.PCG64([index(number) for number in key]) for key in keys]
    except (TypeError, ValueError):
        raise FedcontextError(f"a key must be a tuple of whole numbers, 0 or more, got {keys!r}") from None


def signs_of(sources: list[np.random.PCG64], count: int, length: int) -> list[Vector]:
    """Return one (vectors · count, length) array of ±1 per rotation, from raw bits: equal in all versions of NumPy."""
    rotations = 3 if length < 1024 else 2  # with fewer, vectors with few large entries are restored with a bias
    raw = np.stack([source.random_raw(rotations * count * length // 64) for source in sources]).astype("<u8")
    signs = 1 - 2 * np.unpackbits(raw.view(np.uint8), axis=1).astype(np.float32)
    return [part.reshape(-1, length) for part in np.split(signs, rotations, axis=1)]


def hadamard(blocks: Vector) -> Vector:
    """Return the orthonormal Hadamard transform of each row; it is its own inverse.

    Every stage writes the sums of neighbours, then their differences; log₂ L stages restore the order. Without
    BLAS, so that the result depends neither on the machine nor on the other rows.

    >>> hadamard(np.array([[1, 0, 0, 0]], np.float32))
    array([[0.5, 0.5, 0.5, 0.5]], dtype=float32)
    """
    half = blocks.shape[1] // 2
    source, target = blocks.copy(), np.empty_like(blocks)
    for _ in range(half.bit_length()):
        np.add(source[:, 0::2], source[:, 1::2], out=target[:, :half])
        np.subtract(source[:, 0::2], source[:, 1::2], out=target[:, half:])
        source, target = target, source
    return source * np.float32((2 * half) ** -0.5)


def fastest_transform(size: int) -> Transform:
    """Return the Hadamard transform for ``size`` entries: compiled where Numba is installed and they are many.

    >>> fastest_transform(100).__module__
    'fedcontext.compression.rotation'
    """
    if size < COMPILED_FROM or find_spec("numba") is None:
        return hadamard
    from fedcontext.compression import compiled

    return compiled.hadamard


def rotate(blocks: Vector, signs: Sequence[Vector], transform: Transform = hadamard) -> Vector:
    """Return the blocks after each random rotation: signs, then a Hadamard transform.

    >>> rotate(np.ones((1, 2), np.float32), [np.ones((1, 2), np.float32)]).round(3)
    array([[1.414, 0.   ]], dtype=float32)
    """
    for sign in signs:
        blocks = transform(blocks * sign)
    return blocks


def rotate_back(blocks: Vector, signs: Sequence[Vector], transform: Transform = hadamard) -> Vector:
    """Return the blocks before the rotations: the inverse of `rotate`."""
    for sign in reversed(signs):
        blocks = transform(blocks) * sign
    return blocks


def as_matrix(vectors: Any) -> npt.NDArray[Any]:
    """Return vectors as the rows of a matrix of real numbers.

    >>> as_matrix([[1, 2]]).shape
    (1, 2)
    """
    values = np.asarray(vectors)
    if values.ndim != 2 or values.dtype.kind not in "fiu":
        raise FedcontextError(
            f"expected a vector of real numbers, or one in each row, got {values.dtype} {values.shape}"
        )
    return values
