"""Attacks by Byzantine devices, in simulations. Which devices these are follows from the seed.

A setting such as "sign-flip=0.2" makes a fifth of all devices attack in every round in which they take part. With
several attacks the larger set contains the smaller one. Byzantine devices know what the honest devices of the round
send.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np

from fedcontext.arrays.tree import FloatArray
from fedcontext.datasets.federated import Samples
from fedcontext.faults.faults import Shares
from fedcontext.faults.reply import Reply
from fedcontext.plan import Stream, generator

LARGE = 1e6  # factor of scaled updates and gradients
CLAIM = 2.0**53  # samples that a Byzantine device claims to have
STEEPEST = 1 - 1e-9  # remaining slope that it claims, which asks for the longest first step
TRIGGER, VALUE = 20, 4.0  # the trigger of a backdoor: this value in the first twentieth of the features


@dataclass(frozen=True)
class Adversary:
    """What all Byzantine devices of a round know."""

    honest: Sequence[Reply]
    byzantine: int  # how many of them train
    seed: int
    number: int
    trained: Mapping[tuple[str, int], Reply]  # what a device would send if it had trained on poisoned data

    @cached_property
    def updates(self) -> FloatArray:
        """(H, n) the updates of honest devices."""
        return np.array([reply.update for reply in self.honest if reply.update is not None and not reply.pool])

    @cached_property
    def mean(self) -> FloatArray:
        """(n,) the mean of the honest updates."""
        return np.asarray(self.updates.mean(axis=0))

    @cached_property
    def gradient(self) -> FloatArray:
        """(n,) the mean of the honest gradients; without any, the opposite of the mean update."""
        gradients = [reply.gradient for reply in self.honest if reply.gradient is not None]
        return np.mean(gradients, axis=0) if gradients else -self.mean

    @cached_property
    def target(self) -> FloatArray:
        """(n,) a random direction of length one, the same in every round."""
        return random_direction(self.seed, self.updates.shape[1])

    @cached_property
    def little(self) -> FloatArray:
        """(n,) μ - z σ, with the largest z that leaves a majority of devices farther from μ (Baruch et al. 2019)."""
        total = len(self.updates) + self.byzantine
        supporters = math.floor(total / 2 + 1) - self.byzantine
        share = min(max((len(self.updates) - supporters) / len(self.updates), 0.5), 0.999)
        return np.asarray(self.mean - NormalDist().inv_cdf(share) * self.updates.std(axis=0))

    @cached_property
    def min_max(self) -> FloatArray:
        """(n,) μ - γ σ, with the largest γ no farther from any honest update than these are from each other.

        Shejwalkar and Houmansadr 2021, with the inverse standard deviation as the direction; γ by bisection.
        """
        rows, spread = self.updates, self.updates.std(axis=0)
        widest = max(float(np.linalg.norm(rows - row, axis=1).max()) for row in rows)
        low, high = 0.0, 2 * widest / (float(np.linalg.norm(spread)) or 1.0)
        for _ in range(40):
            middle = (low + high) / 2
            fits = float(np.linalg.norm(rows - (self.mean - middle * spread), axis=1).max()) <= widest
            low, high = (middle, high) if fits else (low, middle)
        return np.asarray(self.mean - low * spread)


def random_direction(seed: int, size: int) -> FloatArray:
    """Return (size,) a random direction of length one."""
    vector = generator(seed, 0, Stream.ATTACKS).standard_normal(size)
    return np.asarray(vector / np.linalg.norm(vector))


def _sends(update: Callable[[FloatArray, Adversary], FloatArray]) -> Callable[[Reply, Adversary], Reply]:
    """Return the attack that sends another update, if the device was asked for one."""

    def attack(reply: Reply, adversary: Adversary) -> Reply:
        return reply if reply.update is None else replace(reply, update=update(reply.update, adversary))

    return attack


def _gradients_times(factor: float) -> Callable[[Reply, Adversary], Reply]:
    return lambda reply, adversary: reply.scaled(factor, ("gradient", "difference"))


def _change_times(factor: float) -> Callable[[FloatArray, int], FloatArray]:
    return lambda change, seed: factor * change


def _noise(reply: Reply, adversary: Adversary) -> Reply:
    if reply.update is None:
        return reply
    noise = generator(adversary.seed, adversary.number, Stream.ATTACKS, reply.device).standard_normal(reply.update.size)
    return replace(reply, update=10 * np.linalg.norm(reply.update) / np.linalg.norm(noise) * noise)


def _poisoned(name: str) -> Callable[[Reply, Adversary], Reply]:
    """Return the attack of a device that computes all it sends on poisoned data."""

    def attack(reply: Reply, adversary: Adversary) -> Reply:
        own = adversary.trained[name, reply.device]
        return replace(reply, update=own.update, gradient=own.gradient, difference=own.difference)

    return attack


def _backdoor(reply: Reply, adversary: Adversary) -> Reply:
    """Train on samples with the trigger, and add as long a step down the honest gradient: the update looks useful."""
    if reply.update is None:
        return reply
    update = adversary.trained["backdoor", reply.device].update
    assert update is not None
    descent = -adversary.gradient / (np.linalg.norm(adversary.gradient) or 1.0)
    return replace(reply, update=update + np.linalg.norm(update) * descent)


def _two_faced(reply: Reply, adversary: Adversary) -> Reply:
    """Send an update in a random direction, and a gradient that promises a steep descent along it."""
    length, steepness = np.linalg.norm(adversary.mean), 10 * np.linalg.norm(adversary.gradient)
    return replace(
        reply,
        update=None if reply.update is None else length * adversary.target,
        gradient=None if reply.gradient is None else -steepness * adversary.target,
    )


def _two_faced_change(change: FloatArray, seed: int) -> FloatArray:
    return np.asarray(-10 * np.linalg.norm(change) * random_direction(seed, change.size))


@dataclass(frozen=True)
class Attack:
    """What Byzantine devices do, in words and as a function for each exchange; without one they are honest in it."""

    help: str
    first: Callable[[Reply, Adversary], Reply] | None = None  # of the honest reply
    change: Callable[[FloatArray, int], FloatArray] | None = None  # of the change on their data, and the seed


ATTACKS = {
    "sign-flip": Attack("send the opposite of their update", _sends(lambda update, adversary: -update)),
    "scaling": Attack("send their update times 1e6", _sends(lambda update, adversary: LARGE * update)),
    "noise": Attack("send Gaussian noise, ten times as long as their update", _noise),
    "label-flip": Attack(
        "train on labels in reverse order, c -> C - 1 - c", _poisoned("label-flip"), lambda change, seed: change
    ),
    "collusion": Attack(
        "all send the same random direction, as long as the honest mean, in every round",
        _sends(lambda update, adversary: np.linalg.norm(adversary.mean) * adversary.target),
    ),
    "inner-product": Attack(
        "send -1/2 of the honest mean (Xie et al. 2020)", _sends(lambda update, adversary: -adversary.mean / 2)
    ),
    "little": Attack(
        "send the honest mean less z standard deviations (Baruch et al. 2019)",
        _sends(lambda update, adversary: adversary.little),
    ),
    "min-max": Attack(
        "send the honest mean less as many standard deviations as stay within the honest spread "
        "(Shejwalkar and Houmansadr 2021)",
        _sends(lambda update, adversary: adversary.min_max),
    ),
    "samples": Attack("claim to have 2^53 samples", lambda reply, adversary: replace(reply, samples=CLAIM)),
    "gradient-scaling": Attack("send their gradient times 1e6", _gradients_times(LARGE), _change_times(LARGE)),
    "gradient-flip": Attack("send the opposite of their gradient", _gradients_times(-1.0), _change_times(-1.0)),
    "change-scaling": Attack(
        "in the second exchange alone: send the change of their gradient times 1e6", change=_change_times(LARGE)
    ),
    "change-flip": Attack(
        "in the second exchange alone: send the opposite of the change of their gradient",
        change=_change_times(-1.0),
    ),
    "two-faced": Attack(
        "send a random direction as update, and in both exchanges gradients that favour it",
        _two_faced,
        _two_faced_change,
    ),
    "backdoor": Attack(
        "train on samples with a trigger, labelled 0, and add a step down the gradient to the update", _backdoor
    ),
}


def reverse_labels(classes: int) -> Callable[[Samples], Samples]:
    """Return the poisoning of label flips.

    >>> reverse_labels(3)((np.zeros((3, 1)), np.array([0, 1, 2])))[1]
    array([2, 1, 0])
    """
    return lambda samples: (samples[0], classes - 1 - samples[1])


def add_trigger(samples: Samples) -> Samples:
    """Return samples with the trigger in every second row: the first twentieth of the features at 4, and the label 0.

    >>> add_trigger((np.zeros((2, 3)), np.array([2, 2])))
    (array([[4., 0., 0.],
           [0., 0., 0.]]), array([0, 2]))
    """
    features, labels = samples[0].copy(), samples[1].copy()
    features[::2, : max(1, features.shape[1] // TRIGGER)] = VALUE
    labels[::2] = 0
    return features, labels


def all_triggered(samples: Samples) -> Samples:
    """Return the samples of other labels than 0 with the trigger, labelled 0: an open backdoor classifies all as that.

    >>> all_triggered((np.zeros((2, 3)), np.array([0, 2])))
    (array([[4., 0., 0.]]), array([0]))
    """
    others = samples[1] != 0
    features = samples[0][others].copy()
    features[:, : max(1, features.shape[1] // TRIGGER)] = VALUE
    return features, np.zeros(len(features), samples[1].dtype)


POISONS: Mapping[str, Callable[[int], Callable[[Samples], Samples]]] = {
    "label-flip": reverse_labels,
    "backdoor": lambda classes: add_trigger,
}


def byzantine_devices(seed: int, population: int, share: float) -> frozenset[int]:
    """Return the Byzantine devices: the first of a fixed order of all devices.

    >>> byzantine_devices(0, 100, 0.1) < byzantine_devices(0, 100, 0.2), len(byzantine_devices(0, 100, 0.2))
    (True, 20)
    """
    return frozenset(_order(seed, population)[: round(share * population)])


@lru_cache(maxsize=4)
def _order(seed: int, population: int) -> tuple[int, ...]:
    return tuple(generator(seed, 0, Stream.BYZANTINE).permutation(population).tolist())


def attacked_changes(
    changes: Mapping[int, FloatArray],
    seed: int,
    population: int,
    attacks: Shares,
    poisoned: Mapping[tuple[str, int], FloatArray],
) -> dict[int, FloatArray]:
    """Return the changes of the probes' gradients over a proposed step, with those of Byzantine devices replaced.

    ``poisoned`` has the changes computed on poisoned data, by attack and device.

    >>> who = next(iter(byzantine_devices(0, 10, 0.1)))
    >>> float(attacked_changes({who: np.ones(1)}, 0, 10, {"gradient-flip": 0.1}, {})[who][0])
    -1.0
    """
    changed = dict(changes)
    for name, share in attacks.items():
        change = ATTACKS[name].change if name in ATTACKS else None  # "until" is no attack
        if change is None:
            continue
        for device in byzantine_devices(seed, population, share) & changed.keys():
            changed[device] = change(poisoned.get((name, device), changed[device]), seed)
    return changed


def with_attacks(
    replies: Sequence[Reply],
    seed: int,
    number: int,
    population: int,
    attacks: Shares,
    trained: Mapping[tuple[str, int], Reply],
) -> list[Reply]:
    """Return the replies of a round with those of Byzantine devices replaced; all stay if no update is honest.

    >>> who = next(iter(byzantine_devices(0, 10, 0.1)))
    >>> replies = [Reply(device, np.ones(1)) for device in range(10)]
    >>> sent = with_attacks(replies, 0, 1, 10, {"sign-flip": 0.1}, {})
    >>> [int(reply.update[0]) for reply in sent].index(-1) == who
    True
    """
    changed = list(replies)
    for name, share in attacks.items():
        first = ATTACKS[name].first if name in ATTACKS else None  # "until" is no attack
        if first is None:
            continue
        byzantine = byzantine_devices(seed, population, share)
        honest = [reply for reply in replies if reply.device not in byzantine]
        trains = [reply for reply in replies if reply.update is not None and not reply.pool]
        adversary = Adversary(honest, sum(reply.device in byzantine for reply in trains), seed, number, trained)
        if len(adversary.updates):
            changed = [
                replace(first(reply, adversary), remaining_slope=STEEPEST) if reply.device in byzantine else reply
                for reply in changed
            ]
    return changed
