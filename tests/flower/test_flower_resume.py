"""A server killed at any moment of a round and started again ends with the model of a run never interrupted."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
from fedcontext_app import task
from flower_grid import MemoryGrid
from flwr.serverapp.strategy import FedAvg

import fedcontext as fc
from fedcontext import checkpoint
from fedcontext.flower import ContextualStrategy, numpy_client
from fedcontext.flower.protocol import arrays_of, record_of
from fedcontext.rules.base import Rule, SumRule
from fedcontext.rules.memory import MemorySettings, contextual_memory
from fedcontext.rules.server import fedadam

CONFIG = {
    "dataset": "synthetic-1-1",
    "algorithm": "fedavg-contextual",
    "batch-size": 10,
    "learning-rate": 0.05,
    "smoothness": 0.0,
    "mu": 0.0,
    "seed": 0,
}
APP = numpy_client(task.train, task.gradient, task.evaluate)


class Killed(BaseException): ...


def memory(**settings: float) -> SumRule:
    return contextual_memory(MemorySettings(**settings))


def momentum() -> Rule:
    """A rule with memory, in two forms: a number and an array."""

    def weigh(geometry, state):
        count, last = state
        weights = np.full(len(geometry.samples), 0.5 / len(geometry.samples)) + 0.1 * last.mean()
        return weights, (count + 1, weights)

    return Rule("momentum", weigh, init=lambda params: (0, np.zeros(1)))


def start(at: Path, grid: MemoryGrid | None = None, rule: Rule | None = None, rounds: int = 4, **settings):
    settings = {"seed": 5, "epochs": (1, 2), **settings}
    files = {"records": at / "run.jsonl", "checkpoint": at / "run.safetensors"}
    strategy = ContextualStrategy(FedAvg(fraction_train=0.5), rule or fc.contextual(20), **settings, **files)
    return strategy.start(grid or MemoryGrid(APP, range(8), CONFIG), record_of(task.initial_params(CONFIG)), rounds)


def files(at: Path) -> tuple[bytes, list[dict]]:
    records = [vars(record) | {"seconds": 0} for record in fc.read_run(at / "run.jsonl")[1]]
    return (at / "run.safetensors").read_bytes(), records


RULES = {fc.contextual(20): 2, momentum(): 2, contextual_memory(): 3}  # exchanges: training, (correction,) evaluation
KILLS = [(exchange, rule) for rule, count in RULES.items() for exchange in range(1, 4 * count + 1)]


@pytest.mark.parametrize(("exchange", "rule"), KILLS, ids=lambda value: getattr(value, "name", value))
def test_a_killed_server_goes_on_to_the_same_bits(tmp_path: Path, exchange: int, rule: Rule) -> None:
    start(tmp_path / "whole", rule=rule)
    grid = MemoryGrid(APP, range(8), CONFIG)

    def kill(partition, message, reply):
        if len(grid.sent) == exchange + 1:  # the first asked the devices who they are
            raise Killed
        return [reply]

    grid.meddle = kill
    with pytest.raises(Killed):
        start(tmp_path / "cut", grid, rule)
    start(tmp_path / "cut", MemoryGrid(APP, range(8), CONFIG, shuffle=9), rule)  # other node ids
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_a_kill_between_record_and_checkpoint_repeats_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path / "whole")
    save = checkpoint.save

    def kill(path, params, rule, facts, after):
        if facts["number"] == 3:
            raise Killed
        save(path, params, rule, facts, after)

    monkeypatch.setattr(checkpoint, "save", kill)
    with pytest.raises(Killed):
        start(tmp_path / "cut")
    monkeypatch.setattr(checkpoint, "save", save)
    assert len(fc.read_run(tmp_path / "cut" / "run.jsonl")[1]) == 3
    start(tmp_path / "cut")
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_the_state_of_a_server_optimizer_resumes_to_the_same_bits(tmp_path: Path) -> None:
    start(tmp_path / "whole", rule=fc.mean(), server=fedadam())
    start(tmp_path / "cut", rule=fc.mean(), server=fedadam(), rounds=2)
    start(tmp_path / "cut", rule=fc.mean(), server=fedadam())
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_more_rounds_can_be_asked_of_a_finished_run(tmp_path: Path) -> None:
    start(tmp_path / "whole")
    start(tmp_path / "more", rounds=2)
    start(tmp_path / "more", rounds=4)
    assert files(tmp_path / "more") == files(tmp_path / "whole")


def test_a_finished_run_returns_its_model_at_once(tmp_path: Path) -> None:
    first, grid = start(tmp_path), MemoryGrid(APP, [])
    again = start(tmp_path, grid)
    assert arrays_of(again.arrays)["softmax"].tobytes() == arrays_of(first.arrays)["softmax"].tobytes()
    assert not grid.sent


OTHERS = {
    "seed": 6,
    "rule": fc.mean(),
    "smoothness": fc.contextual(21),
    "probes": "all",
    "epochs": (1, 3),
    "pool": 2,
    "probe_averaging": "mean",
    "layers": ["softmax"],
    "buffers": ["softmax"],
    "gradient_bits": 8,
    "exchanges": 1,
    "server": fedadam(),
}


@pytest.mark.parametrize(("what", "other"), OTHERS.items())
def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path, what: str, other: object) -> None:
    start(tmp_path, rounds=1)
    with pytest.raises(fc.FedcontextError, match=rf"run.safetensors: {what} must be"):
        start(tmp_path, **{"rule" if what == "smoothness" else what: other})


SETTINGS = {  # two rules or optimisers of one name, and what tells them apart
    "rule settings, step, .*decay must be 0.8": ({"rule": contextual_memory()}, {"rule": memory(decay=0.8)}),
    "server settings, update, rate must be 0.2": (
        {"rule": fc.mean(), "server": fedadam()},
        {"rule": fc.mean(), "server": fedadam(lr=0.2)},
    ),
}


@pytest.mark.parametrize("message", SETTINGS)
def test_a_checkpoint_of_other_hyperparameters_is_refused(tmp_path: Path, message: str) -> None:
    one, other = SETTINGS[message]
    start(tmp_path, rounds=1, **one)
    with pytest.raises(fc.FedcontextError, match=rf"run.safetensors: {message} as in this run"):
        start(tmp_path, **other)
    start(tmp_path, rounds=2, **one)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.WARNING, "fedcontext")  # --quiet of an earlier test raises it
    start(tmp_path / "whole")
    start(tmp_path / "cut", rounds=3)
    (tmp_path / "cut" / "run.safetensors").write_bytes(b"damaged")
    start(tmp_path / "cut")
    assert "not a fedcontext checkpoint" in caplog.text
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_finished_records_survive_a_rerun_that_is_killed_twice(tmp_path: Path) -> None:
    start(tmp_path)
    finished = (tmp_path / "run.jsonl").read_bytes()
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    for exchange in (5, 11):
        grid = MemoryGrid(APP, range(8), CONFIG)

        def kill(partition, message, reply, grid=grid, exchange=exchange):
            if len(grid.sent) == exchange:
                raise Killed
            return [reply]

        grid.meddle = kill
        with pytest.raises(Killed):
            start(tmp_path, grid, rounds=6)
        assert (tmp_path / "run.jsonl").read_bytes() == finished
    start(tmp_path, rounds=6)
    assert len(fc.read_run(tmp_path / "run.jsonl")[1]) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "run.jsonl",
        "run.safetensors",
        "run.safetensors.previous",
    ]


def test_a_second_run_on_a_checkpoint_in_use_is_refused(tmp_path: Path) -> None:
    grid, refused = MemoryGrid(APP, range(8), CONFIG), []

    def start_another(partition, message, reply):
        if not refused:
            with pytest.raises(fc.FedcontextError, match=rf"process {os.getpid()} is already running") as error:
                start(tmp_path)
            refused.append(error)
        return [reply]

    grid.meddle = start_another
    start(tmp_path, grid)
    assert refused
    start(tmp_path, rounds=5)
