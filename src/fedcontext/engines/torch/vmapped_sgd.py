"""Local SGD of many devices in one vmapped step: each device's model is a row of stacked tensors.

Tensors keep their shapes and addresses (batches are padded, finished devices masked), so that one step is compiled or
captured as a CUDA graph once and replayed in every later step and round.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedcontext.engines.base import Work
from fedcontext.engines.torch.cuda_graph import COMPILED, Acceleration, capture
from fedcontext.engines.torch.task import Params, Task, first_line
from fedcontext.local_sgd import LocalSGD
from fedcontext.plan import IntArray, orders

Stack: TypeAlias = dict[str, Tensor]  # (C, ...) each: row k belongs to device k
NORM_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Batches:
    """The mini-batches of some devices, padded to one size; devices with more steps come first."""

    rows: Tensor  # (S, C, B) row of each sample in the data; padding repeats the device's first sample
    weights: Tensor  # (S, C, B) weight of each sample in its batch's mean loss; 0 for padding
    active: list[int]  # (S,) number of devices, from the first, that still train


def padded_batches(work: Work, positions: IntArray, size: int, task: Task) -> Batches:
    """Return the batches of the devices at these ``positions`` of the cohort, ``size`` samples each."""
    devices, epochs = work.devices[positions], work.epochs[positions]
    samples = task.split.sizes[devices]
    steps = epochs * -(-samples // size)
    rows = np.empty((int(steps.max()), len(positions), size), np.int64)
    rows[:] = task.split.offsets[devices][:, None]
    weights = np.zeros(rows.shape)
    for count, times in {*zip(samples.tolist(), epochs.tolist(), strict=True)}:  # same-sized devices in one go
        same = np.flatnonzero((samples == count) & (epochs == times))
        padded = np.zeros((len(same), times, -(-count // size) * size), np.int64)
        padded[:, :, :count] = [orders(work.seed, work.number, int(devices[k]), count, times) for k in same]
        real = np.arange(padded.shape[2]).reshape(-1, size) < count
        total = times * len(real)
        rows[:total, same] += padded.reshape(len(same), total, size).swapaxes(0, 1)
        weights[:total, same] = np.tile(real / real.sum(axis=1, keepdims=True), (times, 1))[:, None]
    active = (np.arange(len(rows))[:, None] < steps).sum(axis=1).tolist()
    return Batches(
        torch.from_numpy(rows).to(task.device), torch.from_numpy(weights).to(task.device, task.dtype), active
    )


def vmapped_gradients(task: Task, stacked: bool) -> Callable[..., Stack]:
    """Return f(params, buffers, features, labels, weights) -> each device's gradient of its weighted loss.

    ``stacked`` params have a row per device; otherwise all devices share one set of params.
    """

    def loss(params: Stack, buffers: Stack, features: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return (task.losses({**params, **buffers}, features, labels) * weights).sum()

    in_dims = (0 if stacked else None, None, 0, 0, 0)
    return torch.vmap(torch.func.grad(loss), in_dims=in_dims, randomness="different")


class VmappedSGD:
    """Stacked params of up to ``width`` devices, and the SGD step that updates all of them."""

    def __init__(
        self,
        task: Task,
        params: Params,
        width: int,
        batch_size: int,
        local: LocalSGD,
        acceleration: Acceleration,
        corrected: bool = False,
    ) -> None:
        self.task, self.width, self.local, self.acceleration = task, width, local, acceleration
        self.initial = {name: leaf.clone() for name, leaf in params.items()}
        self.params = {name: params[name].expand(width, *params[name].shape).clone() for name in task.trainable}
        self.velocity = {name: torch.zeros_like(leaf) for name, leaf in self.params.items()} if local.momentum else {}
        self.corrections = {name: torch.zeros_like(leaf) for name, leaf in self.params.items()} if corrected else {}
        self.rows = torch.zeros((width, batch_size), dtype=torch.int64, device=task.device)
        self.weights = torch.zeros((width, batch_size), dtype=task.dtype, device=task.device)
        self.rates = torch.zeros(width, dtype=task.dtype, device=task.device)
        self.step: Callable[..., None] = self._step
        compiled = acceleration in COMPILED
        if compiled:
            autotune = acceleration == "max-autotune"
            self.step = torch.compile(self._step, dynamic=False, options={"max_autotune_gemm": autotune})
        # Finished devices drop out by halves: few shapes to capture, and at most half of a step is wasted.
        halves = range(1 if compiled else 1 + width.bit_length())
        self.widths = sorted({math.ceil(width / 2**half) for half in halves})
        self.steps: dict[int, Callable[[], None]] = {}  # by width
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def fits(self, width: int, batch_size: int, local: LocalSGD, corrected: bool) -> bool:
        """Return whether these tensors serve such a cohort; the learning rate may differ."""
        same = replace(local, learning_rate=self.local.learning_rate) == self.local
        same &= corrected == bool(self.corrections)
        return same and width <= self.width and self.rows.shape[1] == batch_size

    def load(self, params: Params, corrections: Sequence[Params] | None = None) -> None:
        """Set every device to ``params``, with zero momentum, and its correction of gradients."""
        for name, leaf in params.items():
            self.initial[name].copy_(leaf)
        for row, correction in enumerate(corrections or ()):
            for name, leaf in self.corrections.items():
                leaf[row].copy_(correction[name])
        self._reset()

    def run(self, batches: Batches, learning_rate: float) -> Stack:
        """Return the devices' updates after the steps of ``batches`` from the params last loaded."""
        widths = [next(width for width in self.widths if width >= active) for active in batches.active]
        for width in sorted(set(widths) - self.steps.keys()):
            self.steps[width] = self._accelerated(width)
            self._reset()  # from the warm-up
        devices = batches.rows.shape[1]
        self.rates.fill_(learning_rate)
        for index, (active, width) in enumerate(zip(batches.active, widths, strict=True)):
            self.rows[:devices].copy_(batches.rows[index])
            self.weights[:devices].copy_(batches.weights[index])
            self.rates[active:].zero_()
            self.steps[width]()
        return {name: leaf[:devices] - self.initial[name] for name, leaf in self.params.items()}

    def _reset(self) -> None:
        for name, leaf in self.params.items():
            leaf.copy_(self.initial[name].expand_as(leaf))
        for leaf in (*self.velocity.values(), self.weights):
            leaf.zero_()

    def _accelerated(self, width: int) -> Callable[[], None]:
        """Return the step of the first ``width`` devices; an unavailable acceleration falls back with a warning."""
        params, velocity, corrections = (
            {name: leaf[:width] for name, leaf in stack.items()}
            for stack in (self.params, self.velocity, self.corrections)
        )
        inputs = (self.rows[:width], self.weights[:width], self.rates[:width], self.task.features, self.task.labels)
        on_gpu = self.task.device.type == "cuda"

        def step() -> None:
            self.step(params, velocity, corrections, self.initial, *inputs)

        if self.acceleration == "eager":
            return step
        try:
            if on_gpu:
                return capture(step, self.graphs)
            if self.acceleration == "cuda-graph":
                raise RuntimeError("CUDA graphs need a GPU")
            step()  # compiles
            return step
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # compilers and drivers raise errors of many types
            fallback: Acceleration = "cuda-graph" if on_gpu and self.acceleration in COMPILED else "eager"
            reason = f"acceleration={self.acceleration!r} is unavailable ({first_line(error)}); using {fallback!r}"
            warnings.warn(reason, stacklevel=2)
            self.acceleration, self.step = fallback, self._step
            return self._accelerated(width)

    def _step(
        self,
        params: Stack,
        velocity: Stack,
        corrections: Stack,
        initial: Stack,
        rows: Tensor,
        weights: Tensor,
        rates: Tensor,
        features: Tensor,
        labels: Tensor,
    ) -> None:
        """Take one step of `LocalSGD` in place; a device with a rate of 0 keeps its params."""
        local, buffers = self.local, {name: initial[name] for name in self.task.buffers}
        gradients = vmapped_gradients(self.task, stacked=True)(params, buffers, features[rows], labels[rows], weights)
        scales = _clip_scales(gradients, local.clip) if local.clip else None
        for name, leaf in params.items():
            gradient = gradients[name] if scales is None else gradients[name] * _per_row(scales, leaf)
            if local.weight_decay:
                gradient = gradient + local.weight_decay * leaf
            if local.mu:
                gradient = gradient + local.mu * (leaf - initial[name])
            if corrections:
                gradient = gradient + corrections[name]
            if local.momentum:
                gradient = velocity[name].mul_(local.momentum).add_(gradient)
            leaf.addcmul_(gradient, _per_row(rates, leaf), value=-1)


def _clip_scales(gradients: Stack, clip: float) -> Tensor:
    """Return (C,) factors that scale each device's gradient to a norm of at most ``clip``."""
    squares = [leaf.reshape(len(leaf), -1).square().sum(dim=1) for leaf in gradients.values()]
    norms = torch.stack(squares).sum(dim=0).sqrt()
    return (clip / (norms + NORM_EPSILON)).clamp(max=1)


def _per_row(values: Tensor, like: Tensor) -> Tensor:
    """Return (C,) values reshaped to broadcast over (C, ...) ones."""
    return values.reshape(-1, *[1] * (like.ndim - 1))
