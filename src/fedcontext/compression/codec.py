"""Unbiased few-bit coding of vectors, for the gradients that devices send.

The code is EDEN (Vargaftik et al., "EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated
Learning", ICML 2022). A vector is split into blocks of a power of two entries. Each block x is rotated to z = R x by
random signs and Hadamard transforms, which makes its entries nearly normal; each entry of z is replaced by the
nearest Lloyd-Max level q of the normal distribution; and the block is restored as x̂ = s Rᵀ q. The scale
s = ‖z‖² / <q, z> makes the mean of x̂ over the rotations equal to x. The error is E‖x̂ - x‖² / ‖x‖² = D / (1 - D)
with the Lloyd-Max distortion D: 0.57, 0.13, 0.036 and 0.0096 for 1 to 4 bits an entry.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcontext.compression.rotation import (
    CHUNK,
    Key,
    Transform,
    Vector,
    as_matrix,
    blocks_of,
    fastest_transform,
    groups,
    hadamard,
    rotate,
    rotate_back,
    signs_of,
    sources_of,
)
from fedcontext.errors import FedcontextError
from fedcontext.threads import on_all_cores

Codes: TypeAlias = npt.NDArray[np.uint8]

HEADER = struct.Struct("<BBQ")  # version, bits, number of entries
VERSION = 1
SCALE_LIMIT = 1e35  # a restored entry is at most scale · √LARGEST · largest level and must be finite in float32
LARGEST_ENTRY = 1e32  # of a vector whose scales are below that limit, whatever its rotation


@dataclass(frozen=True)
class Codec:
    """A code with 1 to 8 ``bits`` an entry, or 32 for plain float32.

    Sender and receiver derive the random signs from the same key. Use a key for one vector only: the errors of two
    vectors coded with one key are correlated and do not average out.

    >>> codec = Codec(bits=4)
    >>> data = codec.encode(np.ones(300), key=(0, 1, 2, 3))
    >>> len(data) == codec.nbytes(300)
    True
    >>> restored = codec.decode(data, key=(0, 1, 2, 3), size=300)
    >>> bool(np.mean((restored - 1) ** 2) < 0.02)
    True
    """

    bits: int

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in (1, 2, 3, 4, 5, 6, 7, 8, 32):
            raise FedcontextError(f"bits must be 1 to 8, or 32 for float32, got {self.bits!r}")

    @property
    def distortion(self) -> float:
        """The share of a decoded vector's squared length that is noise: E‖x̂ - x‖² = distortion · E‖x̂‖².

        >>> [round(Codec(bits).distortion, 3) for bits in (1, 2, 4, 32)]
        [0.363, 0.117, 0.01, 0.0]
        """
        return 0.0 if self.bits == 32 else _distortion(self.bits)

    def nbytes(self, size: int) -> int:
        """Return the number of bytes that encode ``size`` entries.

        >>> Codec(2).nbytes(7850), Codec(32).nbytes(7850)  # 7850 = 4096 + 2048 + 1024 + 512 + 128 + 42 (padded to 128)
        (2018, 31410)
        """
        if self.bits == 32:
            return HEADER.size + 4 * size
        return HEADER.size + sum(count * (4 + length * self.bits // 8) for _, count, length in groups(size))

    def encode(self, vector: npt.ArrayLike, key: Key) -> bytes:
        """Return a header, then for each group of blocks the float32 scales and the packed levels.

        >>> Codec(1).encode([1.0, float("nan")], key=(0,))
        Traceback (most recent call last):
        ...
        fedcontext.errors.FedcontextError: the vector has entries that are not finite
        """
        values = as_matrix([vector])
        parts = [HEADER.pack(VERSION, self.bits, values.shape[1])]
        if self.bits == 32:
            return parts[0] + _finite(values).astype("<f4").tobytes()
        for _, scales, codes, _ in self._quantised(values, [key]):
            packed = np.packbits(np.unpackbits(codes.reshape(-1, 1), axis=1)[:, -self.bits :])
            parts += [scales.astype("<f4").tobytes(), packed.tobytes()]
        return b"".join(parts)

    def decode(self, data: bytes, key: Key, size: int) -> Vector:
        """Return the ``size`` entries encoded in ``data``, which need not be trusted.

        >>> Codec(1).decode(b"???", key=(0,), size=2)
        Traceback (most recent call last):
        ...
        fedcontext.errors.FedcontextError: 2 entries at 1 bits are encoded in 30 bytes, got 3
        """
        if len(data) != (expected := self.nbytes(size)):
            raise FedcontextError(
                f"{size} entries at {self.bits} bits are encoded in {expected} bytes, got {len(data)}"
            )
        if (header := HEADER.unpack_from(data)) != (VERSION, self.bits, size):
            raise FedcontextError(f"expected version, bits and entries {(VERSION, self.bits, size)}, got {header}")
        if self.bits == 32:
            return _finite(np.frombuffer(data, "<f4", offset=HEADER.size))
        result, position, sources = np.empty(size, np.float32), HEADER.size, sources_of([key])
        for start, count, length in groups(size):
            scales = _scales(np.frombuffer(data, "<f4", count, position))
            packed = np.frombuffer(data, np.uint8, count * length * self.bits // 8, position + scales.nbytes)
            position += scales.nbytes + packed.nbytes
            codes = np.packbits(np.unpackbits(packed).reshape(-1, self.bits), axis=1) >> np.uint8(8 - self.bits)
            blocks = self._restored(scales, codes.reshape(count, length), signs_of(sources, count, length))
            result[start : start + blocks.size] = blocks.reshape(-1)[: size - start]
        return result

    def roundtrip(self, vectors: npt.ArrayLike, key: Key | Sequence[Any]) -> Vector:
        """Return ``decode(encode(vector))``, bit for bit, without the bytes; of a matrix, each row with its own key.

        >>> Codec(3).roundtrip(np.zeros((2, 5)), [(0, 1), (0, 2)]).shape
        (2, 5)
        """
        single = np.ndim(vectors) == 1
        values, keys = (as_matrix([vectors]), [key]) if single else (as_matrix(vectors), key)
        if len(keys) != len(values):
            raise FedcontextError(f"{len(values)} vectors need one key each, got {len(keys)} keys")
        result = _finite(values) if self.bits == 32 else self._rows(values, keys)
        return result[0] if single else result

    def _rows(self, values: npt.NDArray[Any], keys: Sequence[Any]) -> Vector:
        """Return each row as it is decoded; as many rows at once as fit in a chunk, and chunks on all cores."""
        result, size, transform = np.empty(values.shape, np.float32), values.shape[1], fastest_transform(values.size)
        step = max(1, CHUNK // max(size, 1))

        def code(rows: slice) -> None:
            for start, scales, codes, signs in self._quantised(values[rows], keys[rows], transform):
                blocks = self._restored(scales, codes, signs, transform).reshape(len(values[rows]), -1)
                result[rows, start : start + blocks.shape[1]] = blocks[:, : size - start]

        on_all_cores(code, [slice(row, row + step) for row in range(0, len(values), step)])
        return result

    def _quantised(
        self, values: npt.NDArray[Any], keys: Sequence[Any], transform: Transform = hadamard
    ) -> Iterator[tuple[int, Vector, Codes, list[Vector]]]:
        """Yield (first entry, scales (B,), codes (B, L), signs) for each group of B blocks with L entries."""
        sources, levels = sources_of(keys), _levels(self.bits)
        for start, count, length in groups(values.shape[1]):
            blocks, signs = blocks_of(values, start, count, length), signs_of(sources, count, length)
            peak = np.abs(blocks).max(axis=1)
            if not np.isfinite(peak).all():
                raise FedcontextError("the vector has entries that are not finite")
            zero = peak == 0  # such a block has scale 0 and any codes
            units = (blocks / np.where(zero, 1, peak)[:, None]).astype(np.float32)  # whose squares cannot overflow
            energy = np.where(zero, 1, np.square(units).sum(axis=1))
            rotated = rotate(units, signs, transform)
            codes = _nearest(rotated * np.sqrt(length / energy)[:, None].astype(np.float32), self.bits)
            match = np.where(zero, 1, (levels[codes] * rotated).sum(axis=1))
            yield start, _scales(peak * (energy / match)), codes, signs

    def _restored(self, scales: Vector, codes: Codes, signs: list[Vector], transform: Transform = hadamard) -> Vector:
        return rotate_back(_levels(self.bits)[codes], signs, transform) * scales[:, None]


IDENTITY = Codec(bits=32)


def _nearest(values: Vector, bits: int) -> Codes:
    """Return the index of the level nearest to each value, by bisection: faster here than `searchsorted`."""
    levels = _levels(bits)
    edges = (levels[1:] + levels[:-1]) / 2
    codes = np.zeros(values.shape, np.uint8)
    for step in (1 << bit for bit in reversed(range(bits))):
        codes += (values > edges[codes + np.uint8(step - 1)]) * np.uint8(step)
    return codes


@cache
def _levels(bits: int) -> Vector:
    """Return the Lloyd-Max levels of the standard normal distribution, in ascending order (Max, 1960).

    >>> _levels(2)
    array([-1.5104, -0.4528,  0.4528,  1.5104], dtype=float32)
    """
    normal, half = NormalDist(), 2 ** (bits - 1)
    levels = [3**0.5 * normal.inv_cdf(0.5 + (i + 0.5) / 2 / half) for i in range(half)]  # optimal in the limit
    for _ in range(200):  # Lloyd's iteration: each level is the mean of its cell
        edges = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), np.inf]
        density, below = [normal.pdf(edge) for edge in edges], [normal.cdf(edge) for edge in edges]
        levels = [(density[i] - density[i + 1]) / (below[i + 1] - below[i]) for i in range(half)]
    upper = np.round(np.array(levels, np.float32), 4)
    return np.concatenate([-upper[::-1], upper])


@cache
def _distortion(bits: int) -> float:
    """Return E(z - q)² of a standard normal number z and its level q: 1 - 2 E qz + E q²."""
    levels, normal = _levels(bits).astype(float), NormalDist()
    edges = [-np.inf, *((levels[1:] + levels[:-1]) / 2), np.inf]
    shares = np.array([normal.cdf(high) - normal.cdf(low) for low, high in pairwise(edges)])
    means = np.array([normal.pdf(low) - normal.pdf(high) for low, high in pairwise(edges)])  # E z in each cell
    return float(1 - 2 * levels @ means + np.square(levels) @ shares)


def _scales(values: npt.NDArray[Any]) -> Vector:
    if not ((values >= 0) & (values <= SCALE_LIMIT)).all():
        raise FedcontextError(f"the scales of a coded vector must be between 0 and {SCALE_LIMIT:g}, got {values}")
    return values.astype(np.float32)


def _finite(values: npt.NDArray[Any]) -> Vector:
    with np.errstate(over="ignore"):
        result = values.astype(np.float32)
    if not np.isfinite(result).all():
        raise FedcontextError("the vector has entries that are not finite in float32")
    return result
