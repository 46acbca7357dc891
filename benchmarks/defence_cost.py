"""What the defences cost without attacks: rounds to the leaderboard's levels with them and without, on its convex tasks.

    python benchmarks/defence_cost.py

A level that is not reached counts as all rounds of the task. The budget is 5 % more rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

import fedcontext as fc
from fedcontext.leaderboard.entries import Task, select_tasks
from fedcontext.measurement.defences import OFF
from fedcontext.results.summary import summarise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default=",".join(map(str, range(5, 25))))  # of three seeds the spread is 10 %
    parser.add_argument("--algorithm", default="fedavg-memory")
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    print("| task | without | with | ratio |\n|---|---|---|---|")
    for task in select_tasks("convex"):
        without, with_them = (
            mean_rounds(task, given.algorithm, asdict(defences), seeds) for defences in (OFF, fc.Defences())
        )
        print(f"| {task.name} | {without:.2f} | {with_them:.2f} | {with_them / without:.2f} |", flush=True)


def mean_rounds(task: Task, algorithm: str, defences: Mapping[str, float], seeds: list[int]) -> float:
    """Return the mean rounds to the levels over seeds."""
    rounds = []
    for seed in seeds:
        records = [record for _, record in fc.simulate(task.experiment({"algorithm": algorithm, **defences}, seed))]
        rounds += [count or task.rounds for count in summarise(records, task.levels).rounds_to.values()]
    return float(np.mean(rounds))


if __name__ == "__main__":
    main()
