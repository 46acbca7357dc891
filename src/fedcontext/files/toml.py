"""Reading settings from TOML files, and writing them, for which Python has no function."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcontext.errors import FedcontextError

MAX_BYTES = 2**14  # of a file with settings; `tomllib` needs memory for the square of a dotted name's length


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        return tomllib.loads(content.decode("utf-8"))
    except RecursionError:
        raise FedcontextError(f"{path}: cannot be read (it is nested too deeply)") from None
    except OSError as error:
        hint = "" if path.suffix == ".toml" else "; give a .toml file of settings, or a data set as --dataset NAME"
        raise FedcontextError(f"{path}: cannot be read ({error.strerror}){hint}") from None
    except ValueError as error:
        hint = ": records are no settings, give the .toml file beside them" if path.suffix == ".jsonl" else ""
        raise FedcontextError(f"{path}: cannot be read ({error}){hint}") from None


def to_toml(settings: Mapping[str, Any]) -> str:
    """Return settings as TOML, one per line; None is omitted, for TOML has no null.

    >>> print(to_toml({"seeds": [0, 1], "dataset": "mnist"}), end="")
    seeds = [0, 1]
    dataset = "mnist"
    """
    return "".join(f"{_key(name)} = {_value(value)}\n" for name, value in settings.items() if value is not None)


def _key(name: str) -> str:
    return name if name.isascii() and name.replace("_", "").replace("-", "").isalnum() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{_key(key)} = {_value(child)}" for key, child in value.items() if child is not None)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(child) for child in value) + "]"
    return json.dumps(value)
