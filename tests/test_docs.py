"""The documentation: it builds without a warning, its Python runs, and the names in it exist."""

from __future__ import annotations

import dataclasses
import inspect
import pstats
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
import typer.main

import fedcontext as fc
from fedcontext.faults.attacks import ATTACKS
from fedcontext.faults.faults import FAULTS
from fedcontext.measurement.combination import COMBINATIONS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if "generated" not in path.parts)
TESTED_ELSEWHERE = {"torch-engine.md", "plug-in.md", "privacy.md"}
CHECKS = {  # for each block of Python on a page, whether it made what the page says
    "index.md": [lambda names: np.allclose(names["params"], [1, 1])],
    "guide/quickstart.md": [
        lambda names: names["records"][3:] == names["continued"] and len(names["continued"]) == 2,
        lambda names: np.allclose(names["result"].params, [0.5, 1.5]),
    ],
    "guide/rules.md": [
        lambda names: names["rule"].name == "contextual" and names["promised"] < 0,
        lambda names: (names["params"] > 0.1).all() and names["step"].shape == (2,),
    ],
    "guide/add-a-data-set.md": [
        lambda names: names["trained"].records[-1].accuracy > 0.8 and names["data"].population == 20
    ],
    "guide/look-at-runs.md": [lambda names: list(names["frame"]["number"]) == [1]],
    "guide/defences.md": [lambda names: set(names["result"].excluded) == {"malicious"}],
    "guide/faults.md": [lambda names: names["honest"].records[-1].accuracy > 0.2 and names["attacked"].records],
    "guide/slow-runs.md": [
        lambda names: (
            {"train", "roundtrip", "aggregate"} <= {function for _, _, function in pstats.Stats(names["profile"]).stats}
        )
    ],
}


def python_on(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize(
    ("page", "position"), [(page, i) for page, checks in CHECKS.items() for i in range(len(checks))]
)
def test_the_python_on_a_page_makes_what_it_says(page, position, tmp_path, monkeypatch):
    block = python_on(page)[position]
    if "pandas" in block:
        pytest.importorskip("pandas")
        from fedcontext.runner import run

        run(fc.Experiment("synthetic-iid", "fedavg", rounds=1), tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    round_1 = {"params": np.zeros(2), "updates": [np.ones(2)], "gradients": [-np.ones(2)]}
    names = {**round_1, "differences": None, "state": None}
    exec(block, names)
    assert CHECKS[page][position](names)


def test_all_python_in_the_docs_is_run_by_a_test():
    blocks = {page: len(python_on(page)) for page in PAGES if python_on(page) and page not in TESTED_ELSEWHERE}
    assert blocks == {page: len(checks) for page, checks in CHECKS.items()}


def commands_in(path: Path) -> list[str]:
    blocks = re.findall(r"```\w*\n(.*?)```", path.read_text("utf-8"), re.DOTALL)
    inline = re.findall(r"`(fedcontext [a-z]+ [^`]*)`", path.read_text("utf-8"))
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("fedcontext ")]
    return [line for line in lines + inline if "COMMAND" not in line and "NAME" not in line]


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page}" for page in PAGES if page != "reproduction.md")])
def test_the_command_line_accepts_the_commands_on_a_page(page, tmp_path, monkeypatch):
    from fedcontext.cli.app import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for line in commands_in(ROOT / page):
        command, (name, *arguments) = typer.main.get_command(app), shlex.split(line, comments=True)
        while hasattr(command, "commands"):
            name, *arguments = arguments
            command = command.commands[name]
        command.make_context(name, arguments)  # raises an error for an unknown option or a missing argument


def test_the_commands_on_the_pages_are_found():
    assert len(commands_in(ROOT / "README.md")) >= 8


def test_every_public_name_is_in_the_api_reference():
    page = (DOCS / "guide" / "api.md").read_text("utf-8")
    in_words = {"ALGORITHMS", "PROFILES"}
    assert [name for name in in_words if f"`fc.{name}`" not in page] == []
    own = {*in_words, "__version__", "presets", "runner"}  # of the two modules, the functions are listed
    assert [name for name in fc.__all__ if name not in own and f"fedcontext.{name}\n" not in page] == []


def test_every_rule_is_on_the_page_of_rules():
    page = (DOCS / "guide" / "rules.md").read_text("utf-8")
    helpers = {"bound"}
    modules = ("rules.averaging", "rules.contextual", "rules.robust")
    rules = {"contextual_memory", *(name for module in modules for name in fc.EXPORTS[module])} - helpers
    assert [rule for rule in rules if f"`{rule}(" not in page] == []


def test_every_fault_and_attack_is_on_its_page():
    page = (DOCS / "guide" / "faults.md").read_text("utf-8")
    lines = {**FAULTS, **{name: attack.help for name, attack in ATTACKS.items()}}
    assert [name for name, line in lines.items() if f"| `{name}` | {line} |" not in page] == []


def test_every_field_of_a_geometry_is_on_the_page_about_adding_a_rule():
    """With the comment beside the field, and the first line of the property's docstring."""
    page = (DOCS / "guide" / "add-a-rule.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE))
    comments = re.findall(r"^    (\w+): [^#\n]*# (.+)$", inspect.getsource(fc.Geometry), re.MULTILINE)
    assert [name for name, _ in comments] == [field.name for field in dataclasses.fields(fc.Geometry)]
    assert rows == {**dict(comments), "slope": fc.Geometry.slope.__doc__.removesuffix(".")}


def test_every_combination_of_gradients_is_on_the_page_of_rules():
    page = (DOCS / "guide" / "rules.md").read_text("utf-8")
    assert [how for how, line in COMBINATIONS.items() if f"| `{how}` | {line} |" not in page] == []


def test_the_constants_of_the_rule_with_memory_are_described():
    page = (DOCS / "guide" / "concepts.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", page, re.MULTILINE)
    assert {name: float(value) for name, value in rows} == dataclasses.asdict(fc.MemorySettings())


def test_what_the_page_on_the_paper_names_exists():
    page = (DOCS / "paper.md").read_text("utf-8")
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py"))
    assert [name for name in re.findall(r"`(test_\w+)`", page) if f"def {name}(" not in tests] == []
    paths = re.findall(r"`([\w/.-]+(?:\.py|\.md|/))`", page)
    assert [path for path in paths if not ((ROOT / path).exists() or (ROOT / "src/fedcontext" / path).exists())] == []
    functions = re.findall(r"`((?!docs|tests)[a-z_]+(?:\.[A-Za-z_]+)+)`", page)
    objects = [name for name in functions if not name.endswith((".py", ".md"))]
    assert len(objects) > 10
    for name in objects:
        assert callable(resolve_name(f"fedcontext.{name.removeprefix('fc.')}"))


def test_the_new_names_of_the_changelog_exist():
    """The right column of the migration table: public names by ``fc.``, modules by their full name."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    table = text.partition("### Migration")[2].partition("\n## ")[0]
    new = [row.split(" | ")[1] for row in table.splitlines() if row.startswith("| `")]
    names = {name for cell in new for name in re.findall(r"\bfc\.(\w+)", cell)}
    assert len(names) > 8
    assert [name for name in names if not hasattr(fc, name)] == []
    for cell in new:
        for name in re.findall(r"`(fedcontext(?:\.\w+)+)", cell):
            parent, _, last = name.rpartition(".")
            assert hasattr(import_module(parent), last) or import_module(name)


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_needs_no_other_site(tmp_path):
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    commands = (tmp_path / "generated" / "cli.html").read_text("utf-8")
    for command in ("run", "compare", "report", "export", "algorithms", "data fetch"):
        assert f"fedcontext {command}" in commands
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text("utf-8"))
        assert loaded == [], page.name
    assert "<math" in (tmp_path / "guide" / "rules.html").read_text("utf-8")
    api = (tmp_path / "guide" / "api.html").read_text("utf-8")
    for name in ("fedcontext.flower.ContextualStrategy", "fedcontext.engines.torch.engine.TorchEngine"):
        assert f'id="{name}"' in api
    assert "type: ignore" not in api
    assert "Args:" not in api
