"""Checks of the paper's claims: what the records of a figure's panel measured, and whether the claim holds there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.paper.experiments import STUDIES
from fedcontext.paper.figures import RecordIndex, stages
from fedcontext.records import RoundRecord
from fedcontext.results.summary import LEVELS, Summary, median_rounds, summarise

CONTEXTUAL = ("FedAvg (Contextual)", "FedProx (Contextual)")
COHORT_PROBES = "FedAvg (Contextual), K2 = 0"
BASELINES = ("FedAvg", "FedProx", "FOLB")


@dataclass(frozen=True)
class Check:
    """The outcome of a claim in one setting."""

    figure: str
    panel: str  # empty if the check is about the whole figure
    numbers: str
    holds: bool

    @property
    def setting(self) -> str:
        """Return the figure and, if there is one, the panel."""
        return f"{self.figure}, {self.panel}" if self.panel else self.figure


@dataclass(frozen=True)
class Panel:
    """One panel of a figure with the records of its series."""

    figure: str
    name: str
    runs: Mapping[str, Sequence[Sequence[RoundRecord]]]  # by label, one run per seed

    def summaries(self, label: str) -> list[Summary]:
        """Return the summary of each seed."""
        return [summarise(run) for run in self.runs[label]]

    def values(self, metric: str, labels: Sequence[str]) -> dict[str, list[float]]:
        """Return a field of the summaries by label, for each seed."""
        return {label: [getattr(summary, metric) for summary in self.summaries(label)] for label in labels}

    def mean_curve(self, metric: str, label: str) -> FloatArray:
        """Return the mean over seeds of a metric, round by round."""
        return np.asarray(np.mean([[getattr(record, metric) for record in run] for run in self.runs[label]], axis=0))

    def median_rounds(self, label: str) -> FloatArray:
        """Return the median rounds over seeds to each accuracy level."""
        runs = self.summaries(label)
        return np.array([median_rounds([run.rounds_to[level] for run in runs]) for level in LEVELS])


def panels_of(study: str, index: RecordIndex) -> list[Panel]:
    """Return the panels of a study whose records are in ``index``, in order."""
    series = [each for each in STUDIES[study].series if each in index]
    groups = groupby(series, key=lambda each: (each.figure, each.panel))
    return [Panel(figure, name, {each.label: index[each] for each in members}) for (figure, name), members in groups]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean and the range over seeds.

    >>> spread([1.0, 2.0])
    '1.500 (1.000-2.000)'
    """
    return f"{np.mean(values):.{digits}f} ({np.min(values):.{digits}f}-{np.max(values):.{digits}f})"


def k2_gap(panel: Panel, labels: Sequence[str]) -> Check:
    """Compare variants of K2 to K2 = N by the mean gap over all rounds."""
    gaps = {}
    for label in labels:
        accuracy = np.abs(panel.mean_curve("accuracy", label) - panel.mean_curve("accuracy", "K2 = N")).mean()
        loss = np.abs(panel.mean_curve("loss", label) / panel.mean_curve("loss", "K2 = N") - 1).mean()
        gaps[label] = accuracy, loss
    numbers = ", ".join(f"{label}: {accuracy:.3f} / {loss:.1%}" for label, (accuracy, loss) in gaps.items())
    holds = all(accuracy < 0.01 and loss < 0.05 for accuracy, loss in gaps.values())
    return Check(panel.figure, panel.name, f"accuracy / loss gap: {numbers}", holds)


def gain_after_round_20(panel: Panel) -> Check:
    """Measure how much accuracy each variant gains after round 20."""
    curves = {label: panel.mean_curve("accuracy", label) for label in panel.runs}
    gains = {label: float(curve[-1] - curve[min(20, len(curve)) - 1]) for label, curve in curves.items()}
    numbers = ", ".join(f"{label}: {gain:+.3f}" for label, gain in gains.items())
    holds = all(abs(gain) < 0.01 for gain in gains.values())
    return Check(panel.figure, panel.name, f"gained after round 20: {numbers}", holds)


def effect_of_mu(panels: Sequence[Panel]) -> list[Check]:
    """Compare the final losses at K2 = N between the values of μ, for each figure with several."""
    checks = []
    for figure, members in groupby(panels, key=lambda panel: panel.figure):
        losses = {panel.name: panel.values("loss", ["K2 = N"])["K2 = N"] for panel in members}
        if len(losses) > 1:
            numbers = ", ".join(f"{name}: {spread(values)}" for name, values in losses.items())
            checks.append(Check(figure, "", f"final loss: {numbers}", _ratio(losses) < 1.05))
    return checks


def effective_devices(panel: Panel) -> Check:
    """Count the devices with a substantial weight at the three stages."""
    counts: dict[str, list[float]] = {}
    for run in panel.runs["weights"]:
        for stage, record in stages(run).items():
            weights = np.abs(record.weights)
            counts.setdefault(stage, []).append(float(weights.sum() ** 2 / (weights**2).sum()))
    early, near, end = (float(np.mean(values)) for values in counts.values())
    numbers = f"effective devices: {_listed(counts, lambda values: spread(values, 1))}"
    return Check(panel.figure, "", numbers, near < early and end > max(early, near))


def always_better(panel: Panel) -> Check:
    """Count the rounds in which the contextual versions beat all baselines in loss and accuracy."""
    shares = {}
    for label in CONTEXTUAL:
        lower = [panel.mean_curve("loss", label) < panel.mean_curve("loss", other) for other in BASELINES]
        higher = [panel.mean_curve("accuracy", label) > panel.mean_curve("accuracy", other) for other in BASELINES]
        shares[label] = float(np.mean(np.all([*lower, *higher], axis=0)))
    numbers = f"rounds better than all: {_listed(shares, lambda share: f'{share:.0%}')}"
    return Check(panel.figure, panel.name, numbers, min(shares.values()) > 0.95)


def swing_ratio(panel: Panel, others: Sequence[str]) -> Check:
    """Compare the swing of the accuracy over the last rounds to that of the contextual versions."""
    swings = panel.values("swing", (*others, *CONTEXTUAL))
    least = min(np.mean(swings[label]) for label in others)
    most = max(np.mean(swings[label]) for label in CONTEXTUAL)
    numbers = f"swing: {_listed(swings, lambda values: spread(values, 4))}"
    return Check(panel.figure, panel.name, numbers, bool(least >= 3 * most))


def never_rises(panel: Panel) -> Check:
    """Count the rounds in which the loss rose."""
    values = panel.values("rises", (*CONTEXTUAL, COHORT_PROBES))
    rises = {label: float(np.mean(shares)) for label, shares in values.items()}
    numbers = f"rounds in which the loss rose: {_listed(rises, lambda share: f'{share:.1%}')}"
    return Check(panel.figure, panel.name, numbers, all(rises[label] == 0 for label in CONTEXTUAL))


def equal_final_loss(panel: Panel) -> Check:
    """Compare the final losses of the two contextual versions."""
    losses = panel.values("loss", CONTEXTUAL)
    return Check(panel.figure, panel.name, f"final loss: {_listed(losses, spread)}", _ratio(losses) < 1.05)


def fedprox_margin(panel: Panel) -> Check:
    """Compare FedProx's final loss to FedAvg's."""
    losses = panel.values("loss", ("FedAvg", "FedProx"))
    holds = bool(np.mean(losses["FedProx"]) < np.mean(losses["FedAvg"]))
    return Check(panel.figure, "", f"final loss: {_listed(losses, spread)}", holds)


def folb_ahead(panel: Panel) -> Check:
    """Count the rounds in which FOLB has a lower loss than FedAvg and FedProx."""
    folb, fedavg, fedprox = (panel.mean_curve("loss", label) for label in ("FOLB", "FedAvg", "FedProx"))
    share = float(np.mean((folb < fedavg) & (folb < fedprox)))
    return Check(panel.figure, panel.name, f"rounds in which FOLB's loss is below both: {share:.0%}", share > 0.5)


def fewer_rounds(panel: Panel, others: Sequence[str], factor: float) -> list[Check]:
    """Compare the rounds to each accuracy level to those of the contextual versions: with K2 = N, and with K2 = 0."""
    checks = []
    baselines = {label: panel.median_rounds(label) for label in others}
    for name, labels in (("K2 = N", CONTEXTUAL), ("K2 = 0", (COHORT_PROBES,))):
        contextual = {label: panel.median_rounds(label) for label in labels}
        slowest, fastest = np.max([*contextual.values()], axis=0), np.min([*baselines.values()], axis=0)
        reached = np.isfinite(slowest) | np.isfinite(fastest)
        enough = np.isfinite(slowest[reached]) & (fastest[reached] >= factor * slowest[reached])
        numbers = f"rounds to 50/60/70/80 %: {_listed({**baselines, **contextual}, format_rounds)}"
        checks.append(Check(panel.figure, name, numbers, bool(reached.any() and enough.all())))
    return checks


def much_lower_loss(panel: Panel, good: Sequence[str], bad: Sequence[str], factor: float = np.inf) -> Check:
    """Check that all of ``good`` end far below all of ``bad``, and within ``factor`` of each other."""
    losses = panel.values("loss", (*bad, *good))
    means = {label: float(np.mean(values)) for label, values in losses.items()}
    best, worst = min(means[label] for label in good), max(means[label] for label in good)
    texts = (f"{key} {spread(losses[key])} in {format_rounds(panel.median_rounds(key))} rounds" for key in losses)
    holds = worst < 2 / 3 * min(means[label] for label in bad) and worst <= factor * best
    return Check(panel.figure, "", f"final loss, and rounds to 50/60/70/80 %: {', '.join(texts)}", holds)


def format_rounds(counts: Sequence[float] | FloatArray) -> str:
    """Return round counts with slashes between, a dash for levels never reached.

    >>> format_rounds([3, 7.5, float("inf")])
    '3/7.5/-'
    """
    return "/".join(f"{count:g}" if np.isfinite(count) else "-" for count in counts)


def _listed(values: Mapping[str, Any], text: Callable[[Any], str]) -> str:
    return ", ".join(f"{label} {text(value)}" for label, value in values.items())


def _ratio(losses: Mapping[str, Sequence[float]]) -> float:
    means = [float(np.mean(values)) for values in losses.values()]
    return max(means) / min(means)
