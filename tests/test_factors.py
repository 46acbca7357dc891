"""Layers that keep factors of their change: the same updates as with the weights written down, or no factors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedcontext.cohorts import Work
from fedcontext.cohorts.module import ModuleEngine
from fedcontext.errors import FedcontextError
from test_module import CPU, LOCALS, distance, some_data, two_ways

WIDE = 40


def wide(dtype=torch.float64):
    return nn.Sequential(nn.Linear(WIDE, 48), nn.Tanh(), nn.Linear(48, 3)).to(dtype)


def data():
    return some_data(sizes=(7, 1, 12, 4, 9), dimension=WIDE)


def work(local=LOCALS["sgd"], epochs=(1, 2, 1, 2), number=2):
    return Work(seed=3, number=number, devices=np.array([4, 0, 1, 2]), epochs=np.array(epochs), local=local)


@pytest.mark.parametrize("name", LOCALS)
def test_factors_give_the_updates_of_written_weights(name):
    at_once, one_by_one = two_ways(data(), wide)
    for number in (1, 2):  # the second round finds places that were used
        ours, theirs = (
            engine.train(at_once.start(), work(LOCALS[name], number=number)) for engine in (at_once, one_by_one)
        )
        assert distance(ours, theirs) < 1e-12
    assert at_once.stacked.stage.layers == ["0"]


def test_more_steps_than_the_layers_rank_write_the_weights_down():
    at_once, one_by_one = two_ways(data(), wide)
    for epochs, layers in (((1, 1, 1, 1), ["0"]), ((1, 2, 1, 2), ["0"]), ((1, 5, 1, 5), []), ((1, 1, 1, 1), [])):
        ours, theirs = (engine.train(at_once.start(), work(epochs=epochs)) for engine in (at_once, one_by_one))
        assert distance(ours, theirs) < 1e-12
        assert at_once.stacked.stage.layers == layers


def test_a_round_that_ran_away_leaves_no_trace():
    def deep():
        return nn.Sequential(nn.Linear(WIDE, 48), nn.Linear(48, 44), nn.Linear(44, 3)).double()

    used, fresh = (ModuleEngine(data(), deep, at_once=True, **CPU) for _ in range(2))
    with pytest.raises(FedcontextError, match="the loss turned NaN or infinite"):
        used.train({**used.start(), "0.bias": torch.full((48,), torch.nan, dtype=torch.float64)}, work())
    assert used.stacked.stage.layers == ["0", "1"]  # the second was given NaN for inputs
    assert distance(used.train(used.start(), work()), fresh.train(fresh.start(), work())) < 1e-12


class Shared(nn.Module):
    """Uses a layer's weights in other ways than to multiply its inputs once."""

    def __init__(self, way):
        super().__init__()
        self.way, self.first, self.last = way, nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3)
        if way == "tied":
            self.other = nn.Linear(WIDE, WIDE)
            self.other.weight = self.first.weight

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.way == "twice":
            x = torch.tanh(self.first(x))
        if self.way == "tied":
            x = torch.tanh(self.other(x))
        if self.way == "read":
            x = x + self.first.weight.diagonal()
        if self.way == "three axes":
            x = self.first(x[:, None, :])[:, 0]
        return self.last(x)


@pytest.mark.parametrize("way", ["twice", "tied", "read", "three axes"])
def test_a_layer_whose_weights_are_used_otherwise_keeps_them(way):
    at_once, one_by_one = two_ways(data(), lambda: Shared(way).double())
    ours, theirs = (engine.train(at_once.start(), work(LOCALS["all"])) for engine in (at_once, one_by_one))
    assert at_once.stacked.stage.layers == []
    assert distance(ours, theirs) < 1e-12


def test_frozen_weights_and_dropout_are_as_before():
    def frozen():
        module = nn.Sequential(nn.Linear(WIDE, 48), nn.Dropout(0.5), nn.Linear(48, 40), nn.Linear(40, 3)).double()
        module[0].requires_grad_(False)
        return module

    engine = ModuleEngine(data(), frozen, at_once=True, **CPU)
    first, again = (engine.train(engine.start(), work()) for _ in range(2))
    assert engine.stacked.stage.layers == ["2"]
    assert distance(first, again) == 0
    assert all(not move["0.weight"].any() for move in first)


def test_bfloat16_keeps_no_factors():
    engine = ModuleEngine(data(), lambda: wide(torch.float32), at_once=True, precision="bfloat16", **CPU)
    engine.train(engine.start(), work())
    assert engine.stacked.stage.layers == []
