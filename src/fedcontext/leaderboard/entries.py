"""The leaderboard's tasks and entrants as data: what is solved, by what, and which hyperparameters are tuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, Literal, TypeAlias

from fedcontext.errors import FedcontextError, by_name
from fedcontext.experiment import Experiment, experiment_from
from fedcontext.measurement.defences import Defences
from fedcontext.presets import PRESETS

Settings: TypeAlias = Mapping[str, Any]
Kind: TypeAlias = Literal["baseline", "ours", "oracle", "30 devices"]

TUNING_SEEDS = (100, 101)
TEST_SEEDS = (0, 1, 2, 3, 4)
ORACLE_SEEDS = 2  # an oracle's round costs as much as a hundred others
GROUPS = ("convex", "nonconvex")


@dataclass(frozen=True)
class Task:
    """A data set, a model and a learning rate, and the three accuracies to reach."""

    name: str
    group: str
    settings: Settings
    levels: tuple[float, ...]
    relative: bool = False  # whether levels are shares of the final accuracy of FedAvg (plain mean)

    @property
    def rounds(self) -> int:
        """Return the number of rounds of every run."""
        return int(self.settings["rounds"])

    def experiment(self, settings: Settings, seed: int) -> Experiment:
        """Return the run of this task with an entrant's settings."""
        return experiment_from({**self.settings, **settings, "seed": seed})

    def on(self, device: str) -> Task:
        """Return this task with its deep model on a compute device; without a model or a device, as it is."""
        return (
            replace(self, settings={**self.settings, "device": device}) if device and "model" in self.settings else self
        )


@dataclass(frozen=True)
class Entrant:
    """An algorithm with fixed settings, and a grid of hyperparameters to tune for each task."""

    name: str
    settings: Settings
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    kind: Kind = "baseline"

    def candidates(self) -> list[dict[str, Any]]:
        """Return the settings of every point of the grid.

        >>> Entrant("fedprox", {"algorithm": "fedprox"}, {"mu": (0.1, 1)}).candidates()
        [{'algorithm': 'fedprox', 'mu': 0.1}, {'algorithm': 'fedprox', 'mu': 1}]
        """
        points = product(*self.grid.values())
        return [{**self.settings, **dict(zip(self.grid, point, strict=True))} for point in points]


OFF = {each.name: 0.0 for each in fields(Defences)}  # baselines run as published: without our defences
FEDAVG = {"algorithm": "fedavg", "averaging": "mean", "server_learning_rate": "default", **OFF}  # the plain mean


def _task(group: str, rate: float, rounds: int, levels: tuple[float, ...], model: str = "", **settings: Any) -> Task:
    name = "-".join(filter(None, (model.partition("-")[0], settings["dataset"], f"{rate:g}")))
    common = {"rounds": rounds, "learning_rate": rate, "devices_per_round": 10, "batch_size": 10}
    return Task(
        name,
        group,
        {**common, **settings, **({"model": model} if model else {})},
        levels,
        relative=group == "nonconvex",
    )


_SHARES = (0.9, 0.95, 1.0)
TASKS = (
    *(_task("convex", rate, 40, (0.7, 0.8, 0.85), dataset="mnist", epochs=(1, 20)) for rate in (0.03, 0.3)),
    *(_task("convex", rate, 60, (0.7, 0.8, 0.85), dataset="synthetic-1-1", epochs=(1, 20)) for rate in (0.01, 0.1)),
    *(_task("convex", rate, 60, (0.7, 0.8, 0.85), dataset="synthetic-iid", epochs=(1, 20)) for rate in (0.01, 0.1)),
    *(_task("convex", rate, 40, (0.5, 0.6, 0.65), dataset="femnist", epochs=(1, 20)) for rate in (0.03, 0.3)),
    *(_task("nonconvex", r, 60, _SHARES, "cnn-small", dataset="mnist", epochs=(1, 10)) for r in (0.03, 0.1)),
    *(_task("nonconvex", r, 60, _SHARES, "cnn-small", dataset="femnist", epochs=(1, 10)) for r in (0.03, 0.1)),
    *(_task("nonconvex", r, 40, _SHARES, "mlp", dataset="synthetic-1-1", epochs=(1, 10)) for r in (0.03, 0.1)),
)

_AVERAGING = {"averaging": ("mean", "samples"), "server_learning_rate": ("default", 2.0)}
_ADAPTIVE = {"server_learning_rate": (0.01, 0.03, 0.1, 1.0)}
_MU = {"mu": (0.01, 0.1, 1.0)}
_PRINTED = {name: PRESETS["paper"][name] for name in ("algorithm", "smoothness", "probes", "probe_averaging", *OFF)}
ENTRANTS = (
    Entrant("fedavg", {"algorithm": "fedavg", **OFF}, _AVERAGING),
    Entrant("fedprox", {"algorithm": "fedprox", **OFF}, _MU),
    Entrant("folb", {"algorithm": "folb", **OFF}, _MU),
    Entrant(
        "fedavgm",
        {"algorithm": "fedavgm", **OFF},
        {"server_momentum": (0.5, 0.9), "server_learning_rate": ("default", 0.3)},
    ),
    Entrant("fedadam", {"algorithm": "fedadam", **OFF}, _ADAPTIVE),
    Entrant("fedyogi", {"algorithm": "fedyogi", **OFF}, _ADAPTIVE),
    Entrant("fedadagrad", {"algorithm": "fedadagrad", **OFF}, _ADAPTIVE),
    Entrant("fednova", {"algorithm": "fednova", **OFF}, _AVERAGING),
    Entrant("fedexp", {"algorithm": "fedexp", **OFF}, {"server_learning_rate": ("default", 0.5, 2.0)}),
    Entrant("fedmgda", {"algorithm": "fedmgda", **OFF}, {"server_learning_rate": (0.1, 0.3, "default", 3.0)}),
    Entrant("scaffold", {"algorithm": "scaffold", **OFF}, {"server_learning_rate": ("default", 0.5, 2.0)}),
    Entrant("feddyn", {"algorithm": "feddyn", **OFF}, _MU),
    Entrant("contextual", _PRINTED),
    Entrant("contextual-measured", {**_PRINTED, "smoothness": "measured", "probe_averaging": "samples"}),
    Entrant("memory", {"algorithm": "fedavg-memory", "probes": 20}, kind="ours"),
    Entrant("memory-cohort", {"algorithm": "fedavg-memory", "probes": "cohort"}, kind="ours"),
    Entrant("memory-1-exchange", {"algorithm": "fedavg-memory", "probes": 20, "exchanges": 1}, kind="ours"),
    Entrant(
        "memory-cohort-1-exchange", {"algorithm": "fedavg-memory", "probes": "cohort", "exchanges": 1}, kind="ours"
    ),
    Entrant("fedavg-30", {"algorithm": "fedavg", "devices_per_round": 30, **OFF}, _AVERAGING, "30 devices"),
    Entrant("fedadam-30", {"algorithm": "fedadam", "devices_per_round": 30, **OFF}, _ADAPTIVE, "30 devices"),
    Entrant("oracle-span", {"algorithm": "oracle-span"}, kind="oracle"),
    Entrant("oracle-memory", {"algorithm": "oracle-memory", "probes": 20}, kind="oracle"),
)
QUICK_TASKS = ("mnist-0.03", "synthetic-1-1-0.01", "synthetic-iid-0.01", "femnist-0.03", "mlp-synthetic-1-1-0.03")
QUICK_ENTRANTS = ("fedavg", "fedadam", "feddyn", "contextual", "memory", "memory-cohort")


def select_tasks(group: str = "all", names: Sequence[str] = (), *, quick: bool = False, device: str = "") -> list[Task]:
    """Return the tasks of a group or those named; quick ones have half the rounds, ``device`` is that of deep models.

    >>> [task.name for task in select_tasks("convex", quick=True)][:2]
    ['mnist-0.03', 'synthetic-1-1-0.01']
    """
    if group not in (*GROUPS, "all"):
        raise FedcontextError(f"group must be {', '.join(GROUPS)} or all, got {group!r}")
    chosen = named("task", TASKS, names) or [
        task for task in TASKS if group in (task.group, "all") and (not quick or task.name in QUICK_TASKS)
    ]
    if quick:
        chosen = [replace(task, settings={**task.settings, "rounds": task.rounds // 2}) for task in chosen]
    return [task.on(device) for task in chosen]


def select_entrants(names: Sequence[str] = (), *, quick: bool = False) -> list[Entrant]:
    """Return the entrants named, all by default.

    >>> [entrant.name for entrant in select_entrants(["fedavg", "memory"])]
    ['fedavg', 'memory']
    """
    chosen = named("entrant", ENTRANTS, names)
    return chosen or [entrant for entrant in ENTRANTS if not quick or entrant.name in QUICK_ENTRANTS]


def named(what: str, known: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Return the tasks or entrants with these names.

    >>> named("entrant", ENTRANTS, ["memry"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: entrant 'memry' is unknown, did you mean memory? entrant must be one of fedavg, ...
    """  # noqa: W505
    table = {each.name: each for each in known}
    return [by_name(what, name, table) for name in names]
