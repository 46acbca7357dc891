"""Parts of the site that the program itself knows best: its commands, its table's columns; and formulas as MathML."""

from __future__ import annotations

from typing import Any

import typer.main
from docutils import nodes
from latex2mathml.converter import convert

from fedcontext.cli import app
from fedcontext.export import SCHEMA


def cli_reference() -> str:
    """Return a page about every command, from the program that parses them."""
    parts = ["# Command line", "Written from the program itself: `fedcontext --help` says the same."]
    return "\n\n".join([*parts, *_commands("fedcontext", typer.main.get_command(app))]) + "\n"


def _commands(path: str, command: Any) -> list[str]:
    inner = getattr(command, "commands", None)
    if inner:
        return [part for name, child in inner.items() for part in _commands(f"{path} {name}", child)]
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    usage = " ".join([path, *(_argument(each) for each in arguments), *(["[OPTIONS]"] if options else [])])
    about = (command.help or "").strip()
    return [f"## {path}", about, f"```\n{usage}\n```", *_table("argument", arguments), *_table("option", options)]


def _argument(argument: Any) -> str:
    name = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _table(heading: str, params: list[Any]) -> list[str]:
    if not params:
        return []
    rows = [f"| `{_name(each)}` | {_cell(each.help or '')} |" for each in params]
    return ["\n".join([f"| {heading} | |", "|---|---|", *rows])]


def _name(param: Any) -> str:
    return ", ".join(param.opts) if param.param_type_name == "option" else param.name.upper()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("[default", "\\[default").replace("\n", " ").replace("*", "\\*")


def table_schema() -> str:
    """Return the columns of the exported table."""
    rows = [f"| `{name}` | {_cell(about)} |" for name, about in SCHEMA.items()]
    return "\n".join(["| column | what it holds |", "|---|---|", *rows]) + "\n"


def inline_math(self: Any, node: Any) -> None:
    """Write a formula in a line of text."""
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block_math(self: Any, node: Any) -> None:
    """Write a formula on its own."""
    self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode
