"""Settings as TOML text. Python reads TOML and cannot write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def to_toml(settings: Mapping[str, Any]) -> str:
    """Return settings as TOML, one line each; None is left out.

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
