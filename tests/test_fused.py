"""Convolutions in one kernel: PyTorch's own numbers and gradients, stacked or not. Without a GPU Triton interprets them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fedcontext.engines.base import Work
from fedcontext.engines.torch.convolutions import converted, hindrance_to_fused
from fedcontext.engines.torch.engine import TorchEngine
from test_module import CPU, LOCALS, distance, some_data

pytest.importorskip("triton")
from fedcontext.engines.torch import fused

GPU = torch.cuda.is_available()
PLACE = "cuda" if GPU else "cpu"


def some(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(PLACE)


def loss(convolution, kernels, x):
    return (convolution(x, kernels) ** 2).sum()


def apart(ours, theirs):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("inputs", "outputs", "sides", "kernel", "around"),
    [
        (16, 16, (5, 4), (3, 3), (0, 0)),
        (32, 64, (5, 5), (3, 3), (1, 1)),
        (16, 48, (4, 6), (2, 3), (1, 2)),
        (48, 32, (3, 3), (1, 1), (0, 0)),
    ],
)
def test_kernels_and_their_gradients_are_the_librarys(inputs, outputs, sides, kernel, around):
    devices, samples = 2, 3
    x, kernels = some(devices, samples, inputs, *sides), some(devices, outputs, inputs, *kernel, seed=1)
    ways = (
        partial(fused.convolution, up=around[0], left=around[1]),
        lambda x, kernels: nn.functional.conv2d(x.double(), kernels.double(), padding=around),
    )
    for shared in (False, True):  # kernels of each device's own, and one for all
        own = kernels[0] if shared else kernels
        ours, theirs = (
            torch.vmap(torch.func.grad(partial(loss, way), argnums=(0, 1)), in_dims=(None if shared else 0, 0))(own, x)
            for way in ways
        )
        assert apart(ours, theirs) < 1e-5
    ours, theirs = (way(x[0], kernels[0]) for way in ways)
    assert apart([ours], [theirs]) < 1e-5


def test_a_compiler_leaves_them_alone():
    x, kernels = some(2, 1, 16, 4, 4), some(2, 16, 16, 3, 3)
    gradients = torch.vmap(torch.func.grad(partial(loss, fused.convolution)))
    with torch.no_grad():
        compiled = torch.compile(gradients, backend="aot_eager", fullgraph=True)(kernels, x)
    assert apart([compiled], [gradients(kernels, x)]) < 1e-6


def test_second_derivatives_are_refused():
    x, kernels = some(1, 16, 3, 3), some(16, 16, 3, 3)
    slope = torch.func.grad(partial(loss, fused.convolution))
    with pytest.raises(RuntimeError, match="no second derivatives: take convolutions='slices'"):
        torch.func.grad(lambda own: slope(own, x).sum())(kernels)


@pytest.mark.parametrize(("x", "kernels"), [((1, 32, 4, 4), (16, 16, 3, 3)), ((1, 16, 2, 2), (16, 16, 3, 3))])
def test_kernels_that_do_not_fit_are_refused(x, kernels):
    with pytest.raises(ValueError, match="do not fit samples of shape"):
        fused.convolution(some(*x), some(*kernels))


def test_any_number_of_samples_will_do():
    for samples in (1, 2, 5):
        x, kernels = some(samples, 16, 4, 4), some(16, 16, 3, 3)
        slopes = [torch.func.grad(partial(loss, way))(kernels, x) for way in (fused.convolution, nn.functional.conv2d)]
        assert apart(slopes[:1], slopes[1:]) < 1e-3  # the library may use TF32


def test_elsewhere_they_are_made_of_slices():
    assert hindrance_to_fused(torch.device("cpu")) == "they need a GPU"
    layer = nn.Conv2d(16, 16, 3)
    x = torch.randn(2, 16, 5, 5)
    expected = layer(x)
    assert torch.allclose(converted(layer, "fused")(x), expected, atol=1e-5)
    assert torch.allclose(layer(x[0]), expected[0], atol=1e-5)  # without an axis of samples
    assert type(layer).__name__ == "_Fused"


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("speed", ["plain", "graph", "compile"])
def test_a_gpu_trains_fused_convolutions_as_a_cpu_its_own(speed):
    def make():
        layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 2, 2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 3))

    data, shape = some_data(dimension=64), {"input_shape": (1, 8, 8)}
    fast = TorchEngine(data, make, device="cuda", speed=speed, **shape)
    slow = TorchEngine(data, make, **shape, **CPU)
    for number in (1, 2):
        work = Work(3, number, np.arange(5), np.ones(5, int), LOCALS["all"])
        moves = fast.train({name: leaf.cuda() for name, leaf in slow.initial_params().items()}, work)
        moves = [{name: leaf.cpu() for name, leaf in each.items()} for each in moves]
        assert distance(moves, slow.train(slow.initial_params(), work)) < 1e-4
    assert fast.stacked.speed == speed
    assert {type(layer).__name__ for layer in fast.task.module[:5:2]} == {"_Fused"}
    assert fast.stacked.stage.factors.layers == ["6"]
