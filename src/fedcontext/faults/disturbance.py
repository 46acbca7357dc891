"""Faults and attacks of a simulated round: who takes part, what Byzantine devices send, and what arrives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from fedcontext.arrays.tree import FloatArray, Structure, leaves
from fedcontext.datasets.federated import FederatedData, join
from fedcontext.engines.base import Engine, Work
from fedcontext.errors import FedcontextError
from fedcontext.faults.attacks import ATTACKS, POISONS, all_triggered, attacked_changes, byzantine_devices, with_attacks
from fedcontext.faults.faults import FROM_LAST_ROUND, Shares, active, faulty_changes, hit, with_faults, without_absent
from fedcontext.faults.reply import Reply, replies_of, report_of
from fedcontext.measurement.geometry import Report
from fedcontext.measurement.sums import flat
from fedcontext.plan import IntArray, RoundPlan
from fedcontext.rules.base import Need

Answers: TypeAlias = tuple[list[Structure], list[Structure] | None]  # gradients, and their differences where asked for


@dataclass(frozen=True)
class Request:
    """What a round asked of its devices, and how to compute the same elsewhere."""

    params: Structure
    previous: Structure | None  # the params before the last aggregation
    names: Sequence[str]  # the trained leaves
    work: Work  # of the cohort, then of the pool
    late: Work | None  # of the devices whose updates of the last round arrive now
    answers: Callable[[Engine, IntArray], Answers]  # of these devices, from the data of an engine

    def vectors(self, structures: Sequence[Structure] | None) -> list[FloatArray]:
        """Return structures as flat vectors."""
        return [flat(leaves(structure), self.names) for structure in structures or ()]


@dataclass(frozen=True)
class Disturbance:
    """The faults and attacks of a run: shares by name."""

    seed: int
    sizes: IntArray  # (N,) training samples
    engine: Engine
    needs: Collection[Need]  # of the rule
    by_samples: bool  # how the probes' gradients are weighed
    faults: Shares = field(default_factory=dict)
    attack: Shares = field(default_factory=dict)
    poisoned: Mapping[str, Engine] = field(default_factory=dict)  # by attack: an engine on the data that it poisons
    triggered: Engine | None = None  # on test samples with the trigger of a backdoor, labelled as it wants

    @property
    def needs_previous(self) -> bool:
        """Whether some fault needs the params of the last round."""
        return bool(FROM_LAST_ROUND & self.faults.keys())

    def active(self, number: int) -> bool:
        """Return whether anything can happen to the replies of a round."""
        return active(self.faults, number - 1) or active(self.faults, number) or active(self.attack, number)

    def present(self, plan: RoundPlan) -> tuple[RoundPlan, dict[int, str]]:
        """Return the plan of the devices that take part, and why the others do not."""
        return without_absent(self.seed, plan, self.faults) if active(self.faults, plan.number) else (plan, {})

    def late(self, plan: RoundPlan) -> IntArray:
        """Return the positions of devices of a plan whose updates arrive one round later."""
        return np.flatnonzero([hit(self.seed, plan.number, k, "late", self.faults) for k in plan.devices.tolist()])

    def backdoor(self, params: Structure) -> float | None:
        """Return the share of test samples with the trigger that get its label, None without a backdoor attack."""
        return self.triggered.evaluate(params)[1] if self.triggered else None

    def apply(self, report: Report, request: Request) -> tuple[Report | None, dict[int, str]]:
        """Return the report after attacks and faults, None if too little arrives, and why updates are missing."""
        replies, number = replies_of(report, self.sizes, request.names), request.work.number
        if active(self.attack, number):
            poisoned = self._poisoned(request, replies)
            replies = with_attacks(replies, self.seed, number, len(self.sizes), self.attack, poisoned)
        replies, missing = with_faults(
            replies,
            self.seed,
            number,
            self.faults,
            trained_before=lambda chosen: self._trained_before(request, chosen),
            gradients_before=lambda chosen: self._gradients_before(request, chosen),
            late=self._late(request),
        )
        arrived = report_of(replies, report, request.params, request.names, self.needs, self.by_samples)
        usable = arrived.updates and (arrived.gradients or arrived.own_gradients or "gradient" not in self.needs)
        return arrived if usable else None, missing

    def changes(
        self,
        changes: Mapping[int, FloatArray],
        number: int,
        on_engine: Callable[[Engine, IntArray], Sequence[FloatArray]],
    ) -> dict[int, FloatArray]:
        """Return the changes of the probes' gradients over a proposed step, as attacks and faults change them.

        ``on_engine`` gives those of these devices from the data of an engine.
        """
        if active(self.attack, number):
            poisoned = {
                (name, device): row
                for name, engine in self.poisoned.items()
                if ATTACKS[name].change
                if len(who := np.array(sorted(self._byzantine(name) & changes.keys())))
                for device, row in zip(who.tolist(), on_engine(engine, who), strict=True)
            }
            changes = attacked_changes(changes, self.seed, len(self.sizes), self.attack, poisoned)
        return faulty_changes(changes, self.seed, number, self.faults)

    def _byzantine(self, attack: str) -> frozenset[int]:
        return byzantine_devices(self.seed, len(self.sizes), self.attack[attack])

    def _trained_before(self, request: Request, chosen: Sequence[Reply]) -> list[FloatArray]:
        if request.previous is None:
            return [reply.update for reply in chosen if reply.update is not None]
        rows = [np.flatnonzero(request.work.devices == reply.device)[0] for reply in chosen]
        return request.vectors(self.engine.train(request.previous, request.work.rows(np.array(rows))))

    def _gradients_before(self, request: Request, chosen: Sequence[Reply]) -> list[FloatArray]:
        if request.previous is None:
            return [reply.gradient for reply in chosen if reply.gradient is not None]
        devices = np.array([reply.device for reply in chosen])
        return request.vectors(self.engine.gradients(request.previous, devices))

    def _late(self, request: Request) -> list[Reply]:
        work = request.late
        if work is None or request.previous is None or not len(work.devices):
            return []
        updates = request.vectors(self.engine.train(request.previous, work))
        steps = work.local.steps(self.sizes[work.devices], work.epochs)
        rows = zip(work.devices.tolist(), updates, steps.tolist(), strict=True)
        return [Reply(k, u, samples=float(self.sizes[k]), steps=float(s), copy="late") for k, u, s in rows]

    def _poisoned(self, request: Request, replies: Sequence[Reply]) -> dict[tuple[str, int], Reply]:
        """Return what Byzantine devices send if they compute it on poisoned data, for the attacks that ask for it."""
        made, work = {}, request.work
        for attack, engine in self.poisoned.items():
            byzantine = self._byzantine(attack)
            mine = [reply for reply in replies if reply.device in byzantine]
            rows = np.flatnonzero([device in byzantine for device in work.devices.tolist()])
            updates = engine.train(request.params, work.rows(rows)) if len(rows) else []
            asked = np.array([reply.device for reply in mine if reply.gradient is not None], np.int64)
            gradients, differences = request.answers(engine, asked) if len(asked) else ([], None)
            sent = ((work.devices[rows], updates), (asked, gradients), (asked, differences))
            by_device = [dict(zip(devices.tolist(), request.vectors(given), strict=False)) for devices, given in sent]
            for reply in mine:
                update, gradient, difference = (vectors.get(reply.device) for vectors in by_device)
                made[attack, reply.device] = replace(reply, update=update, gradient=gradient, difference=difference)
        return made


def disturbance_of(
    seed: int,
    faults: Shares,
    attack: Shares,
    data: FederatedData,
    engine: Engine,
    needs: Collection[Need],
    *,
    by_samples: bool,
    make_engine: Callable[[FederatedData], Engine] | None,
) -> Disturbance | None:
    """Return the faults and attacks of a run, None if there are none.

    ``make_engine`` makes engines on changed data, for the attacks that train on it; None where none can be made.
    """
    if not faults and not attack:
        return None
    poisons = {name: make for name, make in POISONS.items() if name in attack}
    if make_engine is None:
        if poisons:
            raise FedcontextError(
                f"attack {', '.join(sorted(poisons))} trains on changed data, which your own engine object cannot be made "
                "for; use an engine by name, or another attack"
            )
        return Disturbance(seed, data.train.sizes, engine, needs, by_samples, faults, attack)
    poisoned = {
        name: make_engine(replace(data, train=data.train.map(make(data.classes)))) for name, make in poisons.items()
    }
    triggered = None
    if "backdoor" in attack:
        samples = join([all_triggered((data.test.features, data.test.labels))])
        triggered = make_engine(FederatedData("triggered", samples, samples, data.classes))
    return Disturbance(seed, data.train.sizes, engine, needs, by_samples, faults, attack, poisoned, triggered)
