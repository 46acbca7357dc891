"""Running sums over devices: all that a rule with memory sees, so that it can run under secure aggregation.

Devices can be added one after another, so that memory does not grow with their number. Partial sums of several
aggregators add up with ``+``; in a fixed order the result is bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedcontext.arrays.tree import SCRATCH, Array, FloatArray, Leaves, blocks, framework, size_of, to_numpy
from fedcontext.errors import FedcontextError
from fedcontext.measurement.geometry import Vectors
from fedcontext.measurement.screening import Screened

LONGEST = 8.0  # lengths of the mean update: the longest step that the devices' own slopes can suggest


@dataclass
class Sums:
    """Sums over the devices of one round, as flat float64 vectors of n entries.

    >>> sums = Sums(size=2)
    >>> sums.add_update(np.array([1.0, 0.0])); sums.add_update(np.array([0.0, 1.0]))
    >>> sums.mean_update
    array([0.5, 0.5])
    """

    size: int  # n
    devices: int = 0  # K, updates added
    probes: int = 0  # Q, gradients or changes added
    update: FloatArray = field(init=False)  # (n,) Σ Δₖ
    gradient: FloatArray = field(init=False)  # (n,) Σ gᵢ, gᵢ = ∇Fᵢ(w_t)
    difference: FloatArray = field(init=False)  # (n,) Σ yᵢ, yᵢ = ∇Fᵢ(w_t) - ∇Fᵢ(w_{t-1})
    square: FloatArray = field(init=False)  # (n,) Σ gᵢ²
    remaining: float = 0.0  # Σ of the devices' remaining slopes, each as `counted_slope`
    gradient_norms: float = 0.0  # Σ ‖gᵢ‖²
    difference_norms: float = 0.0  # Σ ‖yᵢ‖²
    distortions: tuple[float, float] = (0.0, 0.0)  # shares of ‖gᵢ‖² and ‖yᵢ‖² that are noise of a code
    contradicting: int = 0  # probes left out because they contradict the others along the last step

    def __post_init__(self) -> None:
        for name in ("update", "gradient", "difference", "square"):
            setattr(self, name, np.zeros(self.size))

    def add_update(self, update: FloatArray, remaining_slope: float = 0.0) -> None:
        """Fold in one device's update, and the share of the slope along it that is left at its end."""
        self.remaining += counted_slope(remaining_slope)
        self.update += update
        self.devices += 1

    def add_probe(self, gradient: FloatArray, difference: FloatArray | None = None) -> None:
        """Fold in one probe's gradient and its difference to the last round's."""
        self.gradient += gradient
        self.square += gradient * gradient
        self.gradient_norms += dot(gradient, gradient)
        if difference is None:
            self.probes += 1
        else:
            self.add_change(difference)

    def add_change(self, change: FloatArray) -> None:
        """Fold in one probe's gradient difference alone."""
        self.difference += change
        self.difference_norms += dot(change, change)
        self.probes += 1

    def __add__(self, other: Sums) -> Sums:
        """Return the sums over both sets of devices."""
        for what in ("size", "distortions"):
            if (own := getattr(self, what)) != (others := getattr(other, what)):
                raise FedcontextError(f"sums that are added must have the same {what}, got {own} and {others}")
        total = Sums(self.size, self.devices + other.devices, self.probes + other.probes, distortions=self.distortions)
        for name in (
            "update",
            "gradient",
            "difference",
            "square",
            "remaining",
            "gradient_norms",
            "difference_norms",
            "contradicting",
        ):
            setattr(total, name, getattr(self, name) + getattr(other, name))
        return total

    @property
    def finite(self) -> bool:
        """Whether every sum is finite."""
        parts = (self.update, self.square, self.difference, self.difference_norms)
        return all(bool(np.isfinite(part).all()) for part in parts)

    @property
    def mean_update(self) -> FloatArray:
        """(n,) d, the plain mean of the updates."""
        return self.update / self.devices

    @property
    def distance_to_minimum(self) -> float:
        """Where the minimum along the updates is by the devices' own slopes, in lengths of the mean update: 1 to 8.

        On a parabola it is 1 / (1 - r) updates away, r the slope that remains; this is the harmonic mean over devices.
        """
        return self.devices / (self.devices - self.remaining)

    @property
    def mean_gradient(self) -> FloatArray:
        """(n,) ḡ, the plain mean of the probes' gradients."""
        return self.gradient / self.probes

    @property
    def mean_difference(self) -> FloatArray:
        """(n,) ȳ, the plain mean of the probes' gradient differences."""
        return self.difference / self.probes

    def gradient_error(self, population: float) -> float:
        """Return the expected squared error of the mean gradient as an estimate of the mean over all devices."""
        return self._error(self.gradient_norms, self.gradient, self.distortions[0], population)

    def difference_error(self, population: float) -> float:
        """Return the expected squared error of the mean difference."""
        return self._error(self.difference_norms, self.difference, self.distortions[1], population)

    def _error(self, norms: float, total: FloatArray, distortion: float, population: float) -> float:
        """Return the squared error of a mean of Q vectors: (1 - Q/N) Σ‖xᵢ - x̄‖² / (Q (Q - 1)) + (Q/N) D Σ‖xᵢ‖² / Q².

        ``norms`` is Σ‖xᵢ‖² and ``total`` is Σ xᵢ. The first term vanishes where all devices probe, but the noise of
        their codes does not; where few do, the spread of the decoded vectors has that noise in it. The spread of a
        single vector is unknown, and counts as 0.
        """
        share, spread = min(1.0, self.probes / population), 0.0
        if self.probes > 1:
            spread = max(0.0, norms - dot(total, total) / self.probes) / (self.probes * (self.probes - 1))
        return (1 - share) * spread + share * distortion * norms / self.probes**2


def remaining_slope(update: FloatArray, before: FloatArray, after: FloatArray) -> float:
    """Return the slope of a device's loss along its update after local training as a share of that before; NaN for 0/0.

    >>> remaining_slope(np.array([1.0, 0.0]), before=np.array([-4.0, 1.0]), after=np.array([-3.0, 0.0]))
    0.75
    """
    with np.errstate(all="ignore"):
        return float(np.divide(dot(after, update), dot(before, update)))


def counted_slope(remaining: object) -> float:
    """Return a reported remaining slope as it counts: at most 7/8.

    It counts as 0 where it is not between 0 and 1, for the update went too far or the loss is not convex along it, and
    where it is no number.

    >>> counted_slope(0.75), counted_slope(0.99), counted_slope(-0.2), counted_slope(1.3), counted_slope("text")
    (0.75, 0.875, 0.0, 0.0, 0.0)
    """
    try:
        share = float(remaining)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return min(share, 1 - 1 / LONGEST) if 0 < share < 1 else 0.0


def dot(left: FloatArray, right: FloatArray) -> float:
    """Return the inner product by NumPy's pairwise sum: the same bits on any number of cores, unlike BLAS.

    >>> dot(np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    11.0
    """
    return float((left * right).sum())


def sums_of(
    vectors: Vectors, names: Sequence[str], screened: Screened, distortions: tuple[float, float] = (0.0, 0.0)
) -> Sums:
    """Return the sums over what devices sent, clipped, over the leaves ``names``.

    Own gradients count as the probes' (K2 = 0).
    """
    size = sum(size_of(vectors.updates[0][name]) for name in names)
    total = Sums(size, distortions=distortions, contradicting=screened.contradicting)
    updates, gradients, differences = screened.updates, screened.gradients, screened.differences
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks whether the sums are finite
        for row in np.flatnonzero(screened.devices).tolist():
            slope = vectors.remaining_slopes[row] if vectors.remaining_slopes else 0.0
            total.add_update(_scaled(vectors.updates[row], names, updates[row]), slope)
        for row in np.flatnonzero(screened.probes).tolist():
            change = _scaled(vectors.differences[row], names, differences[row]) if vectors.differences else None
            total.add_probe(_scaled(vectors.probes[row], names, gradients[row]), change)
    return total


def sum_of_changes(rows: Sequence[Leaves], names: Sequence[str], factors: FloatArray, distortion: float) -> Sums:
    """Return the sums over the probes' gradient changes, each times its factor; those with factor 0 are left out."""
    total = Sums(sum(size_of(rows[0][name]) for name in names), distortions=(0.0, distortion))
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks whether the sums are finite
        for row in np.flatnonzero(factors).tolist():
            total.add_change(_scaled(rows[row], names, factors[row]))
    return total


def by_coordinate(
    combine: Callable[[FloatArray], FloatArray],
    rows: Sequence[Leaves],
    names: Sequence[str],
    factors: FloatArray,
    scratch: int = SCRATCH,
) -> FloatArray:
    """Return ``combine`` of the rows, applied to one block of entries after another, as one flat vector.

    Each row is multiplied with its factor; those with a factor of 0 are left out.

    >>> rows = [{"w": np.array([1.0, 5.0])}, {"w": np.array([3.0, 2.0])}]
    >>> by_coordinate(lambda block: block.max(axis=0), rows, ["w"], np.ones(2))
    array([3., 5.])
    """
    used = [(row, factor) for row, factor in zip(rows, factors, strict=True) if factor]
    parts = [
        combine(np.stack([factor * _float64(row[name].reshape(-1)[start:stop]) for row, factor in used]))
        for name in names
        for start, stop in blocks(size_of(rows[0][name]), len(rows), scratch)
    ]
    return np.concatenate(parts)


def _scaled(leaves: Leaves, names: Sequence[str], factor: float) -> FloatArray:
    vector = flat(leaves, names)
    return vector if factor == 1 else factor * vector


def flat(leaves: Leaves, names: Sequence[str]) -> FloatArray:
    """Return the named leaves as one flat float64 NumPy vector.

    >>> flat({"w": np.ones((2, 1)), "b": np.zeros(1)}, ["w", "b"])
    array([1., 1., 0.])
    """
    return framework(leaves[names[0]]).flat([leaves[name] for name in names])


def unflat(vector: FloatArray, like: Leaves, names: Sequence[str]) -> Leaves:
    """Return a flat vector as leaves of the shape, dtype, library and device of those in ``like``: undoes `flat`.

    >>> unflat(np.ones(2), {"w": np.zeros((2, 1), np.float32)}, ["w"])["w"].dtype
    dtype('float32')
    """
    arrays = framework(like[names[0]]).unflat(vector, [like[name] for name in names])
    return dict(zip(names, arrays, strict=True))


def _float64(leaf: Array) -> FloatArray:
    return to_numpy(leaf).astype(np.float64, copy=False)
