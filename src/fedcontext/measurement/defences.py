"""Bounds on what one device can do to the model: vectors are clipped and counts capped against the round's median.

The median is the lower one of the positive norms that devices sent in this round, so that no device decides what is normal
while fewer than half of them lie. A vector that is not finite, or out of all proportion, costs its device the round; the
others are aggregated as if it had not been asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from fedcontext.arrays.tree import SCRATCH, BoolArray, FloatArray, Leaves, all_finite, leaf_name
from fedcontext.errors import FedcontextError
from fedcontext.measurement.geometry import Geometry, Name, Products, Vectors, norms_of, shares

NEGLIGIBLE = 1e-3  # a vector of a smaller share of the median length is named: it looks wrong
LISTED = 5  # devices that an error names; the others are counted


@dataclass(frozen=True)
class Defences:
    """How far one device can go, in multiples of the round's median; 0 turns a defence off.

    >>> Defences(max_gradient=0.5)
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: max_gradient must be 0 (off) or at least 1, got 0.5
    """

    max_gradient: float = 3.0  # largest norm of a gradient, and of a gradient difference: longer ones are clipped
    max_update: float = 5.0  # largest norm of an update
    max_samples: float = 3.0  # largest sample count, where counts weigh devices or probes
    max_step: float = 10.0  # largest norm of the step, in median updates; for rules whose step depends on their lengths
    max_concavity: float = 0.1  # most that the loss may bend down along the last step, in median bends up; with memory
    outlier: float = 100.0  # a longer vector costs its device the round, as NaN does; 0 makes NaN an error

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0.1 if each.name == "max_concavity" else 1
            if isinstance(value, bool) or not (value == 0 or least <= value < np.inf):
                raise FedcontextError(f"{each.name} must be 0 (off) or at least {least}, got {value!r}")


OFF = Defences(0, 0, 0, 0, 0, 0)


class NoneUsable(FedcontextError):
    """No update or no gradient of a round can be used; ``excluded`` holds the reasons by device."""

    def __init__(self, kind: str, count: int, excluded: Mapping[Name, str]) -> None:
        who = "; ".join(f"{name}: {reason}" for name, reason in list(excluded.items())[:LISTED])
        more = f"; and {len(excluded) - LISTED} more" if len(excluded) > LISTED else ""
        super().__init__(f"none of {count} {kind}s is usable ({who}{more})")
        self.excluded = dict(excluded)


def lower_median(values: FloatArray) -> float:
    """Return the lower median of the positive, finite values; 0 if there are none.

    >>> lower_median(np.array([1.0, 1e30])), lower_median(np.array([0.0, 3.0, np.nan, 2.0, 5.0]))
    (1.0, 3.0)
    """
    usable = np.sort(values[np.isfinite(values) & (values > 0)])
    return float(usable[(len(usable) - 1) // 2]) if len(usable) else 0.0


@dataclass(frozen=True)
class Sent:
    """One kind of vector: whose each is, how long, and how many medians long it may be.

    >>> sent = Sent("update", ["a", "b", "c"], [], [], np.array([1.0, 2.0, 80.0]), limit=10, outlier=0)
    >>> sent.factors, sent.clipped
    (array([1.  , 1.  , 0.25]), {'c': 'update: 40 times the median norm, clipped to 10'})
    """

    kind: str  # as reasons name it
    names: Sequence[Name]
    rows: Sequence[Leaves]
    leaves: Sequence[str]  # that the norms are over
    norms: FloatArray
    limit: float  # 0: vectors are not clipped
    outlier: float  # 0: no vector is out of proportion

    @cached_property
    def shares(self) -> FloatArray:
        """The norms in medians; 0 where no vector has a length, NaN where it is not known."""
        median = lower_median(self.norms)
        return self.norms / median if median else np.zeros_like(self.norms)

    @cached_property
    def factors(self) -> FloatArray:
        """What to multiply each vector with."""
        shares = self.shares
        longer = (shares > self.limit) & bool(self.limit)
        return np.divide(self.limit, shares, out=np.ones(len(shares)), where=longer)

    def without(self, excluded: Collection[Name]) -> Sent:
        """Return these vectors as if those of some devices had not been sent."""
        if not any(name in excluded for name in self.names):
            return self
        return replace(self, norms=np.where([name in excluded for name in self.names], np.nan, self.norms))

    @property
    def clipped(self) -> dict[Name, str]:
        """Whose vector is clipped, and from where to where; and whose is so short that it looks wrong."""
        rows, least = zip(self.names, self.shares, self.factors, strict=True), NEGLIGIBLE if self.outlier else 0
        return {
            name: f"{self.kind}: {share:.3g} times the median norm"
            + (f", clipped to {self.limit:g}" if share > 1 else "")
            for name, share, factor in rows
            if factor < 1 or 0 < share < least
        }

    @property
    def outliers(self) -> dict[Name, str]:
        """Whose vector is out of all proportion."""
        return {
            name: f"{self.kind}: its norm is {share:.3g} times the median, more than {self.outlier:g}"
            for name, share in zip(self.names, self.shares, strict=True)
            if self.outlier and share > self.outlier
        }

    @property
    def unusable(self) -> dict[Name, str]:
        """Whose vector has no finite norm."""
        rows = np.flatnonzero(~np.isfinite(self.norms)).tolist()
        return {self.names[row]: f"{self.kind}: {self._defect(self.rows[row])}" for row in rows}

    def _defect(self, row: Leaves) -> str:
        bad = [name for name in self.leaves if not all_finite(row[name])]
        return f"{leaf_name(bad[0])} has NaN or infinite entries" if bad else "its squared norm overflows float64"


@dataclass(frozen=True)
class Screened:
    """What remains of a round: who is left out, and what each vector is multiplied with."""

    names: Sequence[Name]  # (K,) of the devices
    kept: BoolArray  # (M,) which updates, the pool's behind the cohort's
    probes: BoolArray  # (P,) which gradients
    updates: FloatArray  # (M,) factors
    gradients: FloatArray  # (P,) factors
    differences: FloatArray  # (P,) factors
    own_gradients: FloatArray  # (K,) factors
    rest: FloatArray  # (K,) factors of the updates' leaves that are not measured
    rest_norms: FloatArray  # (K,)
    samples: FloatArray  # (K,) capped
    probe_weights: FloatArray | None  # (P,) capped
    excluded: dict[Name, str]
    clipped: dict[Name, str]

    @property
    def devices(self) -> BoolArray:
        """(K,) the devices whose updates are applied."""
        return self.kept[: len(self.names)]

    @property
    def factors(self) -> FloatArray:
        """(K,) what each device's update is multiplied with: 1 as it is, 0 if it is left out."""
        return np.where(self.devices, self.updates[: len(self.names)], 0)

    @property
    def averages(self) -> FloatArray:
        """(K',) the weights of the devices that are kept in leaves that are averaged."""
        return shares(self.samples[self.devices], self.devices.sum()) * self.rest[self.devices]

    def geometry(self, products: Products, steps: FloatArray | None) -> Geometry:
        """Return the geometry of all rows: gradients clipped, counts capped, and zeros for what is left out."""
        slopes = alignments = None
        weights = None if self.probe_weights is None else self.probe_weights[self.probes]
        if products.slopes is not None:
            slopes = np.where(self.kept, products.slopes[self.probes] * self.gradients[self.probes, None], 0)
        if products.own is not None:
            between = products.own[:, self.probes] * np.outer(self.own_gradients, self.gradients[self.probes])
            alignments = np.where(self.devices[:, None], between, 0) @ shares(weights, between.shape[1])
        gram = np.where(np.outer(self.kept, self.kept), products.gram, 0)
        return Geometry(gram, np.where(self.devices, self.samples, 0), slopes, weights, alignments, steps)


def screen(
    vectors: Vectors,
    update_norms: FloatArray,
    measured: Sequence[str],
    rest: Sequence[str],
    defences: Defences,
    *,
    scale_free: bool = False,
    weighs: bool = True,
    bends: FloatArray | None = None,
    scratch: int = SCRATCH,
) -> Screened:
    """Return whose vectors are used, and how far each is clipped; raise `NoneUsable` if none are.

    Args:
        vectors: what devices sent; rows without a name, such as the server's own, are used as they are.
        update_norms: (M,) of the updates and the pool's, over the ``measured`` leaves.
        measured: the leaves that enter the geometry.
        rest: the other leaves.
        defences: the limits.
        scale_free: whether the step does not depend on the updates' lengths: then none of them is out of proportion.
        weighs: whether the devices' sample counts weigh anything; else only those out of all proportion are named.
        bends: (P,) inner products of the gradient differences with the last step, where the rule knows it.
        scratch: bytes of a block.
    """
    names, longest = vectors.names, defences.max_gradient

    def sent(kind: str, owners: Sequence[Name], rows: Sequence[Leaves], leaves: Sequence[str], limit: float) -> Sent:
        rows = rows[: len(owners)]
        norms = norms_of(rows, leaves, scratch) if leaves and defences != OFF else np.zeros(len(rows))
        return Sent(kind, owners[: len(rows)], rows, leaves, norms, limit, defences.outlier)

    everyone, rows = [*names.devices, *names.pool], [*vectors.updates, *vectors.pool]
    norms, outlier = update_norms[: len(everyone)], 0 if scale_free else defences.outlier
    updates = Sent("update", everyone, rows[: len(everyone)], measured, norms, defences.max_update, outlier)
    gradients = sent("gradient", names.probes, vectors.probes, measured, longest)
    differences = sent("gradient difference", names.probes, vectors.differences, measured, longest)
    own = sent("gradient", names.devices, vectors.own_gradients, measured, longest) if vectors.gradients else gradients
    others = sent("update outside the geometry", names.devices, vectors.updates, rest, defences.max_update)
    groups: Sequence[Sent] = (updates, gradients, differences, own, others)
    excluded = _excluded(vectors, groups) if defences.outlier else {}
    groups = [group.without(excluded) for group in groups]
    updates, gradients, differences, own, others = groups
    kept = _padded([name not in excluded for name in everyone], len(rows)) > 0
    probes = _padded([name not in excluded for name in names.probes], len(vectors.probes)) > 0
    concave = _concave(names.probes, bends, probes, defences.max_concavity)
    counts, weights = np.where(kept[: len(vectors.samples)], vectors.samples, 0), vectors.probe_weights
    weights = None if weights is None else np.where(probes, weights, 0)
    most, named_from = defences.max_samples, defences.max_samples if weighs else defences.outlier or np.inf
    notes = [note for group in groups for note in group.clipped.items()] + list(concave.items())
    notes += _caps(names.devices, counts, most, named_from) + _caps(names.probes, weights, most, most)
    return Screened(
        names=names.devices,
        kept=kept,
        probes=_padded([name not in {**excluded, **concave} for name in names.probes], len(probes)) > 0,
        updates=_padded(updates.factors, len(rows)),
        gradients=_padded(gradients.factors, len(vectors.probes)),
        differences=differences.factors,
        own_gradients=own.factors,
        rest=others.factors,
        rest_norms=others.norms,
        samples=capped(counts, most),
        probe_weights=None if weights is None else capped(weights, most),
        excluded=excluded,
        clipped=_joined(notes),
    )


def _excluded(vectors: Vectors, groups: Sequence[Sent]) -> dict[Name, str]:
    """Return who is left out and why: first what cannot be used at all, then what is out of all proportion."""
    excluded = dict(vectors.names.invalid)
    for group in groups:
        excluded = group.unusable | excluded
    for group in groups:
        excluded = group.outliers | excluded
    for kind, owners in (("update", vectors.names.devices), ("gradient", vectors.names.probes)):
        if owners and all(name in excluded for name in owners):
            raise NoneUsable(kind, len(owners), excluded)
    return excluded


def capped(counts: FloatArray, multiple: float) -> FloatArray:
    """Return counts of at most ``multiple`` times their lower median; as they are if it is 0.

    >>> capped(np.array([10.0, 30.0, 2.0**53]), 10)
    array([ 10.,  30., 300.])
    """
    return np.minimum(counts, multiple * lower_median(counts)) if multiple else counts


def _caps(names: Sequence[Name], counts: FloatArray | None, most: float, named_from: float) -> list[tuple[Name, str]]:
    """Return notes on counts of more than ``named_from`` medians, which are capped to ``most``."""
    median = 0.0 if counts is None else lower_median(counts)
    if not names or counts is None or not median or not most:
        return []
    shares = zip(names, counts / median, strict=True)
    return [(n, f"samples: {x:.3g} times the median, capped to {most:g}") for n, x in shares if x > named_from]


def _concave(names: Sequence[Name], bends: FloatArray | None, probes: BoolArray, most: float) -> dict[Name, str]:
    """Return whose gradients are not used: those along which the loss bends down where for most devices it bends up.

    That is the mark of a reversed gradient: for a convex loss <∇F(w) - ∇F(w'), w - w'> is never negative.
    """
    median = float(np.median(bends[probes])) if bends is not None and len(names) else 0.0
    if bends is None or not most or not median > 0:
        return {}
    return {
        name: f"gradient: bends the loss down along the last step, {share:.3g} times the median, and is not used"
        for name, share, used in zip(names, bends / median, probes, strict=True)
        if used and share < -most
    }


def _padded(values: Sequence[bool] | FloatArray, count: int) -> FloatArray:
    """Return (count,) the values, and ones for rows without an owner: they are trusted."""
    return np.concatenate([np.asarray(values, np.float64), np.ones(count - len(values))])


def _joined(notes: Iterable[tuple[Name, str]]) -> dict[Name, str]:
    """Return the notes by device, without repetitions."""
    found: dict[Name, dict[str, None]] = {}
    for name, what in notes:
        found.setdefault(name, {})[what] = None
    return {name: "; ".join(several) for name, several in found.items()}
