"""When and where numbers were made, for pages whose numbers are not all of one run."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedcontext.experiment import Experiment
from fedcontext.version import __version__


def made_at(experiments: Iterable[Experiment], out: Path, device: str = "cpu") -> str:
    """Return the version, the day on which the newest of these runs in ``out`` ended, and this machine, in words."""
    files = (out / f"{each.name}{suffix}" for each in experiments for suffix in (".jsonl", ".error"))
    newest = max((path.stat().st_mtime for path in files if path.exists()), default=0.0)
    day = datetime.datetime.fromtimestamp(newest, datetime.UTC).date().isoformat()
    return (
        f"fedcontext {__version__}, {day}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores, {device}"
    )


def provenance(made: Mapping[str, str]) -> str:
    """Return how the numbers of several names were made: first what most have in common, then the others.

    >>> provenance({"fedavg": "May 1, A", "fedadam": "May 1, A", "memory": "May 2, B"})
    'May 1, A; memory: May 2, B'
    """
    names: dict[str, list[str]] = {}
    for name, how in made.items():
        names.setdefault(how, []).append(name)
    common, *others = sorted(names, key=lambda how: -len(names[how]))
    return "; ".join([common, *(f"{', '.join(names[how])}: {how}" for how in others)])
