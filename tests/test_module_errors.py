"""What can go wrong with a module: every complaint is one sentence that names the thing, and nothing is half done."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedcontext as fc
from fedcontext.engines.torch.engine import TorchEngine
from fedcontext.engines.torch.stage import Stage
from fedcontext.engines.torch.task import Task
from fedcontext.errors import FedcontextError
from fedcontext.local_sgd import LocalSGD
from test_module import CPU, distance, perceptron, some_data, some_work, with_batch_norm

OUT_OF_MEMORY = torch.cuda.OutOfMemoryError


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"input_shape": (3, 4)}, r"input_shape \(3, 4\) holds 12 numbers, a sample 6"),
        ({"input_shape": (2, 3)}, r"the module does not take samples of shape \(2, 3\)"),
        ({"module": nn.Linear(6, 2)}, r"must give \(2, 3\) outputs for 2 samples, got \(2, 2\)"),
        ({"module": nn.Linear(5, 3)}, r"the module does not take samples of shape \(6,\)"),
        ({"module": 5}, "module must be a torch.nn.Module or a function that makes one, got int"),
        ({"module": lambda: 5}, "module must be a torch.nn.Module or a function that makes one, got int"),
        ({"module": nn.Flatten()}, "module Flatten has no parameter to train"),
        ({"loss": nn.functional.cross_entropy}, r"one number a sample \(reduction='none'\), shape \(2,\), got \(\)"),
        ({"device": "tpu"}, "device must be auto, cpu or cuda, got 'tpu'"),
        ({"speed": "warp"}, "speed must be one of auto, plain, graph, compile, search, got 'warp'"),
        ({"precision": "half"}, "precision must be full, tf32 or bfloat16, got 'half'"),
        ({"convolutions": "fft"}, "convolutions must be one of auto, library, unfold, slices, fused, got 'fft'"),
        ({"convolutions": ["fused"]}, r"convolutions must be one of auto, .*, fused, got \['fused'\]"),
        ({"speed": ["plain"]}, r"speed must be one of auto, .*, search, got \['plain'\]"),
        ({"precision": ["full"]}, r"precision must be full, tf32 or bfloat16, got \['full'\]"),
        ({"device": ["cpu"]}, r"device must be auto, cpu or cuda, got \['cpu'\]"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"module": with_batch_norm, "at_once": True}, r"BatchNorm1d \(1\) cannot train all at once: use GroupNorm"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_round(options, sentence):
    module = options.pop("module", None) or perceptron()
    with pytest.raises(FedcontextError, match=sentence):
        TorchEngine(some_data(), module, **{**CPU, **options})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda params: params.pop("0.bias"), r"params must have the module's names, got a difference in 0\.bias"),
        (lambda params: params.update(more=torch.zeros(1)), "a difference in more"),
        (
            lambda params: params.update({"0.bias": torch.zeros(2)}),
            r"params '0\.bias' must have shape \(8,\), got \(2,\)",
        ),
        (lambda params: params.update({"0.bias": torch.zeros(8, device="meta")}), "must be on cpu, got meta"),
    ],
)
def test_params_of_another_module_are_refused(change, sentence):
    engine = TorchEngine(some_data(), perceptron, **CPU)
    params = engine.initial_params()
    change(params)
    devices = np.arange(2)
    for ask in (
        lambda: engine.train(params, some_work()),
        lambda: engine.gradients(params, devices),
        lambda: engine.gradient(params, devices, np.full(2, 0.5)),
        lambda: engine.evaluate(params),
    ):
        with pytest.raises(FedcontextError, match=sentence):
            ask()


def test_samples_that_do_not_fit_the_memory_are_a_clear_error(monkeypatch):
    def full(*_):
        raise OUT_OF_MEMORY("CUDA out of memory.")

    monkeypatch.setattr(Task, "_place", full)
    with pytest.raises(FedcontextError, match=r"the samples do not fit cpu's memory \(CUDA out of memory\.\): use cpu"):
        TorchEngine(some_data(), perceptron, **CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(FedcontextError, match="sees no GPU here"):
        TorchEngine(some_data(), perceptron, device="cuda")


@pytest.mark.parametrize("at_once", [False, True])
def test_an_empty_device_is_named(at_once):
    engine = TorchEngine(some_data(sizes=(4, 0, 3)), perceptron, at_once=at_once, **CPU)
    params = engine.initial_params()
    with pytest.raises(FedcontextError, match="device 1 has no training samples"):
        engine.train(params, some_work(devices=(0, 1), epochs=(1, 1)))
    with pytest.raises(FedcontextError, match="device 1 has no training samples"):
        engine.gradients(params, np.array([1]))
    assert len(engine.train(params, some_work(devices=(0, 2), epochs=(1, 1)))) == 2


def test_labels_outside_the_classes_are_refused():
    data = some_data()
    data.train.labels[3] = 7
    with pytest.raises(FedcontextError, match="labels must be from 0 to 2, got 0 to 7"):
        TorchEngine(data, perceptron, **CPU)


def test_batch_norm_on_a_single_sample_names_the_device():
    engine = TorchEngine(some_data(sizes=(4, 1)), with_batch_norm, **CPU)
    with pytest.raises(FedcontextError, match=r"device 1: the module or its loss failed in training .*use GroupNorm"):
        engine.train(engine.initial_params(), some_work(devices=(0, 1), epochs=(1, 1)))


@pytest.mark.parametrize("at_once", [False, True])
def test_a_loss_that_turns_nan_names_the_device_and_aggregates_nothing(at_once):
    data = some_data()
    data.train.features[data.train.rows(2)] *= 1e30
    engine = TorchEngine(data, perceptron, loss=lambda o, y: o.square().sum(1) * o.exp().sum(1), at_once=at_once, **CPU)
    work = some_work(LocalSGD(100.0, 4), devices=(2,), epochs=(5,))
    with pytest.raises(FedcontextError, match=r"device 2: the loss turned NaN or infinite .*learning rate"):
        engine.train(engine.initial_params(), work)


@pytest.mark.parametrize("at_once", [False, True])
def test_only_the_devices_that_ran_away_are_named(at_once):
    data = some_data()
    data.train.features[data.train.rows(2)] = 3e38
    engine = TorchEngine(data, nn.Linear(6, 3), at_once=at_once, **CPU)
    with pytest.raises(FedcontextError, match=r"^device 2: the loss turned NaN"):
        engine.train(engine.initial_params(), some_work())


class Memory(nn.Module):
    """Counts its calls in a buffer, which no stack of models can share."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.centre.add_(x.mean(dim=0))
        return self.layer(x - self.centre)


def test_a_module_that_cannot_be_vectorised_says_what_to_change():
    at_once = TorchEngine(some_data(), Memory, at_once=True, **CPU)
    with pytest.raises(FedcontextError, match="at_once=False"):
        at_once.train(at_once.initial_params(), some_work())
    one_by_one = TorchEngine(some_data(), Memory, at_once=False, **CPU)
    assert one_by_one.train(one_by_one.initial_params(), some_work())[0]["centre"].any()


@pytest.fixture
def little_memory(monkeypatch):
    """Return a function after which a GPU with room for so many devices is played."""
    run = Stage.run

    def allow(width):
        def limited(self, steps, learning_rate):
            if steps.devices() > width:
                raise OUT_OF_MEMORY("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return run(self, steps, learning_rate)

        monkeypatch.setattr(Stage, "run", limited)

    return allow


def test_out_of_memory_halves_the_chunks_and_is_remembered(little_memory):
    free, tight = (TorchEngine(some_data(), perceptron, at_once=True, **CPU) for _ in range(2))
    expected = free.train(free.initial_params(), some_work())
    little_memory(2)
    assert distance(tight.train(tight.initial_params(), some_work()), expected) < 1e-6
    assert tight.stacked.chunk == 2


def test_out_of_memory_for_one_device_is_a_clear_error(little_memory):
    engine = TorchEngine(some_data(), perceptron, at_once=True, **CPU)
    little_memory(0)
    with pytest.raises(FedcontextError, match=r"out of GPU memory while training devices, one at a time .*smaller"):
        engine.train(engine.initial_params(), some_work())


def test_out_of_memory_one_by_one_names_the_device(monkeypatch):
    engine = TorchEngine(some_data(), perceptron, at_once=False, **CPU)

    def full(*_):
        raise OUT_OF_MEMORY("CUDA out of memory.")

    monkeypatch.setattr(engine.task, "losses", full)
    with pytest.raises(FedcontextError, match="device 4: out of GPU memory"):
        engine.train(engine.initial_params(), some_work())


def test_out_of_memory_in_evaluation_takes_fewer_rows(monkeypatch):
    engine = TorchEngine(some_data(), perceptron, **CPU)
    params, losses, outputs = engine.initial_params(), engine.task.losses, engine.task.outputs
    expected, slope = engine.evaluate(params), engine.gradient(params, np.arange(6), np.full(6, 1 / 6))

    def tight(params, features, labels):
        if len(features) > 9:
            raise OUT_OF_MEMORY("CUDA out of memory.")
        return losses(params, features, labels)

    monkeypatch.setattr(engine.task, "losses", tight)
    assert engine.evaluate(params) == pytest.approx(expected)
    assert distance([engine.gradient(params, np.arange(6), np.full(6, 1 / 6))], [slope]) < 1e-5
    assert engine.task.outputs == outputs


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("speed", ["graph", "compile"])
def test_speed_that_cannot_be_had_falls_back_with_a_warning(speed):
    plain = TorchEngine(some_data(), perceptron, at_once=True, **CPU)
    fast = TorchEngine(some_data(), perceptron, at_once=True, speed=speed, **CPU)
    with pytest.warns(UserWarning, match="is not to be had here") as warned:
        moves = fast.train(fast.initial_params(), some_work())
    assert any(f"speed='{speed}'" in str(warning.message) for warning in warned)
    assert distance(moves, plain.train(plain.initial_params(), some_work())) < 1e-6


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"engine": "reference", "model": "cnn"}, "model cnn needs engine 'torch', got 'reference'"),
        ({"engine": "reference", "device": "cuda"}, "device cuda needs engine 'torch', got 'reference'"),
        ({"engine": "torch", "model": "gpt"}, "model must be one of softmax, logistic, cnn, resnet18, got 'gpt'"),
        ({"engine": "torch", "model": "cnn"}, "features must form a square image of 1 or 3 channels"),
        (
            {"engine": "torch", "dataset": "synthetic-1-1-40", "probes": "cohort"},
            "engine 'torch' keeps all samples in one place",
        ),
        ({"engine": "torch", "device": "tpu"}, "device must be auto, cpu or cuda, got 'tpu'"),
    ],
)
def test_experiments_refuse_models_and_devices_that_do_not_fit(settings, sentence):
    with pytest.raises(FedcontextError, match=sentence):
        fc.rounds(**{"dataset": "synthetic-iid", "rounds": 1, **settings})


@pytest.mark.parametrize("engine", ["reference", "numba"])
def test_other_engines_refuse_momentum(engine):
    if engine == "numba":
        pytest.importorskip("numba")
    with pytest.raises(
        FedcontextError, match=rf"engine '{engine}' does not support momentum \(got 0\.9\); use engine 'torch'"
    ):
        fc.rounds(dataset="synthetic-iid", rounds=1, momentum=0.9, engine=engine)
