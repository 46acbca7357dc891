"""`ContextualStrategy`: FedAvg or FedProx configure training and evaluation, a rule of fedcontext aggregates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedcontext.arrays.tree import all_finite
from fedcontext.coding import coding_for
from fedcontext.errors import FedcontextError, positive
from fedcontext.experiment import checked
from fedcontext.flower.coding import Extras
from fedcontext.flower.compatibility import RuleOrFunction, checked_inner, checked_rule, resolved_rule
from fedcontext.flower.correction import corrected
from fedcontext.flower.exclusion import (
    Aggregator,
    Carried,
    Outcome,
    Settings,
    aggregate_usable,
    by_reason,
    without_updates,
)
from fedcontext.flower.identity import run_identity
from fedcontext.flower.messages import Pool, Round, message_for, parse_replies, plan_tasks
from fedcontext.flower.metrics import note_metrics, round_metrics, usable_evaluations
from fedcontext.flower.protocol import array_bytes, arrays_of, record_of
from fedcontext.flower.roster import Roster, snapshot, wait_for_nodes
from fedcontext.flower.run_log import RunLog, RunState
from fedcontext.measurement.defences import Defences
from fedcontext.plan import Probes
from fedcontext.rules.base import AnyRule, asks_remaining_slopes, corrects
from fedcontext.rules.memory import contextual_memory
from fedcontext.rules.server import ServerOptimizer
from fedcontext.settings import integer

log = logging.getLogger("flwr")
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
DEFAULT_PROBES = 20


class ContextualStrategy(Strategy):
    """A Flower strategy whose aggregation is a rule of fedcontext.

    The wrapped strategy decides how many nodes train, the content of their messages, and evaluation. Which nodes train
    and which are probes is drawn as in the simulator, from the seed and the round alone. Records, checkpoints and
    resuming are part of `start`; another driver may call `configure_train` and `aggregate_train` itself.

    Args:
        inner: the strategy to wrap: `FedAvg`, `FedProx`, or a subclass that keeps FedAvg's ``aggregate_train``.
        rule: the aggregation rule, or a function of the train config that returns one; `contextual_memory` by default.
        probes: the devices whose gradients estimate the global one: "cohort", "all", or a number of devices that are
            drawn independently of the cohort. None is "cohort"; for a rule with memory it is 20 devices, or all of them
            if there are fewer, except in rounds in which all connected nodes train.
        seed: decides which devices train and probe, and their epochs.
        epochs: range from which each device's ``local-epochs`` is drawn and put into its config; None leaves it unset.
        pool: number of further devices that train and inform `expected_contextual`; "all" others by default.
        probe_averaging: whether the probes' gradients are weighted by "samples" or equally ("mean").
        layers: leaves that enter the geometry; all by default.
        buffers: leaves that are averaged instead of weighted, besides those that most gradients lack.
        gradient_bits: bits an entry of the gradients, 1 to 8, or 32 for float32; differences get half of them, rounded
            down. "auto" is float32; for a rule with memory it is 2, or 3 where the cohort itself probes.
        exchanges: number of exchanges with the probes in a round, 1 or 2. In the second, nine tenths of the probes of a
            rule with memory report how their gradients change over the proposed step, and `start` corrects it.
        server: an optimiser of `fedcontext.rules.server` that acts on the step of a rule without memory, such as
            ``fedadam()``.
        min_replies: with fewer usable updates the round is lost: the model stays unchanged.
        max_lost: number of consecutive lost rounds that ends the run.
        defences: limits on the influence of one device (`fedcontext.Defences`); None turns them off.
        node_timeout: seconds to wait for enough nodes to connect.
        records: JSONL file for a record of every round.
        checkpoint: safetensors file for the state after every round; `start` resumes from it.
        name: the dataset's name in the records.
    """

    def __init__(
        self,
        inner: Strategy,
        rule: RuleOrFunction | None = None,
        probes: Probes | None = None,
        *,
        seed: int = 0,
        epochs: tuple[int, int] | None = None,
        pool: Pool = "all",
        probe_averaging: Literal["samples", "mean"] = "samples",
        layers: Sequence[str | int] | None = None,
        buffers: Sequence[str | int] = (),
        gradient_bits: int | Literal["auto"] = "auto",
        exchanges: int = 2,
        server: ServerOptimizer | None = None,
        min_replies: int = 1,
        max_lost: int = 3,
        defences: Defences | None = Defences(),  # noqa: B008
        node_timeout: float = 300,
        records: str | Path | None = None,
        checkpoint: str | Path | None = None,
        name: str = "federation",
    ) -> None:
        if isinstance(inner, ContextualStrategy):
            raise FedcontextError(
                "inner is already a ContextualStrategy, as FedAvg of fedcontext.flower is; "
                "wrap Flower's own: from flwr.serverapp.strategy import FedAvg"
            )
        self.inner = checked_inner(inner)
        self.rule = checked_rule(contextual_memory() if rule is None else rule, server)
        self.probes: Probes | None = None if probes is None else checked("probes", probes)
        self.epochs = None if epochs is None else checked("epochs", epochs)
        self.seed, self.pool = checked("seed", seed), checked("pool", pool)
        self.gradient_bits, self.exchanges = checked("gradient_bits", gradient_bits), checked("exchanges", exchanges)
        self.name, self.server, self.max_lost = name, server, integer(1)("max_lost", max_lost)
        averaging = checked("probe_averaging", probe_averaging)
        self.settings = Settings(integer(1)("min_replies", min_replies), averaging, layers, buffers, defences)
        self.node_timeout = positive("node_timeout", node_timeout)
        self._log = RunLog(records, checkpoint)
        self._roster = Roster()
        self._timeout: float | None = None
        self._round: Round | None = None
        self._outcome: Outcome | None = None
        self._carried = Carried()

    def summary(self) -> None:
        """Log the settings of this strategy and of the wrapped one."""
        rule = self.rule.name if isinstance(self.rule, AnyRule) else "chosen by the train config"
        log.info("\t├──> fedcontext: rule %s, probes %s, seed %d", rule, self.probes or "default", self.seed)
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one message per sampled node: train, report the gradient, or both."""
        self.rule = rule = resolved_rule(self.rule, config, self.server)
        probes = self.probes if isinstance(self.probes, int) and "gradient" in rule.needs else 0
        minimum = max(self.inner.min_available_nodes, self.inner.min_train_nodes, probes)
        nodes = wait_for_nodes(grid, minimum, self.node_timeout)
        own_config = ConfigRecord({**config})  # Flower's strategies write into the config they get
        sampled = list(self.inner.configure_train(server_round, arrays, own_config, snapshot(grid, nodes)))
        self._round = Round(server_round, arrays, arrays_of(arrays), trains=bool(sampled))
        if not sampled:
            return []
        node_of = self._roster.devices(grid, nodes, min(self.node_timeout, self._timeout or self.node_timeout))
        if not node_of:
            return []
        devices, cohort = list(node_of), min(len(sampled), len(node_of))
        default: Probes = "cohort" if "differences" not in rule.needs or cohort == len(devices) else DEFAULT_PROBES
        chosen = default if self.probes is None else self.probes
        tasks = plan_tasks(self.seed, server_round, devices, cohort, rule.needs, chosen, self.pool, self.epochs)
        log.info("configure_train: %s nodes report gradients", sum(task.gradient for task in tasks))
        previous = None if self._carried.previous is None else record_of(self._carried.previous)
        coding = coding_for(self.gradient_bits, "differences" in rule.needs, chosen == "cohort")
        remaining = asks_remaining_slopes(rule, self._carried.rule)
        extras = Extras(coding, self.seed, server_round, previous, remaining)
        content = sampled[0].content
        sent = [(task, message_for(task, content, node_of[task.device], self._timeout, extras)) for task in tasks]
        messages = [message for _, message in sent]
        self._round = replace(
            self._round,
            content=content,
            sent=sent,
            extras=extras,
            population=len(devices),
            bytes_down=array_bytes(messages),
        )
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the new model, or None if the round is lost, and the round's metrics."""
        current = self._round
        if current is None or current.number != server_round:
            raise FedcontextError(
                f"aggregate_train was called for round {server_round} without configure_train: call "
                f"configure_train({server_round}, ...) first, send its messages, and pass their replies"
            )
        self._round = self._outcome = None
        if not current.trains:
            return None, None
        outcome = self._aggregate(current, list(replies))
        for line in by_reason(outcome.excluded):
            log.warning("\t> Excluded %s", line)
        metrics, aggregation = round_metrics(outcome, self.inner, self.settings.defences), outcome.aggregation
        kept = aggregation and without_updates(aggregation, keep_step=self._corrects)
        self._outcome = replace(outcome, replies=(), aggregation=kept)  # frees the updates
        if aggregation is None:
            log.warning("\t> Round %d is lost, the model is unchanged: %s", server_round, outcome.reason)
        else:
            self._carried = outcome.carried
            log.debug("\t> Rule %s: %s", outcome.rule.name, aggregation.info)
        return (record_of(aggregation.params) if aggregation else None), metrics

    def _aggregate(self, current: Round, replies: list[Message]) -> Outcome:
        failures = sum(reply.has_error() for reply in replies)
        log.info("aggregate_train: Received %s results and %s failures", len(replies) - failures, failures)
        device_of, key = self._roster.device_of, self.inner.weighted_by_key
        size = array_bytes(replies)  # before parsing, which empties them
        parsed, excluded = parse_replies(current.tasks, replies, current.params, current.extras, device_of, key)
        assert isinstance(self.rule, AnyRule)  # configure_train resolved it
        noise = current.extras.coding.distortions
        aggregator = Aggregator(self.rule, self.settings, self.server, current.population, noise)
        outcome = aggregate_usable(current.params, parsed, excluded, aggregator, self._carried)
        return replace(outcome, bytes_down=current.bytes_down, bytes_up=size)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the wrapped strategy's messages, or none if too few nodes are connected."""
        nodes = sorted(grid.get_node_ids())
        minimum = max(self.inner.min_available_nodes, self.inner.min_evaluate_nodes)
        if len(nodes) < minimum and self.inner.fraction_evaluate > 0:
            log.warning("configure_evaluate: skipped, %d nodes must be connected, got %d", minimum, len(nodes))
            return []
        return self.inner.configure_evaluate(server_round, arrays, config, snapshot(grid, nodes))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the wrapped strategy's aggregate of the usable replies."""
        key, defences = self.inner.weighted_by_key, self.settings.defences
        usable = usable_evaluations(replies, self._roster.device_of, key, defences)
        return self.inner.aggregate_evaluate(server_round, usable)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run all rounds, or those after the checkpoint, and return the final model and the metrics of these rounds."""
        began, self._timeout = time.monotonic(), timeout
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        initial = arrays_of(initial_arrays)
        if bad := [name for name, array in initial.items() if not all_finite(array)]:
            raise FedcontextError(f"the initial model has NaN or infinite entries in {', '.join(bad)}")
        self.rule = rule = resolved_rule(self.rule, train_config, self.server)
        log.info("Starting %s strategy:", type(self).__name__)
        log.info("\t├── Number of rounds: %d", num_rounds)
        self.summary()
        names = ("seed", "probes", "epochs", "pool", "gradient_bits", "exchanges")
        own = {name: getattr(self, name) for name in names}
        result, identity = Result(), run_identity(rule, self.server, self.settings, own)
        with self._log.open(initial, identity, self._manifest(rule, num_rounds)) as state:
            self._carried = state.carried
            result.arrays = record_of(state.params) if state.number else initial_arrays
            if evaluate_fn and state.number == 0:
                log.info("Initial global evaluation")
                evaluation = note_metrics(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, result.arrays))
                state = replace(state, loss=evaluation.get("loss"))
            while state.number < num_rounds:
                log.info("")
                log.info("[ROUND %s/%s]", state.number + 1, num_rounds)
                state = self._run_round(state, result, grid, train_config, evaluate_config, evaluate_fn)
        log.info("")
        log.info("Strategy execution finished in %.2fs", time.monotonic() - began)
        log.info("Final results:\n\n%s", result)
        self._log.log_findings()
        return result

    def _run_round(
        self,
        state: RunState,
        result: Result,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
    ) -> RunState:
        """Return the state after one more round; its model and metrics are in ``result``, its record is written."""
        began, number = time.monotonic(), state.number + 1
        arrays, metrics = self._train(number, result.arrays, train_config, grid)
        note_metrics(result.train_metrics_clientapp, number, metrics)
        result.arrays = result.arrays if arrays is None else arrays
        evaluation: dict[str, float] = {}
        if messages := list(self.configure_evaluate(number, result.arrays, evaluate_config, grid)):
            metrics = self.aggregate_evaluate(number, grid.send_and_receive(messages, timeout=self._timeout))
            evaluation |= note_metrics(result.evaluate_metrics_clientapp, number, metrics)
        if evaluate_fn:
            log.info("Global evaluation")
            evaluation |= note_metrics(result.evaluate_metrics_serverapp, number, evaluate_fn(number, result.arrays))
        outcome, self._outcome = self._outcome, None  # None if nobody was asked to train
        lost = state.lost
        if outcome is not None:
            lost = 0 if outcome.aggregation else lost + 1
        after = RunState(number, arrays_of(result.arrays), self._carried, evaluation.get("loss"), lost)
        seconds = time.monotonic() - began
        self._log.write(after, outcome.record(number, state.loss, seconds, **evaluation) if outcome else None)
        if outcome and lost >= self.max_lost:
            first, *others = by_reason(outcome.excluded) or ["nobody"]
            more = "; others for other reasons (see the log)" if others else ""
            raise FedcontextError(
                f"{lost} consecutive rounds were lost (max_lost {self.max_lost}), the last because "
                f"{outcome.reason}; excluded: {first}{more}"
            )
        return after

    def _train(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the new model (None if the round is lost), its step corrected if the rule does that, and metrics."""
        messages = self.configure_train(number, arrays, config, grid)
        current = self._round
        proposed, metrics = self.aggregate_train(number, grid.send_and_receive(messages, timeout=self._timeout))
        outcome = self._outcome
        if not self._corrects or current is None or outcome is None or proposed is None or metrics is None:
            return proposed, metrics
        key, device_of = self.inner.weighted_by_key, self._roster.device_of
        self._outcome = outcome = corrected(current, outcome, proposed, grid, self._timeout, device_of, key)
        assert outcome.aggregation is not None
        self._carried = outcome.carried
        metrics["fedcontext.weights"] = list(outcome.aggregation.applied.values())
        metrics["fedcontext.clipped"] = sorted(outcome.aggregation.clipped)
        return record_of(outcome.aggregation.params), metrics

    @property
    def _corrects(self) -> bool:
        return self.exchanges > 1 and self.server is None and corrects(self.rule)

    def _manifest(self, rule: AnyRule, rounds: int) -> dict[str, Any]:
        """Return the settings in the first line of the records."""
        algorithm = f"{type(self.inner).__name__}, {rule.name}"
        settings = {"dataset": self.name, "rounds": rounds, "seed": self.seed, "probes": self.probes}
        return {**settings, "algorithm": algorithm, "smoothness": rule.smoothness}
