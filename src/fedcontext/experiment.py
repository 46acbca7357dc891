"""Everything that defines a run: the settings, their published defaults, and the TOML file that repeats it."""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from fedcontext.algorithms import ALGORITHMS, Averaging
from fedcontext.errors import FedcontextError, positive

# Learning rates and rounds published with FedProx for each data set; a LEAF folder gets FEMNIST's.
LEARNING_RATES = {"synthetic": 0.01, "mnist": 0.03, "femnist": 0.003, "leaf": 0.003}
WHOLE = {"seed": 0, "data_seed": 0, "rounds": 1, "devices_per_round": 1, "batch_size": 1, "eval_every": 1}  # least
NUMBERS = ("mu", "deadline", "over_select", "momentum", "weight_decay", "clip")
ROUNDS = {"synthetic": 200, "mnist": 100, "femnist": 200, "leaf": 200}


@dataclass(frozen=True)
class Experiment:
    """One run: a data set, an algorithm and all that decides what happens. Defaults are the paper's.

    >>> Experiment(dataset="mnist").learning_rate
    0.03
    """

    dataset: str = "synthetic-1-1"
    algorithm: str = "fedavg-contextual"
    rounds: int = None  # type: ignore[assignment]  # None, until it is settled: as published for the data set
    seed: int = 0
    data_seed: int = 0
    devices_per_round: int = 10
    probes: int | Literal["cohort", "all"] = "all"
    pool: int | Literal["all"] = "all"  # devices beside the cohort for the expected rules; N: full participation
    epochs: tuple[int, int] = (1, 20)
    batch_size: int = 10
    learning_rate: float = None  # type: ignore[assignment]  # likewise
    mu: float = 0.1
    smoothness: float | str = "1/lr"
    averaging: Averaging = "mean"
    probe_averaging: Averaging = "samples"
    fleet: str = "edge"
    deadline: float = 0.0  # seconds; 0: wait for everyone
    over_select: float = 0.0
    eval_every: int = 1
    engine: str = "auto"  # fast where its extra is installed, else reference; module for other models
    model: str = "softmax"  # logistic (the same), mlp, cnn-small, cnn or resnet18: engine "torch"
    momentum: float = 0.0  # this and the next two: for the module engine
    weight_decay: float = 0.0
    clip: float = 0.0  # the largest norm of a batch's gradient; 0: any
    device: str = "auto"  # where that engine computes: cpu, cuda; auto is a GPU where there is one

    def __post_init__(self) -> None:
        for name, value in _settled(self).items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """Return what files of this run are called: other settings, another name."""
        chosen = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        digest = hashlib.sha256(repr(chosen).encode()).hexdigest()[:8]
        return f"{re.sub('[^A-Za-z0-9.]+', '-', self.dataset)}-{self.algorithm}-seed{self.seed}-{digest}"


def settings_from_toml(path: Path) -> dict[str, Any]:
    """Return the settings that a TOML file gives, checked against the names of `Experiment`'s fields."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FedcontextError(f"{path}: cannot be read ({error})") from None
    known = {field.name for field in fields(Experiment)} | {"algorithms", "seeds"}
    if unknown := settings.keys() - known:
        raise FedcontextError(
            f"{path}: unknown settings {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}"
        )
    return settings


def _settled(given: Experiment) -> dict[str, Any]:
    """Return every setting in its plain form, or refuse it: 'auto' and None resolved, ranges and numbers read."""
    settings = {field.name: getattr(given, field.name) for field in fields(given)}
    for name in ("dataset", "algorithm", "fleet", "engine", "model", "device"):
        if not isinstance(settings[name], str):
            raise FedcontextError(f"{name} must be a word, got {settings[name]!r}")
    if given.algorithm not in ALGORITHMS:
        raise FedcontextError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {given.algorithm!r}")
    for name in ("averaging", "probe_averaging"):
        if settings[name] not in ("mean", "samples"):
            raise FedcontextError(f"{name} must be mean or samples, got {settings[name]!r}")
    kind = given.dataset.split("-")[0].split(":")[0]
    for name, published, else_ in (("rounds", ROUNDS, 100), ("learning_rate", LEARNING_RATES, 0.01)):
        if settings[name] is None:
            settings[name] = published.get(kind, else_)
    if given.engine == "auto":
        deep = given.model not in ("softmax", "logistic") or given.device not in ("auto", "cpu")
        settings["engine"] = "torch" if deep else "numba" if find_spec("numba") else "reference"
    settings |= {name: _whole(name, settings[name], least) for name, least in WHOLE.items()}
    settings |= {name: _number(name, settings[name]) for name in NUMBERS}
    settings |= {
        name: _whole(name, settings[name], 0) for name in ("probes", "pool") if settings[name] not in ("all", "cohort")
    }
    settings["learning_rate"] = positive("learning_rate", settings["learning_rate"])
    if settings["smoothness"] not in ("1/lr", "measured"):
        settings["smoothness"] = positive("smoothness", settings["smoothness"])
    return settings | {"epochs": _range(given.epochs)}


def _range(given: Any) -> tuple[int, int]:
    """Return the lowest and the highest number of epochs: of a pair, a number, or a text like 1..20."""
    low, _, high = given.partition("..") if isinstance(given, str) else (given, "", given)
    pair = tuple(given) if isinstance(given, list | tuple) else (low, high or low)
    if len(pair) != 2:
        raise FedcontextError(f"epochs must be a number or a range like 1..20, got {given!r}")
    bounds = _whole("epochs", pair[0], 1), _whole("epochs", pair[1], 1)
    if bounds[0] > bounds[1]:
        raise FedcontextError(f"epochs must be a range like 1..20 with 1 <= low <= high, got {bounds[0]}..{bounds[1]}")
    return bounds


def _whole(name: str, value: Any, least: int) -> int:
    try:
        number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is None or number < least:
        raise FedcontextError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise FedcontextError(f"{name} must be 0 or more, got {value!r}")
    return float(value)
