"""Records into one HTML page that people can open, keep and send."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fedcontext.report.html import replace, to_html
from fedcontext.report.live import watch
from fedcontext.report.page_data import content
from fedcontext.results.reader import read_runs

__all__ = ["watch", "write"]


def write(paths: Iterable[str | Path], out: Path) -> list[str]:
    """Write the report of the runs in ``paths`` to ``out``; return what could not be used of them."""
    runs, problems = read_runs(paths)
    replace(out, to_html(content(runs, problems)))
    return problems
