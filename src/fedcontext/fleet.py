"""Device speeds and network links: which devices reply in time, and what a round costs in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedcontext.arrays.tree import BoolArray, FloatArray
from fedcontext.errors import FedcontextError
from fedcontext.plan import IntArray, RoundPlan, Stream, generator

# the reason for valid replies beyond the number that the server waits for
QUOTA_MET = "over-selection quota met"


@dataclass(frozen=True)
class Spread:
    """A log-normal distribution, median · exp(sigma · N(0, 1))."""

    median: float
    sigma: float = 0.0

    def draw(self, random: np.random.Generator, count: int) -> FloatArray:
        """Return ``count`` samples.

        >>> Spread(median=5.0).draw(np.random.default_rng(0), 2)
        array([5., 5.])
        """
        return self.median * np.exp(self.sigma * random.standard_normal(count))


@dataclass(frozen=True)
class Profile:
    """The distributions from which a fleet is drawn."""

    speed: Spread  # training samples per second
    latency: Spread  # seconds, one way
    bandwidth: Spread  # bytes per second, each way


# Assumed, not measured: phones on mobile networks differ by an order of magnitude and more.
PROFILES = {
    "even": Profile(Spread(1_000), Spread(0.05), Spread(1e6)),
    "edge": Profile(Spread(1_000, 0.8), Spread(0.05, 0.5), Spread(1e6, 1.0)),
}


@dataclass(frozen=True)
class Fleet:
    """The speed and the network link of each of N devices."""

    speeds: FloatArray  # (N,) training samples per second
    latencies: FloatArray  # (N,) seconds, one way
    bandwidths: FloatArray  # (N,) bytes per second

    def seconds(
        self, devices: IntArray, samples: IntArray | FloatArray, sent: float | IntArray | FloatArray
    ) -> FloatArray:
        """Return (K,) seconds until each device's reply arrives: 2 · latency + sent / bandwidth + samples / speed.

        >>> fleet = make_fleet(PROFILES["even"], population=3, seed=0)
        >>> fleet.seconds(np.array([0]), samples=np.array([500]), sent=2e6)
        array([2.6])
        """
        return 2 * self.latencies[devices] + sent / self.bandwidths[devices] + samples / self.speeds[devices]


def make_fleet(profile: Profile, population: int, seed: int) -> Fleet:
    """Return a fleet of ``population`` devices drawn from ``profile`` with ``seed``.

    >>> fleet = make_fleet(PROFILES["edge"], population=100, seed=0)
    >>> bool(fleet.speeds.max() > 4 * fleet.speeds.min())
    True
    """
    random = generator(seed, 0, Stream.FLEET)
    return Fleet(*(spread.draw(random, population) for spread in (profile.speed, profile.latency, profile.bandwidth)))


@dataclass(frozen=True)
class Replies:
    """The replies that arrived in time, and the cost of the round."""

    cohort: IntArray  # positions in plan.devices
    pool: IntArray  # positions in plan.pool
    probes: IntArray  # positions in plan.probes
    excluded: dict[int, str]  # the reason for each device whose reply is not used
    seconds: float  # duration of the round
    bytes_down: int
    bytes_up: int


_NOBODY = np.zeros(0, np.int64)
NO_REPLIES = Replies(_NOBODY, _NOBODY, _NOBODY, excluded={}, seconds=0.0, bytes_down=0, bytes_up=0)


@dataclass(frozen=True)
class ProbeCost:
    """What a device spends on reporting its gradient, beside receiving the params."""

    passes: int = 1  # over its training data
    bytes_up: int = 0
    bytes_down: int = 0


def second_replies(
    fleet: Fleet,
    received: Replies,
    devices: IntArray,
    samples: IntArray,
    model_bytes: int,
    probe: ProbeCost,
    deadline: float | None = None,
) -> tuple[BoolArray, Replies]:
    """Return which of the probes answer the second exchange of a round in time, and ``received`` with its costs added.

    >>> fleet = make_fleet(PROFILES["even"], population=3, seed=0)
    >>> cost = ProbeCost(passes=2, bytes_up=1000, bytes_down=1000)
    >>> in_time, received = second_replies(fleet, NO_REPLIES, np.array([0, 2]), np.full(3, 100), 1000, cost)
    >>> in_time.tolist(), round(received.seconds, 3), received.bytes_down, received.bytes_up
    ([True, True], 0.303, 4000, 2000)
    """
    sent = model_bytes + probe.bytes_down + probe.bytes_up
    arrivals, limit = fleet.seconds(devices, probe.passes * samples[devices], sent), deadline or np.inf
    in_time = arrivals <= limit
    return in_time, replace(
        received,
        seconds=received.seconds + float(min(limit, arrivals.max())),
        bytes_down=received.bytes_down + len(devices) * (model_bytes + probe.bytes_down),
        bytes_up=received.bytes_up + int(in_time.sum()) * probe.bytes_up,
    )


def replies(
    fleet: Fleet,
    plan: RoundPlan,
    samples: IntArray,
    model_bytes: int,
    *,
    probe: ProbeCost | None = None,
    own_gradients: bool = False,
    state_bytes: int = 0,
    cohort_passes: int = 0,
    deadline: float | None = None,
) -> Replies:
    """Return whose replies arrive before ``deadline``, and what the round cost.

    A device sends one reply: its update, its gradient or both. Where more devices train than wanted, the first to reply
    are kept. ``probe`` is the cost of a gradient (by default one pass, and one model sent), ``own_gradients`` asks the
    whole cohort for gradients too, and ``state_bytes`` go to every device that trains beside the params.
    ``cohort_passes`` are passes of the cohort over its data in addition to its epochs.

    >>> from fedcontext.plan import plan_round
    >>> plan, fleet = plan_round(0, 1, 50, over_select=0.5), make_fleet(PROFILES["edge"], 50, seed=0)
    >>> received = replies(fleet, plan, np.full(50, 100), model_bytes=1000)
    >>> len(plan.devices), len(received.cohort), len(received.excluded)
    (15, 10, 5)
    """
    if deadline is not None and not deadline > 0:
        raise FedcontextError(f"deadline must be positive, got {deadline}")
    limit = np.inf if deadline is None else deadline
    probe = probe or ProbeCost(bytes_up=model_bytes)
    probe_bytes = probe.bytes_up + probe.bytes_down
    both, pool_both = np.isin(plan.devices, plan.probes) | own_gradients, np.isin(plan.pool, plan.probes)

    def trained(devices: IntArray, epochs: IntArray, probing: BoolArray) -> FloatArray:
        passes, sent = epochs + probing * probe.passes, 2 * model_bytes + state_bytes + probing * probe_bytes
        return fleet.seconds(devices, passes * samples[devices], sent)

    arrivals = trained(plan.devices, plan.epochs + cohort_passes, both)
    pool_arrivals = trained(plan.pool, plan.pool_epochs, pool_both)
    probe_arrivals = fleet.seconds(plan.probes, probe.passes * samples[plan.probes], model_bytes + probe_bytes)

    first = np.sort(np.argsort(arrivals, kind="stable")[: plan.wanted])
    cohort = first[arrivals[first] <= limit]
    pool = np.flatnonzero(pool_arrivals <= limit)
    trains = np.isin(plan.probes, [*plan.devices, *plan.pool])
    replied = np.isin(plan.probes, [*plan.devices[cohort], *plan.pool[pool]])
    probes = np.flatnonzero(np.where(trains, replied, probe_arrivals <= limit))
    late = [*plan.devices[first[arrivals[first] > limit]], *plan.pool[pool_arrivals > limit]]
    excluded = {int(k): "gradient missed the deadline" for k in plan.probes[~trains & (probe_arrivals > limit)]}
    excluded |= {int(k): QUOTA_MET for k in np.delete(plan.devices, first)}
    excluded |= {int(k): "missed the deadline" for k in late}
    contacted = np.unique(np.concatenate([plan.devices, plan.pool, plan.probes])).size
    alone = np.count_nonzero(~trains)
    gradients = np.count_nonzero(both[cohort]) + np.count_nonzero(pool_both[pool]) + np.count_nonzero(~trains[probes])
    return Replies(
        cohort=cohort,
        pool=pool,
        probes=probes,
        excluded=excluded,
        seconds=float(min(limit, np.concatenate([arrivals[first], pool_arrivals, probe_arrivals[~trains]]).max())),
        bytes_down=int(
            contacted * model_bytes
            + (len(plan.devices) + len(plan.pool)) * state_bytes
            + (np.count_nonzero(both) + np.count_nonzero(pool_both) + alone) * probe.bytes_down
        ),
        bytes_up=int((len(cohort) + len(pool)) * model_bytes + gradients * probe.bytes_up),
    )
