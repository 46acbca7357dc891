"""Everything that defines a run: the settings, their published defaults, and the TOML file that repeats it."""

from __future__ import annotations

import dataclasses
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
ROUNDS = {"synthetic": 200, "mnist": 100, "femnist": 200, "leaf": 200}


@dataclass(frozen=True)
class Experiment:
    """One run: a data set, an algorithm and all that decides what happens. Defaults are the paper's.

    >>> Experiment(dataset="mnist").learning_rate
    0.03
    """

    dataset: str = "synthetic-1-1"
    algorithm: str = "fedavg-contextual"
    rounds: int = 0  # 0: as published for the data set
    seed: int = 0
    data_seed: int = 0
    devices_per_round: int = 10
    k2: int | Literal["N"] = "N"  # probes; 0: the cohort's own gradients
    pool: int | Literal["N"] = "N"  # devices beside the cohort for the expected rules; N: full participation
    epochs: tuple[int, int] = (1, 20)
    batch_size: int = 10
    learning_rate: float = 0.0  # 0: as published for the data set
    mu: float = 0.1
    smoothness: float | str = "1/lr"
    averaging: Averaging = "mean"
    probe_averaging: Averaging = "samples"
    fleet: str = "edge"
    deadline: float = 0.0  # seconds; 0: wait for everyone
    over_select: float = 0.0
    eval_every: int = 1
    engine: str = "auto"  # fast where its extra is installed, else reference; module for other models
    model: str = "softmax"  # logistic (the same), cnn or resnet18: for the module engine
    momentum: float = 0.0  # this and the next two: for the module engine
    weight_decay: float = 0.0
    clip: float = 0.0  # the largest norm of a batch's gradient; 0: any
    device: str = "auto"  # where that engine computes: cpu, cuda; auto is a GPU where there is one

    def __post_init__(self) -> None:
        kind = self.dataset.split("-")[0].split(":")[0]
        if self.algorithm not in ALGORITHMS:
            raise FedcontextError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {self.algorithm!r}")
        _whole("seed", self.seed, 0)
        _whole("data_seed", self.data_seed, 0)
        _whole("rounds", self.rounds, 0)
        _whole("devices_per_round", self.devices_per_round, 1)
        _whole("batch_size", self.batch_size, 1)
        _whole("eval_every", self.eval_every, 1)
        for name in ("k2", "pool"):
            if getattr(self, name) != "N":
                _whole(name, getattr(self, name), 0)
        for name in ("averaging", "probe_averaging"):
            if getattr(self, name) not in ("mean", "samples"):
                raise FedcontextError(f"{name} must be mean or samples, got {getattr(self, name)!r}")
        object.__setattr__(self, "epochs", tuple(self.epochs))
        object.__setattr__(self, "rounds", self.rounds or ROUNDS.get(kind, 100))
        object.__setattr__(self, "learning_rate", self.learning_rate or LEARNING_RATES.get(kind, 0.01))
        if self.engine == "auto":
            deep = self.model not in ("softmax", "logistic") or self.device not in ("auto", "cpu")
            plain = "fast" if find_spec("numba") else "reference"
            object.__setattr__(self, "engine", "module" if deep else plain)
        positive("learning_rate", self.learning_rate)
        if not 0 <= self.deadline < float("inf"):
            raise FedcontextError(f"deadline must be 0 (none) or positive, got {self.deadline}")

    @property
    def name(self) -> str:
        """Return what files of this run are called: other settings, another name."""
        chosen = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        digest = hashlib.sha256(repr(chosen).encode()).hexdigest()[:8]
        return f"{re.sub('[^A-Za-z0-9.]+', '-', self.dataset)}-{self.algorithm}-seed{self.seed}-{digest}"


def to_toml(experiment: Experiment) -> str:
    """Return the file that repeats ``experiment``.

    >>> print(to_toml(Experiment(rounds=5)).splitlines()[2])
    rounds = 5
    """
    return "".join(f"{key} = {_toml(value)}\n" for key, value in dataclasses.asdict(experiment).items())


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


def _toml(value: object) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise FedcontextError(f"{name} must be a whole number of at least {least}, got {value!r}")
