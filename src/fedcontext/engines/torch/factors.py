"""Dense layers that keep what local steps add to their weights as factors, instead of a matrix for each device.

A step on B samples adds a matrix of rank B to a layer's (out, in) weights: the slopes of its outputs, turned, times its
inputs. So after S steps a device's weights are

    share · W + slopesᵀ inputs,    slopes (S B, out), inputs (S B, in),

with W, the start, the same for all devices. While S B (in + out) is below in · out, that is less to read and to write.
Decay, proximal terms and momentum are linear in the weights: they act on (share, slopes) as they would on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeAlias

from fedcontext.engines.torch.task import Params, Task, seeded
from fedcontext.errors import require

require("torch", extra="torch")
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

Stack: TypeAlias = dict[str, Tensor]  # (C, ...) each: a row of every leaf belongs to one device
# What a layer is given: W, share, slopes and inputs so far; the inputs and slopes of one step, to be found.
START, SHARE, SLOPES, INPUTS, INPUT, SLOPE = GIVEN = tuple(
    f"factor_{leaf}" for leaf in ("start", "share", "slopes", "inputs", "input", "slope")
)
ALIKE = 1e-2  # relative distance of gradients that may be rounding, also in TF32


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return what a Linear layer makes of x: of the factors it is given, if any, else of its weights."""
    given: dict[str, Any] = {leaf: getattr(layer, leaf) for leaf in GIVEN}
    if not given[START].numel():
        return nn.Linear.forward(layer, x)
    if x.shape != given[INPUT].shape:
        raise ValueError(f"factors need inputs of shape {tuple(given[INPUT].shape)}, got {tuple(x.shape)}")
    product: Tensor = _in_graph(x, *given.values())
    return product if layer.bias is None else product + layer.bias


class _Multiply(torch.autograd.Function):
    """The product with factored weights. What stands for their gradient is its two factors, one for each last leaf."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, start: Tensor, share: Tensor, slopes: Tensor, inputs: Tensor, own: Tensor, slope: Tensor
    ) -> Tensor:
        return share * (x @ start.T) + (x @ inputs.T) @ slopes

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, start, share, slopes, inputs = ctx.saved_tensors
        before = share * (slope @ start) + (slope @ slopes.T) @ inputs
        return before, None, None, None, None, x.clone(), slope  # x may be a parameter, which the step will change


class Factors:
    """The factors of some layers of stacked models: where they are kept, and what a step reads and writes there."""

    def __init__(self, layers: list[str], rows: int) -> None:
        self.layers, self.rows = layers, rows

    def beginning(self, params: Params) -> dict[str, Tensor]:
        """Return the share and the slopes that every device begins with."""
        weights = {layer: params[f"{layer}.weight"] for layer in self.layers}
        shares = {f"{layer}.{SHARE}": weight.new_ones(()) for layer, weight in weights.items()}
        return shares | {f"{layer}.{SLOPES}": w.new_zeros((self.rows, w.shape[0])) for layer, w in weights.items()}

    def inputs(self, params: Params, width: int) -> Stack:
        """Return places for the inputs of each layer, none of them filled."""
        weights = {layer: params[f"{layer}.weight"] for layer in self.layers}
        return {layer: w.new_zeros((width, self.rows, w.shape[1])) for layer, w in weights.items()}

    def keeps(self, name: str) -> bool:
        """Return whether a leaf is the weight of one of the layers."""
        return name.endswith(".weight") and name.removesuffix(".weight") in self.layers

    def given(self, own: Stack, inputs: Stack, params: Params, size: int) -> tuple[Stack, Stack, dict[str, Tensor]]:
        """Return what a step on ``size`` samples is given: leaves to find the slopes of, to keep, and common to all.

        A layer's weight is NaN, so that no module can read it unseen.
        """
        found: Stack = {}
        common: dict[str, Tensor] = {}
        for layer in self.layers:
            start, count = params[f"{layer}.weight"], len(inputs[layer])
            found[f"{layer}.{INPUT}"] = start.new_zeros((count, size, start.shape[1]))
            found[f"{layer}.{SLOPE}"] = start.new_zeros((count, size, start.shape[0]))
            common |= {f"{layer}.{START}": start, f"{layer}.weight": start.new_full((), torch.nan).expand_as(start)}
        kept = {f"{layer}.{leaf}": own[f"{layer}.{leaf}"] for layer in self.layers for leaf in (SHARE, SLOPES)}
        return found, kept | {f"{layer}.{INPUTS}": inputs[layer] for layer in self.layers}, common

    def squares(self, slopes: Stack) -> list[Tensor]:
        """Return (C,) for each layer: the squared length of its weights' gradient, from the slopes found in a step."""
        pairs = [(slopes[f"{layer}.{SLOPE}"], slopes[f"{layer}.{INPUT}"]) for layer in self.layers]
        return [((one @ one.mT) * (two @ two.mT)).sum(dim=(1, 2)).clamp(min=0) for one, two in pairs]

    def take(self, slopes: Stack, own: Stack, rows: Tensor) -> Stack:
        """Turn the slopes found in a step into those of shares and slopes; return each layer's inputs.

        ``rows`` are those of the step's samples among all.
        """
        inputs = {layer: slopes.pop(f"{layer}.{INPUT}") for layer in self.layers}
        for layer in self.layers:
            slopes[f"{layer}.{SHARE}"] = torch.zeros_like(own[f"{layer}.{SHARE}"])
            kept = torch.zeros_like(own[f"{layer}.{SLOPES}"])
            slopes[f"{layer}.{SLOPES}"] = kept.index_copy(1, rows, slopes.pop(f"{layer}.{SLOPE}"))
        return inputs

    def moved(self, name: str, own: Stack, inputs: Stack, start: Tensor | None) -> Tensor:
        """Return (C, out, in): what the steps have added to a layer's weights; no ``start`` says that shares are 1."""
        layer = name.removesuffix(".weight")
        added = own[f"{layer}.{SLOPES}"].mT @ inputs[layer]
        return added if start is None else added + (own[f"{layer}.{SHARE}"][:, None, None] - 1) * start


def layers_to_factor(task: Task, size: int, length: int) -> list[str]:
    """Return the Linear layers of which factors are smaller than weights, for ``length`` steps, and that can take them.

    A layer whose weights are used in any other way than to be multiplied once, by a row for each of the ``size``
    samples, cannot: that is tried out.
    """
    found: list[str] = []
    if task.precision == "bfloat16":  # whose casts know of weights alone
        return found
    for name, layer in task.module.named_modules():
        if type(layer) is nn.Linear and f"{name}.weight" in task.trainable:
            out, into = layer.weight.shape
            if length * size * (out + into) < out * into and _takes_factors(task, name, layer, size):
                found.append(name)
    return found


def _takes_factors(task: Task, name: str, layer: nn.Linear, size: int) -> bool:
    """Return whether the module has the same loss and gradients with a layer's factors as with its weights."""
    _restore(layer)
    params, features, labels = task.initial_params(), task.features[:size], task.labels[:size]
    weight = params[f"{name}.weight"]
    like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}

    def slopes_of(moving: Params, fixed: Params) -> dict[str, Tensor]:
        def loss(given: Params) -> Tensor:
            return task.losses({**params, **fixed, **given}, features, labels).sum()

        with seeded(task.device, 0):  # the same dropout
            found, value = torch.func.grad_and_value(loss)(moving)
        return {**found, "loss": value}

    factors = Factors([name], rows=3)
    with seeded(task.device, 1), task.mode(training=True):
        slopes, inputs = (torch.randn(3, side, **like) / weight.shape[1] ** 0.5 for side in weight.shape)
        own = {f"{name}.{SHARE}": torch.full((1,), 0.5, **like), f"{name}.{SLOPES}": slopes[None]}
        moving = {leaf: params[leaf] for leaf in task.trainable}
        moving[f"{name}.weight"] = weight + factors.moved(f"{name}.weight", own, {name: inputs[None]}, weight)[0]
        try:
            plain = slopes_of(moving, {})
            del moving[f"{name}.weight"]
            found, kept, common = factors.given(own, {name: inputs[None]}, params, size)
            with _counting(layer) as calls:
                ours = slopes_of({**moving, **_first(found)}, {**_first(kept), **common})
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError):
            calls = []
    alike = len(calls) == 1
    if alike:
        ours[f"{name}.weight"] = ours[f"{name}.{SLOPE}"].T @ ours[f"{name}.{INPUT}"]
        alike = all(bool((ours[leaf] - slope).norm() <= ALIKE * slope.norm()) for leaf, slope in plain.items())
    if not alike:
        _restore(layer)
    return alike


def _first(stack: Stack) -> dict[str, Tensor]:
    return {name: leaf[0] for name, leaf in stack.items()}


@contextmanager
def _counting(layer: nn.Linear) -> Iterator[list[int]]:
    """Let a layer take factors from here on, and count how often it is called inside."""
    for leaf in GIVEN:
        layer.register_buffer(leaf, torch.empty(0), persistent=False)
    layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
    calls: list[int] = []
    hook = layer.register_forward_hook(lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        hook.remove()


def _restore(layer: nn.Linear) -> None:
    """Let a layer be as it was."""
    for name in ("forward", *GIVEN):
        if name in {**layer.__dict__, **layer._buffers}:
            delattr(layer, name)


_apply: Any = _Multiply.apply
# A compiler cannot look into it, and need not.
_in_graph: Any = torch.compiler.allow_in_graph(lambda *given: _apply(*given))  # type: ignore[no-untyped-call]
