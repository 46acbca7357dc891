"""Row (e): how the cost of a round grows with the cohort, the devices, the model and the epochs, with a figure.

A round is plan, training, gradients, aggregation and record, without evaluation.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

import fedcontext as fc
from fedcontext.datasets.federated import FederatedData, LazySplit, Samples, join

CLASSES = 10
SERIES = ("devices that train, K", "devices, N", "parameters", "epochs")


def random_samples(device: int, samples: int, dimension: int) -> Samples:
    random = np.random.default_rng(device)
    return random.standard_normal((samples, dimension), np.float32), random.integers(0, CLASSES, samples)


def stored(devices: int, samples: int, dimension: int) -> FederatedData:
    """Return devices of equal size with random data."""
    sides = [join([random_samples(k, count, dimension) for k in range(devices)]) for count in (samples, 1)]
    return FederatedData("random", *sides, CLASSES)


def on_demand(devices: int, samples: int, dimension: int) -> FederatedData:
    """Return the same, with samples drawn when a device trains."""
    evaluation = stored(100, samples, dimension)
    train = LazySplit(
        np.full(devices, samples), lambda k: random_samples(k, samples, dimension), evaluation.evaluation_split
    )
    return FederatedData("random on demand", train, evaluation.test, CLASSES)


def milliseconds(data: FederatedData, rounds: int, **settings: object) -> float:
    """Return the median time of a round of contextual aggregation, with the cohort's own gradients."""
    given = {
        "rounds": rounds + 2,
        "eval_every": rounds + 3,
        "probes": "cohort",
        "engine": "numba",
        "epochs": (1, 1),
        **settings,
    }
    simulation = fc.prepare(fc.Experiment(algorithm="fedavg-contextual", learning_rate=0.01, **given), data=data)
    state, times = simulation.start(), []
    for _ in range(rounds + 1):
        before = time.perf_counter()
        state, _ = simulation.step(state)
        times.append(time.perf_counter() - before)
    return 1000 * float(np.median(times[1:]))


def measure(quick: bool) -> dict[str, dict[str, float]]:
    """Return milliseconds per round, by the value of each of the four quantities."""
    rounds, small = (3, 1) if quick else (20, 0)
    cohorts, fleets = (10, 32, 100, 316, 1000)[: 5 - 2 * small], (1_000, 10_000, 100_000, 1_000_000)
    base = stored(1000, 60, 60)
    return {
        SERIES[0]: {str(k): milliseconds(base, rounds, devices_per_round=k) for k in cohorts},
        SERIES[1]: {str(n): milliseconds(on_demand(n, 60, 60), max(10, rounds)) for n in fleets},
        SERIES[2]: {
            str(10 * (d + 1)): milliseconds(stored(50, 60, d), rounds) for d in (10, 100, 1_000, 10_000)[: 4 - small]
        },
        SERIES[3]: {str(e): milliseconds(base, rounds, epochs=(e, e)) for e in (1, 2, 5, 10, 20)},
    }


def draw(measured: dict[str, dict[str, float]], path: Path) -> None:
    """Draw the four curves side by side, both axes logarithmic, with the line of proportional growth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(measured), figsize=(13, 3.2), sharey=True, layout="constrained")
    for panel, (name, series) in zip(panels, measured.items(), strict=True):
        x, y = np.array([float(value) for value in series]), np.array(list(series.values()))
        panel.loglog(x, y, "o-", label="measured")
        panel.loglog(x, y[0] * x / x[0], ":", color="grey", label="proportional")
        panel.set(xlabel=name)
        panel.grid(alpha=0.3)
    highest = max(max(series.values()) for series in measured.values())
    panels[0].set(ylabel="milliseconds per round", ylim=(0.1, 3 * highest))
    panels[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
