"""2-d convolutions as matrix products: with weights that differ from device to device, libraries have no fast one."""

from __future__ import annotations

from typing import Literal, TypeAlias

from fedcontext.errors import FedcontextError, require

require("torch", extra="torch")
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

Convolutions: TypeAlias = Literal["library", "unfold", "slices"]


class _Product(nn.Conv2d):
    """A Conv2d that gathers each output's inputs into a column and multiplies by the kernel matrix."""

    def forward(self, x: Tensor) -> Tensor:
        sides = (x.shape[-2], x.shape[-1])
        reach = [self.dilation[i] * (self.kernel_size[i] - 1) for i in (0, 1)]
        height, width = ((sides[i] + 2 * int(self.padding[i]) - reach[i] - 1) // self.stride[i] + 1 for i in (0, 1))
        kernels = self.weight.flatten(1).expand(len(x), -1, -1)
        products = torch.bmm(kernels, self._columns(x, height, width))  # (n, out, height · width)
        if self.bias is not None:
            products = products + self.bias[:, None]
        return products.reshape(*products.shape[:-1], height, width)

    def _columns(self, x: Tensor, height: int, width: int) -> Tensor:
        raise NotImplementedError


class _Unfolded(_Product):
    def _columns(self, x: Tensor, height: int, width: int) -> Tensor:
        padding = (int(self.padding[0]), int(self.padding[1]))
        return nn.functional.unfold(x, self.kernel_size, self.dilation, padding, self.stride)


class _Sliced(_Product):
    """The same columns from shifted slices: their gradient is a sum of slices, which a compiler can fuse."""

    def _columns(self, x: Tensor, height: int, width: int) -> Tensor:
        (down, right), (up, left) = self.stride, (int(self.padding[0]), int(self.padding[1]))
        x = nn.functional.pad(x, (left, left, up, up))
        starts = [
            (i * self.dilation[0], j * self.dilation[1])
            for i in range(self.kernel_size[0])
            for j in range(self.kernel_size[1])
        ]
        slices = [x[..., i : i + down * height : down, j : j + right * width : right] for i, j in starts]
        return torch.stack(slices, dim=-3).flatten(-2).flatten(-3, -2)


def converted(module: nn.Module, convolutions: Convolutions) -> nn.Module:
    """Return ``module`` with its plain 2-d convolutions computed in the way asked for; names and values stay.

    >>> converted(nn.Conv2d(1, 2, 3), "unfold")(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 2, 6, 6])
    """
    kinds = {"library": nn.Conv2d, "unfold": _Unfolded, "slices": _Sliced}
    if convolutions not in kinds:
        raise FedcontextError(f"convolutions must be one of {', '.join(kinds)}, got {convolutions!r}")
    for child in module.modules():
        plain = type(child) is nn.Conv2d and child.groups == 1 and child.padding_mode == "zeros"
        if plain and not isinstance(child.padding, str):
            child.__class__ = kinds[convolutions]
    return module
