"""From what devices sent to a `Geometry`: the inner products (K x K) that a rule sees instead of models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from fedcontext.arrays.tree import SCRATCH, BoolArray, FloatArray, Leaves, Structure, framework
from fedcontext.errors import FedcontextError

Structures: TypeAlias = Sequence[Structure] | Mapping[Any, Structure]
Name: TypeAlias = Any  # of a device: its key in a mapping, its position in a sequence


@dataclass(frozen=True)
class Report:
    """What the devices of one round sent: simulations and the Flower strategy make it, `aggregate` takes it.

    Rows are devices in plan order. A mapping names the devices in errors; a sequence numbers them.
    """

    updates: Structures  # K updates Δₖ = wₖ - w
    samples: Iterable[float] | None = None  # (K,) training samples of each device
    gradient: Structure | None = None  # one estimate of ∇f(w), or instead of it:
    gradients: Structures | None = None  # P gradients ∇F_p(w) of the probes
    probe_weights: Iterable[float] | None = None  # (P,) how much each probe counts; equal where None
    own_gradients: Structures | None = None  # K gradients ∇F_k(w) of the updates' own devices
    pool: Structures | None = None  # updates of devices outside the cohort; they inform the weights only
    differences: Structures | None = None  # ∇F_p(w) - ∇F_p(w') of the probes, w' the params of the last round
    population: int | None = None  # total number of devices
    steps: Iterable[float] | None = None  # (K,) local SGD steps of each device
    root_gradient: Structure | None = None  # the gradient of the server's own samples
    remaining_slopes: Iterable[float] | None = None  # (K,) slope along each update at its end / that before it
    distortions: tuple[float, float] = (0.0, 0.0)  # shares of gradients and differences that are noise of a code


@dataclass(frozen=True)
class Geometry:
    """The inner products of one round, in float64.

    Rows are the M directions: the K updates in the order of the devices, then those of the pool, if there is one.

    >>> geometry = Geometry(gram=np.eye(2), samples=np.ones(2), slopes=np.array([[-1.0, 0.0], [-3.0, 0.0]]))
    >>> geometry.slope
    array([-2.,  0.])
    """

    gram: FloatArray  # (M, M) <Δi, Δj>
    samples: FloatArray  # (K,) training samples of each device; ones where unknown
    slopes: FloatArray | None = None  # (P, M) <∇F_p, Δk>
    probe_weights: FloatArray | None = None  # (P,) how much each probe counts; equal where None
    alignments: FloatArray | None = None  # (K,) <∇F_k, ∇f>
    steps: FloatArray | None = None  # (K,) local SGD steps of each device

    @cached_property
    def slope(self) -> FloatArray:
        """(M,) <∇f, Δk>, with ∇f estimated by the weighted mean of the probes' gradients."""
        if self.slopes is None:
            raise FedcontextError("this geometry has no gradient: a rule that uses slopes declares needs=('gradient',)")
        return shares(self.probe_weights, len(self.slopes)) @ self.slopes

    @property
    def finite(self) -> bool:
        """Whether every inner product is finite, and with them every entry that was measured."""
        parts = (self.gram, self.slopes, self.alignments)
        return all(part is None or bool(np.isfinite(part).all()) for part in parts)

    def rows(self, kept: BoolArray, factors: FloatArray) -> Geometry:
        """Return the geometry of the rows that are ``kept`` (M,), each scaled by its factor (M,).

        >>> Geometry(np.eye(3), np.ones(3)).rows(np.array([True, False, True]), np.array([1.0, 1.0, 2.0])).gram
        array([[1., 0.],
               [0., 4.]])
        """
        cohort, scale = kept[: len(self.samples)], factors[kept]
        return Geometry(
            gram=self.gram[np.ix_(kept, kept)] * np.outer(scale, scale),
            samples=self.samples[cohort],
            slopes=None if self.slopes is None else self.slopes[:, kept] * scale,
            probe_weights=self.probe_weights,
            alignments=None if self.alignments is None else self.alignments[cohort],
            steps=None if self.steps is None else self.steps[cohort],
        )

    @cached_property
    def condition(self) -> float:
        """Condition number of the Gram matrix of the normalised, non-zero updates: 1 is orthogonal, 1e16 singular."""
        norms = np.sqrt(np.diag(self.gram))
        moved = norms > 0
        if not moved.any():
            return 1.0
        values = np.linalg.eigvalsh((self.gram / np.outer(norms, norms).clip(1e-300))[np.ix_(moved, moved)])
        return float(values[-1] / max(values[0], values[-1] * 1e-16))


@dataclass(frozen=True)
class Names:
    """Whose the rows are. A device has one name: the same key in two mappings is the same device."""

    devices: Sequence[Name] = ()
    probes: Sequence[Name] = ()
    pool: Sequence[Name] = ()
    invalid: Mapping[Name, str] = field(default_factory=dict)  # why a device's counts cannot be used


@dataclass(frozen=True)
class Vectors:
    """A `Report` after validation: every structure as its leaves by name, every count as an array."""

    updates: list[Leaves]  # K
    samples: FloatArray  # (K,)
    gradients: list[Leaves]  # P, the probes' or the one estimate
    own_gradients: list[Leaves]  # K, or none
    probe_weights: FloatArray | None  # (P,)
    pool: list[Leaves]
    differences: list[Leaves]  # one for each probe, or none
    steps: FloatArray | None = None  # (K,)
    names: Names = Names()
    root_gradient: Sequence[Leaves] = ()  # the server's own, or none
    remaining_slopes: Sequence[float] = ()  # K as devices reported them, unchecked, or none

    @property
    def probes(self) -> list[Leaves]:
        """The gradients that estimate the global one: the probes', or without probes the cohort's own (K2 = 0)."""
        return self.gradients or self.own_gradients


@dataclass(frozen=True)
class Products:
    """Inner products of all that devices sent, as measured."""

    gram: FloatArray  # (M, M) <Δi, Δj>
    slopes: FloatArray | None  # (P, M) <∇F_p, Δk>
    own: FloatArray | None  # (K, P) <∇F_k, ∇F_p>, where asked for


def measure(
    vectors: Vectors, layers: Iterable[str] | None = None, own: bool = False, scratch: int = SCRATCH
) -> Products:
    """Return the inner products of what the devices sent, in one pass over the blocks of the chosen ``layers``.

    ``own`` asks for the inner products of the own gradients with those of the probes.
    """
    rows = [*vectors.updates, *vectors.pool]
    names = list(rows[0] if layers is None else layers)
    products = inner_products(rows, vectors.probes, names, scratch)
    between = inner_products(vectors.own_gradients, vectors.probes, names, scratch) if own else None
    return Products(
        gram=products[:, : len(rows)],
        slopes=products[:, len(rows) :].T if vectors.probes else None,
        own=None if between is None else between[:, len(between) :],
    )


def norms_of(rows: Sequence[Leaves], names: Iterable[str], scratch: int = SCRATCH) -> FloatArray:
    """Return (K,) the norm of each row over the leaves ``names``; NaN or infinite where an entry or a square is.

    >>> norms_of([{"w": np.array([3.0, 4.0])}, {"w": np.array([1e30, np.nan])}], ["w"])
    array([ 5., nan])
    """
    names, several = list(names), 4  # rows at once: as many as the compiled products read together
    squares = [
        np.diag(inner_products(rows[first : first + several], [], names, scratch))
        for first in range(0, len(rows), several)
    ]
    return np.asarray(np.sqrt(np.concatenate([np.zeros(0), *squares])))


def inner_products(
    rows: Sequence[Leaves], columns: Sequence[Leaves], names: Sequence[str], scratch: int = SCRATCH
) -> FloatArray:
    """Return (K, K + P), the inner products of the rows with the rows and the columns over the leaves ``names``.

    >>> inner_products([{"w": np.array([3.0, 4.0])}], [{"w": np.array([1.0, 0.0])}], ["w"])
    array([[25.,  3.]])
    """
    total = np.zeros((len(rows), len(rows) + len(columns)))
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks whether the products are finite
        for name in names:
            library = framework(rows[0][name])
            total += library.products([row[name] for row in rows], [column[name] for column in columns], scratch)
    return total


def shares(weights: FloatArray | None, count: int) -> FloatArray:
    """Return ``weights`` scaled to sum to one; equal shares where there are none.

    >>> shares(np.array([1.0, 3.0]), 2), shares(None, 2)
    (array([0.25, 0.75]), array([0.5, 0.5]))
    """
    return np.full(count, 1 / count) if weights is None else weights / weights.sum()
