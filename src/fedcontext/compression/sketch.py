"""Sketches: a few numbers in place of a gradient, for rules that need only its slopes along the updates.

A sketch holds r entries of the randomly rotated vector, drawn without replacement (a subsampled randomised Hadamard
transform). Restored with its scale and rotated back it is a vector whose inner product with any other one has the right
mean: the error of a slope is about ‖g‖ ‖Δ‖ / √r, and averages out over probes with different keys. As a vector it is
nearly all noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcontext.compression.rotation import (
    CHUNK,
    Key,
    Vector,
    as_matrix,
    blocks_of,
    groups,
    rotate,
    rotate_back,
    signs_of,
    sources_of,
)
from fedcontext.errors import FedcontextError


@dataclass(frozen=True)
class Sketch:
    """A code that sends ``numbers`` float32 numbers of a vector, whatever its length.

    >>> sketch, gradient = Sketch(64), np.ones(10_000)
    >>> sent = sketch.encode(gradient, key=(0, 1, 2))
    >>> sent.nbytes, sketch.decode(sent, key=(0, 1, 2), size=10_000).shape
    (256, (10000,))
    """

    numbers: int
    distortion = 1.0  # the share of a restored vector that is noise, for long ones

    def __post_init__(self) -> None:
        if isinstance(self.numbers, bool) or not isinstance(self.numbers, int) or self.numbers < 1:
            raise FedcontextError(f"a sketch must have at least 1 number, got {self.numbers!r}")

    def nbytes(self, size: int) -> int:
        """Return the number of bytes that ``size`` entries become.

        >>> Sketch(64).nbytes(7850), Sketch(64).nbytes(1_000_000)
        (256, 256)
        """
        return 4 * min(self.numbers, _padded(size))

    def encode(self, vector: npt.ArrayLike, key: Key) -> Vector:
        """Return the numbers to send; ``key`` decides which, and must be different for each vector."""
        return np.asarray(self._encoded(as_matrix([vector]), [key])[0])

    def decode(self, numbers: npt.ArrayLike, key: Key, size: int) -> Vector:
        """Return a vector of ``size`` entries whose inner products have the mean of those of the encoded vector."""
        sent = as_matrix([numbers])
        if sent.shape[1] != self.nbytes(size) // 4 or not np.isfinite(sent).all():
            raise FedcontextError(f"expected a sketch of {self.nbytes(size) // 4} finite numbers, got {sent.shape[1]}")
        return np.asarray(self._decoded(sent.astype(np.float32), [key], size)[0])

    def roundtrip(self, vectors: npt.ArrayLike, keys: Sequence[Any]) -> Vector:
        """Return ``decode(encode(vector))`` of each row of a matrix, with its own key.

        >>> Sketch(200).roundtrip(np.eye(2, 100), [(0, 1), (0, 2)]).round(3)[0, :3]  # of 128 numbers: exact
        array([1., 0., 0.], dtype=float32)
        """
        values = as_matrix(vectors)
        step = max(1, CHUNK // max(values.shape[1], 1))
        parts = [slice(row, row + step) for row in range(0, len(values), step)]
        sent = ((self._encoded(values[rows], keys[rows]), keys[rows]) for rows in parts)
        return np.concatenate(
            [np.empty((0, values.shape[1]), np.float32), *(self._decoded(*each, values.shape[1]) for each in sent)]
        )

    def _encoded(self, values: npt.NDArray[Any], keys: Sequence[Any]) -> Vector:
        sources, rotated = sources_of(keys), []
        for start, count, length in groups(values.shape[1]):
            blocks = blocks_of(values, start, count, length).astype(np.float32)
            rotated.append(rotate(blocks, signs_of(sources, count, length)).reshape(len(values), -1))
        return np.take_along_axis(np.concatenate(rotated, axis=1), self._chosen(sources, values.shape[1]), axis=1)

    def _decoded(self, sent: Vector, keys: Sequence[Any], size: int) -> Vector:
        sources = sources_of(keys)
        signs = [signs_of(sources, count, length) for _, count, length in groups(size)]
        rotated = np.zeros((len(sent), _padded(size)), np.float32)
        np.put_along_axis(
            rotated, self._chosen(sources, size), sent * np.float32(_padded(size) / sent.shape[1]), axis=1
        )
        parts = [
            rotate_back(rotated[:, start : start + count * length].reshape(-1, length), sign).reshape(len(sent), -1)
            for (start, count, length), sign in zip(groups(size), signs, strict=True)
        ]
        return np.concatenate(parts, axis=1)[:, :size]

    def _chosen(self, sources: Sequence[np.random.PCG64], size: int) -> npt.NDArray[np.int64]:
        """Return (vectors, numbers) the entries of each rotated vector that are sent; drawn after the signs."""
        count = self.nbytes(size) // 4
        return np.stack([np.random.Generator(each).choice(_padded(size), count, replace=False) for each in sources])


def _padded(size: int) -> int:
    return sum(count * length for _, count, length in groups(size))
