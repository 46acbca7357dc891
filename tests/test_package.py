"""The package's lazily imported public names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import fedcontext as fc

ROOT = Path(fc.__file__).parent


def test_every_public_name_can_be_imported_and_is_listed():
    for name in fc.__all__:
        assert getattr(fc, name) is not None
    assert set(fc.__all__) <= set(dir(fc))
    assert not hasattr(fc, "no_such_name")


def test_type_checkers_see_the_same_names():
    stub = ast.parse((ROOT / "__init__.pyi").read_text(encoding="utf-8"))
    imported = [
        (node.module, alias.asname) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert sorted(name for _, name in imported) == sorted(fc.__all__)
    for module, name in imported:
        assert getattr(fc, name) is getattr(__import__(module, fromlist=[name]), name)


def test_no_module_has_the_name_of_something_else():
    """Importing such a module would put it in the place of the function or class."""
    modules = {path.stem for path in ROOT.iterdir()} - {"presets", "runner"}
    assert modules.isdisjoint(set(fc.__all__))


def test_importing_the_package_or_printing_its_version_imports_no_other_library():
    script = "import sys; sys.argv[1:] = ['--version']; from fedcontext.cli import main; main(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    version, modules = done.stdout.splitlines()
    assert version == f"fedcontext {fc.__version__}"
    assert {"numpy", "typer", "rich"}.isdisjoint(modules.split())
