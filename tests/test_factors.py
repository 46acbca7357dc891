"""Layers that keep factors of their change: the same updates as with the weights written down, or no factors."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fedcontext.datasets.federated import FederatedData, Split
from fedcontext.engines.base import Work
from fedcontext.engines.torch import stage
from fedcontext.engines.torch.engine import TorchEngine
from fedcontext.engines.torch.task import cross_entropy
from fedcontext.errors import FedcontextError
from fedcontext.local_sgd import LocalSGD
from test_module import CPU, LOCALS, distance, some_data, two_ways, warmed_up

SIDE, OUT = 120, 100  # factors are smaller up to 54 rows


def wide(dtype=torch.float64):
    return nn.Sequential(nn.Linear(SIDE, OUT), nn.Tanh(), nn.Linear(OUT, 3)).to(dtype)


def data(classes=3):
    return some_data(sizes=(7, 1, 12, 4, 9), dimension=SIDE, classes=classes)


def work(local=LOCALS["sgd"], epochs=(1, 2, 1, 2), number=2):
    return Work(seed=3, number=number, devices=np.array([4, 0, 1, 2]), epochs=np.array(epochs), local=local)


def apart(at_once, one_by_one, work):
    """Return how far the two ways are from each other, and the layers that kept factors."""
    params = at_once.initial_params()
    return distance(at_once.train(params, work), one_by_one.train(params, work)), at_once.stacked.stage.factors.layers


@pytest.mark.parametrize("name", LOCALS)
def test_factors_give_the_updates_of_written_weights(name):
    at_once, one_by_one = two_ways(data(), wide)
    for number in (1, 2):  # the second round finds places that were used
        far, layers = apart(at_once, one_by_one, work(LOCALS[name], number=number))
        assert far < 1e-12
        assert layers == ["0"]


@pytest.mark.parametrize("speed", ["graph", "compile"])
def test_factors_can_be_recorded_and_compiled(speed, monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, dynamic, options: compile(step, backend="aot_eager"))
    monkeypatch.setattr(stage, "_graph", warmed_up)
    recorded, one_by_one = TorchEngine(data(), wide, at_once=True, speed=speed, **CPU), two_ways(data(), wide)[1]
    for number in (1, 2):
        far, layers = apart(recorded, one_by_one, work(LOCALS["all"], number=number))
        assert far < 1e-12
        assert layers == ["0"]
    assert recorded.stacked.speed == speed


def test_weights_are_written_down_where_factors_of_that_many_steps_are_larger():
    at_once, one_by_one = two_ways(data(), wide)
    for epochs, expected in ((1, ["0"]), (2, ["0"]), (5, []), (1, [])):
        far, layers = apart(at_once, one_by_one, work(epochs=(epochs,) * 4))
        assert far < 1e-12
        assert layers == expected


def test_a_round_that_ran_away_leaves_no_trace():
    def deep():
        return nn.Sequential(nn.Linear(SIDE, OUT), nn.Linear(OUT, 90), nn.Linear(90, 3)).double()

    used, fresh = (TorchEngine(data(), deep, at_once=True, **CPU) for _ in range(2))
    with pytest.raises(FedcontextError, match="the loss turned NaN or infinite"):
        used.train({**used.initial_params(), "0.bias": torch.full((OUT,), torch.nan, dtype=torch.float64)}, work())
    assert used.stacked.stage.factors.layers == ["0", "1"]  # the second was given NaN for inputs
    assert distance(used.train(used.initial_params(), work()), fresh.train(fresh.initial_params(), work())) < 1e-12


class Otherwise(nn.Module):
    """Uses a layer's weights in other ways than to multiply a row for each sample once."""

    def __init__(self, way):
        super().__init__()
        self.way, self.first, self.last = way, nn.Linear(SIDE, SIDE), nn.Linear(SIDE, 3)
        self.gate = nn.Parameter(torch.zeros(()))
        self.prototypes = nn.Parameter(torch.randn(2, SIDE))
        if way == "tied":
            self.other = nn.Linear(SIDE, SIDE)
            self.other.weight = self.first.weight

    def forward(self, x):
        if self.way == "in pieces":
            return self.last(torch.cat([torch.tanh(self.first(part)) for part in x.split(2)]))
        if self.way == "of prototypes":
            return self.last(x) + self.last(torch.tanh(self.first(self.prototypes)).mean(dim=0))
        h = torch.tanh(self.first(x))
        match self.way:
            case "twice":
                h = torch.tanh(self.first(h))
            case "gated":
                h = h + self.gate * torch.tanh(self.first(self.gate * h))
            case "tied":
                h = torch.tanh(self.other(h))
            case "read":
                h = h + self.first.weight.diagonal()
            case "penalty":
                return self.last(h) + 1e-3 * self.first.weight.square().sum() * torch.arange(3)
            case "by type":
                known = [child for child in self.modules() if type(child) is nn.Linear]
                return self.last(h) * len(known)
            case "three axes":
                h = self.first(x[:, None, :])[:, 0]
        return self.last(h)


OTHERS = ["twice", "gated", "tied", "read", "penalty", "three axes", "in pieces", "of prototypes"]


@pytest.mark.parametrize("silent", ["all count", "zero head", "some ignored"])
@pytest.mark.parametrize("way", OTHERS)
def test_a_layer_whose_weights_are_used_otherwise_keeps_them(way, silent):
    def make():
        module = Otherwise(way).double()
        if silent == "zero head":
            nn.init.zeros_(module.last.weight)
        return module

    given = data()
    ignored = int(given.train.labels[0])

    def loss(outputs, labels):  # the trial's samples are the first
        return cross_entropy(outputs, labels) * (labels != ignored)

    options = {"loss": loss} if silent == "some ignored" else {}
    for local in (LOCALS["all"], LocalSGD(0.05, 1, mu=0.1), LocalSGD(0.05, 2)):
        far, layers = apart(*two_ways(given, make, **options), work(local, epochs=(1, 1, 1, 1)))
        assert far < 1e-12
        rows = {"in pieces": (1, 2), "of prototypes": (2,)}.get(way, ())  # then it is a row for each sample
        assert layers == (["first"] if local.batch_size in rows else [])


def test_a_layer_that_keeps_factors_is_still_what_it_was():
    far, layers = apart(*two_ways(data(), lambda: Otherwise("by type").double()), work(LOCALS["all"]))
    assert far < 1e-12
    assert layers == ["first"]


def test_what_is_refused_is_left_as_it_was():
    engine = TorchEngine(data(), lambda: Otherwise("twice").double(), at_once=True, **CPU)
    engine.train(engine.initial_params(), work())
    layer = engine.task.module.first
    assert not list(layer.named_buffers())
    assert "forward" not in vars(layer)


def test_the_modules_own_words_stay_free():
    def hooked():
        module = wide()
        module[0].register_forward_hook(lambda layer, given, _: setattr(layer, "input", given[0].shape))
        return module

    far, layers = apart(*two_ways(data(), hooked), work())
    assert far < 1e-12
    assert layers == ["0"]


def test_a_function_that_hands_out_its_own_module_finds_it_unchanged():
    module = wide()
    engine = TorchEngine(data(), lambda: module, at_once=True, **CPU)
    engine.train(engine.initial_params(), work())
    assert engine.stacked.stage.factors.layers == ["0"]
    assert not list(module.buffers())


def test_layers_of_different_types_keep_their_own():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(SIDE, 90), nn.Linear(90, OUT).double(), nn.Linear(OUT, 3)

        def forward(self, x):
            return self.last(torch.tanh(self.second(torch.tanh(self.first(x)).double())).float())

    far, layers = apart(*two_ways(data(), Mixed), work())
    assert far < 1e-5
    assert layers == ["first", "second"]


def test_a_gradient_that_cancels_can_be_clipped():
    weights = torch.tensor([0.1, 0.2, -0.3])
    for seed in range(10):
        x = np.random.default_rng(seed).standard_normal((4, SIDE)).astype(np.float32)[[0, 1, 2, 3, 3, 3]]
        split = Split(x, np.arange(6) % 3, np.array([0, 3, 6]))
        engine = TorchEngine(
            FederatedData("cancels", split, split, 3),
            lambda: nn.Sequential(nn.Linear(SIDE, OUT, bias=False), nn.Linear(OUT, 3, bias=False)),
            loss=lambda outputs, labels: weights[labels] * outputs.sum(dim=1) * 1000,
            at_once=True,
            seed=seed,
            **CPU,
        )
        engine.train(engine.initial_params(), Work(3, 1, np.ones(1, int), np.ones(1, int), LocalSGD(0.05, 3, clip=1.0)))
        assert engine.stacked.stage.factors.layers == ["0"]


def test_dropout_and_frozen_weights_are_as_without_factors(monkeypatch):
    def frozen():
        layers = nn.Linear(SIDE, OUT), nn.Dropout(0.5), nn.Linear(OUT, 90), nn.Dropout(0.5), nn.Linear(90, 3)
        module = nn.Sequential(*layers).double()
        module[0].requires_grad_(False)
        return module

    factored = TorchEngine(data(), frozen, at_once=True, **CPU)
    found = factored.train(factored.initial_params(), work())
    monkeypatch.setattr(stage, "layers_to_factor", lambda *_: [])
    written = TorchEngine(data(), frozen, at_once=True, **CPU)
    assert distance(found, written.train(written.initial_params(), work())) < 1e-12
    assert factored.stacked.stage.factors.layers == ["2"]
    assert written.stacked.stage.factors.layers == []


def test_a_copy_of_an_engine_trains_like_it():
    engine = TorchEngine(data(), wide, at_once=True, **CPU)
    params, moves = engine.initial_params(), None
    moves = engine.train(params, work())
    copied = copy.deepcopy(engine)
    assert distance(copied.train(params, work()), moves) == 0
    assert distance(engine.train(params, work()), moves) == 0


def test_bfloat16_keeps_no_factors():
    engine = TorchEngine(data(), lambda: wide(torch.float32), at_once=True, precision="bfloat16", **CPU)
    engine.train(engine.initial_params(), work())
    assert engine.stacked.stage.factors.layers == []
