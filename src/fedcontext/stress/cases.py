"""What the stress test measures, as data: tasks, methods, and the faults and attacks that they meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from fedcontext.experiment import Experiment
from fedcontext.faults.attacks import ATTACKS
from fedcontext.faults.faults import FAULTS
from fedcontext.leaderboard.entries import Settings, Task, named
from fedcontext.measurement.defences import OFF

Kind: TypeAlias = Literal["none", "faults", "attack"]

SEEDS = (0, 1, 2)
SHARES = (0.1, 0.2, 0.3)
LEVEL = 0.7  # the accuracy to reach
DISTURBED = 2 / 3  # share of the rounds with faults or attacks; the others show the recovery
TOGETHER = "dropout=0.3,nan=0.1,scale=0.1"

TASKS = (
    Task("synthetic-1-1", "convex", {"dataset": "synthetic-1-1", "rounds": 30, "smoothness": 6.3}, (LEVEL,)),
    Task("mnist", "convex", {"dataset": "mnist", "rounds": 20, "smoothness": 4.1}, (LEVEL,)),
    Task(
        "cnn-mnist-30",
        "nonconvex",
        {
            "dataset": "mnist-30",
            "data_seed": 1,  # no device of this partition has more than 142 samples
            "model": "cnn-tiny",
            "device": "cpu",
            "rounds": 15,
            "learning_rate": 0.3,
            "batch_size": 20,
            "epochs": (1, 5),
        },
        (LEVEL,),
    ),
)

# Without defences what is not finite is left out all the same: with outlier=0 the first NaN would end the run.
BARE = {**asdict(OFF), "outlier": 1e300}
METHODS: Mapping[str, Settings] = {
    "mean": {"algorithm": "fedavg", **BARE},
    "by samples": {"algorithm": "fedavg", "averaging": "samples", **BARE},
    "FedAdam": {"algorithm": "fedadam", **BARE},
    "Krum": {"algorithm": "krum", **BARE},
    "median": {"algorithm": "median", **BARE},
    "FLTrust": {"algorithm": "fltrust", **BARE},
    "contextual, bare": {"algorithm": "fedavg-contextual", **BARE},
    "contextual": {"algorithm": "fedavg-contextual"},
    "memory, bare": {"algorithm": "fedavg-memory", **BARE},
    "memory": {"algorithm": "fedavg-memory"},
}


@dataclass(frozen=True)
class Condition:
    """A fault or an attack, and how often it happens or how many devices lie."""

    name: str
    kind: Kind
    share: float
    text: str  # of the setting

    def settings(self, until: int) -> dict[str, Any]:
        """Return the settings of a run that is disturbed until a round.

        >>> Condition("nan", "faults", 0.1, "nan=0.1").settings(40)
        {'faults': 'nan=0.1,until=40'}
        """
        return {} if self.kind == "none" else {self.kind: f"{self.text},until={until}"}


HONEST = Condition("none", "none", 0.0, "")
CONDITIONS = (
    HONEST,
    *(Condition(name, "faults", share, f"{name}={share}") for name in FAULTS for share in SHARES),
    Condition(TOGETHER, "faults", 0.3, TOGETHER),
    *(Condition(name, "attack", share, f"{name}={share}") for name in ATTACKS for share in SHARES),
)
QUICK = ("none", "nan", "dropout", "sign-flip", "gradient-flip", "backdoor")


def last_disturbed(task: Task) -> int:
    """Return the last round with faults or attacks.

    >>> last_disturbed(TASKS[0])
    20
    """
    return round(DISTURBED * task.rounds)


def experiment(task: Task, method: str, condition: Condition, seed: int) -> Experiment:
    """Return one run of the stress test."""
    return task.experiment({**METHODS[method], **condition.settings(last_disturbed(task))}, seed)


def select(tasks: Sequence[str], *, quick: bool, device: str = "") -> tuple[list[Task], list[Condition]]:
    """Return tasks by name, all if none is named, and the conditions; ``device`` is that of the CNN.

    The quick tasks and conditions take a minute.

    >>> tasks, conditions = select(["mnist"], quick=False)
    >>> [task.name for task in tasks], len(conditions)
    (['mnist'], 77)
    """
    chosen = [task.on(device) for task in named("task", TASKS, tasks) or TASKS]
    if not quick:
        return chosen, list(CONDITIONS)
    small = [replace(task, settings={**task.settings, "rounds": 9}) for task in chosen[:1]]
    return small, [each for each in CONDITIONS if each.name in QUICK and each.share in (0.0, 0.2)]
