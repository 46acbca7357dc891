"""What is wrong with a run that does not train, from its records alone: findings with evidence and advice.

The limits are wide, so that a healthy run has no finding; those about the loss need ten rounds, unless it exploded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import median
from typing import Any

from fedcontext.errors import shortened
from fedcontext.fleet import QUOTA_MET
from fedcontext.records import RoundRecord
from fedcontext.rules.server import ADAPTIVE_RATE

ENOUGH = 10  # rounds before anything is said about the loss
RECENT = 5  # rounds whose median is compared
SHORT = 0.1  # a step is short below this share of the mean update's length
FAR = 5.0  # a setting is far off from this factor on
SLOW = 0.005, 0.15  # least fall of the loss, as a share of the first one: per round, and in all
JUMP, OFTEN = 0.25, 0.2  # the loss is unstable if it rises by this share in this share of the rounds
HALF = 0.5  # short steps are no problem if the loss fell by this share
EXPLODED = 1000.0  # the loss exploded if it is this many times the first one
COMMON_RATES, USUAL_RATE = (0.001, 0.1), 0.01  # for a learning rate outside the range the latter is suggested
ADAPTIVE = ("fedadagrad", "fedadam", "fedyogi")
GOOD = 0.8  # a model with this accuracy may have nothing left to learn


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a run."""

    what: str  # is the same in every round in which it is found
    evidence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}: {self.evidence}; {self.advice}"


def diagnose(records: Sequence[RoundRecord], settings: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return what is wrong with a run, most likely cause first; an empty list if nothing is.

    ``settings`` are those of the run, as in the first line of its file: they make the advice more precise.

    >>> stuck = [RoundRecord(n, loss=2.3, update_norm=1.0, step_norm=0.01, slope=-0.5, smoothness=50.0, promised_change=-1e-5) for n in range(1, 11)]
    >>> print(diagnose(stuck)[0])  # doctest: +NORMALIZE_WHITESPACE
    the steps are too short: they are 1 % as long as the mean update, and smoothness 50 is 100 times the curvature that
    the rounds met (0.5); set smoothness to 0.5, or use the default rule, contextual_memory() (algorithm fedavg-memory)
    """  # noqa: W505
    settings = settings or {}
    of_loss = (_exploded,) if _exploded(records, settings) else (_rising, _unstable)
    causes = (_excluded, _no_updates, _no_gradients, _uphill, _short_steps, *of_loss)
    findings = [finding for cause in causes if (finding := cause(records, settings))]
    slow = _slow(records, settings)
    return [slow] if slow and not findings else findings


class Monitor:
    """Diagnoses a run while it goes on, and reports each finding once.

    >>> monitor = Monitor()
    >>> [len(monitor.add(RoundRecord(number, update_norm=0.0))) for number in (1, 2, 3)]
    [0, 1, 0]
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, records: Iterable[RoundRecord] = ()) -> None:
        self.settings, self.records = settings, list(records)
        self._seen: set[str] = set()

    def add(self, record: RoundRecord) -> list[Finding]:
        """Return the findings after one more round that were not returned before.

        Long runs are checked less often, but for a loss that exploded.
        """
        self.records.append(record)
        skipped = len(self.records) % (1 + len(self.records) // 50)
        exploded = _exploded(self.records, self.settings or {}) if skipped else None
        findings = diagnose(self.records, self.settings) if not skipped else [exploded] if exploded else []
        new = [finding for finding in findings if finding.what not in self._seen]
        self._seen |= {finding.what for finding in new}
        return new


def findings_over_seeds(findings: Mapping[str, Sequence[Finding]]) -> list[str]:
    """Return one line for each kind of finding, with the seeds that have it, from the findings of each seed.

    >>> findings_over_seeds({"0": [], "1": [Finding("the loss rises", "it was 1 and is 2", "decrease the learning rate")]})
    ['the loss rises: it was 1 and is 2; decrease the learning rate (seed 1)']
    """  # noqa: W505
    first = {finding.what: finding for each in reversed([*findings.values()]) for finding in each}
    seeds = {what: [seed for seed, each in findings.items() if what in {f.what for f in each}] for what in first}
    return [f"{first[what]} (seed{'s' * (len(own) > 1)} {', '.join(own)})" for what, own in seeds.items()]


def _excluded(records: Sequence[RoundRecord], settings: Mapping[str, Any]) -> Finding | None:
    reasons = Counter(reason for record in records for reason in record.excluded.values())
    reasons.pop(QUOTA_MET, None)
    used, lost = sum(len(record.devices) for record in records), sum(record.lost for record in records)
    asked = settings.get("devices_per_round")  # probes can be among those excluded, but not among those used
    missing = asked * len(records) - used if isinstance(asked, int) else reasons.total()
    few = len(records) < RECENT and not 2 <= lost == len(records)  # so early only if every round was lost
    if few or not reasons or (missing <= used and 2 * lost < len(records)):
        return None
    (reason, count), *_ = reasons.most_common(1)
    late = _number("deadline", settings) if "deadline" in reason else None
    advice = _without_simulated(settings) or "see these devices' logs"
    if late is not None:  # the seconds of the rounds end at the deadline, so that they do not tell what replies need
        advice = f"set deadline to 0 (now {_short(late)}), and then to the seconds that rounds take without one"
    evidence = f"{lost} of {len(records)} rounds were lost; {count} replies were excluded: {reason}"
    return Finding("most replies are not used", evidence, advice)


def _no_updates(records: Sequence[RoundRecord], settings: Mapping[str, Any]) -> Finding | None:
    norms = [record.update_norm for record in records if record.update_norm is not None]
    if len(norms) < 2 or any(norms):
        return None
    evidence = f"in all {len(norms)} rounds the mean update is zero"
    return Finding("the devices do not train", evidence, "an update is the local model after training minus params")


def _no_gradients(records: Sequence[RoundRecord], settings: Mapping[str, Any]) -> Finding | None:
    moved = [record for record in records if record.update_norm and record.slope is not None]
    if len(moved) < 2 or any(record.slope for record in moved):
        return None
    evidence = f"in all {len(moved)} rounds the probes' mean gradient is zero along the mean update"
    advice = "a probe reports the gradient of its loss at params, taken before it trains and before gradients are reset"
    return Finding("the gradients are zero", evidence, advice)


def _uphill(records: Sequence[RoundRecord], settings: Mapping[str, Any]) -> Finding | None:
    slopes = [record.slope for record in records if record.slope is not None][:ENOUGH]
    uphill = sum(slope > 0 for slope in slopes)
    if len(slopes) < 4 or slopes[0] <= 0 or uphill < 0.9 * len(slopes):
        return None
    evidence = f"by the probes' gradients, the mean update goes uphill in {uphill} of the first {len(slopes)} rounds"
    advice = "an update is the local model minus params, a gradient points uphill: check both signs"
    return Finding("updates and gradients contradict each other", evidence, _without_simulated(settings) or advice)


def _short_steps(records: Sequence[RoundRecord], settings: Mapping[str, Any]) -> Finding | None:
    """Find a β far above the curvature: the larger of that along mean updates, -<g, d>/‖d‖², and along the steps."""
    complete = ("update_norm", "step_norm", "slope", "smoothness", "promised_change")
    known = [r for r in records if r.update_norm and all(getattr(r, name) is not None for name in complete)]
    if len(known) < RECENT or _fall(records) > HALF:
        return None
    length = median((record.step_norm or 0) / (record.update_norm or 1) for record in known)
    implied = median(-(record.slope or 0) / (record.update_norm or 1) ** 2 for record in known)
    met = max([implied, *_median_curvature(known)])
    smoothness = median(record.smoothness or 0 for record in known)
    if length >= SHORT or met <= 0 or smoothness < FAR * met:
        return None
    evidence = (
        f"they are {_short(100 * length)} % as long as the mean update, and smoothness {_short(smoothness)} is "
        f"{_short(smoothness / met)} times the curvature that the rounds met ({_short(met)})"
    )
    return Finding("the steps are too short", evidence, f"set smoothness to {_short(met)}{_or_memory(settings)}")


def _exploded(records: Sequence[RoundRecord], settings: Mapping[str, Any]) -> Finding | None:
    first = next(_finite_losses(records), None)
    last = next((record.loss for record in reversed(records) if record.loss is not None), None)
    if last is None:
        return None
    if isfinite(last) and not (first and 0 < EXPLODED * first < last and _losses(records)):
        return None
    before = "" if first is None else f"was {first:.3g} at first and "
    return Finding("the loss exploded", f"it {before}is {last:.3g} now", _shorter_steps(records, settings))


def _rising(records: Sequence[RoundRecord], settings: Mapping[str, Any]) -> Finding | None:
    losses = _losses(records)
    if len(losses) <= ENOUGH:
        return None
    now, lowest = median(losses[-RECENT:]), min(losses)
    if now < 1.1 * losses[0] and not (now > 2 * lowest and now - lowest > 0.2 * losses[0]):
        return None
    number = next((record.number for record in records if record.loss == lowest), 0)
    when = f"after round {number}" if number else "at first"
    return Finding(
        "the loss rises", f"it was {lowest:.3g} {when} and is {now:.3g} now", _shorter_steps(records, settings)
    )


def _unstable(records: Sequence[RoundRecord], settings: Mapping[str, Any]) -> Finding | None:
    losses = _losses(records)
    jumps = _rises(losses, by=JUMP)
    if len(losses) <= ENOUGH or jumps < OFTEN * (len(losses) - 1):
        return None
    evidence = f"it rose by more than {100 * JUMP:.0f} % in {jumps} of {len(losses) - 1} rounds"
    return Finding("the loss is unstable", evidence, _shorter_steps(records, settings))


def _slow(records: Sequence[RoundRecord], settings: Mapping[str, Any]) -> Finding | None:
    losses = _losses(records)
    accuracy = max((record.accuracy for record in records if record.accuracy is not None), default=0.0)
    rounds = records[-1].number if records else 0
    if len(losses) <= ENOUGH or accuracy >= GOOD or _fall(records) >= min(SLOW[0] * rounds, SLOW[1]):
        return None
    evidence = f"it was {losses[0]:.3g} at first, and at its lowest {min(losses):.3g} in {rounds} rounds"
    swings = _rises(losses, by=0.02) > OFTEN * len(losses)
    advice = _shorter_steps(records, settings) if swings else _longer_steps(settings)
    return Finding("the loss hardly falls", evidence, advice)


def _without_simulated(settings: Mapping[str, Any]) -> str:
    """Return the advice to leave out an attack and faults that a simulation was asked for, "" if there are none."""
    given = {name: settings.get(name) for name in ("attack", "faults")}
    texts = [f"{name} (now {shortened(str(value), 80)})" for name, value in given.items() if value and value != "none"]
    return f"try it without {' and '.join(texts)} first" if texts else ""


def _unusual(settings: Mapping[str, Any], longer: bool = False) -> str:
    """Return the advice on a setting that is far off, else on an attack and faults, else on one that is not common."""
    return (
        _usual_value(settings, longer, beyond=FAR)
        or _without_simulated(settings)
        or _usual_value(settings, longer, beyond=1)
    )


def _usual_value(settings: Mapping[str, Any], longer: bool, beyond: float) -> str:
    """Return the advice to set what makes steps too long (or too short) to its usual value.

    It is "" if no value is more than a factor of ``beyond`` outside the common ones.
    """
    name = str(settings.get("algorithm", ""))
    server_rate = (ADAPTIVE_RATE, f"{ADAPTIVE_RATE}") if name in ADAPTIVE else (1.0, "default")
    common = {  # the least and the largest value that are common, and the usual one
        "server_learning_rate": (server_rate[0] / 10, *server_rate),
        "learning_rate": (*COMMON_RATES, f"{USUAL_RATE}"),
    }
    if "contextual" in name or "expected" in name:
        common["smoothness"] = (1.0, 1000.0, "measured")
    given = {each: value for each in common if (value := _number(each, settings) or 0) > 0}
    factors = {
        each: common[each][0] / value if longer != (each == "smoothness") else value / common[each][1]
        for each, value in given.items()
    }
    factor, furthest = max(((factor, each) for each, factor in factors.items()), default=(0.0, ""))
    return f"set {furthest} to {common[furthest][2]} (now {_short(given[furthest])})" if factor > beyond else ""


def _longer_steps(settings: Mapping[str, Any]) -> str:
    """Return which setting makes the steps longer."""
    if advice := _unusual(settings, longer=True):
        return advice
    if 10 * (_number("learning_rate", settings) or 0) <= COMMON_RATES[1]:
        return _changed("learning_rate", settings, 10) + _or_memory(settings)
    return _or_memory(settings).removeprefix(", or ") or "check that features and labels belong together"


def _shorter_steps(records: Sequence[RoundRecord], settings: Mapping[str, Any]) -> str:
    """Return which setting makes the steps of this algorithm shorter."""
    if advice := _unusual(settings):
        return advice
    name, smoothness = str(settings.get("algorithm", "")), records[-1].smoothness
    if "contextual" in name and "memory" not in name and smoothness:
        better = max([3 * smoothness, *_median_curvature(records)])
        return f"set smoothness to {_short(better)} (now {_short(smoothness)}), or ask more probes"
    if name in ADAPTIVE:
        rate = _number("server_learning_rate", settings) or ADAPTIVE_RATE
        return _changed("server_learning_rate", {"server_learning_rate": rate}, 0.1) + _or_memory(settings)
    return _changed("learning_rate", settings, 1 / 3) + _or_memory(settings)


def _changed(name: str, settings: Mapping[str, Any], factor: float) -> str:
    value = _number(name, settings)
    if value is None:
        return f"{'increase' if factor > 1 else 'decrease'} the {name.replace('_', ' ')}"
    return f"set {name} to {_short(factor * value)} (now {_short(value)})"


def _number(name: str, settings: Mapping[str, Any]) -> float | None:
    """Return the value of a setting, None if it is no number or an integer beyond all floats."""
    value = settings.get(name)
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def _or_memory(settings: Mapping[str, Any]) -> str:
    own = "memory" in str(settings.get("algorithm", ""))
    return "" if own else ", or use the default rule, contextual_memory() (algorithm fedavg-memory)"


def _losses(records: Sequence[RoundRecord]) -> list[float]:
    """Return the finite losses; none if any is negative."""
    losses = list(_finite_losses(records))
    return losses if min(losses, default=0.0) >= 0 else []  # a share of a negative loss means nothing


def _finite_losses(records: Sequence[RoundRecord]) -> Iterator[float]:
    """Yield the loss before the first round, if known, and after each evaluated one, where it is finite."""
    first = records[0] if records else RoundRecord(0)
    if first.loss is not None and first.measured_change is not None and isfinite(first.loss - first.measured_change):
        yield first.loss - first.measured_change
    yield from (record.loss for record in records if record.loss is not None and isfinite(record.loss))


def _fall(records: Sequence[RoundRecord]) -> float:
    """Return how far the loss fell at most, as a share of the first one."""
    losses = _losses(records)
    return 1 - min(losses) / losses[0] if losses and losses[0] > 0 else 0.0


def _rises(losses: Sequence[float], by: float) -> int:
    return sum(after > (1 + by) * before for before, after in pairwise(losses))


def _median_curvature(records: Sequence[RoundRecord]) -> list[float]:
    known = [record.curvature for record in records if record.curvature is not None]
    return [median(known)] if known else []


def _short(value: float) -> str:
    """Return a number with two digits.

    >>> _short(171.3), _short(0.5821)
    ('170', '0.58')
    """
    return f"{float(f'{value:.2g}'):g}"
