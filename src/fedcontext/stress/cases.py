"""What the stress test measures, as data: tasks, methods, and the faults and attacks that they meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from fedcontext.errors import FedcontextError, by_name, shown
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
    "contextual undefended": {"algorithm": "fedavg-contextual", **BARE},
    "contextual": {"algorithm": "fedavg-contextual"},
    "memory undefended": {"algorithm": "fedavg-memory", **BARE},
    "memory": {"algorithm": "fedavg-memory"},
}


@dataclass(frozen=True)
class Condition:
    """A fault or an attack, and how often it happens or how many devices are Byzantine."""

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
    Condition("combined", "faults", 0.3, TOGETHER),
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


def select(
    tasks: Sequence[str] = (),
    methods: Sequence[str] = (),
    conditions: Sequence[str] = (),
    *,
    quick: bool = False,
    device: str = "",
) -> tuple[list[Task], list[str], list[Condition]]:
    """Return tasks, methods and conditions by name, all where none is named; ``device`` is that of the CNN.

    Runs without faults are always among the conditions: the others are compared with them. The quick tasks and
    conditions take a minute.

    >>> chosen, methods, conditions = select(["mnist"], ["memory"], ["nan"])
    >>> [task.name for task in chosen], methods, [(each.name, each.share) for each in conditions]
    (['mnist'], ['memory'], [('none', 0.0), ('nan', 0.1), ('nan', 0.2), ('nan', 0.3)])
    """
    chosen = [task.on(device) for task in named("task", TASKS, tasks) or TASKS]
    for method in methods:
        by_name("method", method, METHODS)
    for condition in conditions:
        by_name("condition", condition, {each.name: each for each in CONDITIONS})
    wanted = [each for each in CONDITIONS if each.name in (HONEST.name, *conditions)] if conditions else CONDITIONS
    if quick:
        chosen = [replace(task, settings={**task.settings, "rounds": 9}) for task in chosen[:1]]
        wanted = [each for each in wanted if each.name in QUICK and each.share in (0.0, 0.2)]
    if list(wanted) == [HONEST]:
        among = f"; the quick ones are {', '.join(QUICK)}" if quick else ""
        raise FedcontextError(f"conditions must have a fault or an attack, got {shown(list(conditions))}{among}")
    return chosen, [name for name in METHODS if not methods or name in methods], list(wanted)
