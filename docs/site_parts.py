"""Generated parts of the site: command reference, table of columns, descriptions of fields; and formulas as MathML."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import typer.main
from docutils import nodes
from latex2mathml.converter import convert

from fedcontext.cli.app import app
from fedcontext.results.export import SCHEMA

SHORTER = {  # patterns in the signatures of autodoc, and what to show instead; in this order
    r"TypeAliasForwardRef\('(\w+)'\)": r"\1",
    r"~(?:\w+\.)+": "",
    r"ndarray\[tuple\[Any, \.\.\.\], dtype\[\w+\]\]": "ndarray",
    r"<function .*?>+|<factory>": "...",
}
TOOLS = re.compile(r"(type|noqa|pragma)\b")  # comments for linters and type checkers


def cli_reference() -> str:
    """Return a page with all commands and their options, generated from the Typer app."""
    parts = ["# Command line", "Generated from the program: `fedcontext COMMAND --help` prints the same."]
    return "\n\n".join([*parts, *_commands("fedcontext", typer.main.get_command(app))]) + "\n"


def _commands(path: str, command: Any) -> list[str]:
    inner = getattr(command, "commands", None)
    if inner:
        return [part for name, child in inner.items() for part in _commands(f"{path} {name}", child)]
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    usage = " ".join([path, *(_argument(each) for each in arguments), *(["[OPTIONS]"] if options else [])])
    about = (command.help or "").strip()
    return [f"## {path}", about, f"```\n{usage}\n```", _table([*arguments, *options])]


def _argument(argument: Any) -> str:
    name = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _table(params: list[Any]) -> str:
    rows = [f"| `{_name(each)}` | {_cell(_help(each))} |" for each in params]
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else ""


def _name(param: Any) -> str:
    return ", ".join(param.opts) if param.param_type_name == "option" else param.name.upper()


def _help(param: Any) -> str:
    """Return the help with the accepted values, which the terminal shows as a placeholder."""
    values = f" Values: {param.metavar.replace('|', ', ')}." if param.metavar and "|" in param.metavar else ""
    return (param.help or "").replace(" [default", f"{values} [default", 1) if values else param.help or ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("[default", "\\[default").replace("\n", " ").replace("*", "\\*")


def table_schema() -> str:
    """Return the columns of the exported table."""
    rows = [f"| `{name}` | {_cell(about)} |" for name, about in SCHEMA.items()]
    return "\n".join(["| column | what it holds |", "|---|---|", *rows]) + "\n"


def field_descriptions(kind: type) -> dict[str, str]:
    """Return the description of a dataclass's fields: the help of a setting, or the comment beside the field."""
    settings = {each.name: each.metadata for each in dataclasses.fields(kind) if "help" in each.metadata}
    described = {
        name: f"{about['help']}. Accepts {about['check'].accepts}; default: {about['default']}."
        for name, about in settings.items()
    }
    names = {each.name for each in dataclasses.fields(kind)}
    comments = re.findall(r"^    (\w+): [^#\n]*#\s*(.+)$", inspect.getsource(kind), re.MULTILINE)
    return described or {name: text for name, text in comments if name in names and not TOOLS.match(text)}


def escaped(lines: list[str]) -> list[str]:
    """Return the lines of a docstring with bars escaped, which would be substitutions in reStructuredText."""
    return [line if line.lstrip().startswith(">>>") else line.replace("|", "\\|") for line in lines]


def short(signature: str | None) -> str | None:
    """Return a signature without module paths, array types in full, and the addresses of default functions."""
    for pattern, text in SHORTER.items():
        signature = signature and re.sub(pattern, text, signature)
    return signature


def inline_math(self: Any, node: Any) -> None:
    """Write an inline formula."""
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block_math(self: Any, node: Any) -> None:
    """Write a displayed formula."""
    self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode
