"""What the records say: for each question, what every setting of a study showed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.paper.experiments import MUS, STUDIES, Line
from fedcontext.paper.figures import Book, stages
from fedcontext.records import RoundRecord
from fedcontext.results.summary import LEVELS, Summary, median_rounds, summarise

CONTEXTUAL = ("FedAvg (Contextual)", "FedProx (Contextual)")
COHORT_PROBES = "FedAvg (Contextual), K2 = 0"
BASELINES = ("FedAvg", "FedProx", "FOLB")


@dataclass(frozen=True)
class Finding:
    """What one setting showed."""

    sheet: str
    panel: str  # empty where a finding is about the whole sheet
    numbers: str
    holds: bool

    @property
    def setting(self) -> str:
        """Return the sheet and, where there is one, the panel."""
        return f"{self.sheet}, {self.panel}" if self.panel else self.sheet


class Results:
    """The records of all studies, by study, sheet, panel and label."""

    def __init__(self, book: Book) -> None:
        self.book = book

    def lines(self, study: str, **where: str) -> list[Line]:
        """Return the lines of a study that match, in order."""
        found = [line for line in STUDIES[study].lines if line in self.book]
        return [line for line in found if all(getattr(line, key) == value for key, value in where.items())]

    def sheets(self, study: str) -> list[str]:
        """Return the names of a study's pictures."""
        return list(dict.fromkeys(line.sheet for line in self.lines(study)))

    def panels(self, study: str, sheet: str) -> list[str]:
        """Return the names of a picture's panels."""
        return list(dict.fromkeys(line.panel for line in self.lines(study, sheet=sheet)))

    def runs(self, study: str, sheet: str, panel: str, label: str) -> Sequence[Sequence[RoundRecord]]:
        """Return the records of one line, for each seed."""
        return self.book[self.lines(study, sheet=sheet, panel=panel, label=label)[0]]

    def summaries(self, study: str, sheet: str, panel: str, label: str) -> list[Summary]:
        """Return the summaries of one line, for each seed."""
        return [summarise(run) for run in self.runs(study, sheet, panel, label)]


def mean_curve(runs: Sequence[Sequence[RoundRecord]], measure: Literal["loss", "accuracy"]) -> FloatArray:
    """Return the mean over seeds of a measure, round by round."""
    return np.asarray(np.mean([[getattr(record, measure) for record in run] for run in runs], axis=0))


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean and the range over seeds.

    >>> spread([1.0, 2.0])
    '1.500 (1.000-2.000)'
    """
    return f"{np.mean(values):.{digits}f} ({np.min(values):.{digits}f}-{np.max(values):.{digits}f})"


def _panels(results: Results, study: str) -> Iterator[tuple[str, str]]:
    for sheet in results.sheets(study):
        for panel in results.panels(study, sheet):
            yield sheet, panel


def gaps(results: Results, variants: Sequence[str]) -> Iterator[Finding]:
    """Yield how far each variant of K2 is from K2 = N."""
    for sheet, panel in _panels(results, "variants"):
        base = results.runs("variants", sheet, panel, "K2 = N")
        parts, holds = [], True
        for label in variants:
            runs = results.runs("variants", sheet, panel, label)
            accuracy = float(np.mean(np.abs(mean_curve(runs, "accuracy") - mean_curve(base, "accuracy"))))
            loss = float(np.mean(np.abs(mean_curve(runs, "loss") / mean_curve(base, "loss") - 1)))
            parts.append(f"{label}: {accuracy:.3f} / {loss:.1%}")
            holds &= accuracy < 0.01 and loss < 0.05
        yield Finding(sheet, panel, "accuracy / loss gap: " + ", ".join(parts), holds)


def converged(results: Results) -> Iterator[Finding]:
    """Yield how much accuracy each variant gains after round 20."""
    for sheet, panel in _panels(results, "variants"):
        gaps = {}
        for line in results.lines("variants", sheet=sheet, panel=panel):
            curve = mean_curve(results.book[line], "accuracy")
            gaps[line.label] = float(curve[-1] - curve[min(20, len(curve)) - 1])
        numbers = "gained after round 20: " + ", ".join(f"{label}: {gap:+.3f}" for label, gap in gaps.items())
        yield Finding(sheet, panel, numbers, all(abs(gap) < 0.01 for gap in gaps.values()))


def mu_matters_little(results: Results) -> Iterator[Finding]:
    """Yield the final losses for the values of μ."""
    for sheet in results.sheets("variants"):
        panels = results.panels("variants", sheet)
        if len(panels) < 2:
            continue
        losses = {panel: [s.loss for s in results.summaries("variants", sheet, panel, "K2 = N")] for panel in panels}
        means = [float(np.mean(values)) for values in losses.values()]
        numbers = "final loss: " + ", ".join(f"{panel}: {spread(values)}" for panel, values in losses.items())
        yield Finding(sheet, "", numbers, max(means) / min(means) < 1.05)


def weight_stages(results: Results) -> Iterator[Finding]:
    """Yield how many devices count at each of the three stages."""
    for line in results.lines("weights"):
        counts: dict[str, list[float]] = {}
        for run in results.book[line]:
            for stage, record in stages(run).items():
                weights = np.abs(record.weights)
                counts.setdefault(stage, []).append(float(weights.sum() ** 2 / (weights**2).sum()))
        early, near, end = (float(np.mean(values)) for values in counts.values())
        numbers = "effective devices: " + ", ".join(f"{stage} {spread(values, 1)}" for stage, values in counts.items())
        yield Finding(line.sheet, "", numbers, near < early and end > max(early, near))


def always_better(results: Results) -> Iterator[Finding]:
    """Yield in how many rounds the contextual versions beat all others."""
    for sheet, panel in _panels(results, "comparison"):
        shares = {}
        for label in CONTEXTUAL:
            runs = results.runs("comparison", sheet, panel, label)
            loss, accuracy = mean_curve(runs, "loss"), mean_curve(runs, "accuracy")
            others = [results.runs("comparison", sheet, panel, other) for other in BASELINES]
            better = [(loss < mean_curve(o, "loss")) & (accuracy > mean_curve(o, "accuracy")) for o in others]
            shares[label] = float(np.mean(np.all(better, axis=0)))
        numbers = "rounds better than all: " + ", ".join(f"{label} {share:.0%}" for label, share in shares.items())
        yield Finding(sheet, panel, numbers, min(shares.values()) > 0.95)


def swings(results: Results, others: Sequence[str]) -> Iterator[Finding]:
    """Yield how much the accuracy swings over the last rounds."""
    for sheet, panel in _panels(results, "comparison"):
        swings = {
            label: [s.swing for s in results.summaries("comparison", sheet, panel, label)]
            for label in (*others, *CONTEXTUAL)
        }
        least = min(np.mean(swings[label]) for label in others)
        most = max(np.mean(swings[label]) for label in CONTEXTUAL)
        numbers = "swing: " + ", ".join(f"{label} {spread(values, 4)}" for label, values in swings.items())
        yield Finding(sheet, panel, numbers, bool(least >= 3 * most))


def never_rises(results: Results) -> Iterator[Finding]:
    """Yield in how many rounds the loss rose."""
    for sheet, panel in _panels(results, "comparison"):
        rises = {
            label: float(np.mean([s.rises for s in results.summaries("comparison", sheet, panel, label)]))
            for label in (*CONTEXTUAL, COHORT_PROBES)
        }
        numbers = "rounds in which the loss rose: " + ", ".join(f"{label} {rise:.1%}" for label, rise in rises.items())
        yield Finding(sheet, panel, numbers, all(rises[label] == 0 for label in CONTEXTUAL))


def alike(results: Results) -> Iterator[Finding]:
    """Yield the two contextual versions' final losses."""
    for sheet, panel in _panels(results, "comparison"):
        losses = {label: [s.loss for s in results.summaries("comparison", sheet, panel, label)] for label in CONTEXTUAL}
        means = [float(np.mean(values)) for values in losses.values()]
        numbers = "final loss: " + ", ".join(f"{label} {spread(values)}" for label, values in losses.items())
        yield Finding(sheet, panel, numbers, max(means) / min(means) < 1.05)


def prox_margin(results: Results) -> Iterator[Finding]:
    """Yield FedProx's final loss at the largest μ beside FedAvg's."""
    for sheet in results.sheets("comparison"):
        panel = f"μ = {MUS[-1]:g}"
        if panel not in results.panels("comparison", sheet):
            continue
        losses = {
            label: [s.loss for s in results.summaries("comparison", sheet, panel, label)]
            for label in ("FedAvg", "FedProx")
        }
        numbers = "final loss: " + ", ".join(f"{label} {spread(values)}" for label, values in losses.items())
        yield Finding(sheet, "", numbers, bool(np.mean(losses["FedProx"]) < np.mean(losses["FedAvg"])))


def folb_ahead(results: Results) -> Iterator[Finding]:
    """Yield in how many rounds FOLB has a lower loss than FedAvg and FedProx."""
    for sheet, panel in _panels(results, "comparison"):
        curves = {label: mean_curve(results.runs("comparison", sheet, panel, label), "loss") for label in BASELINES}
        share = float(np.mean((curves["FOLB"] < curves["FedAvg"]) & (curves["FOLB"] < curves["FedProx"])))
        yield Finding(sheet, panel, f"rounds in which FOLB's loss is below both: {share:.0%}", share > 0.5)


def fewer_rounds(results: Results, panel: str, others: Sequence[str], factor: float) -> Iterator[Finding]:
    """Yield the rounds to each accuracy level: the two contextual versions with K2 = N, then K2 = 0."""
    for sheet in results.sheets("rounds"):
        rivals = {label: _medians(results, sheet, panel, label) for label in others}
        for group, versions in (("K2 = N", CONTEXTUAL), ("K2 = 0", (COHORT_PROBES,))):
            ours = {label: _medians(results, sheet, panel, label) for label in versions}
            slowest, fastest = np.max([*ours.values()], axis=0), np.min([*rivals.values()], axis=0)
            reached = np.isfinite(slowest) | np.isfinite(fastest)
            enough = np.isfinite(slowest[reached]) & (fastest[reached] >= factor * slowest[reached])
            told = ", ".join(f"{label} {_slashed(values)}" for label, values in {**rivals, **ours}.items())
            yield Finding(sheet, group, f"rounds to 50/60/70/80 %: {told}", bool(reached.any() and enough.all()))


def _medians(results: Results, sheet: str, panel: str, label: str) -> FloatArray:
    runs = results.summaries("rounds", sheet, panel, label)
    return np.array([median_rounds([run.rounds_to[level] for run in runs]) for level in LEVELS])


def _slashed(counts: FloatArray) -> str:
    return "/".join(f"{count:g}" if np.isfinite(count) else "-" for count in counts)


def much_better(
    results: Results, panel: str, good: Sequence[str], bad: Sequence[str], alike: float = np.inf
) -> Iterator[Finding]:
    """Yield whether all of ``good`` end far below all of ``bad``, and within a factor ``alike`` of each other."""
    for sheet in results.sheets("rounds"):
        if panel not in results.panels("rounds", sheet):
            continue
        losses = {label: [s.loss for s in results.summaries("rounds", sheet, panel, label)] for label in (*bad, *good)}
        means = {label: float(np.mean(values)) for label, values in losses.items()}
        best, worst = min(means[label] for label in good), max(means[label] for label in good)
        told = ", ".join(
            f"{label} {spread(values)} in {_slashed(_medians(results, sheet, panel, label))} rounds"
            for label, values in losses.items()
        )
        holds = worst < 2 / 3 * min(means[label] for label in bad) and worst <= alike * best
        yield Finding(sheet, "", f"final loss, and rounds to 50/60/70/80 %: {told}", holds)
