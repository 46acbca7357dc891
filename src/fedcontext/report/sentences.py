"""What the page says in words: two sentences about what came out, and the settings that repeat it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fedcontext.report.groups import Group, algorithm_of, seed_of
from fedcontext.results.reader import Run
from fedcontext.toml import to_toml

NAMED = 6  # algorithms that a sentence lists before it only counts them


def compared(dataset: str, groups: Sequence[Group]) -> str:
    """Return the sentence that says what was compared."""
    labels = [group.label for group in groups]
    names = (
        listed(labels) if len(labels) <= NAMED else f"{listed(labels[: NAMED - 1])} and {len(labels) - NAMED + 1} more"
    )
    seeds = {len(group.runs) for group in groups}
    rounds = {len(group.numbers) for group in groups}
    verb = "compares" if len(labels) > 1 else "shows"
    return f"This page {verb} {names} on {dataset}: {_span(rounds, 'round')}, {_span(seeds, 'seed')}{' each' * (len(labels) > 1)}."


def outcome(groups: Sequence[dict[str, Any]], levels: Sequence[float]) -> str:
    """Return the sentence that says what came out: who was first to the highest accuracy, and who ended lowest."""
    lowest = min((g for g in groups if g["final"]["loss"] is not None), key=lambda g: g["final"]["loss"], default=None)
    end = "" if lowest is None else f"the lowest final loss is {lowest['final']['loss']:.3g}, of {lowest['label']}"
    for position in reversed(range(len(levels))):
        there = [(g["reach"]["rounds"][position], g["label"]) for g in groups]
        ranked = sorted((count, label) for count, label in there if count is not None)
        if ranked:
            first = f"{ranked[0][1]} reached {levels[position]:.0%} accuracy after {_rounds(ranked[0][0])}"
            return f"{first}{_next(ranked, len(groups))}{'; ' * bool(end)}{end}."
    return f"No accuracy level was reached{'; ' * bool(end)}{end}." if groups else "There are no rounds yet."


def _rounds(count: float) -> str:
    return f"{count:g} round{'s' * (count != 1)}"


def _next(ranked: Sequence[tuple[float, str]], everyone: int) -> str:
    if everyone == 1:
        return ""
    if len(ranked) == 1:
        return ", and no other got there"
    (best, _), (count, label) = ranked[:2]
    return f", level with {label}" if count == best else f", ahead of {label} after {count:g}"


def repeats(runs: Sequence[Run]) -> list[str]:
    """Return TOML texts, each for one `fedcontext compare`, that together repeat all runs."""
    seeds: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for run in runs:
        rest = {name: value for name, value in run.settings.items() if name not in ("algorithm", "seed")}
        seeds[json.dumps(rest, default=str), algorithm_of(run)].append(run.settings.get("seed", seed_of(run)))
    algorithms: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (rest_text, algorithm), numbers in seeds.items():
        algorithms[rest_text, json.dumps(numbers, default=str)].append(algorithm)
    return [
        to_toml({"algorithms": names, "seeds": json.loads(numbers), **json.loads(rest_text)})
        for (rest_text, numbers), names in algorithms.items()
    ]


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence has them.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + [*names[-1:]])


def _span(counts: set[int], noun: str) -> str:
    low, high = min(counts), max(counts)
    return (f"{low}" if low == high else f"{low} to {high}") + f" {noun}{'s' * (high != 1)}"
