"""The settings of a run. `Experiment` is the one place for their defaults, checks and help texts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from fedcontext.algorithms import ALGORITHMS, similar_algorithm
from fedcontext.compression.codec import IDENTITY, Codec
from fedcontext.datasets import NAMES
from fedcontext.engines.base import ENGINES
from fedcontext.errors import FedcontextError, did_you_mean, nearest, shown
from fedcontext.faults.attacks import ATTACKS
from fedcontext.faults.faults import FAULTS
from fedcontext.files.toml import read_toml
from fedcontext.fleet import PROFILES
from fedcontext.measurement.combination import COMBINATIONS, Combination
from fedcontext.measurement.defences import OFF, Defences
from fedcontext.rules.base import Averaging
from fedcontext.rules.server import ADAPTIVE_RATE
from fedcontext.settings import Check, integer, integer_range, number, one_of, setting, shares_by_name, text

# Rounds and learning rates published with FedProx for each data set; a LEAF folder gets FEMNIST's.
ROUNDS = {"synthetic": 200, "mnist": 100, "femnist": 200, "leaf": 200}
LEARNING_RATES = {"synthetic": 0.01, "mnist": 0.03, "femnist": 0.003, "leaf": 0.003}
MAX_SEED = 2**63 - 1
MAX_EPOCHS = 10**6
PUBLISHED = "as published for the data set"
AVERAGING = one_of(("mean", "samples"))
SAFE = Defences()
GRADIENT_BITS = Check(
    "INTEGER", "1 to 8, 32", lambda value: Codec(integer(1, most=IDENTITY.bits).convert(value)).bits, ("auto",)
)


@dataclass(frozen=True)
class Experiment:
    """One run: the data set, the algorithm and everything else that decides its result.

    Where settings are given by name, as in `train` and TOML files, ``defences`` stands for all limits of `Defences`.

    >>> Experiment(dataset="mnist").learning_rate
    0.03
    >>> Experiment(smoothness="steep")
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: smoothness must be a positive number, 1/lr or measured, got 'steep'
    """

    dataset: str = setting("synthetic-1-1", text("NAME"), f"Data set: {', '.join(NAMES)}")
    algorithm: str = setting(
        "fedavg-memory",
        one_of(ALGORITHMS, "NAME", similar_algorithm),
        "Algorithm; `fedcontext algorithms` lists all",
    )
    rounds: int = setting(None, integer(1), "Number of rounds", default_text=PUBLISHED, aliases=("num_rounds",))
    seed: int = setting(0, integer(0, most=MAX_SEED), "Seed of device selection, local epochs, batch order and fleet")
    data_seed: int = setting(0, integer(0, most=MAX_SEED), "Seed of generating or partitioning the data")
    devices_per_round: int = setting(
        10,
        integer(1),
        "Devices that train in each round (K); left out, all of mnist-N or synthetic-A-B-N with a smaller N",
        aliases=("k", "cohort", "clients_per_round"),
    )
    probes: int | Literal["cohort", "all"] = setting(
        20,
        integer(1, "cohort", "all"),
        "Devices that report their gradient in each round (K2); cohort is the devices that train",
        aliases=("k2", "K2"),
    )
    gradient_bits: int | Literal["auto"] = setting(
        "auto",
        GRADIENT_BITS,
        "Bits an entry of the probes' gradients on the uplink, 1 to 8 or 32 (exact); auto is 2 or 3 for memory, else 32",
    )
    exchanges: int = setting(
        2,
        integer(1, most=2),
        "Exchanges with the probes in a round: the second corrects the step of the rule with memory, 1 leaves it out",
    )
    sketch: int = setting(
        0,
        integer(0),
        "Numbers that a probe sends in place of its gradient, for the contextual rules; 0 sends the gradient",
    )
    pool: int | Literal["all"] = setting(
        "all", integer(0, "all"), "Devices that train beside the cohort, for the expected rules"
    )
    epochs: tuple[int, int] = setting(
        (1, 20),
        integer_range(1, MAX_EPOCHS),
        "Local epochs, fixed or drawn uniformly from a range",
        aliases=("local_epochs",),
    )
    batch_size: int = setting(10, integer(1), "Mini-batch size of local SGD")
    learning_rate: float = setting(
        None, number(positive=True), "Learning rate of local SGD", default_text=PUBLISHED, aliases=("lr", "eta_l")
    )
    mu: float = setting(0.1, number(), "Proximal constant μ of FedProx and FOLB, α of FedDyn", aliases=("proximal_mu",))
    server_learning_rate: float | Literal["default"] = setting(
        "default",
        number("default", positive=True),
        f"Factor of the server's step; the default is {ADAPTIVE_RATE} for FedAdagrad, FedAdam and FedYogi, else 1",
        aliases=("server_lr", "eta"),
    )
    server_momentum: float = setting(
        0.9, number(below=1), "Momentum of FedAvgM, β₁ of FedAdam and FedYogi", aliases=("beta1", "beta_1")
    )
    smoothness: float | str = setting(
        "1/lr",
        number("1/lr", "measured", positive=True),
        "Smoothness β of the bound; 1/lr is the paper's choice, measured is the largest curvature of the loss",
        aliases=("beta",),
    )
    averaging: Averaging = setting(
        "mean",
        AVERAGING,
        "Averaging of updates in FedAvg and FedProx: plain mean, or by sample counts; the rule with memory uses the mean",
    )
    gradient_averaging: Combination = setting(
        "mean",
        one_of(COMBINATIONS),
        "Combination of the probes' gradients; all but mean tolerate some Byzantine probes and have one exchange a round; trust needs samples on the server",
    )
    byzantine: float = setting(
        0.3,
        number(most=0.49),
        "Assumed share of Byzantine devices, in krum, multi-krum and trimmed-mean",
        aliases=("num_malicious_nodes", "beta_trim"),
    )
    probe_averaging: Averaging = setting(
        "samples",
        AVERAGING,
        "Averaging of the probes' gradients: plain mean, or by sample counts; the rule with memory uses the mean",
    )
    max_gradient: float = setting(
        SAFE.max_gradient, number(), "Gradients are clipped to this multiple of the probes' median norm; 0 disables"
    )
    max_update: float = setting(
        SAFE.max_update, number(), "Updates are clipped to this multiple of the cohort's median norm; 0 disables"
    )
    max_samples: float = setting(
        SAFE.max_samples, number(), "Sample counts weigh at most this multiple of their median; 0 disables"
    )
    max_step: float = setting(
        SAFE.max_step, number(), "Steps of averaging rules are at most this multiple of the median update; 0 disables"
    )
    max_descent: float = setting(
        SAFE.max_descent,
        number(),
        "Gradients whose cosine with the last step is this many spreads below the median are not used (memory); 0 disables",
    )
    max_concavity: float = setting(
        SAFE.max_concavity,
        number(),
        "Gradients whose difference has a negative cosine with the last step above this multiple of the median are not used (memory); 0 disables",
    )
    max_uphill: float = setting(
        SAFE.max_uphill,
        number(),
        "Updates with a larger cosine with the gradient of the same device are not used (memory); 0 disables",
    )
    outlier: float = setting(
        SAFE.outlier,
        number(),
        "Devices whose gradient or update is longer than this multiple of the upper median are left out, as for NaN; 0 disables",
    )
    fleet: str = setting("edge", one_of(PROFILES), "Speeds and links of the devices")
    deadline: float = setting(0, number(), "Seconds after which an exchange of a round ends; 0 waits for every device")
    over_select: float = setting(0, number(), "Fraction of additional devices to select; the first replies are kept")
    faults: str = setting(
        "none",
        shares_by_name(FAULTS),
        "Chance of each fault of a device in a round, such as dropout=0.3,nan=0.1; `fedcontext faults` lists all",
    )
    attack: str = setting(
        "none",
        shares_by_name(ATTACKS),
        "Share of Byzantine devices for each attack, such as sign-flip=0.2; `fedcontext faults` lists all",
        aliases=("attacks",),
    )
    eval_every: int = setting(1, integer(1), "Evaluate every n-th round and the last")
    engine: str = setting(
        "auto",
        one_of(("auto", *ENGINES)),
        "Training engine; auto is torch for deep models and GPUs, else numba if installed, else reference",
    )
    model: str = setting(
        "softmax",
        text(),
        "Model: softmax, logistic (the same), or with engine torch mlp, cnn-tiny, cnn-small, cnn or resnet18",
    )
    momentum: float = setting(0, number(below=1), "Momentum of local SGD (engine torch)")
    weight_decay: float = setting(0, number(), "Weight decay of local SGD (engine torch)")
    clip: float = setting(0, number(), "Largest norm of a batch's gradient (engine torch); 0 disables clipping")
    device: str = setting(
        "auto", text(), "Compute device of engine torch: cpu, cuda, or auto for a GPU if there is one"
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None and each.default is None:
                value = _published(each.name, self.dataset)
            object.__setattr__(self, each.name, each.metadata["check"](each.name, value))
        if self.engine == "auto":
            object.__setattr__(self, "engine", _engine_for(self.model, self.device))
        _ = self.defences  # refuses multiples between 0 and 1

    @property
    def defences(self) -> Defences:
        """Return the bounds on what one device can do."""
        return Defences(**{each.name: getattr(self, each.name) for each in fields(Defences)})

    @property
    def name(self) -> str:
        """Return the name of this run's files, which differs between different settings."""
        chosen = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        digest = hashlib.sha256(repr(chosen).encode()).hexdigest()[:8]
        return f"{re.sub('[^A-Za-z0-9.]+', '-', self.dataset)}-{self.algorithm}-seed{self.seed}-{digest}"


CHECKS: Mapping[str, Check] = {each.name: each.metadata["check"] for each in fields(Experiment)}
SETTINGS = tuple(CHECKS)
SETTING_OF = {alias: each.name for each in fields(Experiment) for alias in (each.name, *each.metadata["aliases"])}


def checked(name: str, value: Any) -> Any:
    """Return a value as `Experiment` stores it in the setting ``name``; raise an error if it accepts no such value.

    >>> checked("epochs", "1..20")
    (1, 20)
    """
    return CHECKS[name](name, value)


def experiment_from(settings: Mapping[str, Any]) -> Experiment:
    """Return the experiment with these settings, after checking their names.

    Where devices_per_round is left out and the name of the data says that there are fewer devices, all of them train.

    >>> experiment_from({"dataset": "mnist", "rounds": "5"}).rounds, experiment_from({"dataset": "mnist-8"}).devices_per_round
    (5, 8)
    """  # noqa: W505
    settings = with_limits(settings)
    check_names(settings)
    count = re.fullmatch(r"(?:mnist|synthetic-[\d.]+-[\d.]+)-(\d{1,18})", str(settings.get("dataset", "")))
    if count and 0 < int(count[1]) < Experiment.devices_per_round:
        settings.setdefault("devices_per_round", int(count[1]))
    return Experiment(**settings)


def with_limits(settings: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Return settings with each limit on its own in place of ``defences``: `Defences`, or None or "none" for no limit.

    Limits that are given beside it override it. ``source`` is put before the message of an error.

    >>> with_limits({"defences": None, "outlier": 50})["max_update"], with_limits({"defences": None, "outlier": 50})["outlier"]
    (0.0, 50)
    """  # noqa: W505
    if "defences" not in settings:
        return dict(settings)
    given = settings["defences"]
    limits = OFF if given is None or (isinstance(given, str) and given == "none") else given
    if not isinstance(limits, Defences):
        raise FedcontextError(
            f"{source}defences must be none, or fc.Defences(...) in Python, got {shown(given)}; "
            f"the single limits are {', '.join(each.name for each in fields(Defences))}"
        )
    return {**asdict(limits), **{name: value for name, value in settings.items() if name != "defences"}}


def check_names(names: Collection[str], known: Collection[str] = SETTINGS, source: str = "") -> None:
    """Raise an error for a name that is not a setting, with the nearest one, or where all are listed.

    >>> check_names(["lr"])
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: unknown setting 'lr', did you mean learning_rate?
    """
    for name in names:
        if name not in known:
            similar = nearest(name, {**dict.fromkeys(known), **SETTING_OF})
            hint = did_you_mean(SETTING_OF.get(similar, similar))
            every = "" if similar else " `fedcontext run --help` lists all"
            raise FedcontextError(f"{source}unknown setting {shown(name)}{hint}{every}")


def settings_from_toml(path: Path, known: Collection[str] = SETTINGS) -> dict[str, Any]:
    """Return the settings in a TOML file, their names checked."""
    settings = with_limits(read_toml(path), source=f"{path}: ")
    check_names(settings, known, source=f"{path}: ")
    return settings


def _published(name: str, dataset: str) -> float:
    kind = re.split("[-:]", dataset)[0]
    return ROUNDS.get(kind, 100) if name == "rounds" else LEARNING_RATES.get(kind, 0.01)


def _engine_for(model: str, device: str) -> str:
    if model not in ("softmax", "logistic") or device not in ("auto", "cpu"):
        return "torch"
    return "numba" if find_spec("numba") else "reference"
