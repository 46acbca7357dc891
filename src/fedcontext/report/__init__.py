"""The HTML report: runs as one self-contained page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fedcontext.files.storage import write_text
from fedcontext.report.html import check_page, render
from fedcontext.report.live import live_report
from fedcontext.report.page_data import page_data
from fedcontext.results.reader import read_runs

__all__ = ["check_page", "live_report", "write_report"]


def write_report(paths: str | Path | Iterable[str | Path], out: str | Path) -> list[str]:
    """Write the report on the runs in ``paths`` to ``out``; return one message for everything that was skipped."""
    out = Path(out)
    check_page(out)
    runs, problems = read_runs([paths] if isinstance(paths, str | Path) else paths)
    write_text(out, render(page_data(runs, problems)))
    return problems
