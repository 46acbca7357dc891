"""The experiments of the paper's section IV, as data: which runs stand behind which line of which figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fedcontext.errors import FedcontextError
from fedcontext.experiment import LEARNING_RATES, Experiment

SEEDS = (0, 1, 2)
QUICK_ROUNDS = 6
MUS = (0.01, 0.1, 1.0)  # of FedProx's grid; the paper does not say which it used
DATASETS = {"MNIST": "mnist", "FEMNIST": "femnist", "Synthetic_IID": "synthetic-iid", "Synthetic_1_1": "synthetic-1-1"}
K2 = {"N": "all", "50": 50, "20": 20, "10": 10, "0": "cohort"}  # the paper's notation, and the setting `probes`
BETAS = {"1/lr": "β = 1/lr", "measured": "β measured"}


@dataclass(frozen=True)
class Line:
    """One line of a figure, run once for each seed."""

    sheet: str  # one picture
    panel: str  # one pair of axes in it
    label: str
    settings: tuple[tuple[str, Any], ...]

    def experiment(self, seed: int, quick: bool = False) -> Experiment:
        """Return the run for one seed; the quick one has a few rounds only."""
        rounds = {"rounds": QUICK_ROUNDS} if quick else {}
        return Experiment(**{**dict(self.settings), "seed": seed, **rounds})


@dataclass(frozen=True)
class Study:
    """One of the paper's experiments."""

    name: str
    title: str
    drawn_as: str  # curves, weights or bars
    lines: tuple[Line, ...]

    def quick_lines(self) -> tuple[Line, ...]:
        """Return the lines of the first picture: enough to see that everything works."""
        return tuple(line for line in self.lines if line.sheet == self.lines[0].sheet)


def study_named(name: str) -> Study:
    """Return one of the paper's experiments.

    >>> study_named("variants").drawn_as
    'curves'
    """
    if name not in STUDIES:
        raise FedcontextError(f"experiment must be one of {', '.join(STUDIES)} or all, got {name!r}")
    return STUDIES[name]


def runs_of(lines: Sequence[Line], quick: bool = False) -> list[Experiment]:
    """Return the different runs behind ``lines``: several lines may share one."""
    return list(dict.fromkeys(line.experiment(seed, quick) for line in lines for seed in SEEDS))


def _line(sheet: str, panel: str, label: str, **settings: Any) -> Line:
    return Line(sheet, panel, label, tuple(settings.items()))


def _variants() -> Iterator[Line]:
    """Figures 2 and 3: FedProx (Contextual) with K2 in N, 50, 20, 10, 0, for several mu, on MNIST."""
    common = {"dataset": "mnist", "algorithm": "fedprox-contextual"}
    for probing, mus in (("samples", MUS), ("mean", (0.1,))):
        for beta, beta_label in BETAS.items():
            sheet = f"{beta_label}, gradients by {probing}"
            for mu, (k2, probes) in product(mus, K2.items()):
                settings = {"mu": mu, "probes": probes, "smoothness": beta, "probe_averaging": probing}
                yield _line(sheet, f"μ = {mu:g}", f"K2 = {k2}", **common, **settings)


def _weights() -> Iterator[Line]:
    """Figure 7: the aggregation weights of FedAvg (Contextual) at three stages."""
    for beta, beta_label in BETAS.items():
        yield _line(beta_label, "MNIST", "weights", dataset="mnist", algorithm="fedavg-contextual", smoothness=beta)


def _algorithms(sheet: str, panel: str, averaging: str, beta: str, mu: float, **common: Any) -> Iterator[Line]:
    """One panel that compares the five algorithms; settings that an algorithm does not use stay at their defaults."""
    yield _line(sheet, panel, "FedAvg", algorithm="fedavg", averaging=averaging, **common)
    yield _line(sheet, panel, "FedProx", algorithm="fedprox", averaging=averaging, mu=mu, **common)
    yield _line(sheet, panel, "FOLB", algorithm="folb", mu=mu, **common)
    yield _line(sheet, panel, "FedAvg (Contextual)", algorithm="fedavg-contextual", smoothness=beta, **common)
    yield _line(sheet, panel, "FedProx (Contextual)", algorithm="fedprox-contextual", smoothness=beta, mu=mu, **common)
    yield _line(
        sheet,
        panel,
        "FedAvg (Contextual), K2 = 0",
        algorithm="fedavg-contextual",
        smoothness=beta,
        probes="cohort",
        **common,
    )


def _comparison() -> Iterator[Line]:
    """Figures 4 and 5: the five algorithms on MNIST for several mu, under both averagings and both choices of β."""
    for rate in (0.03, 0.3):
        for averaging in ("mean", "samples"):
            for beta, beta_label in BETAS.items():
                sheet = f"lr {rate:g}, averaging by {averaging}, {beta_label}"
                for mu in MUS:
                    yield from _algorithms(
                        sheet, f"μ = {mu:g}", averaging, beta, mu, dataset="mnist", learning_rate=rate
                    )


def _rounds() -> Iterator[Line]:
    """Figure 6: rounds to 50, 60, 70 and 80 % on the four data sets, mu = 0.1."""
    for factor in (1, 10):
        for averaging in ("mean", "samples"):
            for beta, beta_label in BETAS.items():
                times = "published lr" if factor == 1 else f"{factor} x published lr"
                sheet = f"{times}, averaging by {averaging}, {beta_label}"
                for panel, dataset in DATASETS.items():
                    rate = factor * LEARNING_RATES[dataset.split("-")[0]]
                    yield from _algorithms(sheet, panel, averaging, beta, 0.1, dataset=dataset, learning_rate=rate)


STUDIES = {
    study.name: study
    for study in (
        Study("variants", "Contextual variants on MNIST", "curves", tuple(_variants())),
        Study("weights", "Aggregation weights at three stages", "weights", tuple(_weights())),
        Study("comparison", "Algorithms on MNIST", "curves", tuple(_comparison())),
        Study("rounds", "Rounds to reach an accuracy", "bars", tuple(_rounds())),
    )
}
