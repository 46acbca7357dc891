"""The PyTorch engine: vectorized and sequential training agree with each other, the reference engine and torch.optim."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedcontext as fc
from fedcontext.datasets.federated import FederatedData, join
from fedcontext.engines.base import Work
from fedcontext.engines.softmax import SoftmaxReference
from fedcontext.engines.torch.convolutions import convert_convolutions
from fedcontext.engines.torch.engine import TorchEngine
from fedcontext.engines.torch.models import cnn, cnn_small, cnn_tiny, logistic, mlp, resnet18
from fedcontext.local_sgd import LocalSGD

LOCALS = {
    "sgd": LocalSGD(0.05, 4),
    "proximal": LocalSGD(0.05, 4, mu=0.5),
    "momentum": LocalSGD(0.05, 4, momentum=0.9),
    "decay": LocalSGD(0.05, 4, weight_decay=0.1),
    "clip": LocalSGD(0.05, 4, clip=0.1),
    "all": LocalSGD(0.05, 4, mu=0.3, momentum=0.8, weight_decay=0.05, clip=0.5),
    "batch above the data": LocalSGD(0.05, 1000),
}
CPU = {"device": "cpu"}
torch.set_num_threads(1)  # more would fight over small products


def some_data(sizes=(7, 1, 12, 4, 9, 30), dimension=6, classes=3, seed=0):
    random = np.random.default_rng(seed)
    parts = [(random.standard_normal((n, dimension)), random.integers(0, classes, n)) for n in sizes]
    split = join([(features.astype(np.float32), labels) for features, labels in parts])
    return FederatedData("some", split, split, classes)


def some_work(local=LOCALS["sgd"], devices=(4, 0, 1, 5, 2), epochs=(2, 1, 3, 1, 2)):
    return Work(seed=3, number=2, devices=np.array(devices), epochs=np.array(epochs), local=local)


def perceptron(dimension=6, classes=3):
    return nn.Sequential(nn.Linear(dimension, 8), nn.Tanh(), nn.Linear(8, classes))


def flat(moves):
    return torch.cat([leaf.double().reshape(-1) for leaf in moves.values()])


def distance(ours, theirs):
    """Return the largest relative distance between updates."""
    return max(float((flat(a) - flat(b)).norm() / flat(b).norm()) for a, b in zip(ours, theirs, strict=True))


def two_ways(data, module, **options):
    return [TorchEngine(data, module, vectorize=vectorize, **CPU, **options) for vectorize in (True, False)]


@pytest.mark.parametrize("name", LOCALS)
def test_both_ways_give_the_same_updates(name):
    vectorized, one_by_one = two_ways(some_data(), perceptron)
    params, work = vectorized.initial_params(), some_work(LOCALS[name])
    assert distance(vectorized.train(params, work), one_by_one.train(params, work)) < 1e-5


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_the_chunk_size_changes_nothing(chunk_size):
    whole = TorchEngine(some_data(), perceptron, vectorize=True, **CPU)
    cut = TorchEngine(some_data(), perceptron, vectorize=True, chunk_size=chunk_size, **CPU)
    for number in (1, 2):  # the second round reuses the tensors of the first
        work = Work(3, number, np.arange(5), np.array([1, 4, 2, 1, 3]), LOCALS["all"])
        assert distance(cut.train(whole.initial_params(), work), whole.train(whole.initial_params(), work)) < 1e-6


@pytest.mark.parametrize("acceleration", ["compile", "max-autotune"])
def test_compiled_steps_give_the_same_updates(acceleration, monkeypatch):
    def traced(function, dynamic, options):  # traces without a C++ compiler
        assert options == {"max_autotune_gemm": acceleration == "max-autotune"}
        return torch_compile(function, dynamic=dynamic, backend="aot_eager")

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", traced)
    eager = TorchEngine(some_data(), perceptron, vectorize=True, **CPU)
    compiled = TorchEngine(some_data(), perceptron, vectorize=True, acceleration=acceleration, **CPU)
    for number in (1, 2):
        work = Work(3, number, np.arange(5), np.array([1, 4, 2, 1, 3]), LOCALS["all"])
        assert distance(compiled.train(eager.initial_params(), work), eager.train(eager.initial_params(), work)) < 1e-6
    assert compiled.acceleration == acceleration


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("acceleration", ["eager", "cuda-graph", "compile", "max-autotune"])
@pytest.mark.parametrize("name", ["sgd", "all"])
def test_a_gpu_trains_as_one_by_one_on_a_cpu(acceleration, name):
    make, data = partial(cnn, (1, 8, 8), 3), some_data(dimension=64)
    fast = TorchEngine(data, make, input_shape=(1, 8, 8), device="cuda", acceleration=acceleration)
    slow = TorchEngine(data, make, input_shape=(1, 8, 8), **CPU)
    for number in (1, 2):
        work = Work(3, number, np.arange(5), np.array([1, 4, 2, 1, 3]), LOCALS[name])
        moves = fast.train({name: leaf.cuda() for name, leaf in slow.initial_params().items()}, work)
        moves = [{name: leaf.cpu() for name, leaf in each.items()} for each in moves]
        assert distance(moves, slow.train(slow.initial_params(), work)) < 1e-4
    assert fast.vectorize
    assert fast.acceleration == acceleration


def test_an_earlier_cohort_and_learning_rate_leave_no_trace():
    used, fresh = (TorchEngine(some_data(), perceptron, vectorize=True, **CPU) for _ in range(2))
    params = used.initial_params()
    used.train(params, some_work(LOCALS["all"]))
    later = some_work(replace(LOCALS["all"], learning_rate=0.01), devices=(2, 3), epochs=(1, 2))
    assert distance(used.train(params, later), fresh.train(params, later)) < 1e-6


def test_a_copy_of_an_engine_trains_like_it():
    engine = TorchEngine(some_data(), perceptron, vectorize=True, **CPU)
    params = engine.initial_params()
    updates = engine.train(params, some_work())
    copied = copy.deepcopy(engine)
    assert distance(copied.train(params, some_work()), updates) == 0
    assert distance(engine.train(params, some_work()), updates) == 0


def test_local_training_is_what_torch_optim_does():
    data, local = some_data(sizes=(5,)), LocalSGD(0.1, 5, momentum=0.9, weight_decay=0.01)
    module = perceptron()
    engine = TorchEngine(data, module, vectorize=True, **CPU)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    params = engine.initial_params()
    (moves,) = engine.train(params, some_work(local, devices=(0,), epochs=(3,)))
    for _ in range(3):  # a full batch: its order does not matter
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            module(torch.from_numpy(data.train.features)), torch.from_numpy(data.train.labels)
        ).backward()
        optimizer.step()
    theirs = {name: leaf.detach() - params[name] for name, leaf in module.named_parameters()}
    assert distance([moves], [theirs]) < 1e-5


def as_matrix(leaves):
    """Return a logistic module's leaves as the reference engine's (d + 1, C) matrix."""
    weight, bias = (leaves[name].double().numpy() for name in ("1.weight", "1.bias"))
    return np.vstack([weight.T, bias])


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_logistic_regression_matches_the_reference_engine_to_rounding(vectorize, mu):
    data, local = some_data(), LocalSGD(0.1, 4, mu=mu)
    reference = SoftmaxReference(data, np.float64)
    engine = TorchEngine(data, logistic((6,), 3).double(), vectorize=vectorize, **CPU)
    random = np.random.default_rng(1)
    params = {
        name: torch.from_numpy(random.standard_normal(leaf.shape)) for name, leaf in engine.initial_params().items()
    }
    base, devices, weights = as_matrix(params), np.array([5, 1, 2]), np.array([0.5, 0.2, 0.3])
    for ours, theirs in zip(
        engine.train(params, some_work(local)), reference.train(base, some_work(local)), strict=True
    ):
        np.testing.assert_allclose(as_matrix(ours), theirs, atol=1e-13)
    for ours, theirs in zip(engine.gradients(params, devices), reference.gradients(base, devices), strict=True):
        np.testing.assert_allclose(as_matrix(ours), theirs, atol=1e-14)
    mean = as_matrix(engine.gradient(params, devices, weights))
    np.testing.assert_allclose(mean, reference.gradient(base, devices, weights), atol=1e-14)
    np.testing.assert_allclose(engine.evaluate(params), reference.evaluate(base), rtol=1e-12)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "folb", "fedavg-contextual", "fedprox-expected"])
@pytest.mark.parametrize("probes", ["cohort", "all"])
def test_whole_runs_match_the_reference_engine(algorithm, probes):
    data = some_data(sizes=range(1, 40, 3))
    settings = {
        "algorithm": algorithm,
        "rounds": 3,
        "devices_per_round": 5,
        "epochs": (1, 3),
        "probes": probes,
        "pool": 4,
    }
    settings |= {"learning_rate": 0.1, "data": data}
    theirs = fc.train(**settings, engine="reference").records
    ours = fc.train(**settings, engine="torch", model="logistic", device="cpu").records
    for one, other in zip(ours, theirs, strict=True):
        assert one.devices == other.devices
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        np.testing.assert_allclose(one.weights, other.weights, rtol=1e-3, atol=1e-3)


def test_momentum_decay_and_clipping_reach_a_run():
    settings = {"algorithm": "fedavg", "rounds": 1, "devices_per_round": 5, "data": some_data(), "engine": "torch"}
    losses = {fc.train(**settings, device="cpu").records[0].loss}
    for more in ({"momentum": 0.9}, {"weight_decay": 0.5}, {"clip": 0.01}):
        losses.add(fc.train(**settings, **more, device="cpu").records[0].loss)
    assert len(losses) == 4


def test_measured_smoothness_is_the_reference_engines():
    settings = {"dataset": "synthetic-iid", "rounds": 1, "smoothness": "measured", "epochs": (1, 1)}
    (theirs,) = fc.train(**settings, engine="reference").records
    (ours,) = fc.train(**settings, engine="torch", device="cpu").records
    assert ours.smoothness == pytest.approx(theirs.smoothness, rel=0.03)


MODELS = {
    "mlp": (mlp, (144,)),
    "cnn-tiny": (cnn_tiny, (1, 20, 20)),
    "cnn-small": (cnn_small, (1, 12, 12)),
    "cnn": (cnn, (1, 12, 12)),
    "resnet18": (resnet18, (1, 12, 12)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_train_the_same_both_ways(name):
    make, shape = MODELS[name]
    data = some_data(sizes=(5, 3), dimension=math.prod(shape))
    vectorized, one_by_one = two_ways(data, partial(make, shape, 3), input_shape=shape)
    params, work = vectorized.initial_params(), some_work(LocalSGD(0.01, 3), devices=(0, 1), epochs=(1, 2))
    assert distance(vectorized.train(params, work), one_by_one.train(params, work)) < 1e-4
    devices = np.array([1, 0])
    assert distance(vectorized.gradients(params, devices), one_by_one.gradients(params, devices)) < 1e-4


@pytest.mark.parametrize("side", [14, 15, 28])  # of images; pooling drops the last row and column of odd ones
def test_models_give_the_same_outputs_with_and_without_gradients(side):
    images = torch.randn(3, 1, side, side)
    model = cnn_small((1, side, side), 10)
    with torch.no_grad():
        without = model(images)
    torch.testing.assert_close(without, model(images).detach())


@pytest.mark.parametrize("way", ["unfold", "slices"])
@pytest.mark.parametrize("channels", [3, 20])  # a narrow kernel and a wide one
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"padding": 1}, {"dilation": 2, "bias": False}, {"stride": 3, "padding": 2}]
)
def test_convolutions_as_products_give_the_same_numbers(way, channels, options):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, channels, 11, 9, generator=random, dtype=torch.float64)
    layer = nn.Conv2d(channels, 4, (3, 2), **options).double()
    expected = layer(x)
    torch.testing.assert_close(convert_convolutions(layer, way)(x), expected)
    assert convert_convolutions(layer, way)(x[:0]).shape == expected[:0].shape


@pytest.mark.parametrize("way", ["unfold", "slices"])
def test_convolutions_as_products_train_the_same(way):
    make, data = partial(cnn, (1, 8, 8), 3), some_data(sizes=(5, 3), dimension=64)
    options = {"input_shape": (1, 8, 8), "vectorize": True, **CPU}
    products, library = (TorchEngine(data, make, convolutions=c, **options) for c in (way, "native"))
    work = some_work(LocalSGD(0.01, 3), devices=(0, 1), epochs=(1, 2))
    assert (
        distance(products.train(products.initial_params(), work), library.train(library.initial_params(), work)) < 1e-5
    )


def test_bfloat16_is_near_full_precision_and_keeps_params_in_it():
    data, work = some_data(), some_work()
    low, full = (TorchEngine(data, perceptron, vectorize=True, precision=p, **CPU) for p in ("bfloat16", "full"))
    moves = low.train(low.initial_params(), work)
    assert {leaf.dtype for leaf in moves[0].values()} == {torch.float32}
    assert 1e-5 < distance(moves, full.train(full.initial_params(), work)) < 0.05


@pytest.mark.parametrize("call", ["train", "gradients", "evaluate"])
def test_small_models_run_on_one_thread_and_large_ones_on_all(call):
    seen = []

    class Watched(nn.Linear):
        def forward(self, features):
            seen.append(torch.get_num_threads())
            return super().forward(features)

    torch.set_num_threads(2)
    try:
        for hidden, threads in ((8, 1), (20_000, 2)):
            module = nn.Sequential(Watched(6, hidden), nn.Tanh(), nn.Linear(hidden, 3))
            engine = TorchEngine(some_data(), module, vectorize=False, **CPU)
            work = {"train": some_work(), "gradients": np.arange(3)}
            seen.clear()
            getattr(engine, call)(engine.initial_params(), *([work[call]] if call in work else []))
            assert set(seen) == {threads}
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_the_start_follows_the_seed_and_leaves_global_randomness_alone():
    before = torch.get_rng_state()
    first, again, other = (TorchEngine(some_data(), perceptron, seed=s, **CPU).initial_params() for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(flat(first), flat(again))
    assert not torch.equal(flat(first), flat(other))


@pytest.mark.parametrize("vectorize", [False, True])
def test_dropout_trains_and_repeats_itself(vectorize):
    module = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    before = torch.get_rng_state()
    engine = TorchEngine(some_data(), module, vectorize=vectorize, **CPU)
    first, again = (engine.train(engine.initial_params(), some_work()) for _ in range(2))
    assert distance(first, again) == 0
    still = TorchEngine(some_data(), nn.Sequential(module[0], nn.Dropout(0), module[2]), vectorize=vectorize, **CPU)
    assert distance(first, still.train(engine.initial_params(), some_work())) > 0.01
    assert engine.evaluate(engine.initial_params()) == engine.evaluate(engine.initial_params())
    assert torch.equal(torch.get_rng_state(), before)


def with_batch_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def test_batch_norm_trains_one_by_one_and_its_buffers_are_averaged():
    engine = TorchEngine(some_data(sizes=(8, 8, 12)), with_batch_norm, **CPU)
    params = engine.initial_params()
    updates = engine.train(params, some_work(devices=(0, 2), epochs=(1, 1)))
    assert set(engine.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert list(updates[0]) == list(params)
    assert [int(moves["1.num_batches_tracked"]) for moves in updates] == [2, 3]
    result = fc.aggregate(
        params,
        updates,
        rule=fc.contextual(smoothness=10),
        gradient=engine.gradient(params, np.arange(3), np.full(3, 1 / 3)),
        buffers=engine.buffers,
    )
    halfway = params["1.running_mean"] + (updates[0]["1.running_mean"] + updates[1]["1.running_mean"]) / 2
    torch.testing.assert_close(result.params["1.running_mean"], halfway)


def test_a_whole_run_with_batch_norm_improves():
    data = fc.load_dataset("synthetic-iid")
    module = nn.Sequential(nn.Linear(60, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    settings = {"algorithm": "fedavg", "rounds": 3, "epochs": (1, 2), "batch_size": 10_000}
    simulation = fc.prepare(fc.Experiment(**settings), data=data, engine=TorchEngine(data, module, **CPU))
    losses = [record.loss for _, record in simulation.run()]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("vectorize", [False, True])
def test_frozen_parameters_and_constant_buffers_stay(vectorize):
    module = perceptron()
    module[0].weight.requires_grad_(False)
    module.register_buffer("scale", torch.ones(2))
    engine = TorchEngine(some_data(), module, vectorize=vectorize, **CPU)
    moves = engine.train(engine.initial_params(), some_work())[0]
    assert engine.buffers == ("0.weight", "scale")
    assert not moves["0.weight"].any()
    assert not moves["scale"].any()
    assert moves["2.weight"].any()


class Tied(nn.Module):
    """One matrix used twice, and one that is never used."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.idle = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(2, 2)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_tied_and_unused_parameters_train_the_same_both_ways():
    vectorized, one_by_one = two_ways(some_data(), Tied)
    params, work = vectorized.initial_params(), some_work(LOCALS["all"])
    assert "second.weight" not in params
    assert distance(vectorized.train(params, work), one_by_one.train(params, work)) < 1e-5


def test_a_loss_of_ones_own_is_used():
    def squares(outputs, labels):
        return (outputs - torch.eye(3)[labels]).square().sum(dim=1)

    ways = two_ways(some_data(), perceptron, loss=squares)
    params = ways[0].initial_params()
    moved = [engine.train(params, some_work()) for engine in ways]
    assert distance(*moved) < 1e-5
    assert distance(moved[0], two_ways(some_data(), perceptron)[0].train(params, some_work())) > 0.1


def test_the_module_given_is_never_changed():
    module = perceptron()
    before = flat(module.state_dict())
    engine = TorchEngine(some_data(), module, **CPU)
    engine.train(engine.initial_params(), some_work())
    assert torch.equal(flat(module.state_dict()), before)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_runs_by_its_name(model):
    settings = {
        "algorithm": "fedavg-contextual",
        "rounds": 2,
        "epochs": (1, 1),
        "devices_per_round": 2,
        "probes": "cohort",
    }
    pixels = 400 if model == "cnn-tiny" else 144  # its first layers halve the image three times
    experiment = fc.Experiment(**settings, model=model, device="cpu", learning_rate=0.05)
    assert experiment.engine == "torch"
    records = [record for _, record in fc.prepare(experiment, data=some_data(sizes=(6, 5, 4), dimension=pixels)).run()]
    assert all(np.isfinite(record.loss) for record in records)
    assert records[0].promised_change < 0


def test_the_documents_example_learns():
    text = (Path(__file__).parent.parent / "docs" / "torch-engine.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    exec(block, names)
    assert names["records"][-1].loss < names["records"][0].loss
