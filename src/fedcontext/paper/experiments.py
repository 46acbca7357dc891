"""The experiments of the paper's section IV as data: the settings behind every curve of every figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from fedcontext.errors import FedcontextError
from fedcontext.experiment import LEARNING_RATES, Experiment
from fedcontext.measurement.defences import OFF

SEEDS = (0, 1, 2)
QUICK_ROUNDS = 6
MUS = (0.01, 0.1, 1.0)  # from FedProx's grid; the paper does not state its values
DATASETS = {"MNIST": "mnist", "FEMNIST": "femnist", "Synthetic_IID": "synthetic-iid", "Synthetic_1_1": "synthetic-1-1"}
K2 = {"N": "all", "50": 50, "20": 20, "10": 10, "0": "cohort"}  # the paper's notation, and the setting `probes`
BETAS = {"1/lr": "β = 1/lr", "measured": "β measured"}


@dataclass(frozen=True)
class Series:
    """One curve or bar of a figure: the same settings, run once per seed."""

    figure: str
    panel: str  # of the figure
    label: str
    settings: tuple[tuple[str, Any], ...]

    def experiment(self, seed: int, quick: bool = False) -> Experiment:
        """Return the experiment for one seed, without defences, as in the paper; a quick one has only a few rounds."""
        rounds = {"rounds": QUICK_ROUNDS} if quick else {}
        return Experiment(**{**asdict(OFF), **dict(self.settings), "seed": seed, **rounds})


@dataclass(frozen=True)
class Study:
    """One of the paper's experiments."""

    name: str
    title: str
    chart: str  # curves, weights or bars
    series: tuple[Series, ...]

    def quick_series(self) -> tuple[Series, ...]:
        """Return the series of the first figure, for a short trial."""
        return tuple(series for series in self.series if series.figure == self.series[0].figure)


def get_study(name: str) -> Study:
    """Return the study called ``name``.

    >>> get_study("variants").chart
    'curves'
    """
    if name not in STUDIES:
        raise FedcontextError(f"experiment must be one of {', '.join(STUDIES)} or all, got {name!r}")
    return STUDIES[name]


def experiments_of(series: Sequence[Series], quick: bool = False) -> list[Experiment]:
    """Return the distinct experiments behind ``series``: several series may share one."""
    return list(dict.fromkeys(each.experiment(seed, quick) for each in series for seed in SEEDS))


def _series(figure: str, panel: str, label: str, **settings: Any) -> Series:
    return Series(figure, panel, label, tuple(settings.items()))


def _variants() -> Iterator[Series]:
    """Figures 2 and 3: FedProx (Contextual) with K2 in N, 50, 20, 10, 0, for several mu, on MNIST."""
    common = {"dataset": "mnist", "algorithm": "fedprox-contextual"}
    for probing, mus in (("samples", MUS), ("mean", (0.1,))):
        for beta, beta_label in BETAS.items():
            figure = f"{beta_label}, gradients by {probing}"
            for mu, (k2, probes) in product(mus, K2.items()):
                settings = {"mu": mu, "probes": probes, "smoothness": beta, "probe_averaging": probing}
                yield _series(figure, f"μ = {mu:g}", f"K2 = {k2}", **common, **settings)


def _weights() -> Iterator[Series]:
    """Figure 7: the aggregation weights of FedAvg (Contextual) at three stages."""
    for beta, beta_label in BETAS.items():
        settings = {"dataset": "mnist", "algorithm": "fedavg-contextual", "smoothness": beta, "probes": "all"}
        yield _series(beta_label, "MNIST", "weights", **settings)


def _algorithms(figure: str, panel: str, averaging: str, beta: str, mu: float, **common: Any) -> Iterator[Series]:
    """One panel that compares the five algorithms, all with the paper's K2 = N but where it says otherwise."""
    yield _series(figure, panel, "FedAvg", algorithm="fedavg", averaging=averaging, probes="all", **common)
    yield _series(figure, panel, "FedProx", algorithm="fedprox", averaging=averaging, mu=mu, probes="all", **common)
    yield _series(figure, panel, "FOLB", algorithm="folb", mu=mu, probes="all", **common)
    contextual = {"algorithm": "fedavg-contextual", "smoothness": beta, **common}
    proximal = {"algorithm": "fedprox-contextual", "smoothness": beta, "mu": mu, **common}
    yield _series(figure, panel, "FedAvg (Contextual)", probes="all", **contextual)
    yield _series(figure, panel, "FedProx (Contextual)", probes="all", **proximal)
    yield _series(figure, panel, "FedAvg (Contextual), K2 = 0", probes="cohort", **contextual)


def _comparison() -> Iterator[Series]:
    """Figures 4 and 5: the five algorithms on MNIST for several mu, under both averagings and both choices of β."""
    for rate in (0.03, 0.3):
        for averaging in ("mean", "samples"):
            for beta, beta_label in BETAS.items():
                figure = f"lr {rate:g}, averaging by {averaging}, {beta_label}"
                for mu in MUS:
                    yield from _algorithms(
                        figure, f"μ = {mu:g}", averaging, beta, mu, dataset="mnist", learning_rate=rate
                    )


def _rounds() -> Iterator[Series]:
    """Figure 6: rounds to 50, 60, 70 and 80 % on the four data sets, mu = 0.1."""
    for factor in (1, 10):
        for averaging in ("mean", "samples"):
            for beta, beta_label in BETAS.items():
                times = "published lr" if factor == 1 else f"{factor} x published lr"
                figure = f"{times}, averaging by {averaging}, {beta_label}"
                for panel, dataset in DATASETS.items():
                    rate = factor * LEARNING_RATES[dataset.split("-")[0]]
                    yield from _algorithms(figure, panel, averaging, beta, 0.1, dataset=dataset, learning_rate=rate)


STUDIES = {
    study.name: study
    for study in (
        Study("variants", "Contextual variants on MNIST", "curves", tuple(_variants())),
        Study("weights", "Aggregation weights at three stages", "weights", tuple(_weights())),
        Study("comparison", "Algorithms on MNIST", "curves", tuple(_comparison())),
        Study("rounds", "Rounds to reach an accuracy", "bars", tuple(_rounds())),
    )
}
