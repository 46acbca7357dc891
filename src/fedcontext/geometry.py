"""From what the devices sent to a `Geometry`: the few K-sized inner products that a rule sees instead of models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedcontext.arrays.tree import SCRATCH, FloatArray, Leaves, framework
from fedcontext.errors import FedcontextError


@dataclass(frozen=True)
class Geometry:
    """The inner products of one round, in float64.

    Rows are the M directions measured: the K devices in the order of their updates, then the pool, if there is
    one (devices that trained but will not be applied).

    >>> geometry = Geometry(gram=np.eye(2), samples=np.ones(2), slopes=np.array([[-1.0, 0.0], [-3.0, 0.0]]))
    >>> geometry.slope
    array([-2.,  0.])
    """

    gram: FloatArray  # (M, M) <Δi, Δj>
    samples: FloatArray  # (K,) training samples of each device; ones where unknown
    slopes: FloatArray | None = None  # (P, M) <∇F_p, Δk>
    probe_weights: FloatArray | None = None  # (P,) how much each probe counts; equal where None
    alignments: FloatArray | None = None  # (K,) <∇F_k, ∇f>
    updates: FloatArray | None = None  # (M, n) only for a rule that asks for the vectors themselves
    gradient: FloatArray | None = None  # (n,) likewise: the estimate of ∇f

    @cached_property
    def slope(self) -> FloatArray:
        """(M,) <∇f, Δk>, with ∇f estimated by the weighted mean of the probes' gradients."""
        if self.slopes is None:
            raise FedcontextError("this geometry has no gradient: measure it with gradients")
        return shares(self.probe_weights, len(self.slopes)) @ self.slopes

    @property
    def finite(self) -> bool:
        """Whether every inner product is finite, and with them every entry that was measured."""
        parts = (self.gram, self.slopes, self.alignments)
        return all(part is None or bool(np.isfinite(part).all()) for part in parts)

    @cached_property
    def condition(self) -> float:
        """Condition of the Gram matrix of the normalised, non-zero updates: 1 is orthogonal, 1e16 singular."""
        norms = np.sqrt(np.diag(self.gram))
        moved = norms > 0
        if not moved.any():
            return 1.0
        values = np.linalg.eigvalsh((self.gram / np.outer(norms, norms).clip(1e-300))[np.ix_(moved, moved)])
        return float(values[-1] / max(values[0], values[-1] * 1e-16))


@dataclass(frozen=True)
class Report:
    """What came back from the devices in one round, leaf by leaf; rows are devices in plan order."""

    updates: Sequence[Leaves]  # K of them
    samples: FloatArray  # (K,)
    gradients: Sequence[Leaves] = ()  # P of them, from the probes
    own_gradients: Sequence[Leaves] = ()  # K of them, or none: from the updates' own devices
    probe_weights: FloatArray | None = None  # (P,)
    pool: Sequence[Leaves] = ()  # updates of devices outside the cohort: they inform, they are not applied


def measure(
    report: Report, layers: Iterable[str] | None = None, needs: Iterable[str] = (), scratch: int = SCRATCH
) -> Geometry:
    """Return the geometry of what the devices sent, in one pass over the blocks of the chosen ``layers``.

    Where there are no probes the cohort's own gradients stand in for them (K2 = 0). What only some rules look at is
    measured if they say that they need it. Structures and shapes must agree: `fedcontext.aggregate` checks that.

    >>> move, pull = {"w": np.array([3.0, 4.0])}, {"w": np.array([1.0, 0.0])}
    >>> geometry = measure(Report(updates=[move], samples=np.ones(1), gradients=[pull]))
    >>> float(geometry.gram[0, 0]), float(geometry.slope[0])
    (25.0, 3.0)
    """
    updates, probes = [*report.updates, *report.pool], report.gradients or report.own_gradients
    count, names = len(updates), list(updates[0] if layers is None else layers)
    weights = shares(report.probe_weights, len(probes)) if probes else np.zeros(0)
    both = _products(updates, probes, names, scratch)
    owns, vectors = report.own_gradients, "vectors" in needs
    between = _products(owns, probes, names, scratch)[:, len(owns) :] if "own gradients" in needs else None
    return Geometry(
        gram=both[:, :count],
        samples=report.samples,
        slopes=both[:, count:].T if probes else None,
        probe_weights=report.probe_weights,
        alignments=None if between is None else between @ weights,
        updates=_vectors(updates, names) if vectors else None,
        gradient=weights @ _vectors(probes, names) if vectors else None,
    )


def _products(rows: Sequence[Leaves], columns: Sequence[Leaves], names: Sequence[str], scratch: int) -> FloatArray:
    """Return (K, K + P), the inner products of the rows with themselves, then with the columns, over all leaves."""
    total = np.zeros((len(rows), len(rows) + len(columns)))
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks that the products are finite
        for name in names:
            library = framework(rows[0][name])
            total += library.products([row[name] for row in rows], [column[name] for column in columns], scratch)
    return total


def is_well_conditioned(matrix: FloatArray, limit: float) -> bool:
    """Return True where a symmetric matrix is quickly seen to be positive and of a condition of at most ``limit``.

    No eigenvalue is above the largest sum of a row's sizes, and none below what can be taken off the diagonal with a
    Cholesky factor left. False says little: that sum can be √K times the largest eigenvalue.

    >>> is_well_conditioned(np.array([[1.0, 0.5], [0.5, 1.0]]), limit=4), is_well_conditioned(np.ones((2, 2)), limit=1e6)
    (True, False)
    """
    try:
        np.linalg.cholesky(matrix - np.abs(matrix).sum(axis=0).max() / limit * np.eye(len(matrix)))
    except np.linalg.LinAlgError:
        return False
    return True


def _vectors(structures: Sequence[Leaves], names: Sequence[str]) -> FloatArray:
    parts = [framework(structures[0][name]).vectors([each[name] for each in structures]) for name in names]
    return np.hstack(parts)


def shares(weights: FloatArray | None, count: int) -> FloatArray:
    """Return ``weights`` scaled to sum to one; equal shares where there are none.

    >>> shares(np.array([1.0, 3.0]), 2), shares(None, 2)
    (array([0.25, 0.75]), array([0.5, 0.5]))
    """
    return np.full(count, 1 / count) if weights is None else weights / weights.sum()
