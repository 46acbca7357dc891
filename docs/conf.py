"""The documentation site: `sphinx-build -W docs build/docs`.

Sphinx with the theme Shibuya: warnings fail the build, and no page loads anything from another site.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import site_parts  # noqa: E402

from fedcontext import __version__  # noqa: E402

project = "fedcontext"
author = "The fedcontext developers"
copyright = "The fedcontext developers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}
exclude_patterns = ["figures", "templates", "generated/schema.md"]
templates_path = ["templates"]
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_type_aliases = {
    alias: alias.rpartition(".")[2]
    for alias in ("FloatArray", "IntArray", "npt.ArrayLike", "Structure", "Structures", "AnyRule", "Probes", "OnRound")
}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_default_options = {"members": True, "undoc-members": False}
add_module_names = False
pygments_style = "friendly"

html_theme = "shibuya"
html_title = "fedcontext"
html_static_path = ["pictures"]
html_math_renderer = "mathml"
html_theme_options = {"accent_color": "blue", "nav_links": []}
html_show_sphinx = False


def tidy(app: Any, what: str, name: str, obj: Any, options: object, lines: list[str]) -> None:
    """Add descriptions of a dataclass's fields, and escape what is not reStructuredText."""
    if what == "class" and dataclasses.is_dataclass(obj):
        lines += ["", *(f":param {field}: {text}" for field, text in site_parts.field_descriptions(obj).items()), ""]
    lines[:] = site_parts.escaped(lines)


def shorten(
    app: Any, what: str, name: str, obj: Any, options: object, signature: str | None, result: str | None
) -> Any:
    """Shorten the types in a signature."""
    return site_parts.short(signature), site_parts.short(result)


def skip(app: Any, what: str, name: str, obj: object, skipped: bool, options: object) -> bool:
    """Leave out fields, which the docstring of their class describes."""
    return skipped or not (callable(obj) or isinstance(obj, property | functools.cached_property))


def setup(app: Any) -> None:
    """Generate the pages that come from the program, and render formulas as MathML."""
    (HERE / "generated").mkdir(exist_ok=True)
    (HERE / "generated" / "cli.md").write_text(site_parts.cli_reference(), encoding="utf-8")
    (HERE / "generated" / "schema.md").write_text(site_parts.table_schema(), encoding="utf-8")
    app.add_html_math_renderer("mathml", (site_parts.inline_math, None), (site_parts.block_math, None))
    app.connect("autodoc-process-docstring", tidy)
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-skip-member", skip)
