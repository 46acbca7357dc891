"""Errors and warnings of the PyTorch engine: each names the option, device or leaf, and what to do."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fedcontext as fc
from fedcontext.engines.torch.engine import TorchEngine
from fedcontext.errors import FedcontextError
from fedcontext.local_sgd import LocalSGD
from test_torch_engine import CPU, distance, perceptron, some_data, some_work, with_batch_norm

OUT_OF_MEMORY = torch.cuda.OutOfMemoryError


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"input_shape": (3, 4)}, r"input_shape \(3, 4\) has 12 entries, but a sample has 6"),
        ({"input_shape": "6"}, "input_shape must be a tuple of positive integers, got '6'"),
        ({"input_shape": (2, 3)}, r"the module does not accept samples of shape \(2, 3\)"),
        ({"module": nn.Linear(6, 2)}, r"must return \(2, 3\) outputs for 2 samples, got \(2, 2\)"),
        ({"module": nn.Linear(5, 3)}, r"the module does not accept samples of shape \(6,\)"),
        ({"module": 5}, "module must be a torch.nn.Module or a function that returns one, got int"),
        ({"module": nn.Linear}, r"but Linear needs arguments .*; give an instance, such as Linear\(...\)"),
        (
            {"module": lambda width: nn.Linear(6, width)},
            "or a function without arguments that returns one, but <lambda> needs",
        ),
        ({"module": dict}, "module must be a torch.nn.Module or a function that returns one, got dict"),
        ({"module": lambda: 5}, "module must be a torch.nn.Module or a function that returns one, got int"),
        ({"module": nn.Flatten()}, "module Flatten has no trainable parameter"),
        ({"loss": nn.functional.cross_entropy}, r"one number per sample \(reduction='none'\), shape \(2,\), got \(\)"),
        ({"loss": "mse"}, r"loss must be a function \(outputs, labels\) -> losses, got 'mse'"),
        ({"device": "tpu"}, "device must be auto, cpu or cuda, got 'tpu'"),
        ({"device": ["cpu"]}, r"device must be auto, cpu or cuda, got \['cpu'\]"),
        (
            {"acceleration": "warp"},
            "acceleration must be one of auto, eager, cuda-graph, compile, max-autotune, got 'warp'",
        ),
        ({"acceleration": ["eager"]}, r"acceleration must be one of .*, got \['eager'\]"),
        ({"precision": "half"}, "precision must be one of full, tf32, bfloat16, got 'half'"),
        ({"precision": ["full"]}, r"precision must be one of full, tf32, bfloat16, got \['full'\]"),
        ({"convolutions": "fft"}, "convolutions must be one of auto, native, unfold, slices, got 'fft'"),
        ({"convolutions": ["unfold"]}, r"convolutions must be one of .*, got \['unfold'\]"),
        ({"vectorize": "yes"}, "vectorize must be True, False or None, got 'yes'"),
        ({"vectorize": 1}, "vectorize must be True, False or None, got 1"),
        ({"chunk_size": 0}, "chunk_size must be an integer of at least 1, got 0"),
        ({"chunk_size": 2.5}, r"chunk_size must be an integer of at least 1, got 2\.5"),
        ({"chunk_size": True}, "chunk_size must be an integer of at least 1, got True"),
        ({"seed": "1"}, "seed must be an integer of at least 0, got '1'"),
        ({"module": with_batch_norm, "vectorize": True}, r"BatchNorm1d \(1\) cannot be vectorized; use GroupNorm"),
    ],
)
def test_wrong_options_raise_before_any_round(options, sentence):
    module = options.pop("module", None) or perceptron()
    with pytest.raises(FedcontextError, match=sentence):
        TorchEngine(some_data(), module, **{**CPU, **options})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda params: params.pop("0.bias"), r"params must have the module's names, they differ in 0\.bias"),
        (lambda params: params.update(more=torch.zeros(1)), "they differ in more"),
        (
            lambda params: params.update({"0.bias": torch.zeros(2)}),
            r"params '0\.bias' must have shape \(8,\), got \(2,\)",
        ),
        (lambda params: params.update({"0.bias": torch.zeros(8, device="meta")}), "must be on cpu, got meta"),
    ],
)
def test_params_of_another_module_raise(change, sentence):
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

    monkeypatch.setattr(torch, "from_numpy", full)
    with pytest.raises(
        FedcontextError, match=r"the samples do not fit the memory of cpu \(CUDA out of memory\.\); use"
    ):
        TorchEngine(some_data(), perceptron, **CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_raises():
    with pytest.raises(FedcontextError, match=r"device='cuda' needs a GPU that PyTorch .* does not find"):
        TorchEngine(some_data(), perceptron, device="cuda")


@pytest.mark.parametrize("vectorize", [False, True])
def test_an_empty_device_is_named(vectorize):
    engine = TorchEngine(some_data(sizes=(4, 0, 3)), perceptron, vectorize=vectorize, **CPU)
    params = engine.initial_params()
    with pytest.raises(FedcontextError, match="device 1 has no training samples"):
        engine.train(params, some_work(devices=(0, 1), epochs=(1, 1)))
    with pytest.raises(FedcontextError, match="device 1 has no training samples"):
        engine.gradients(params, np.array([1]))
    assert len(engine.train(params, some_work(devices=(0, 2), epochs=(1, 1)))) == 2


def test_labels_outside_the_classes_raise():
    data = some_data()
    data.train.labels[3] = 7
    with pytest.raises(FedcontextError, match="labels must be from 0 to 2, got 0 to 7"):
        TorchEngine(data, perceptron, **CPU)


def test_batch_norm_on_a_single_sample_names_the_device():
    engine = TorchEngine(some_data(sizes=(4, 1)), with_batch_norm, **CPU)
    with pytest.raises(FedcontextError, match=r"device 1: the module or its loss failed .*use GroupNorm"):
        engine.train(engine.initial_params(), some_work(devices=(0, 1), epochs=(1, 1)))


@pytest.mark.parametrize("vectorize", [False, True])
def test_a_loss_that_turns_nan_names_the_device_and_aggregates_nothing(vectorize):
    data = some_data()
    data.train.features[data.train.rows(2)] *= 1e30
    engine = TorchEngine(
        data, perceptron, loss=lambda o, y: o.square().sum(1) * o.exp().sum(1), vectorize=vectorize, **CPU
    )
    work = some_work(LocalSGD(100.0, 4), devices=(2,), epochs=(5,))
    with pytest.raises(FedcontextError, match=r"device 2: the loss turned NaN or infinite .*learning rate"):
        engine.train(engine.initial_params(), work)


@pytest.mark.parametrize("vectorize", [False, True])
def test_only_the_devices_that_ran_away_are_named(vectorize):
    data = some_data()
    data.train.features[data.train.rows(2)] = 3e38
    engine = TorchEngine(data, nn.Linear(6, 3), vectorize=vectorize, **CPU)
    with pytest.raises(FedcontextError, match=r"^device 2: the loss turned NaN"):
        engine.train(engine.initial_params(), some_work())


class Memory(nn.Module):
    """Writes to a buffer in training, which vmapped models cannot share."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.centre.add_(x.mean(dim=0))
        return self.layer(x - self.centre)


def test_a_module_that_cannot_be_vectorized_says_what_to_change():
    vectorized = TorchEngine(some_data(), Memory, vectorize=True, **CPU)
    with pytest.raises(FedcontextError, match="vectorize=False"):
        vectorized.train(vectorized.initial_params(), some_work())
    one_by_one = TorchEngine(some_data(), Memory, vectorize=False, **CPU)
    assert one_by_one.train(one_by_one.initial_params(), some_work())[0]["centre"].any()


class LimitedMemory:
    """A cross-entropy that runs out of GPU memory: in its next calls, or for more than some samples."""

    def __init__(self):
        self.failures, self.samples = 0, 10**9

    def __call__(self, outputs, labels):
        self.failures -= 1
        if self.failures >= 0 or len(labels) > self.samples:
            raise OUT_OF_MEMORY("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return nn.functional.cross_entropy(outputs, labels, reduction="none")


def limited(vectorize):
    memory = LimitedMemory()
    return TorchEngine(some_data(), perceptron, loss=memory, vectorize=vectorize, **CPU), memory


def test_out_of_memory_halves_the_chunk_size_and_keeps_it():
    engine, memory = limited(vectorize=True)
    expected = engine.train(engine.initial_params(), some_work())
    memory.failures = 2  # five devices at once, then three
    with pytest.warns(UserWarning, match="out of GPU memory while training devices; continuing with 2 at once"):
        updates = engine.train(engine.initial_params(), some_work())
    assert distance(updates, expected) < 1e-6
    assert engine.chunk_size == 2


@pytest.mark.filterwarnings("ignore:out of GPU memory")
def test_out_of_memory_for_one_device_is_a_clear_error():
    engine, memory = limited(vectorize=True)
    memory.failures = 100
    with pytest.raises(FedcontextError, match=r"out of GPU memory while training devices, one at a time .*smaller"):
        engine.train(engine.initial_params(), some_work())


def test_out_of_memory_one_by_one_names_the_device():
    engine, memory = limited(vectorize=False)
    memory.failures = 100
    with pytest.raises(FedcontextError, match="device 4: out of GPU memory"):
        engine.train(engine.initial_params(), some_work())


@pytest.mark.filterwarnings("ignore:out of GPU memory")
def test_out_of_memory_in_evaluation_takes_fewer_samples_at_once():
    engine, memory = limited(vectorize=False)
    params, devices, weights = engine.initial_params(), np.arange(6), np.full(6, 1 / 6)
    expected, gradient = engine.evaluate(params), engine.gradient(params, devices, weights)
    memory.samples = 9
    assert engine.evaluate(params) == pytest.approx(expected)
    assert distance([engine.gradient(params, devices, weights)], [gradient]) < 1e-5


def test_an_unavailable_acceleration_falls_back_with_a_warning(monkeypatch):
    def broken(function, **_):
        def fail(*_):
            raise RuntimeError("no C++ compiler")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    eager = TorchEngine(some_data(), perceptron, vectorize=True, **CPU)
    for acceleration, reason in (("cuda-graph", "CUDA graphs need a GPU"), ("compile", r"no C\+\+ compiler")):
        fast = TorchEngine(some_data(), perceptron, vectorize=True, acceleration=acceleration, **CPU)
        with pytest.warns(UserWarning, match=rf"'{acceleration}' is unavailable \({reason}\); using 'eager'"):
            updates = fast.train(fast.initial_params(), some_work())
        assert fast.acceleration == "eager"
        assert distance(updates, eager.train(eager.initial_params(), some_work())) < 1e-6


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"acceleration": "compile"}, "acceleration='compile' is ignored: it needs vectorize=True"),
        ({"precision": "tf32"}, "precision='tf32' is ignored: it needs a GPU"),
        ({"convolutions": "slices"}, r"convolutions='slices' does not support Conv2d\(.*groups=2\) \(1\)"),
    ],
)
def test_options_without_effect_warn(options, sentence):
    grouped = nn.Sequential(nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 4, 1, groups=2), nn.Flatten(), nn.Linear(12, 3))
    with pytest.warns(UserWarning, match=sentence):
        TorchEngine(some_data(), grouped, **options, **CPU)


def test_gradients_of_many_samples_on_a_cpu_warn_once():
    data = some_data(sizes=(60_000, 60_000))
    engine, few = (TorchEngine(data, perceptron, **CPU) for _ in range(2))
    params, both = engine.initial_params(), np.arange(2)
    with pytest.warns(UserWarning, match=r"gradients of 120,000 samples from 2 devices .*fewer probes \(probes=20\)"):
        engine.gradient(params, both, np.full(2, 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.gradients(params, both)
        few.gradients(params, both[:1])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"engine": "reference", "model": "cnn"},
            "engine 'reference' does not support model 'cnn'; use engine 'torch'",
        ),
        (
            {"engine": "reference", "device": "cuda"},
            "engine 'reference' does not support device 'cuda'; use engine 'torch'",
        ),
        (
            {"engine": "torch", "model": "gpt"},
            "model must be one of softmax, logistic, mlp, cnn-tiny, cnn-small, cnn, resnet18, got 'gpt'",
        ),
        ({"engine": "torch", "model": "cnn"}, "needs square images of 1 or 3 channels, got 60 features; use model mlp"),
        (
            {"engine": "torch", "dataset": "synthetic-1-1-200", "probes": "cohort"},
            "engine 'torch' does not support data made on demand",
        ),
        ({"engine": "torch", "device": "tpu"}, "device must be auto, cpu or cuda, got 'tpu'"),
    ],
)
def test_experiments_with_unsupported_models_or_devices_raise(settings, sentence):
    with pytest.raises(FedcontextError, match=sentence):
        fc.train(**{"dataset": "synthetic-iid", "rounds": 1, **settings})


@pytest.mark.parametrize("engine", ["reference", "numba"])
def test_other_engines_do_not_support_momentum(engine):
    if engine == "numba":
        pytest.importorskip("numba")
    with pytest.raises(
        FedcontextError, match=rf"engine '{engine}' does not support momentum \(got 0\.9\); use engine 'torch'"
    ):
        fc.train(dataset="synthetic-iid", rounds=1, momentum=0.9, engine=engine)
