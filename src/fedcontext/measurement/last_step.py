"""Find probes whose gradients contradict the others along the last step: reversed, or from colluding devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedcontext.arrays.tree import BoolArray, FloatArray
from fedcontext.measurement.defences import Defences
from fedcontext.measurement.geometry import Name

FEWEST = 8  # of fewer gradients the spread says little
NEAR = 0.4  # a cosine this close to the median is never too steep


@dataclass(frozen=True)
class AlongLastStep:
    """Inner products of what the probes sent with the last step, scaled to length one."""

    slopes: FloatArray  # (P,) of the gradients
    curvatures: FloatArray  # (P,) of the gradient differences


def contradicting(
    names: Sequence[Name],
    along: AlongLastStep | None,
    gradient_norms: FloatArray,
    difference_norms: FloatArray,
    used: BoolArray,
    defences: Defences,
) -> dict[Name, str]:
    """Return whose gradients are not used, and why. Compared are cosines, hence the norms; all are (P,).

    >>> along = AlongLastStep(slopes=np.zeros(3), curvatures=np.array([1.0, 2.0, -1.0]))
    >>> contradicting("abc", along, np.ones(3), np.full(3, 2.0), np.full(3, True), Defences())
    {'c': 'gradient: not used, its difference has -1 times the median cosine with the last step'}
    """
    if along is None or not names:
        return {}
    steep = _steep(names, _divided(along.slopes, gradient_norms), used, defences.max_descent)
    against = concave(names, along.curvatures, difference_norms, used, defences.max_concavity)
    return steep | {
        name: f"gradient: not used, its difference has {multiple:.3g} times the median cosine with the last step"
        for name, multiple in against.items()
    }


def concave(
    names: Sequence[Name], products: FloatArray, norms: FloatArray, used: BoolArray, most: float
) -> dict[Name, float]:
    """Return who has negative curvature where most devices have positive, and their multiples of the median cosine.

    ``products`` are (P,) inner products of the changes of gradients with a step of length one, ``norms`` their lengths.

    That is the mark of a reversed gradient: for a convex loss <∇F(w) - ∇F(w'), w - w'> is never negative.
    """
    cosines = _divided(products, norms)
    median = float(np.median(cosines[used]))
    if not most or not median > 0:
        return {}
    return {
        name: float(multiple)
        for name, multiple, use in zip(names, cosines / median, used, strict=True)
        if use and multiple < -most
    }


def _steep(names: Sequence[Name], cosines: FloatArray, used: BoolArray, most: float) -> dict[Name, str]:
    """Return who promises far more descent along the last step than the others: they pull the model that way.

    The spread is that of the upper half, in which these are not. Who promises less is used: the step may have hurt it.
    """
    if not most or used.sum() < FEWEST:
        return {}
    median, upper = np.quantile(cosines[used], [0.5, 0.75])
    limit = median - max(most * (upper - median), NEAR)
    return {
        name: f"gradient: not used, its cosine with the last step is {cosine:.2g}, the median {median:.2g}"
        for name, cosine, use in zip(names, cosines, used, strict=True)
        if use and cosine < limit
    }


def _divided(products: FloatArray, norms: FloatArray) -> FloatArray:
    """Return the cosines; 0 for a vector of length zero or without a norm."""
    return np.divide(products, norms, out=np.zeros(len(products)), where=norms > 0)
