"""From settings and objects to a simulation: `prepare`, `simulate` and `train`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedcontext.algorithms import Algorithm, Hyperparameters, algorithm_named, with_server_rate
from fedcontext.arrays.tree import Structure
from fedcontext.coding import coding_for
from fedcontext.datasets import FederatedData, load_dataset
from fedcontext.datasets.federated import full_participation, gather
from fedcontext.engines.base import Engine, EngineOptions, engine_named
from fedcontext.errors import FedcontextError, positive, shown, warn_user
from fedcontext.experiment import Experiment, checked, experiment_from
from fedcontext.faults.disturbance import disturbance_of
from fedcontext.fleet import PROFILES, make_fleet
from fedcontext.local_sgd import sgd
from fedcontext.plan import Stream, generator
from fedcontext.records import RoundRecord
from fedcontext.rules.base import AnyRule, shown_rule
from fedcontext.settings import parse_shares
from fedcontext.simulation import Simulation
from fedcontext.smoothness import measured_smoothness
from fedcontext.state import State

USED_WITH_RULES = ("learning_rate", "batch_size", "momentum", "weight_decay", "clip", "server_learning_rate")
ROOT_SAMPLES = 100  # of the server's own set, as in the paper on FLTrust


@dataclass(frozen=True)
class Trained:
    """A finished run: its final params, and the record of every round."""

    params: Structure
    records: list[RoundRecord]


def prepare(
    experiment: Experiment,
    *,
    data: FederatedData | None = None,
    algorithm: Algorithm | AnyRule | None = None,
    engine: Engine | None = None,
    model: Any = None,
) -> Simulation:
    """Return ``experiment`` ready to run; objects given here take the place of what its settings name.

    Args:
        experiment: the settings.
        data: your own data, such as `federate` makes.
        algorithm: your own `Algorithm`, or a rule for FedAvg's local training. A setting that it overrules, such as the
            learning rate of an `Algorithm`, must be left at its default or be the same.
        engine: your own `Engine`, already made for the data.
        model: a ``torch.nn.Module``, or a function that makes one, for the PyTorch engine.
    """
    if engine is not None and model is not None:
        raise FedcontextError("give an engine or a model, not both: an engine already has its model")
    check_inputs(experiment, data)
    data = data or load_dataset(experiment.dataset, experiment.data_seed)
    if not len(data.test.labels):
        warn_user(f"data '{data.name}' has no test samples: records have an accuracy of 0")
    own_engine = engine is not None
    engine = engine or _engine(experiment, data, model)
    rate = algorithm.local.learning_rate if isinstance(algorithm, Algorithm) else experiment.learning_rate
    beta = _smoothness(experiment.smoothness, rate, engine, data)
    algorithm = _algorithm(experiment, algorithm, beta)
    rule, memory = algorithm.rule, "differences" in algorithm.rule.needs
    fleet = make_fleet(PROFILES[experiment.fleet], data.population, experiment.seed)
    _check_combination(algorithm, engine)
    if memory and experiment.averaging != "mean":
        warn_user(f"averaging has no effect on rule '{rule.name}', which uses the plain mean")
    _check_sketch(experiment.sketch, rule)
    coding = coding_for(experiment.gradient_bits, memory, experiment.probes == "cohort", experiment.sketch)
    beta = rule.smoothness or beta  # the bound is reported at the rule's own β
    disturbance = disturbance_of(
        experiment.seed,
        parse_shares(experiment.faults),
        parse_shares(experiment.attack),
        data,
        engine,
        rule.needs,
        by_samples=experiment.probe_averaging == "samples",
        make_engine=None if own_engine else lambda changed: _engine(experiment, changed, model),
    )
    root = _root(experiment, data, model) if rule.needs & {"root", "root gradient"} else None
    simulation = Simulation(experiment, data, engine, algorithm, fleet, beta, coding, disturbance, root)
    _check_participation(simulation)
    return simulation


def _check_participation(simulation: Simulation) -> None:
    """Raise an error for data made on demand if a round asks all devices."""
    plan, data = simulation.plan(1), simulation.data
    probes = np.arange(data.population) if simulation.algorithm.oracle else plan.probes
    for devices in (probes, np.union1d(plan.devices, plan.pool)):
        full_participation(data.train, devices)


def check_inputs(experiment: object, data: object) -> None:
    """Raise an error if ``experiment`` is no `Experiment`, or ``data`` neither `FederatedData` nor None.

    >>> check_inputs("mnist", None)
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: experiment must be an Experiment, such as fc.Experiment(dataset="mnist"), got 'mnist'
    """  # noqa: W505
    if not isinstance(experiment, Experiment):
        raise FedcontextError(
            f'experiment must be an Experiment, such as fc.Experiment(dataset="mnist"), got {shown(experiment)}'
        )
    if not isinstance(data, FederatedData | None):
        raise FedcontextError(f"data must be FederatedData, such as federate() makes, got {type(data).__name__}")


def _engine(experiment: Experiment, data: FederatedData, model: Any) -> Engine:
    if model is not None:
        if experiment.engine not in ("torch", Experiment(experiment.dataset).engine):  # chosen, and not the default
            raise _wrong_engine(experiment.engine)
        from fedcontext.engines.torch.engine import TorchEngine

        return TorchEngine(data, model, device=experiment.device, seed=experiment.seed)
    return engine_named(experiment.engine, data, EngineOptions(experiment.model, experiment.device, experiment.seed))


def _wrong_engine(name: str) -> FedcontextError:
    return FedcontextError(f"engine '{name}' cannot train a PyTorch module; use engine 'torch'")


def _root(experiment: Experiment, data: FederatedData, model: Any) -> Engine:
    """Return an engine on the server's own samples, drawn from all training samples: its one device is the server."""
    samples = data.evaluation_split
    count = min(ROOT_SAMPLES, len(samples.labels))
    rows = generator(experiment.seed, 0, Stream.ROOT).permutation(len(samples.labels))[:count]
    own = gather(samples.features, samples.labels, [rows])
    return _engine(experiment, FederatedData("root", own, own, data.classes), model)


def _check_combination(algorithm: Algorithm, engine: Engine) -> None:
    """Refuse what cannot work together: a rule with memory models its own step, so nothing may change it."""
    if "differences" in algorithm.rule.needs and (algorithm.server or algorithm.variates):
        changed_by = algorithm.server.name if algorithm.server else "control variates"
        raise FedcontextError(
            f"rule '{algorithm.rule.name}' cannot be followed by {changed_by}: it models its own step; "
            "use rule mean(), or leave the server learning rate at its default"
        )
    if algorithm.variates is None:
        return
    if not getattr(engine, "supports_corrections", False):
        raise FedcontextError(
            f"engine {type(engine).__name__} does not support the corrected gradients of algorithm '{algorithm.name}'; "
            "use engine 'reference', 'numba', 'ray' or 'torch'"
        )
    if algorithm.variates.plain_sgd and algorithm.local.momentum:
        raise FedcontextError(
            f"algorithm '{algorithm.name}' does not support momentum (got {algorithm.local.momentum}); use 0"
        )


def _check_sketch(sketch: int, rule: AnyRule) -> None:
    """Refuse sketches where more than slopes along the updates is needed of a gradient."""
    if sketch and (rule.needs & {"differences", "own gradients"} or getattr(rule, "gradients", "mean") != "mean"):
        raise FedcontextError(
            f"sketch gives slopes along the updates, and rule '{rule.name}' needs whole gradients; use sketch 0, or a "
            "contextual rule such as fedavg-contextual"
        )


def _smoothness(choice: float | str, learning_rate: float, engine: Engine, data: FederatedData) -> float:
    """Return β for a choice: a positive number, "1/lr" (the paper's), or "measured"."""
    if choice == "1/lr":
        return 1 / learning_rate
    if choice == "measured":
        return positive("measured smoothness", measured_smoothness(engine, data))
    return float(choice)


def _algorithm(experiment: Experiment, given: Algorithm | AnyRule | None, smoothness: float) -> Algorithm:
    if isinstance(given, Algorithm):
        _check_overruled(experiment, vars(given.local), f"Algorithm '{given.name}'")
        return given
    if given is not None and not isinstance(given, AnyRule):
        raise FedcontextError(
            f"algorithm must be a name, an Algorithm or a rule such as mean(), got {shown_rule(given)}"
        )
    hyperparameters = Hyperparameters(
        learning_rate=experiment.learning_rate,
        smoothness=smoothness,
        batch_size=experiment.batch_size,
        mu=experiment.mu,
        server_learning_rate=None if experiment.server_learning_rate == "default" else experiment.server_learning_rate,
        server_momentum=experiment.server_momentum,
        averaging=experiment.averaging,
        gradients=experiment.gradient_averaging,
        byzantine=experiment.byzantine,
    )
    if given is None:
        algorithm = algorithm_named(experiment.algorithm, hyperparameters)
    else:
        _check_overruled(
            experiment, {name: getattr(experiment, name) for name in USED_WITH_RULES}, f"rule '{given.name}'"
        )
        local = sgd(experiment.learning_rate, experiment.batch_size)
        algorithm = with_server_rate(Algorithm(given.name, local, given), hyperparameters)
    extra = {name: getattr(experiment, name) for name in ("momentum", "weight_decay", "clip")}
    return replace(algorithm, local=replace(algorithm.local, **extra))


def _check_overruled(experiment: Experiment, used: Mapping[str, Any], by: str) -> None:
    """Raise an error for a setting of an algorithm that has no effect beside the object given in its place."""
    usual = Experiment(experiment.dataset)
    for name in (
        *vars(sgd(1.0)),
        "server_learning_rate",
        "server_momentum",
        "averaging",
        "gradient_averaging",
        "byzantine",
    ):
        value = getattr(experiment, name)
        if value not in (getattr(usual, name), used.get(name)):
            own = f"has {used[name]}" if name in used else "does not use it"
            raise FedcontextError(f"{name} is {value} in the settings, but the {by} given {own}: leave the setting out")


def simulate(
    experiment: Experiment | None = None,
    *,
    data: FederatedData | None = None,
    algorithm: Algorithm | AnyRule | str | None = None,
    engine: Engine | str | None = None,
    model: Any = None,
    **settings: Any,
) -> Iterator[tuple[State, RoundRecord]]:
    """Yield the state and the record of every round of an `Experiment`, or of the one that ``settings`` describe.

    ``algorithm``, ``engine`` and ``model`` are names of settings, or objects as in `prepare`. Unless set, at most all
    devices of ``data`` train in a round. To continue after a state, use `Simulation.run` of what `prepare` returns.

    >>> import fedcontext as fc
    >>> records = [record for _, record in fc.simulate(dataset="synthetic-iid", algorithm="fedavg", rounds=3)]
    >>> [record.number for record in records], records[-1].loss < records[0].loss
    ([1, 2, 3], True)
    """
    named = {"algorithm": algorithm, "engine": engine, "model": model}
    settings |= {name: value for name, value in named.items() if isinstance(value, str)}
    check_inputs(Experiment() if experiment is None else experiment, data)
    if experiment is not None and settings:
        raise FedcontextError("give an Experiment or settings, not both")
    if data is not None and settings.setdefault("dataset", data.name) != data.name:
        raise FedcontextError(f"give data or a dataset, not both: data is {data.name!r}, got {settings['dataset']!r}")
    if experiment is None and data is not None:
        settings.setdefault("devices_per_round", min(Experiment.devices_per_round, data.population))
    if model is not None and not isinstance(model, str):
        name = checked("engine", settings.get("engine", "auto"))
        if name not in ("auto", "torch"):
            raise _wrong_engine(name)
    objects = {name: None if isinstance(value, str) else value for name, value in named.items()}
    return prepare(experiment or experiment_from(settings), data=data, **objects).run()


def train(experiment: Experiment | None = None, **given: Any) -> Trained:
    """Return the final params and the records of a simulation; it takes what `simulate` takes.

    >>> import fedcontext as fc
    >>> result = fc.train(dataset="synthetic-iid", algorithm="fedavg", rounds=2)
    >>> result.params.shape, len(result.records)
    ((61, 10), 2)
    """
    records = []
    for after, record in simulate(experiment, **given):
        records.append(record)
        params = after.params
    return Trained(params, records)
