"""2-d convolutions as matrix products: with weights that differ from device to device, libraries have no fast one."""

from __future__ import annotations

from typing import Literal, TypeAlias

from fedcontext.errors import FedcontextError, require

require("torch", extra="torch")
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

Convolutions: TypeAlias = Literal["auto", "library", "unfold", "slices", "fused"]


CHANNELS = 16  # fused convolutions take multiples of this: the least that tensor cores multiply
WIDE = 64  # numbers that an output is made of, from which one product a device is faster than one a sample


class _Unfolded(nn.Conv2d):
    """A Conv2d that gathers the inputs of each output into a column and multiplies by the kernel matrix."""

    def forward(self, x: Tensor) -> Tensor:
        sides = (x.shape[-2], x.shape[-1])
        reach = [self.dilation[i] * (self.kernel_size[i] - 1) for i in (0, 1)]
        height, width = ((sides[i] + 2 * int(self.padding[i]) - reach[i] - 1) // self.stride[i] + 1 for i in (0, 1))
        products = self._products(self.weight.flatten(1), x, height, width)  # (n, out, height · width)
        if self.bias is not None:
            products = products + self.bias[:, None]
        return products.reshape(*products.shape[:-1], height, width)

    def _products(self, kernels: Tensor, x: Tensor, height: int, width: int) -> Tensor:
        padding = (int(self.padding[0]), int(self.padding[1]))
        columns = nn.functional.unfold(x, self.kernel_size, self.dilation, padding, self.stride)
        return torch.bmm(kernels.expand(len(x), -1, -1), columns)


class _Sliced(_Unfolded):
    """The same columns from shifted slices: their gradient is a sum of slices, which a compiler can fuse.

    Wide kernels meet the columns of all samples in one product; for narrow ones a product a sample keeps a GPU busier.
    """

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
            columns = torch.stack(slices, dim=2).flatten(-2).flatten(1, 2)  # (n, in · places, height · width)
            return torch.bmm(kernels.expand(len(x), -1, -1), columns)
        together = torch.stack([piece.transpose(0, 1) for piece in slices], dim=1)  # (in, places, n, height, width)
        products = kernels @ together.flatten(2).flatten(0, 1)
        return products.reshape(len(products), len(x), height * width).transpose(0, 1)


class _Fused(_Sliced):
    """Gathered and multiplied in one kernel, on a GPU and where there is a kernel; else from slices."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4:
            return nn.Conv2d.forward(self, x)
        if not (x.is_cuda and x.dtype == torch.float32 and self._has_kernel(x)):
            return super().forward(x)
        from fedcontext.engines.torch.fused import convolution  # Triton comes with PyTorch for GPUs alone

        result = convolution(x, self.weight, int(self.padding[0]), int(self.padding[1]))
        return result if self.bias is None else result + self.bias[:, None, None]

    def _has_kernel(self, x: Tensor) -> bool:
        still = {*self.stride, *self.dilation} == {1}
        within = all(int(self.padding[i]) < self.kernel_size[i] for i in (0, 1))
        channels = self.in_channels % CHANNELS == self.out_channels % CHANNELS == 0
        around = (x.shape[-2] + 2 * int(self.padding[0])) * (x.shape[-1] + 2 * int(self.padding[1]))
        small = len(x) * around * max(self.in_channels, self.out_channels) < 2**31  # places are 32-bit numbers
        return still and within and channels and small


def hindrance_to_fused(device: torch.device) -> str | None:
    """Return why fused convolutions cannot be had on a device, or None.

    >>> hindrance_to_fused(torch.device("cpu"))
    'they need a GPU'
    """
    if device.type != "cuda":
        return "they need a GPU"
    try:
        from fedcontext.engines.torch.fused import hindrance
    except (FedcontextError, AttributeError) as error:  # an older PyTorch has no such operations
        return str(error)
    return hindrance(device)


def converted(module: nn.Module, convolutions: Convolutions) -> nn.Module:
    """Return ``module`` with its plain 2-d convolutions computed in the way asked for; names and values stay.

    "auto" leaves them to the library: whoever knows how the module will train may convert it again.

    >>> converted(nn.Conv2d(1, 2, 3), "unfold")(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 2, 6, 6])
    """
    kinds = {"auto": nn.Conv2d, "library": nn.Conv2d, "unfold": _Unfolded, "slices": _Sliced, "fused": _Fused}
    if convolutions not in list(kinds):  # also what has no hash
        raise FedcontextError(f"convolutions must be one of {', '.join(kinds)}, got {convolutions!r}")
    for child in module.modules():
        plain = type(child) is nn.Conv2d and child.groups == 1 and child.padding_mode == "zeros"
        if plain and not isinstance(child.padding, str):
            child.__class__ = kinds[convolutions]
    return module
