"""Page data as one HTML file that needs no network."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from fedcontext.errors import FileError, require
from fedcontext.files.storage import check_writable, naming

GENERATOR = b'<meta name="generator" content="fedcontext'  # in the head of every page
HEAD = 4096  # bytes in which it is


def render(data: dict[str, Any]) -> str:
    """Return the page: text, styles, scripts, data and Plotly in one string."""
    assets = resources.files("fedcontext.report") / "assets"
    headline, outcome = data["datasets"][0]["sentences"]
    parts = {
        "version": html.escape(data["version"]),
        "title": html.escape(f"fedcontext: {data['datasets'][0]['name']}"),
        "headline": html.escape(headline),
        "outcome": html.escape(outcome),
        "css": (assets / "page.css").read_text(encoding="utf-8"),
        "view": (assets / "view.js").read_text(encoding="utf-8"),
        "charts": (assets / "charts.js").read_text(encoding="utf-8"),
        "plotly": require("plotly.offline", extra="report").get_plotlyjs(),
        "data": to_json(data),
    }
    template = (assets / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def check_page(path: Path) -> None:
    """Raise an error if ``path`` cannot be written, or is a file that is no report: a page replaces only reports.

    >>> import tempfile
    >>> notes = Path(tempfile.mkdtemp()) / "notes.html"
    >>> check_page(notes)
    >>> _ = notes.write_text("my notes")
    >>> check_page(notes)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedcontext.errors.FileError: ...notes.html: exists and is not a report of fedcontext: use another path, or delete it
    """
    check_writable(path)
    if path.exists():
        with naming(path), path.open("rb") as file:
            start = file.read(HEAD)
        if start and GENERATOR not in start:
            raise FileError(f"{path}: exists and is not a report of fedcontext: use another path, or delete it")
    if path.suffix not in (".html", ".htm"):
        raise FileError(f"{path}: a report is an HTML page: use a name that ends in .html")


def to_json(value: object) -> str:
    """Return JSON for a script element: without ``<``, so that no text in it can end the element.

    >>> to_json("</script>")
    '"\\\\u003c/script>"'
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
