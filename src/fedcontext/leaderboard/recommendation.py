"""Which algorithm to use, answered from the leaderboard's numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedcontext.algorithms import Hyperparameters, algorithm_named
from fedcontext.errors import FedcontextError
from fedcontext.leaderboard.entries import ENTRANTS, OFF, Entrant
from fedcontext.leaderboard.results import Ratio, TaskResult, ratios

VECTOR_RULES = ("folb", "fedmgda", "contextual")  # need inner products of single devices' updates


@dataclass(frozen=True)
class Constraints:
    """What a federation can do."""

    uplink: float = math.inf  # bytes that devices send in a round, relative to FedAvg's
    probes: bool = True  # devices beside the cohort can be asked for a gradient
    device_state: bool = True  # devices keep a model between rounds, and are asked again
    secure_aggregation: bool = False  # the server sees sums over devices only
    nonconvex: bool = False

    def __post_init__(self) -> None:
        if not self.uplink > 0:
            raise FedcontextError(
                f"uplink must be a positive multiple of FedAvg's bytes, such as 1.5, got {self.uplink}"
            )

    def allow(self, entrant: Entrant, ratio: Ratio) -> bool:
        """Return whether an entrant can be used."""
        algorithm = algorithm_named(entrant.settings["algorithm"], Hyperparameters(learning_rate=1, smoothness=1))
        asks_probes = "gradient" in algorithm.rule.needs and entrant.settings.get("probes") != "cohort"
        return (
            entrant.kind in ("baseline", "ours")
            and ratio.uplink_round <= self.uplink
            and (self.probes or not asks_probes)
            and (self.device_state or algorithm.variates is None)
            and not (self.secure_aggregation and algorithm.rule.name in VECTOR_RULES)
        )


def recommend(results: Sequence[TaskResult], constraints: Constraints) -> list[tuple[Entrant, Ratio]]:
    """Return the entrants that the constraints allow, that with the lowest geometric mean of rounds first."""
    group = "nonconvex" if constraints.nonconvex else "convex"
    members = [result for result in results if result.group == group]
    if not members:
        raise FedcontextError(
            f"the leaderboard has no {group} results; run `fedcontext leaderboard --group {group} --docs docs`"
        )
    by_name = {entrant.name: entrant for entrant in ENTRANTS}
    complete = [row for row in ratios(members) if row.entrant in by_name and len(row.by_task) == len(members)]
    allowed = [(by_name[row.entrant], row) for row in complete if constraints.allow(by_name[row.entrant], row)]
    if not allowed:
        raise FedcontextError("no algorithm of the leaderboard fulfils these constraints; allow more uplink")
    return allowed


def command_for(entrant: Entrant) -> str:
    """Return the command that runs an entrant, or tunes it first if it has a grid.

    >>> command_for(Entrant("prox", {"algorithm": "fedprox"}, {"mu": (0.1, 1)}))
    'fedcontext tune --algorithm fedprox --grid mu=0.1,1'
    """
    chosen = {name: value for name, value in entrant.settings.items() if name not in OFF}  # defences stay on
    settings = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in chosen.items())
    grid = " ".join(f"--grid {name}={','.join(map(str, values))}" for name, values in entrant.grid.items())
    return f"fedcontext tune {settings} {grid}" if grid else f"fedcontext run {settings}"
