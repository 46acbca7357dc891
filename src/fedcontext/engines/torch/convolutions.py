"""2-d convolutions as batched matrix products.

Under `torch.vmap` every device has its own kernels, which PyTorch's convolution runs as a slow grouped convolution.
"""

from __future__ import annotations

import warnings
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

Convolutions: TypeAlias = Literal["auto", "native", "unfold", "slices"]
WIDE = 64  # entries of a patch from which one product per device is faster than one per sample (H200)


class _UnfoldConv2d(nn.Conv2d):
    """Conv2d as the product of the kernel matrix and the patches that `torch.nn.functional.unfold` gathers."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = (
            (x.shape[axis - 2] + 2 * int(self.padding[axis]) - self.dilation[axis] * (self.kernel_size[axis] - 1) - 1)
            // self.stride[axis]
            + 1
            for axis in (0, 1)
        )
        products = self._products(self.weight.flatten(1), x, height, width)  # (n, out, height · width)
        if self.bias is not None:
            products = products + self.bias[:, None]
        return products.reshape(*products.shape[:-1], height, width)

    def _products(self, kernels: Tensor, x: Tensor, height: int, width: int) -> Tensor:
        padding = (int(self.padding[0]), int(self.padding[1]))
        patches = nn.functional.unfold(x, self.kernel_size, self.dilation, padding, self.stride)
        return torch.bmm(kernels.expand(len(x), -1, -1), patches)


class _SliceConv2d(_UnfoldConv2d):
    """The same patches from shifted slices: their backward pass is a sum of slices, which `torch.compile` fuses."""

    def _products(self, kernels: Tensor, x: Tensor, height: int, width: int) -> Tensor:
        (down, right), (up, left) = self.stride, (int(self.padding[0]), int(self.padding[1]))
        x = nn.functional.pad(x, (left, left, up, up))
        starts = [
            (i * self.dilation[0], j * self.dilation[1])
            for i in range(self.kernel_size[0])
            for j in range(self.kernel_size[1])
        ]
        slices = [x[..., i : i + down * height : down, j : j + right * width : right] for i, j in starts]
        if kernels.shape[1] < WIDE:
            patches = torch.stack(slices, dim=2).flatten(-2).flatten(1, 2)  # (n, in · places, height · width)
            return torch.bmm(kernels.expand(len(x), -1, -1), patches)
        stacked = torch.stack([piece.transpose(0, 1) for piece in slices], dim=1)  # (in, places, n, height, width)
        products = kernels @ stacked.flatten(2).flatten(0, 1)
        return products.reshape(len(products), len(x), height * width).transpose(0, 1)


LAYERS = {"unfold": _UnfoldConv2d, "slices": _SliceConv2d}


def convert_convolutions(module: nn.Module, convolutions: str) -> nn.Module:
    """Return ``module`` with its Conv2d layers computed as asked; names and parameters are unchanged.

    Grouped layers, other paddings than zeros and paddings by name stay native, with a warning.

    >>> convert_convolutions(nn.Conv2d(1, 2, 3), "unfold")(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 2, 6, 6])
    """
    for name, layer in module.named_modules():
        if type(layer) is not nn.Conv2d or convolutions == "native":  # a subclass may compute something else
            continue
        if layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
            layer.__class__ = LAYERS[convolutions]
        else:
            warnings.warn(
                f"convolutions={convolutions!r} does not support {layer} ({name}); it stays native", stacklevel=3
            )
    return module
