"""The architecture is what docs/architecture.md draws: imports point one way, and every module is in its table."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src/fedcontext"
TABLE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## Modules")[1].split("## Decisions")[0]
MODULES = [
    [name.removesuffix(".py").rstrip("/") for name in re.findall(r"`([a-z_]+(?:\.py|/))`", row.split("|")[1])]
    for row in TABLE.splitlines()
    if row.startswith("| `")
]
ROW = {module: index for index, row in enumerate(MODULES) for module in row}


def module_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_at_the_top(path):
    """The modules that a module imports when it is itself imported: not inside functions, not for types alone."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if names == ["fedcontext"]:
            names = [f"fedcontext.{alias.name}" for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("fedcontext."))


def test_every_module_is_on_the_map():
    modules = {module_of(path) for path in SOURCE.rglob("*.py")} - {"__init__", "version"}
    assert modules == set(ROW)


def test_the_walk_names_functions_where_they_are():
    walk = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## One round")[1].split("## Modules")[0]
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in walk.splitlines() if line.startswith("| ")]
    steps = [row for row in rows if row[0].startswith("`")]
    assert len(steps) > 25
    for files, *functions in steps:
        folder, paths = SOURCE, []
        for name in re.findall(r"`([a-z_/0-9]+\.py)`", files):  # a bare name is in the folder of the one before it
            paths.append(SOURCE / name if (SOURCE / name).exists() else folder / name)
            folder = paths[-1].parent
        nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        named = {name for cell in functions for name in re.findall(r"`([A-Za-z_]+)`", cell)}
        assert named <= defined, f"{files}: {named - defined}"


def test_imports_point_one_way():
    wrong = [
        f"{path.relative_to(SOURCE)} imports {module}"
        for path in SOURCE.rglob("*.py")
        if path != SOURCE / "__init__.py"
        for module in imports_at_the_top(path)
        if module != "version" and ROW[module] > ROW[module_of(path)]
    ]
    assert wrong == []


def test_the_command_line_imports_only_its_declared_dependencies():
    """What another package happens to install, such as Click, is missing where only fedcontext is installed."""
    allowed = {*sys.stdlib_module_names, "fedcontext", "numpy", "rich", "typer"}
    names = [
        (path.name, name.split(".")[0])
        for path in (SOURCE / "cli").glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    ]
    assert len(names) > 20
    assert [pair for pair in names if pair[1] not in allowed] == []
