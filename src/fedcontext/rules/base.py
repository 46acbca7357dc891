"""Rules: a `Rule` weighs updates, a `SumRule` sees sums over devices, a `CoordinateRule` combines each entry alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeGuard, get_args

from fedcontext.arrays.tree import FloatArray, Structure
from fedcontext.errors import FedcontextError, accepts, positive, shown
from fedcontext.measurement.combination import Combination
from fedcontext.measurement.geometry import Geometry
from fedcontext.measurement.sums import Sums

Averaging: TypeAlias = Literal["mean", "samples"]
Need: TypeAlias = Literal[
    "gradient",
    "differences",
    "own gradients",
    "pool",
    "remaining slopes",  # optional, in the first round
    "root",
    "root gradient",
    "samples",
    "steps",
]
State: TypeAlias = Any  # numbers, arrays, and lists, tuples and dicts of them; None for a rule without memory


def _no_state(params: Structure) -> State:
    return None


@dataclass(frozen=True)
class Rule:
    """How the server weighs the devices of a round: ``weigh(geometry, state) -> (weights, state)``.

    ``needs`` names what devices must send beyond their updates, ``init(params)`` gives the state before the first
    round, and ``smoothness`` is the β that the rule itself uses, if any. ``scale_free`` says that the step does not
    depend on the lengths of the updates; the step of other rules is limited to a multiple of them. A rule with
    ``keeps_state=False`` refuses a state: it is that of another rule.
    """

    name: str
    weigh: Callable[[Geometry, State], tuple[FloatArray, State]]
    needs: frozenset[Need] = frozenset()
    smoothness: float | None = None
    init: Callable[[Structure], State] = _no_state
    scale_free: bool = False
    gradients: Combination = "mean"  # how the probes' gradients are combined; set by `robust_gradients`
    keeps_state: bool = True

    def __post_init__(self) -> None:
        _check_needs(self.name, self.needs)


@dataclass(frozen=True)
class SumRule:
    """A rule that sees sums over devices alone: ``step(sums, state, population) -> (step, state, info)``.

    The step is a flat float64 vector over the floating-point leaves, ``population`` the total number of devices (None
    where unknown) and ``info`` diagnostics; ``mean`` among them, if given, is the multiple of the mean update that
    `Aggregation.weights` show. ``last_step(state)`` is the last step, None for a rule that does not keep it: the
    defences look whether a probe's gradient difference fits it.
    ``correct(change, error, state) -> (step, state, info)`` changes the last step, from the mean change of the probes'
    gradients over it and that mean's expected squared error; None for a rule that does not.
    """

    name: str
    step: Callable[[Sums, State, int | None], tuple[FloatArray, State, dict[str, Any]]]
    needs: frozenset[Need] = frozenset()
    init: Callable[[Structure], State] = _no_state
    smoothness: None = None
    last_step: Callable[[State], FloatArray | None] | None = None
    correct: Callable[[FloatArray, float, State], tuple[FloatArray, State, dict[str, Any]]] | None = None
    gradients: Combination = "mean"  # how the probes' gradients are combined; set by `robust_gradients`

    def __post_init__(self) -> None:
        _check_needs(self.name, self.needs)


@dataclass(frozen=True)
class CoordinateRule:
    """A rule for each entry of the model alone: ``combine(block) -> step``, from (K, n') device values to (n',).

    It is called for one block of entries after another. No set of K weights gives such a step.
    """

    name: str
    combine: Callable[[FloatArray], FloatArray]
    needs: frozenset[Need] = frozenset()
    init: Callable[[Structure], State] = _no_state
    smoothness: None = None

    def __post_init__(self) -> None:
        _check_needs(self.name, self.needs)


AnyRule: TypeAlias = Rule | SumRule | CoordinateRule


def asks_remaining_slopes(rule: AnyRule, state: State) -> bool:
    """Return whether devices report remaining slopes along their updates: in a rule's first round, if it uses them."""
    return "remaining slopes" in rule.needs and state is None


def corrects(rule: object) -> TypeGuard[SumRule]:
    """Return whether a rule corrects its steps in a second exchange with the probes."""
    return isinstance(rule, SumRule) and rule.correct is not None


def shown_rule(given: object) -> str:
    """Return an object that is not a rule, as error messages show it; for a function that makes rules, how to call it.

    >>> shown_rule(stateless), shown_rule(3)
    ('a function; call it: stateless(...)', '3')
    """
    if not inspect.isfunction(given) or not given.__module__.startswith("fedcontext.rules."):
        return shown(given)
    return f"a function; call it: {given.__name__}({'' if accepts(given) else '...'})"


def _check_needs(name: str, needs: frozenset[Need]) -> None:
    if unknown := set(needs) - set(get_args(Need)):
        known = ", ".join(map(repr, get_args(Need)))
        raise FedcontextError(f"rule {name!r}: needs must be among {known}, got {sorted(unknown)}")


def stateless(
    name: str,
    weigh: Callable[[Geometry], FloatArray],
    needs: Need | tuple[Need, ...] = (),
    smoothness: float | None = None,
    scale_free: bool = False,
) -> Rule:
    """Return a plain function of the geometry as a `Rule`.

    >>> import numpy as np
    >>> first = stateless("first", lambda geometry: np.eye(len(geometry.gram))[0])
    >>> weights, _ = first.weigh(Geometry(gram=np.eye(3), samples=np.ones(3)), None)
    >>> weights
    array([1., 0., 0.])
    """
    if not callable(weigh):
        raise FedcontextError(f"weigh must be a function of the geometry, got {shown(weigh)}")
    beta = None if smoothness is None else positive("smoothness", smoothness)
    needs = (needs,) if isinstance(needs, str) else needs

    def weigh_only(geometry: Geometry, state: State) -> tuple[FloatArray, State]:
        return weigh(geometry), None

    return Rule(name, weigh_only, frozenset(needs), beta, scale_free=scale_free, keeps_state=False)
