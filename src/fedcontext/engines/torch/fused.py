"""Convolutions of stacked models by `fused_kernels`, differentiable: no columns are written to memory.

A product of two float32 numbers is the sum of three TF32 products on a GPU's tensor cores ("tf32x3"), with errors no
larger than those of float32's own. Where the library may use TF32 for products, it is one TF32 product here too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from fedcontext.engines.torch import fused_kernels
from fedcontext.engines.torch.convolutions import CHANNELS
from fedcontext.engines.torch.task import first_line
from fedcontext.errors import require

require("torch", extra="torch")
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

PARTS = 2  # sums over the places that are kept apart: 450 blocks for 50 devices, where an H200 runs 132 at a time
WARPS = 4


@cache
def hindrance(device: torch.device) -> str | None:
    """Return why these convolutions cannot be had on a device, or None; tried once, as drivers and compilers vary."""
    x, kernels = torch.zeros(1, 32, 3, 3, device=device), torch.zeros(64, 32, 3, 3, device=device)
    try:
        torch.func.grad(lambda given: convolution(x, given).sum())(kernels)
    except Exception as error:
        return first_line(error)
    return None


def convolution(x: Tensor, kernels: Tensor, up: int = 0, left: int = 0) -> Tensor:
    """Return (samples, out, tall, broad): samples (samples, in, high, wide) under kernels (out, in, down, across).

    There are ``up`` rows and ``left`` columns of zeros on each side. vmap stacks it.
    """
    tall, broad = _sides(x, kernels, up, left)
    if x.ndim != 4 or kernels.ndim != 4 or x.shape[1] != kernels.shape[1] or min(tall, broad) < 1:
        raise ValueError(f"kernels of shape {tuple(kernels.shape)} do not fit samples of shape {tuple(x.shape)}")
    result: Tensor = _in_graph(x[None], kernels[None], up, left)
    return result[0]


def _convolve(x: Tensor, kernels: Tensor, up: int, left: int) -> Tensor:
    """Return (C, samples, out, tall, broad): each device's samples under its own kernels."""
    x, turned = x.contiguous(), kernels.permute(0, 3, 4, 1, 2).contiguous()
    result = _convolved(x, kernels, up, left)
    sizes = _sizes(x, result, up, left, kernels)
    (devices, samples, inputs, *_), (_, _, outputs, tall, broad) = x.shape, result.shape
    out = _piece(outputs)
    # Wide tiles take more channels and fewer places at a time.
    places, into, stages = (64, 32, 2) if out == 64 and inputs % 32 == 0 else (128, CHANNELS, 3)
    grid = -(-samples * tall * broad // places), outputs // out, devices
    tile = {"PLACES": places, "OUT": out, "IN": into, "num_warps": WARPS, "num_stages": stages}
    with _on(x):
        fused_kernels.convolve[grid](x, turned, result, *sizes, _precision(), **tile)
    return result


def _correlate(x: Tensor, slopes: Tensor, up: int, left: int) -> Tensor:
    """Return (C, out, in, down, across): the slopes of the kernels, from those of what they made of ``x``."""
    x, slopes = x.contiguous(), slopes.contiguous()
    result = _correlated(x, slopes, up, left)
    sizes = _sizes(x, slopes, up, left, result)
    devices, outputs, *weights = result.shape
    parts, out = x.new_empty((PARTS, *result.shape)), _piece(outputs)
    grid = -(-weights[0] * weights[1] * weights[2] // 64), outputs // out, devices * PARTS
    tile = {"PARTS": PARTS, "WEIGHTS": 64, "OUT": out, "PLACES": CHANNELS, "num_warps": WARPS, "num_stages": 3}
    with _on(x):
        fused_kernels.correlate[grid](x, slopes, parts, *sizes, _precision(), **tile)
    return torch.sum(parts, dim=0, out=result)


def _convolved(x: Tensor, kernels: Tensor, up: int, left: int) -> Tensor:
    return x.new_empty((*x.shape[:2], kernels.shape[1], *_sides(x, kernels, up, left)))


def _correlated(x: Tensor, slopes: Tensor, up: int, left: int) -> Tensor:
    return x.new_empty((x.shape[0], slopes.shape[2], x.shape[2], *_sides(x, slopes, up, left)))


def _sides(x: Tensor, other: Tensor, up: int, left: int) -> tuple[int, int]:
    return x.shape[-2] + 2 * up - other.shape[-2] + 1, x.shape[-1] + 2 * left - other.shape[-1] + 1


def _sizes(x: Tensor, y: Tensor, up: int, left: int, kernels: Tensor) -> tuple[int, ...]:
    return (*x.shape[1:], *y.shape[2:], up, left, *kernels.shape[-2:])


def _on(x: Tensor) -> AbstractContextManager[None]:
    """Return the context in which Triton launches where x is."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _piece(channels: int) -> int:
    return next(size for size in (64, 32, CHANNELS) if channels % size == 0)


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def _operation(function: Callable[..., Tensor], empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``function`` as an operation that compilers leave alone, and to which vmap adds an axis of devices."""
    operation: Any = torch.library.custom_op(f"fedcontext::{function.__name__[1:]}", function, mutates_args=())

    def stacked(info: Any, axes: tuple[int | None, ...], one: Tensor, two: Tensor, *around: int) -> tuple[Tensor, int]:
        one, two = (
            tensor.expand(info.batch_size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
            for tensor, axis in zip((one, two), axes[:2], strict=True)
        )
        result = operation(one.flatten(0, 1), two.flatten(0, 1), *around)
        return result.reshape(*one.shape[:2], *result.shape[1:]), 0

    operation.register_fake(empty)
    operation.register_vmap(stacked)
    return operation  # type: ignore[no-any-return]


class _Convolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, kernels: Tensor, up: int, left: int) -> Tensor:
        return _convolution(x, kernels, up, left)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.around = inputs[2:]

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        (x, kernels), (up, left) = ctx.saved_tensors, ctx.around
        before = None
        if ctx.needs_input_grad[0]:
            mirrored = kernels.transpose(1, 2).flip(-2, -1)
            before = _apply(slopes, mirrored, kernels.shape[-2] - 1 - up, kernels.shape[-1] - 1 - left)
        return before, _apply_correlation(x, slopes, up, left), None, None


class _Correlation(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, slopes: Tensor, up: int, left: int) -> Tensor:
        return _correlation(x, slopes, up, left)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass  # nobody asks for second derivatives

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError("fused convolutions have no second derivatives: take convolutions='slices'")


_convolution, _correlation = _operation(_convolve, _convolved), _operation(_correlate, _correlated)
_apply: Any = _Convolution.apply
_apply_correlation: Any = _Correlation.apply
# A compiler cannot look into it, and need not.
_in_graph: Any = torch.compiler.allow_in_graph(lambda *given: _apply(*given))  # type: ignore[no-untyped-call]
