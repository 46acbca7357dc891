"""The data of a page into one HTML file that needs nothing else."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from fedcontext.errors import FedcontextError
from fedcontext.report import library


def to_html(content: dict[str, Any]) -> str:
    """Return the page: its words, styles, scripts, data and Plotly in one text."""
    assets = resources.files("fedcontext.report") / "assets"
    first, second = content["scenes"][0]["sentences"]
    parts = {
        "version": html.escape(content["version"]),
        "title": html.escape(f"fedcontext: {content['scenes'][0]['dataset']}"),
        "first": html.escape(first),
        "second": html.escape(second),
        "css": (assets / "page.css").read_text(encoding="utf-8"),
        "view": (assets / "view.js").read_text(encoding="utf-8"),
        "charts": (assets / "charts.js").read_text(encoding="utf-8"),
        "plotly": library.script(),
        "data": to_json(content),
    }
    template = (assets / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def to_json(content: object) -> str:
    """Return JSON that may stand inside a script element: no ``<`` in it can end that element.

    >>> to_json("</script>")
    '"\\\\u003c/script>"'
    """
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def replace(path: Path, text: str) -> None:
    """Write ``path`` whole or not at all, so that a browser never reads half a page."""
    scratch = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(text.encode("utf-8", errors="replace"))
        scratch.replace(path)
    except OSError as error:
        raise FedcontextError(f"{path}: cannot be written ({error.strerror})") from None
