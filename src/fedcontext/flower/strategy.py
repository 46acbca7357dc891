"""A Flower strategy around another: the inner one configures and evaluates, our rules aggregate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from fedcontext.aggregation import Aggregation
from fedcontext.arrays.tree import all_finite
from fedcontext.errors import FedcontextError, positive
from fedcontext.flower.messages import Answer, Probes, Task, collect, message_for, plan_tasks, received
from fedcontext.flower.protocol import SAMPLES, Arrays, arrays_of, record_of, size
from fedcontext.flower.robust import combine
from fedcontext.flower.roster import Roster, Snapshot, connected
from fedcontext.flower.run_log import History, client_metrics, round_metrics, sound_metrics
from fedcontext.rules import Rule, contextual

log = logging.getLogger("flwr")
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class ContextualStrategy(Strategy):
    """Any Flower strategy with its aggregation replaced by one of our rules.

    The inner strategy says how many devices train and what their messages hold, and configures and aggregates
    evaluation. Which devices train and probe is ours: the simulator's plan, from the seed and the round's number
    alone. Keep this strategy outermost: records, checkpoints and resuming belong to its `start`.

    Args:
        inner: the strategy to wrap: `FedAvg`, `FedProx`, ...
        rule: how to weigh; if not given, `contextual` with the smoothness 1 / ``lr`` of the train config.
        probes: whose gradients estimate the global one: a number of devices outside the cohort, "all", "cohort".
        seed: decides which devices train and probe, and their epochs.
        epochs: the range that each device's ``local-epochs`` (in its config) is drawn from; unset if not given.
        pool: devices that train beside the cohort and inform `expected_contextual`, or "all" others.
        probe_averaging: how probes' gradients are averaged: by "samples", or as a plain "mean".
        layers: leaves that enter the geometry; all if not given.
        buffers: leaves that are averaged instead of weighted, beside those that most gradients lack.
        min_replies: fewer usable updates lose the round: the model is kept.
        max_lost: consecutive lost rounds that end the run.
        node_timeout: seconds to wait for enough devices to connect.
        records: JSONL file for a record of every round.
        checkpoint: safetensors file for the run's state after every round, which `start` goes on from.
        name: what the records call the data.
    """

    def __init__(
        self,
        inner: Strategy,
        rule: Rule | None = None,
        probes: Probes = "cohort",
        *,
        seed: int = 0,
        epochs: tuple[int, int] | None = None,
        pool: int | Literal["all"] = 0,
        probe_averaging: Literal["samples", "mean"] = "samples",
        layers: Sequence[str | int] | None = None,
        buffers: Sequence[str | int] = (),
        min_replies: int = 1,
        max_lost: int = 3,
        node_timeout: float = 300,
        records: str | Path | None = None,
        checkpoint: str | Path | None = None,
        name: str = "federation",
    ) -> None:
        if probes not in ("cohort", "all") and not (isinstance(probes, int) and probes > 0):
            raise FedcontextError(f"probes must be a number of devices, 'all' or 'cohort', got {probes!r}")
        if min_replies < 1 or max_lost < 1:
            raise FedcontextError(f"min_replies and max_lost must be at least 1, got {min_replies} and {max_lost}")
        if isinstance(getattr(inner, "strategy", None), Strategy):
            raise FedcontextError(
                f"inner must not be a wrapper such as {type(inner).__name__}: the noise and clipping of its aggregation "
                "would be lost; wrap the strategy inside it"
            )
        self.inner, self.rule, self.probes, self.seed = inner, rule, probes, seed
        self.epochs, self.pool, self.probe_averaging = epochs, pool, probe_averaging
        self.layers, self.buffers = layers, buffers
        self.min_replies, self.max_lost = min_replies, max_lost
        self.node_timeout = positive("node_timeout", node_timeout)
        self.history = History(records, checkpoint, name)
        self._roster = Roster()
        self._params: Arrays = {}
        self._sent: list[tuple[Task, Message]] = []
        self._timeout: float | None = None
        self._why_lost = ""
        self._samples_key: str = getattr(inner, "weighted_by_key", SAMPLES)

    def summary(self) -> None:
        """Log what this strategy adds to the inner one."""
        rule = self.rule.name if self.rule else "contextual, smoothness 1/lr"
        log.info("\t├──> fedcontext: rule %s, probes %s, seed %d", rule, self.probes, self.seed)
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one message for each device of the round: train, train and report the gradient, or report it."""
        rule = self._settled_rule(config)
        nodes = connected(grid, self._least("min_train_nodes"), self.node_timeout)
        own_config = ConfigRecord({**config})  # strategies write into what they get
        wanted = list(self.inner.configure_train(server_round, arrays, own_config, Snapshot(grid, nodes)))
        self._params, self._sent = arrays_of(arrays), []
        if not wanted:
            return []
        devices = self._roster.devices(grid, nodes, min(self.node_timeout, self._timeout or self.node_timeout))
        needs = rule.needs
        cohort = self._cohort(len(wanted), len(devices), rule)
        if cohort < 1:
            self.history.note(server_round, rule, [], None, {}, 0, 0)
            return []
        tasks = plan_tasks(
            self.seed,
            server_round,
            list(devices),
            cohort,
            probes=self.probes if "gradient" in needs else None,
            own_gradients="own gradients" in needs,
            pool=self._pool(len(devices) - cohort) if "pool" in needs else 0,
            epochs=self.epochs,
        )
        self._sent = [(t, message_for(t, wanted[0].content, devices[t.device], self._timeout)) for t in tasks]
        return [message for _, message in self._sent]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the new model, or None where too few answers could be used, and the round's numbers."""
        if not self._sent:
            return None, None
        replies = list(replies)
        sent = {message.metadata.message_id: task for task, message in self._sent}
        down = sum(size(record) for _, m in self._sent for record in m.content.array_records.values())
        up = received(replies)
        answers, excluded = collect(sent, replies, self._params, self._roster.device_of, self._samples_key)
        result = self._combined(answers, excluded)
        used = [answer for answer in answers if answer.task.device not in excluded]
        cohort = [answer.task.device for answer in used if answer.task.role == "cohort"]
        self.history.note(server_round, self.rule, cohort, result, excluded, down, up)
        metrics = client_metrics(self.inner, [a.content for a in used if a.update is not None], self._samples_key)
        self._sent = []
        return (record_of(result.params) if result else None), round_metrics(metrics, cohort, result, excluded)

    def _combined(self, answers: Sequence[Answer], excluded: dict[int, str]) -> Aggregation | None:
        """Return the aggregation; None, with the reason logged, if the round is lost."""
        assert self.rule is not None
        try:
            return combine(
                self._params,
                answers,
                excluded,
                rule=self.rule,
                state=self.history.rule_state,
                min_replies=self.min_replies,
                by_samples=self.probe_averaging == "samples",
                layers=self.layers,
                buffers=self.buffers,
            )
        except (FedcontextError, np.linalg.LinAlgError) as error:
            self._lose(str(error))
            return None

    def _lose(self, why: str) -> None:
        self._why_lost = why
        log.warning("the round is lost, the model is kept: %s", why)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the inner strategy's messages; none where too few devices are connected to evaluate."""
        nodes, least = sorted(grid.get_node_ids()), self._least("min_evaluate_nodes")
        if len(nodes) < least and getattr(self.inner, "fraction_evaluate", 1.0) > 0:
            log.warning("no evaluation: %d devices must be connected, got %d", least, len(nodes))
            return []
        return self.inner.configure_evaluate(server_round, arrays, config, Snapshot(grid, nodes))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the inner strategy's summary of the replies that hold finite numbers, in the devices' order."""
        return self.inner.aggregate_evaluate(
            server_round, sound_metrics(replies, self._roster.device_of, self._samples_key)
        )

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
        """Run the rounds, or those after the last checkpoint, and return the model and these rounds' metrics."""
        self._timeout = timeout
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        result, rule = Result(), self._settled_rule(train_config)
        arrays = self._begin(initial_arrays, num_rounds, rule)
        result.arrays = arrays
        self.summary()
        if evaluate_fn and self.history.number == 0:
            self._judge(result, 0, evaluate_fn(0, arrays))
        for number in range(self.history.number + 1, num_rounds + 1):
            log.info("[ROUND %d/%d]", number, num_rounds)
            began = time.monotonic()
            messages = self.configure_train(number, arrays, train_config, grid)
            new, metrics = self.aggregate_train(number, grid.send_and_receive(messages, timeout=timeout))
            arrays = result.arrays = arrays if new is None else new
            if metrics is not None:
                result.train_metrics_clientapp[number] = metrics
            self._evaluate(result, number, arrays, evaluate_config, grid)
            if evaluate_fn:
                self._judge(result, number, evaluate_fn(number, arrays))
            self.history.close(number, arrays_of(arrays), time.monotonic() - began)
            if self.history.lost >= self.max_lost:
                raise FedcontextError(
                    f"{self.history.lost} rounds in a row were lost (max_lost {self.max_lost}), the last because "
                    f"{self._why_lost}; left out: {self.history.excluded}"
                )
        log.info("Final results:\n%s", result)
        return result

    def _begin(self, initial: ArrayRecord, rounds: int, rule: Rule) -> ArrayRecord:
        if bad := [name for name, array in arrays_of(initial).items() if not all_finite(array)]:
            raise FedcontextError(f"the initial model has NaN or infinite entries in {', '.join(bad)}")
        settings: dict[str, Any] = {"rounds": rounds, "seed": self.seed, "probes": self.probes}
        settings |= {"algorithm": f"{type(self.inner).__name__}, {rule.name}", "smoothness": rule.smoothness}
        params = self.history.begin(arrays_of(initial), self._identity(rule), settings)
        return initial if params is None else record_of(params)

    def _identity(self, rule: Rule) -> dict[str, Any]:
        """Return the settings that decide what a round does: a run goes on only with the same ones."""
        names = ("seed", "probes", "epochs", "pool", "probe_averaging", "layers", "buffers")
        return {"rule": rule.name, "smoothness": rule.smoothness, **{name: getattr(self, name) for name in names}}

    def _evaluate(self, result: Result, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> None:
        messages = list(self.configure_evaluate(number, arrays, config, grid))
        if not messages:
            return
        metrics = self.aggregate_evaluate(number, grid.send_and_receive(messages, timeout=self._timeout))
        if metrics is not None:
            result.evaluate_metrics_clientapp[number] = metrics
            self.history.judge(metrics)

    def _judge(self, result: Result, number: int, metrics: MetricRecord | None) -> None:
        """Note the server's own evaluation, which stands before the devices'."""
        if metrics is not None:
            result.evaluate_metrics_serverapp[number] = metrics
            self.history.judge(metrics)

    def _settled_rule(self, config: ConfigRecord) -> Rule:
        if self.rule is None:
            rate = config.get("lr", config.get("learning-rate"))
            if not isinstance(rate, int | float):
                raise FedcontextError("give a rule, or the learning rate as 'lr' in the train config: β is its inverse")
            self.rule = contextual(smoothness=1 / positive("lr", rate))
        return self.rule

    def _least(self, which: str) -> int:
        """Return how many nodes the inner strategy would wait for, and the probes beside them."""
        least = max(getattr(self.inner, "min_available_nodes", 1), getattr(self.inner, which, 1), 1)
        apart = self.probes if isinstance(self.probes, int) and which == "min_train_nodes" else 0
        return max(least, getattr(self.inner, which, 1) + apart)

    def _cohort(self, wanted: int, known: int, rule: Rule) -> int:
        """Return how many devices can train beside the probes, ``wanted`` at most; with none the round is lost."""
        apart = self.probes if isinstance(self.probes, int) and "gradient" in rule.needs else 0
        cohort = min(wanted, known - apart)
        if cohort < 1:
            self._lose(f"{known} connected devices said who they are, and {apart} of them must probe")
        elif cohort < wanted:
            log.warning("%d devices train instead of %d: %d are known, %d probe", cohort, wanted, known, apart)
        return cohort

    def _pool(self, others: int) -> int:
        return others if self.pool == "all" else min(self.pool, others)


def contextual_fedavg(**settings: Any) -> ContextualStrategy:
    """Return contextual `FedAvg`, with FedAvg's own settings: the rule is at 1 / ``lr``, the cohort probes.

    >>> contextual_fedavg(fraction_train=0.5).inner.fraction_train
    0.5
    """
    return ContextualStrategy(FedAvg(**settings))
