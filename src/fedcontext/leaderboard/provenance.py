"""When and where numbers were made, for pages whose numbers are not all of one run."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping

from fedcontext.version import __version__


def here(device: str = "cpu") -> str:
    """Return the version, today's date and this machine, in words."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return (
        f"fedcontext {__version__}, {today}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores, {device}"
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
