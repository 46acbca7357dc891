"""Named algorithms: how devices train, and how the server aggregates. To add one, add a line to the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from fedcontext import variates
from fedcontext.errors import FedcontextError, nearest, positive, unknown_value_error
from fedcontext.local_sgd import LocalSGD, proximal, sgd
from fedcontext.measurement.combination import Combination
from fedcontext.rules import averaging, robust, server
from fedcontext.rules.base import AnyRule, Averaging, CoordinateRule, Need, Rule, corrects
from fedcontext.rules.contextual import contextual, expected_contextual
from fedcontext.rules.memory import contextual_memory
from fedcontext.rules.server import ServerOptimizer, server_sgd
from fedcontext.variates import ControlVariates


@dataclass(frozen=True)
class Hyperparameters:
    """The settings that algorithms are made from; each algorithm reads the ones it needs."""

    learning_rate: float
    smoothness: float  # β of the bound; the paper's choice is 1 / learning_rate
    batch_size: int = 10
    mu: float = 0.1
    server_learning_rate: float | None = None  # None is the algorithm's own default
    server_momentum: float = 0.9  # of FedAvgM; β₁ of FedAdam and FedYogi
    averaging: Averaging = "mean"
    gradients: Combination = "mean"  # how the probes' gradients are combined
    byzantine: float = 0.3  # share of Byzantine devices that Krum, multi-Krum and the trimmed mean withstand


@dataclass(frozen=True)
class Algorithm:
    """How devices train, the rule by which the server aggregates what they send, and how it applies the rule's step."""

    name: str
    local: LocalSGD
    rule: AnyRule
    server: ServerOptimizer | None = None  # None adds the step to the params as it is
    variates: ControlVariates | None = None  # state that devices keep between rounds
    oracle: bool = False  # the step minimises the loss of all devices over the rule's directions: simulations only


Recipe: TypeAlias = Callable[[Hyperparameters], Algorithm]


def fedavg(h: Hyperparameters) -> Algorithm:
    """Return FedAvg: local SGD, averaged."""
    if h.averaging not in ("mean", "samples"):
        raise FedcontextError(f"averaging must be 'mean' or 'samples', got {h.averaging!r}")
    rule = averaging.mean() if h.averaging == "mean" else averaging.by_samples()
    return Algorithm("fedavg", sgd(h.learning_rate, h.batch_size), rule)


def fedprox(h: Hyperparameters) -> Algorithm:
    """Return FedProx: local SGD with a proximal term, averaged."""
    return replace(fedavg(h), name="fedprox", local=proximal(h.mu, h.learning_rate, h.batch_size))


def with_server_rate(algorithm: Algorithm, h: Hyperparameters) -> Algorithm:
    """Return an algorithm without a server optimiser with its step scaled by the server learning rate, if one is set.

    >>> h = Hyperparameters(learning_rate=0.1, smoothness=10, server_learning_rate=2.0)
    >>> with_server_rate(fedavg(h), h).server.name
    'server_sgd'
    """
    if algorithm.server is not None or h.server_learning_rate is None:
        return algorithm
    return replace(algorithm, server=server_sgd(h.server_learning_rate))


def contextual_version(algorithm: Algorithm | str, smoothness: float) -> Algorithm:
    """Return ``algorithm`` with the paper's aggregation in place of its own (Algorithm 2).

    A name stands for that algorithm of the table at the learning rate that goes with the paper's β: 1 / smoothness.

    >>> contextual_version("fedavg", smoothness=10).local.learning_rate
    0.1
    """
    base = _resolved(algorithm, smoothness)
    return replace(base, name=f"{base.name}-contextual", rule=contextual(smoothness), oracle=False)


def expected_version(algorithm: Algorithm | str, smoothness: float) -> Algorithm:
    """Return ``algorithm`` with the aggregation of section III-C, in the exact form of its equation.

    >>> expected_version(fedavg(Hyperparameters(learning_rate=0.1, smoothness=10)), smoothness=10).name
    'fedavg-expected'
    """
    base = _resolved(algorithm, smoothness)
    return replace(base, name=f"{base.name}-expected", rule=expected_contextual(smoothness), oracle=False)


def memory_version(algorithm: Algorithm) -> Algorithm:
    """Return ``algorithm`` with contextual aggregation with memory in place of its own rule.

    >>> memory_version(fedavg(Hyperparameters(learning_rate=0.1, smoothness=10))).name
    'fedavg-memory'
    """
    return replace(algorithm, name=f"{algorithm.name}-memory", rule=contextual_memory(), oracle=False)


def _with_rule(name: str, rule: Callable[[Hyperparameters], AnyRule], base: Recipe = fedavg) -> Recipe:
    """Return another algorithm's local training with this rule."""
    return lambda h: replace(base(h), name=name, rule=rule(h))


def _with_server(name: str, optimizer: Callable[[Hyperparameters], ServerOptimizer]) -> Recipe:
    """Return FedAvg with an optimiser on the server."""
    return lambda h: replace(fedavg(h), name=name, server=optimizer(h))


ALGORITHMS: dict[str, Recipe] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "folb": _with_rule("folb", lambda h: averaging.folb(), fedprox),
    "fedavg-contextual": lambda h: contextual_version(fedavg(h), h.smoothness),
    "fedprox-contextual": lambda h: contextual_version(fedprox(h), h.smoothness),
    "fedavg-expected": lambda h: expected_version(fedavg(h), h.smoothness),
    "fedprox-expected": lambda h: expected_version(fedprox(h), h.smoothness),
    "fedavg-memory": lambda h: memory_version(fedavg(h)),
    "fedprox-memory": lambda h: memory_version(fedprox(h)),
    "fedavgm": _with_server("fedavgm", lambda h: server.fedavgm(**_server_rate(h), momentum=h.server_momentum)),
    "fedadagrad": _with_server("fedadagrad", lambda h: server.fedadagrad(**_server_rate(h))),
    "fedadam": _with_server("fedadam", lambda h: server.fedadam(**_server_rate(h), beta1=h.server_momentum)),
    "fedyogi": _with_server("fedyogi", lambda h: server.fedyogi(**_server_rate(h), beta1=h.server_momentum)),
    "fednova": _with_rule("fednova", lambda h: averaging.fednova(h.averaging)),
    "fedexp": _with_rule("fedexp", lambda h: averaging.fedexp()),
    "fedmgda": _with_rule("fedmgda", lambda h: averaging.fedmgda()),
    "scaffold": lambda h: replace(fedavg(h), name="scaffold", variates=variates.scaffold(h.learning_rate)),
    "feddyn": lambda h: replace(fedprox(h), name="feddyn", variates=variates.feddyn(h.mu)),
    "krum": _with_rule("krum", lambda h: robust.krum(h.byzantine)),
    "multi-krum": _with_rule("multi-krum", lambda h: robust.multi_krum(h.byzantine)),
    "median": _with_rule("median", lambda h: robust.coordinate_median()),
    "trimmed-mean": _with_rule("trimmed-mean", lambda h: robust.trimmed_mean(h.byzantine)),
    "geometric-median": _with_rule("geometric-median", lambda h: robust.geometric_median()),
    "norm-clipping": _with_rule("norm-clipping", lambda h: robust.norm_clipping()),
    "fltrust": _with_rule("fltrust", lambda h: robust.fltrust()),
    "oracle-span": lambda h: replace(fedavg(h), name="oracle-span", oracle=True),
    "oracle-memory": lambda h: replace(memory_version(fedavg(h)), name="oracle-memory", oracle=True),
}


def algorithm_named(name: str, hyperparameters: Hyperparameters) -> Algorithm:
    """Return an algorithm of the table.

    >>> algorithm_named("fedavg", Hyperparameters(learning_rate=0.1, smoothness=10)).rule.name
    'mean'
    """
    if name not in ALGORITHMS:
        raise unknown_value_error("algorithm", name, ALGORITHMS, suggestion=similar_algorithm(name))
    algorithm = ALGORITHMS[name](hyperparameters)
    return with_server_rate(_with_gradients(algorithm, hyperparameters), hyperparameters)


def similar_algorithm(name: object) -> str:
    """Return the algorithm nearest to a wrong name; an oracle, for simulations only, where no other is near.

    >>> similar_algorithm("memory"), similar_algorithm("oracle")
    ('fedavg-memory', 'oracle-span')
    """
    return nearest(name, [each for each in ALGORITHMS if not each.startswith("oracle-")]) or nearest(name, ALGORITHMS)


def _needs(*any_of: Need) -> Callable[[Algorithm], bool]:
    return lambda algorithm: not algorithm.rule.needs.isdisjoint(any_of)


def _weighs_probes(algorithm: Algorithm) -> bool:
    """Return whether sample counts can weigh the probes' gradients; a rule that works on sums counts them alike."""
    return isinstance(algorithm.rule, Rule) and "gradient" in algorithm.rule.needs


# By setting: whether an algorithm uses it when made with averaging by samples. `unused_settings` finds the unused
# hyperparameters itself; all algorithms accept the other settings.
USES: dict[str, Callable[[Algorithm], bool]] = {
    "probes": _needs("gradient"),
    "gradient_averaging": _needs("gradient"),
    "gradient_bits": _needs("gradient", "own gradients"),
    "sketch": _needs("gradient", "own gradients"),
    "max_gradient": _needs("gradient", "own gradients"),
    "probe_averaging": _weighs_probes,
    "averaging": _needs("samples"),
    "max_samples": lambda algorithm: _needs("samples")(algorithm) or _weighs_probes(algorithm),
    "max_step": lambda algorithm: isinstance(algorithm.rule, Rule) and not algorithm.rule.scale_free,
    "max_descent": _needs("differences"),
    "max_concavity": _needs("differences"),
    "max_uphill": _needs("differences"),
    "exchanges": lambda algorithm: corrects(algorithm.rule) and not algorithm.oracle,
    "pool": _needs("pool"),
}


def unused_settings(name: str) -> set[str]:
    """Return the settings of some algorithms that do not change this one's steps; none for an unknown algorithm.

    >>> sorted(unused_settings("fedprox-memory"))
    ['averaging', 'byzantine', 'max_samples', 'max_step', 'pool', 'probe_averaging', 'server_momentum', 'smoothness']
    """
    if name not in ALGORITHMS:
        return set()
    used: set[str] = set()

    class Traced(Hyperparameters):
        def __getattribute__(self, setting: str) -> object:
            used.add(setting)
            return super().__getattribute__(setting)

    algorithm = ALGORITHMS[name](Traced(learning_rate=0.1, smoothness=10.0, averaging="samples"))
    bounded = {"smoothness"} if "own gradients" in algorithm.rule.needs else set()  # at which a bound is reported
    unread = {"mu", "smoothness", "server_momentum", "byzantine"} - used - bounded
    return unread | {setting for setting, uses in USES.items() if not uses(algorithm)}


def _with_gradients(algorithm: Algorithm, h: Hyperparameters) -> Algorithm:
    """Return an algorithm whose rule combines the probes' gradients as set; one without probes is returned as it is."""
    if isinstance(algorithm.rule, CoordinateRule) or "gradient" not in algorithm.rule.needs:
        return algorithm
    return replace(algorithm, rule=robust.robust_gradients(algorithm.rule, h.gradients))


def _server_rate(h: Hyperparameters) -> dict[str, float]:
    return {} if h.server_learning_rate is None else {"lr": h.server_learning_rate}


def _resolved(algorithm: Algorithm | str, smoothness: float) -> Algorithm:
    if isinstance(algorithm, Algorithm):
        return algorithm
    rate = 1 / positive("smoothness", smoothness)
    return algorithm_named(algorithm, Hyperparameters(learning_rate=rate, smoothness=smoothness))
