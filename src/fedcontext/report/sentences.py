"""The sentences at the top of the page, and the configuration files that reproduce its runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fedcontext.files.toml import to_toml
from fedcontext.report.groups import Group, algorithm_of, seed_of
from fedcontext.results.reader import Run
from fedcontext.results.summary import at_most, join_names


def headline(dataset: str, groups: Sequence[Group]) -> str:
    """Return the sentence that says what is compared."""
    labels = [group.label for group in groups]
    several = len(groups) > 1
    rounds = _count({len(run.rows) for group in groups for run in group.runs}, "round")
    seeds = _count({len(group.runs) for group in groups}, "seed")
    verb = "compares" if several else "shows"
    return f"This page {verb} {join_names(labels)} on {dataset}: {rounds}, {seeds}{' each' if several else ''}."


def seeds_note(groups: Sequence[Group]) -> str:
    """Return a sentence that warns of groups with different seeds, whose comparison is unfair; "" if all agree."""
    seeds = {group.label: {seed_of(run) for run in group.runs} for group in groups}
    if all(own == seeds[groups[0].label] for own in seeds.values()):
        return ""
    counts = at_most([f"{label} has {_count({len(own)}, 'seed')}" for label, own in seeds.items()])
    return f" The seeds differ: {', '.join(counts)}."


def reproduction_configs(runs: Sequence[Run]) -> list[str]:
    """Return TOML files, each for one `fedcontext compare`, that together reproduce all runs."""
    seeds: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for run in runs:
        shared = {name: value for name, value in run.settings.items() if name not in ("algorithm", "seed")}
        seeds[json.dumps(shared, default=str), algorithm_of(run)].append(run.settings.get("seed", seed_of(run)))
    algorithms: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (settings, algorithm), numbers in seeds.items():
        algorithms[settings, json.dumps(numbers, default=str)].append(algorithm)
    return [
        to_toml({"algorithms": names, "seeds": json.loads(numbers), **json.loads(settings)})
        for (settings, numbers), names in algorithms.items()
    ]


def _count(counts: set[int], noun: str) -> str:
    low, high = min(counts), max(counts)
    return (f"{low}" if low == high else f"{low} to {high}") + f" {noun}{'s' if high != 1 else ''}"
