"""PyTorch models by name: logistic regression, an MLP, two CNNs and a ResNet-18 with GroupNorm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fedcontext.errors import FedcontextError, by_name

Shape: TypeAlias = tuple[int, ...]
GROUPS = 2  # of GroupNorm


def logistic(shape: Shape, classes: int) -> nn.Module:
    """Return the paper's model, softmax(x W + c), with zero weights as in the reference engine.

    >>> sum(p.numel() for p in logistic((784,), 10).parameters())
    7850
    """
    layer = nn.Linear(math.prod(shape), classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


def mlp(shape: Shape, classes: int) -> nn.Module:
    """Return a perceptron with one hidden layer of 128 ReLU units.

    >>> mlp((60,), 10)[1]
    Linear(in_features=60, out_features=128, bias=True)
    """
    return nn.Sequential(*_dense(math.prod(shape), classes))


def cnn_small(shape: Shape, classes: int) -> nn.Module:
    """Return two 3x3 convolutions (16, 32), each with max-pooling, and a dense layer of 128.

    >>> sum(p.numel() for p in cnn_small((1, 28, 28), 10).parameters())
    108618
    """
    channels, height, width = _image(shape, least=10)
    return nn.Sequential(
        *_pooled(channels, 16),
        *_pooled(16, 32),
        *_dense(32 * (((height - 2) // 2 - 2) // 2) * (((width - 2) // 2 - 2) // 2), classes),
    )


def cnn_tiny(shape: Shape, classes: int) -> nn.Module:
    """Return two 3x3 convolutions (8, 16) on the image at half its size, each with max-pooling: fast on a CPU.

    >>> sum(p.numel() for p in cnn_tiny((1, 28, 28), 10).parameters())
    1898
    """
    channels, height, width = _image(shape, least=20)
    return nn.Sequential(
        nn.AvgPool2d(2),
        *_pooled(channels, 8),
        *_pooled(8, 16),
        nn.Flatten(),
        nn.Linear(16 * (((height // 2 - 2) // 2 - 2) // 2) * (((width // 2 - 2) // 2 - 2) // 2), classes),
    )


def cnn(shape: Shape, classes: int) -> nn.Module:
    """Return two 3x3 convolutions (32, 64), max-pooling and a dense layer of 128: pfl-research's CIFAR-10 model.

    >>> sum(p.numel() for p in cnn((3, 32, 32), 10).parameters())
    1626442
    """
    channels, height, width = _image(shape, least=6)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        *_pooled(32, 64),
        *_dense(64 * ((height - 4) // 2) * ((width - 4) // 2), classes),
    )


class _MaxPool2d(nn.MaxPool2d):
    """2x2 max-pooling; on a CPU, where no gradient is needed, the maximum of slices: evaluation takes half the time."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        if x.is_cuda or torch.is_grad_enabled():  # the gradient of slices is slower
            pooled: Tensor = super().forward(x)
            return pooled
        height, width = (size // 2 * 2 for size in x.shape[-2:])
        rows = torch.maximum(x[..., 0:height:2, :], x[..., 1:height:2, :])
        return torch.maximum(rows[..., 0:width:2], rows[..., 1:width:2])


class Residual(nn.Module):
    """relu(x + two convolutions of x), each followed by GroupNorm; a 1x1 convolution where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_normed(nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)),
            nn.ReLU(),
            *_normed(nn.Conv2d(width, width, 3, padding=1, bias=False)),
        )
        same = stride == 1 and channels == width
        pointwise = () if same else _normed(nn.Conv2d(channels, width, 1, stride, bias=False))
        self.shortcut = nn.Sequential(*pointwise)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        result: Tensor = nn.functional.relu(self.shortcut(x) + self.body(x))
        return result


def resnet18(shape: Shape, classes: int) -> nn.Module:
    """Return a ResNet-18 for small images (3x3 stem, no pooling after it), with GroupNorm in place of BatchNorm.

    >>> sum(p.numel() for p in resnet18((3, 32, 32), 10).parameters())
    11173962
    """
    channels, _, _ = _image(shape, least=8)
    layers: list[nn.Module] = [*_normed(nn.Conv2d(channels, 64, 3, padding=1, bias=False)), nn.ReLU()]
    before = 64
    for width in (64, 128, 256, 512):
        layers += [Residual(before, width, 1 if width == 64 else 2), Residual(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "softmax": logistic,  # the name of the same model in the other engines
    "logistic": logistic,
    "mlp": mlp,
    "cnn-tiny": cnn_tiny,
    "cnn-small": cnn_small,
    "cnn": cnn,
    "resnet18": resnet18,
}


def model_named(name: str, features: int, classes: int) -> tuple[Callable[[], nn.Module], Shape]:
    """Return a function that builds the named model, and the shape of the samples that it expects.

    >>> factory, shape = model_named("cnn", features=784, classes=10)
    >>> shape
    (1, 28, 28)
    """
    model = by_name("model", name, MODELS)
    shape = (features,) if model in (logistic, mlp) else image_shape(features)
    return lambda: model(shape, classes), shape


def image_shape(features: int) -> Shape:
    """Return (channels, side, side) of a square image with 1 or 3 channels and so many features.

    >>> image_shape(3072)
    (3, 32, 32)
    >>> image_shape(60)
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: this model needs square images of 1 or 3 channels, got 60 features; use model mlp
    """
    for channels in (1, 3):
        side = math.isqrt(features // channels)
        if channels * side * side == features:
            return channels, side, side
    raise FedcontextError(f"this model needs square images of 1 or 3 channels, got {features} features; use model mlp")


def _image(shape: Shape, least: int) -> Shape:
    if len(shape) != 3 or min(shape[1:]) < least:
        raise FedcontextError(
            f"samples must have shape (channels, height, width) of at least {least}x{least}, got {shape}"
        )
    return shape


def _pooled(channels: int, width: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, width, 3), nn.ReLU(), _MaxPool2d(2)


def _dense(features: int, classes: int) -> tuple[nn.Module, ...]:
    return nn.Flatten(), nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, classes)


def _normed(convolution: nn.Conv2d) -> tuple[nn.Module, nn.Module]:
    return convolution, nn.GroupNorm(GROUPS, convolution.out_channels)
