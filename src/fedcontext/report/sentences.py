"""The sentences at the top of the page, and the configuration files that reproduce its runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fedcontext.files.toml import to_toml
from fedcontext.report.groups import Group, algorithm_of, seed_of
from fedcontext.results.reader import Run
from fedcontext.results.summary import join_names

MAX_NAMES = 6  # algorithms listed in a sentence


def headline(dataset: str, groups: Sequence[Group]) -> str:
    """Return the sentence that says what is compared."""
    labels = [group.label for group in groups]
    if len(labels) > MAX_NAMES:
        labels[MAX_NAMES - 1 :] = [f"{len(labels) - MAX_NAMES + 1} more"]
    several = len(groups) > 1
    rounds = _count({len(group.numbers) for group in groups}, "round")
    seeds = _count({len(group.runs) for group in groups}, "seed")
    verb = "compares" if several else "shows"
    return f"This page {verb} {join_names(labels)} on {dataset}: {rounds}, {seeds}{' each' if several else ''}."


def outcome(groups: Sequence[dict[str, Any]], levels: Sequence[float]) -> str:
    """Return the sentence about the results: who first reached the highest accuracy level, and the lowest final loss."""
    if not groups:
        return "There are no rounds yet."
    median, mean = ("a median of ", "mean ") if any(len(group["seeds"]) > 1 for group in groups) else ("", "")
    ranked = _ranked_at_highest_level(groups, levels)
    text = "No accuracy level was reached"
    if ranked:
        level, (count, label), *others = ranked
        text = f"{label} reached {level:.0%} accuracy after {median}{count:g} round{'s' if count != 1 else ''}"
        text += _comparison(count, others) if len(groups) > 1 else ""
    known = [group for group in groups if group["final"]["loss"] is not None]
    if known:
        lowest = min(known, key=lambda group: group["final"]["loss"])
        text += f"; the lowest {mean}final loss is {lowest['final']['loss']:.3g}, of {lowest['label']}"
    return f"{text}."


def _ranked_at_highest_level(groups: Sequence[dict[str, Any]], levels: Sequence[float]) -> list[Any]:
    """Return the highest level reached, then (rounds, label) of the groups that reached it, the fastest first."""
    for position, level in reversed(list(enumerate(levels))):
        counts = [(group["milestones"]["rounds"][position], group["label"]) for group in groups]
        if ranked := sorted(pair for pair in counts if pair[0] is not None):
            return [level, *ranked]
    return []


def _comparison(count: float, others: Sequence[tuple[float, str]]) -> str:
    if not others:
        return ", and no other reached it"
    second, label = others[0]
    return f", level with {label}" if second == count else f", ahead of {label} after {second:g}"


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
