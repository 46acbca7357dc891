"""From what the devices sent to a `Geometry`: the few K-sized inner products that a rule sees instead of models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedcontext.arrays import FloatArray, Leaves, blocks, framework, size_of
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


def measure(report: Report, layers: Iterable[str] | None = None, vectors: bool = False) -> Geometry:
    """Return the geometry of what the devices sent, in one pass over the blocks of the chosen ``layers``.

    Where there are no probes the cohort's own gradients stand in for them (K2 = 0). Structures and shapes must
    agree: `fedcontext.aggregate` checks that.

    >>> move, pull = {"w": np.array([3.0, 4.0])}, {"w": np.array([1.0, 0.0])}
    >>> geometry = measure(Report(updates=[move], samples=np.ones(1), gradients=[pull]))
    >>> float(geometry.gram[0, 0]), float(geometry.slope[0])
    (25.0, 3.0)
    """
    updates, own_gradients = [*report.updates, *report.pool], report.own_gradients
    probes = report.gradients or own_gradients
    gram, slopes = np.zeros((len(updates), len(updates))), np.zeros((len(probes), len(updates)))
    alignments = np.zeros(len(own_gradients))
    weights = shares(report.probe_weights, len(probes)) if probes else np.zeros(0)
    parts: list[tuple[FloatArray, FloatArray]] = []
    for name in updates[0] if layers is None else layers:
        ways, size = framework(updates[0][name]), size_of(updates[0][name])
        for start, stop in blocks(size, len(updates) + len(probes) + len(own_gradients)):
            moves = ways.load([update[name] for update in updates], start, stop)
            gram += ways.number(moves @ moves.T)
            if not probes:
                continue
            pulls = ways.load([probe[name] for probe in probes], start, stop)
            slopes += ways.number(pulls @ moves.T)
            if own_gradients or vectors:
                pull = weights @ ways.number(pulls)
            if own_gradients:
                own = ways.load([own[name] for own in own_gradients], start, stop) if report.gradients else pulls
                alignments += ways.number(own) @ pull
            if vectors:
                parts.append((ways.number(moves), pull))
    return Geometry(
        gram=gram,
        samples=report.samples,
        slopes=slopes if probes else None,
        probe_weights=report.probe_weights,
        alignments=alignments if own_gradients else None,
        updates=np.hstack([moves for moves, _ in parts]) if parts else None,
        gradient=np.hstack([pull for _, pull in parts]) if parts else None,
    )


def shares(weights: FloatArray | None, count: int) -> FloatArray:
    """Return ``weights`` scaled to sum to one; equal shares where there are none.

    >>> shares(np.array([1.0, 3.0]), 2), shares(None, 2)
    (array([0.25, 0.75]), array([0.5, 0.5]))
    """
    return np.full(count, 1 / count) if weights is None else weights / weights.sum()
