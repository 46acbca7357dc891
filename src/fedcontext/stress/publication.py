"""Writes the page and the numbers of the stress test side by side."""

from __future__ import annotations

from pathlib import Path

from fedcontext.files.storage import write_text
from fedcontext.stress.cells import Results, merge, read_results, write_results
from fedcontext.stress.document import document


def publish(results: Results, folder: Path) -> list[Path]:
    """Write reliability.json and reliability.md into a folder, with the tasks that it holds already, and return the paths."""
    numbers, page = folder / "reliability.json", folder / "reliability.md"
    merged = merge(read_results(numbers) if numbers.exists() else None, results)
    write_results(merged, numbers)
    write_text(page, document(merged))
    return [numbers, page]
