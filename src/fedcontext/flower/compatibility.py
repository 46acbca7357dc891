"""Which of Flower's strategies can be wrapped, and which rules Flower's clients can serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg, Strategy

from fedcontext.errors import FedcontextError, accepts, shown
from fedcontext.rules import server as optimizers
from fedcontext.rules.base import AnyRule, shown_rule
from fedcontext.rules.server import ServerOptimizer

RuleOrFunction: TypeAlias = AnyRule | Callable[[ConfigRecord], AnyRule]
SIMULATED_ONLY = {
    "root": "an update of the server's own samples",
    "root gradient": "a gradient of the server's own samples",
    "steps": "the number of local steps",
}


def _share(inner: Any) -> str:
    """Return the share of malicious nodes that one of Flower's strategies is set up for, as an argument."""
    return f"byzantine={min(inner.num_malicious_nodes / max(inner.min_train_nodes, 1), 0.49):.2g}"


ROBUST: dict[str, Callable[[Any], str]] = {  # our rules in place of the aggregation of Flower's strategies
    "Krum": lambda inner: f"krum({_share(inner)})",
    "MultiKrum": lambda inner: f"multi_krum({_share(inner)})",
    "Bulyan": lambda inner: f"multi_krum({_share(inner)})",
    "FedMedian": lambda inner: "coordinate_median()",
    "FedTrimmedAvg": lambda inner: f"trimmed_mean(byzantine={inner.beta:.2g})",
}


def checked_inner(inner: Any) -> FedAvg:
    """Return ``inner`` if all that the rule replaces is FedAvg's weighted average."""
    if isinstance(inner, FedAvg) and type(inner).aggregate_train is FedAvg.aggregate_train:
        return inner
    if not isinstance(inner, Strategy):
        name = inner.__name__ if isinstance(inner, type) and issubclass(inner, Strategy) else "FedAvg"
        line = f"{name}(...){', rule=...' if isinstance(inner, AnyRule) else ''}"
        raise FedcontextError(
            f"inner must be a strategy of flwr.serverapp.strategy, got {shown(inner)}: write ContextualStrategy({line})"
        )
    wraps, optimizer = isinstance(getattr(inner, "strategy", None), Strategy), type(inner).__name__.lower()
    advice, source = "", "; no rule can be combined with it"
    if hasattr(optimizers, optimizer):
        advice, source = (
            f", rule=by_samples(), server={optimizer}()",
            f", with {optimizer} from fedcontext.rules.server",
        )
    elif make := ROBUST.get(type(inner).__name__):
        advice, source = f", rule={make(inner)}", ", with this rule from fedcontext"
    raise FedcontextError(
        f"{type(inner).__name__} cannot be wrapped: the rule replaces aggregate_train, so its "
        f"{'clipping and noise' if wraps else 'own aggregation'} would have no effect. Write "
        f"ContextualStrategy(FedAvg(...){advice}) instead{source}"
    )


def checked_rule(rule: RuleOrFunction, server: ServerOptimizer | None) -> RuleOrFunction:
    """Return ``rule`` if it is one that clients can serve, or a function, which `resolved_rule` calls later."""
    if server is not None and not isinstance(server, ServerOptimizer):
        raise FedcontextError(
            f"server must be an optimiser of fedcontext.rules.server, such as fedadam(), got {shown(server)}"
        )
    if isinstance(rule, AnyRule):
        _check_rule(rule, server)
    elif not accepts(rule, ConfigRecord()) or rule.__module__.startswith("fedcontext.rules."):
        raise FedcontextError(
            f"rule must be a rule such as contextual_memory(), or a function of the train config, got {shown_rule(rule)}"
        )
    return rule


def resolved_rule(rule: RuleOrFunction, config: ConfigRecord, server: ServerOptimizer | None) -> AnyRule:
    """Return the rule itself, or the one that a function of the train config returns, if clients can serve it."""
    made = rule if isinstance(rule, AnyRule) else rule(config)
    if not isinstance(made, AnyRule):
        raise FedcontextError(f"the function given as rule must return a rule, got {shown(made)}")
    _check_rule(made, server)
    return made


def _check_rule(rule: AnyRule, server: ServerOptimizer | None) -> None:
    """Refuse rules that need what clients do not send, and optimisers after a rule that models its own step."""
    if missing := [about for need, about in SIMULATED_ONLY.items() if need in rule.needs]:
        raise FedcontextError(
            f"rule '{rule.name}' needs {missing[0]}, which clients do not send: it is for simulations and "
            "aggregate; use another rule, such as contextual_memory() or krum()"
        )
    if server is not None and "differences" in rule.needs:
        raise FedcontextError(
            f"{server.name} cannot follow rule '{rule.name}', which models the step that it takes itself: "
            f"write ContextualStrategy(FedAvg(...), rule=by_samples(), server={server.name}())"
        )
