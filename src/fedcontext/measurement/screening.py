"""Screening of a round by the defences: vectors are clipped and counts capped against the round's median.

A device that sent a vector that is not finite, or an outlier, is left out; the others are aggregated as if it had not
been asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedcontext.arrays.tree import SCRATCH, BoolArray, FloatArray, Leaves, all_finite, leaf_name
from fedcontext.measurement.defences import OFF, Defences, NoneUsable, capped, lower_median, upper_median
from fedcontext.measurement.geometry import Geometry, Name, Products, Vectors, norms_of, shares
from fedcontext.measurement.last_step import AlongLastStep, concave, contradicting

FEWEST = 3  # vectors that are not zero among which one can be an outlier
NEGLIGIBLE = 1e-3  # shorter vectors, relative to the median length, are reported as suspicious
CHANGE = "gradient change"  # as notes on the second exchange begin


@dataclass(frozen=True)
class SentVectors:
    """One kind of vector: whose each is, how long, and how many medians long it may be.

    >>> sent = SentVectors("update", ["a", "b", "c"], [], [], np.array([1.0, 2.0, 80.0]), limit=10, outlier=0)
    >>> sent.factors, sent.clipped
    (array([1.  , 1.  , 0.25]), {'c': 'update: 40 times the median norm, clipped to 10'})
    """

    kind: str  # as reasons name it
    names: Sequence[Name]
    rows: Sequence[Leaves]
    leaves: Sequence[str]  # that the norms are over
    norms: FloatArray
    limit: float  # 0 disables clipping
    outlier: float  # 0 excludes nobody
    usual: float = 0.0  # a vector that is not longer than this is no outlier

    @cached_property
    def relative_norms(self) -> FloatArray:
        """The norms as multiples of their median; 0 if all vectors are zero, NaN where a norm is not known."""
        median = lower_median(self.norms)
        return self.norms / median if median else np.zeros_like(self.norms)

    @cached_property
    def factors(self) -> FloatArray:
        """What to multiply each vector with."""
        if not self.limit or not self.norms.any():
            return np.ones(len(self.norms))
        longer = self.relative_norms > self.limit
        return np.divide(self.limit, self.relative_norms, out=np.ones(len(self.norms)), where=longer)

    def without(self, excluded: Collection[Name]) -> SentVectors:
        """Return these vectors as if those of some devices had not been sent."""
        absent = [name in excluded for name in self.names]
        return replace(self, norms=np.where(absent, np.nan, self.norms)) if any(absent) else self

    @property
    def clipped(self) -> dict[Name, str]:
        """Notes on vectors that are clipped, with their length and the limit, or suspiciously short."""
        least = NEGLIGIBLE if self.outlier else 0
        return {
            name: f"{self.kind}: {multiple:.3g} times the median norm"
            + (f", clipped to {self.limit:g}" if multiple > 1 else "")
            for name, multiple, factor in zip(self.names, self.relative_norms, self.factors, strict=True)
            if factor < 1 or 0 < multiple < least
        }

    @property
    def outliers(self) -> dict[Name, str]:
        """Whose vector is an outlier among at least three: of two, nobody knows which is wrong.

        They are compared with the upper median, so that two short vectors of four do not make the other two outliers.
        """
        if np.count_nonzero(self.norms > 0) < FEWEST or not self.outlier:
            return {}
        multiples = self.norms / upper_median(self.norms)
        return {
            name: f"{self.kind}: its norm is {multiple:.3g} times the upper median, more than {self.outlier:g}"
            for name, multiple, norm in zip(self.names, multiples, self.norms, strict=True)
            if multiple > self.outlier and norm > self.usual
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
    contradicting: int = 0  # probes left out because they contradict the others along the last step
    probe_names: Sequence[Name] = ()  # of the probes whose gradients are used
    median_gradient: float = 0.0  # the lower median of the gradients' norms

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

    def with_notes(self, notes: Mapping[Name, str]) -> Screened:
        """Return this with notes added to those on what was clipped."""
        return replace(self, clipped=joined([*self.clipped.items(), *notes.items()]))

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
    along: AlongLastStep | None = None,
    uphill: Mapping[Name, str] | None = None,
    scratch: int = SCRATCH,
) -> Screened:
    """Return whose vectors are used, and how far each is clipped; raise `NoneUsable` if none are.

    ``update_norms`` are (M,) over the ``measured`` leaves. ``scale_free``: the step does not depend on the updates'
    lengths, so none is an outlier. ``weighs``: sample counts weigh something; else only outliers among them are named.
    Rows without a name, such as the server's own, are used as they are. ``uphill``: whose update contradicts the
    gradient of the same device, and the reason. The update is not used, unless it is the gradient that is not used.
    """
    groups = _groups(vectors, update_norms, measured, rest, defences, scale_free, scratch)
    sent = [group for group in groups if group.norms.any()]  # often most are empty
    excluded = _excluded(vectors, sent) if defences.outlier else {}
    if excluded:
        groups = sent = [group.without(excluded) for group in groups]
    updates, gradients, differences, own, others = groups
    devices, asked = vectors.names.devices, vectors.names.probes
    probes = _used(asked, excluded, len(vectors.probes))
    unused = contradicting(asked, along, gradients.norms, differences.norms, probes, defences)
    left_out = {**excluded, **unused}
    unused_updates = _minority(uphill or {}, left_out, [name for name in devices if name not in excluded])
    kept = _used(updates.names, {**excluded, **unused_updates}, len(update_norms))
    samples, weights = np.where(kept[: len(devices)], vectors.samples, 0), vectors.probe_weights
    weights = None if weights is None else np.where(probes, weights, 0)
    most, named_from = defences.max_samples, defences.max_samples if weighs else defences.outlier or np.inf
    notes = [note for group in sent for note in group.clipped.items()] + [*unused.items(), *unused_updates.items()]
    notes += _caps(devices, samples, most, named_from) + _caps(asked, weights, most, most)
    return Screened(
        names=devices,
        kept=kept,
        probes=_used(asked, left_out, len(probes)),
        updates=_padded(updates.factors, len(update_norms)),
        gradients=_padded(gradients.factors, len(vectors.probes)),
        differences=differences.factors,
        own_gradients=own.factors,
        rest=others.factors,
        rest_norms=others.norms,
        samples=capped(samples, most),
        probe_weights=None if weights is None else capped(weights, most),
        excluded=excluded,
        clipped=joined(notes),
        contradicting=len(unused),
        probe_names=[name for name in asked if name not in left_out],
        median_gradient=lower_median(gradients.norms),
    )


def screen_changes(
    names: Sequence[Name],
    rows: Sequence[Leaves],
    measured: Sequence[str],
    along: FloatArray,
    median: float,
    defences: Defences,
) -> tuple[FloatArray, dict[Name, str]]:
    """Return (P,) what each probe's change of gradient is multiplied with, 0 if it is not used, and why.

    ``along`` are (P,) the inner products with the proposed step, scaled to length one: a change against it, where most
    are along it, is that of a reversed gradient. Changes differ in length by orders of magnitude among honest devices,
    so they are clipped relative to the ``median`` norm of the round's gradients; or to their own, where that is larger:
    then the proposed step went too far, which most of them say.
    """
    sent = SentVectors(CHANGE, names, rows, measured, norms_of(rows, measured), 0, 0)
    notes = {name: f"{why}, not used" for name, why in sent.unusable.items()}
    used = _used(names, notes, len(rows))
    norms = np.where(used, sent.norms, 0)
    against = concave(names, np.where(used, along, 0), norms, used, defences.max_concavity) if used.any() else {}
    for name, multiple in against.items():
        notes[name] = f"{CHANGE}: not used, it has {multiple:.3g} times the median cosine with the proposed step"
    used = _used(names, notes, len(rows))
    own = lower_median(norms[used]) if used.any() else 0.0
    of, median = ("changes", own) if own > median else ("gradients", median)
    longest = defences.max_gradient * median
    longer = (norms > longest) & (longest > 0)
    factors = np.divide(longest, norms, out=np.ones(len(norms)), where=longer)
    for row in np.flatnonzero(longer).tolist():
        length = f"{norms[row] / median:.3g} times the median norm of the {of}"
        notes.setdefault(names[row], f"{CHANGE}: {length}, clipped to {defences.max_gradient:g}")
    return np.where(used, factors, 0), notes


def _groups(
    vectors: Vectors,
    update_norms: FloatArray,
    measured: Sequence[str],
    rest: Sequence[str],
    defences: Defences,
    scale_free: bool,
    scratch: int,
) -> list[SentVectors]:
    """Return updates, gradients, differences, own gradients, and the leaves of updates outside the geometry."""
    names, longest = vectors.names, defences.max_gradient

    def sent(
        kind: str, owners: Sequence[Name], rows: Sequence[Leaves], leaves: Sequence[str], limit: float
    ) -> SentVectors:
        rows = rows[: len(owners)]
        norms = norms_of(rows, leaves, scratch) if rows and leaves and defences != OFF else np.zeros(len(rows))
        return SentVectors(kind, owners[: len(rows)], rows, leaves, norms, limit, defences.outlier)

    owners, outlier = [*names.devices, *names.pool], 0 if scale_free else defences.outlier
    rows, norms = [*vectors.updates, *vectors.pool][: len(owners)], update_norms[: len(owners)]
    gradients = sent("gradient", names.probes, vectors.probes, measured, longest)
    differences = sent("gradient difference", names.probes, vectors.differences, measured, longest)
    # Differences vanish where most devices have converged, so a longer one is an outlier only among gradients too.
    differences = replace(differences, usual=defences.outlier * upper_median(gradients.norms))
    return [
        SentVectors("update", owners, rows, measured, norms, defences.max_update, outlier),
        gradients,
        differences,
        sent("gradient", names.devices, vectors.own_gradients, measured, longest) if vectors.gradients else gradients,
        sent("update outside the geometry", names.devices, vectors.updates, rest, defences.max_update),
    ]


def _excluded(vectors: Vectors, groups: Sequence[SentVectors]) -> dict[Name, str]:
    """Return who is left out and why: first what cannot be used at all, then outliers."""
    excluded = dict(vectors.names.invalid)
    for group in groups:
        excluded = group.unusable | excluded
    for group in groups:
        excluded = group.outliers | excluded
    for kind, owners in (("update", vectors.names.devices), ("gradient", vectors.names.probes)):
        if owners and all(name in excluded for name in owners):
            raise NoneUsable(kind, len(owners), excluded)
    return excluded


def _minority(found: Mapping[Name, str], left_out: Collection[Name], devices: Sequence[Name]) -> dict[Name, str]:
    """Return who of the devices is found and not left out already; nobody, if these are half of them or more."""
    minority = {name: found[name] for name in devices if name in found and name not in left_out}
    return minority if 2 * len(minority) < len(devices) else {}


def _caps(names: Sequence[Name], counts: FloatArray | None, most: float, named_from: float) -> list[tuple[Name, str]]:
    """Return notes on counts of more than ``named_from`` medians, which are capped to ``most``."""
    median = 0.0 if counts is None else lower_median(counts)
    if not names or counts is None or not median or not most:
        return []
    multiples = zip(names, counts / median, strict=True)
    return [(n, f"samples: {x:.3g} times the median, capped to {most:g}") for n, x in multiples if x > named_from]


def _used(names: Sequence[Name], excluded: Collection[Name], count: int) -> BoolArray:
    """Return (count,) whether a row is used: all but those of excluded devices."""
    return _padded(np.array([name not in excluded for name in names], np.float64), count) > 0


def _padded(factors: FloatArray, count: int) -> FloatArray:
    """Return (count,) the factors, and ones for rows without a name: they are trusted."""
    return np.concatenate([factors, np.ones(count - len(factors))])


def joined(notes: Iterable[tuple[Name, str]]) -> dict[Name, str]:
    """Return the notes by device, without repetitions.

    >>> joined([(7, "clipped"), (8, "late"), (7, "clipped"), (7, "late")])
    {7: 'clipped; late', 8: 'late'}
    """
    by_name: dict[Name, dict[str, None]] = {}
    for name, note in notes:
        by_name.setdefault(name, {})[note] = None
    return {name: "; ".join(own) for name, own in by_name.items()}
