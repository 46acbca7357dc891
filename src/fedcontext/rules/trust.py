"""How far a step of the rule with memory may go, judged by what gradients say of earlier steps and deviations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.measurement.sums import dot
from fedcontext.rules.curvature import TINY, norm
from fedcontext.rules.memory_state import Memory, MemorySettings


@dataclass(frozen=True)
class Limits:
    """The limits of a step, and what they follow from."""

    step: float  # longest step
    deviation: float  # longest deviation from the mean update d
    reference: float  # R, the larger of ‖d‖ and its running mean
    length: float  # running mean of ‖d‖
    trust: float
    anchor: float
    evidence: FloatArray  # (2, 2) on steps and on deviations: decayed sum, and sum of its weights


def limits_of(
    g: FloatArray, y: FloatArray, mean: float, previous: float, memory: Memory, settings: MemorySettings
) -> Limits:
    """Return the limits of a step, from the mean fresh gradient ḡ and gradient difference ȳ.

    ``mean`` is the length of the mean update, ``previous`` that of the last step.
    """
    evidence, (on_steps, on_deviations), (_, deviated) = _updated_evidence(g, y, memory, settings)
    trust = memory.trust * settings.trust_growth**-on_steps
    trust = float(np.clip(trust, settings.least_trust, settings.largest))
    length = settings.decay * memory.length + (1 - settings.decay) * mean
    reference = max(mean, length)
    longest = min(settings.reach * trust * reference, max(settings.stretch * previous, mean))
    anchor, deviation = memory.anchor, np.inf
    if deviated:
        anchor = float(np.clip(anchor * settings.growth**-on_deviations, settings.floor / 2, settings.largest))
        # evidence on a short deviation says nothing about a much longer one
        deviation = max(settings.widening * norm(memory.deviation), settings.trial * mean)
    elif anchor:  # nothing is known of deviations yet
        cosine = max(0.0, dot(y, memory.step)) / (norm(y) * previous)  # 1 where y is along the step, as on a parabola
        ahead = min(settings.secant * cosine * _steps_ahead(on_steps), settings.stretch)
        deviation = max(settings.trial * settings.growth**-on_steps, ahead) * mean
        anchor = max(anchor, ahead)
    deviation = min(deviation, anchor * (reference if anchor > settings.near else mean))
    return Limits(longest, deviation, reference, length, trust, anchor, evidence)


def _updated_evidence(
    g: FloatArray, y: FloatArray, memory: Memory, settings: MemorySettings
) -> tuple[FloatArray, list[float], list[bool]]:
    """Return the running evidence on the last step and its deviation, its means, and which of the two was not zero."""
    fresh = np.stack([_evidence(g, y, memory.step), _evidence(g, y, memory.deviation)])
    moved = fresh[:, 1] > 0
    evidence = np.where(moved[:, None], settings.evidence_decay * memory.evidence + fresh, memory.evidence)
    means = np.divide(evidence[:, 0], evidence[:, 1], out=np.zeros(2), where=moved)
    return evidence, means.tolist(), moved.tolist()


def _evidence(g: FloatArray, y: FloatArray, move: FloatArray) -> FloatArray:
    """Return (2,) the evidence of fresh gradients on the last ``move``, and its weight: 1, or 0 for a move of zero.

    With slopes σ₁ = <ḡ, move> after the move and σ₀ = σ₁ - <ȳ, move> before it, it is e = σ₁ / (|σ₁| + |σ₀|): negative
    where the loss still falls along the move, positive where the move went too far, above 1/2 where the loss rose.
    """
    if not move.any():
        return np.zeros(2)
    after = dot(g, move)
    before = after - dot(y, move)
    return np.array([after / (abs(after) + abs(before) + TINY), 1.0])


def _steps_ahead(evidence: float) -> float:
    """Return how many lengths of a move ahead the slopes at its ends put the minimum: σ₁ / (σ₀ - σ₁) = -e / (1 + 2e).

    Zero where the move went too far, and where the slope is as steep as before or steeper: no minimum is ahead then.
    """
    return -evidence / (1 + 2 * evidence) if -0.5 < evidence < 0 else 0.0
