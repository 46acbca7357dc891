"""The local steps of a whole cohort: models stacked along a first axis, one vectorised step for all of them.

Shapes and places are fixed (padded batches, masked devices), so that a step can be compiled or recorded as a CUDA
graph once and replayed for every later step and round.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from fedcontext.datasets.federated import Split
from fedcontext.engines.torch.factors import Factors, Stack, layers_to_factor
from fedcontext.engines.torch.task import Params, Task, first_line
from fedcontext.errors import require
from fedcontext.local_sgd import LocalSGD
from fedcontext.plan import orders

require("torch", extra="torch")
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

if TYPE_CHECKING:
    from fedcontext.engines.base import Work

Speed: TypeAlias = Literal["auto", "plain", "graph", "compile", "search"]
WARM_UP = 3  # steps before a CUDA graph is recorded: libraries allocate and choose their kernels in them
NORM_FLOOR = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Steps:
    """The batches of a chunk of devices, padded; devices with more steps come first."""

    rows: Tensor  # (S, C, B) samples by their place in the data; a padding is the device's first sample
    shares: Tensor  # (S, C, B) what each counts in its batch's mean; 0 for a padding
    active: list[int]  # (S,) how many devices, from the first, still train

    def devices(self) -> int:
        """Return C."""
        return int(self.rows.shape[1])


def plan_steps(work: Work, chosen: list[int], split: Split, size: int, task: Task) -> Steps:
    """Return the local steps of the ``chosen`` positions of the cohort, in batches of at most ``size``."""
    counts, epochs = split.sizes[work.devices[chosen]], work.epochs[chosen]
    each = -(-counts // size)  # steps of an epoch, the last one perhaps short
    rows = np.empty((int((each * epochs).max()), len(chosen), size), np.int64)
    rows[:] = split.offsets[work.devices[chosen]][:, None]
    shares = np.zeros(rows.shape)
    for count, times in {*zip(counts.tolist(), epochs.tolist(), strict=True)}:  # alike devices together
        alike = np.flatnonzero((counts == count) & (epochs == times))
        order = [orders(work.seed, work.number, int(work.devices[chosen[k]]), count, times) for k in alike]
        padded = np.zeros((len(alike), times, -(-count // size) * size), np.int64)
        padded[:, :, :count] = order
        filled = np.arange(padded.shape[2]).reshape(-1, size) < count
        steps = times * len(filled)
        rows[:steps, alike] += padded.reshape(len(alike), steps, size).swapaxes(0, 1)
        shares[:steps, alike] = np.tile(filled / filled.sum(axis=1, keepdims=True), (times, 1))[:, None]
    active = (np.arange(len(rows))[:, None] < each * epochs).sum(axis=1).tolist()
    place = task.device
    return Steps(torch.from_numpy(rows).to(place), torch.from_numpy(shares).to(place, task.dtype), active)


def stacked_gradients(task: Task, own: bool) -> Callable[..., Stack]:
    """Return the function to each device's gradient of its weighted loss; at its own params, or at one set for all.

    Beside params that are moved it takes some of each device's own that are not, and some that all have in common.
    """

    def loss(params: Stack, held: Stack, constants: Stack, features: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
        return (task.losses({**params, **held, **constants}, features, labels) * shares).sum()

    each = torch.func.grad(loss)
    return torch.vmap(each, in_dims=(0 if own else None, 0, None, 0, 0, 0), randomness="different")


class Stage:
    """Room for the stacked models of up to ``width`` devices, and the step that moves them all.

    Layers may keep factors in place of weights (`factors`), where those of ``length`` steps are smaller.
    """

    def __init__(
        self, task: Task, params: Params, width: int, size: int, length: int, local: LocalSGD, speed: Speed
    ) -> None:
        self.task, self.width, self.length, self.local, self.speed = task, width, length, local, speed
        self.factors = Factors(layers_to_factor(task, size, length), rows=length * size)
        beginning = self.factors.beginning(params)
        self.anchor = {**{name: leaf.clone() for name, leaf in params.items()}, **beginning}
        whole = [name for name in task.trainable if not self.factors.keeps(name)]
        self.own = {
            name: self.anchor[name].expand(width, *self.anchor[name].shape).clone() for name in [*whole, *beginning]
        }
        self.inputs = self.factors.inputs(params, width)
        self.velocity = {name: torch.zeros_like(own) for name, own in self.own.items()} if local.momentum else {}
        self.rows = torch.zeros((width, size), dtype=torch.int64, device=task.device)
        self.shares = torch.zeros((width, size), dtype=task.dtype, device=task.device)
        self.rates = torch.zeros(width, dtype=task.dtype, device=task.device)
        self.slots = torch.arange(size, device=task.device)  # of a step's samples among all
        self.step: Callable[..., Stack] = self._step
        compiled = speed in ("compile", "search")
        if compiled:
            options: dict[str, str | int | bool | Callable[..., object]] = {"max_autotune_gemm": speed == "search"}
            self.step = torch.compile(self._step, dynamic=False, options=options)
        # Devices that are done drop out by halves: few shapes to record, and at most half of a step for nothing.
        halves = range(1 if compiled else 1 + width.bit_length())
        self.counts = sorted({math.ceil(width / 2**half) for half in halves})
        self.replays: dict[int, Callable[[], None]] = {}
        self.graphs: list[torch.cuda.CUDAGraph] = []  # all share the first one's scratch memory

    def fits(self, width: int, size: int, length: int, local: LocalSGD) -> bool:
        """Return whether the work of these devices can be done in these places; any learning rate can."""
        same = replace(local, learning_rate=self.local.learning_rate) == self.local
        room = length <= self.length or not self.factors.layers
        return same and room and width <= self.width and self.rows.shape[1] == size

    def run(self, steps: Steps, learning_rate: float) -> Stack:
        """Return the updates of the devices in ``steps``, from where `load` has put them."""
        counts = [next(count for count in self.counts if count >= active) for active in steps.active]
        for count in sorted(set(counts) - self.replays.keys()):
            self.replays[count] = self._recorded(count)
            self._start()  # recording takes steps
        self.rates.fill_(learning_rate)
        devices = steps.devices()
        for step, (active, count) in enumerate(zip(steps.active, counts, strict=True)):
            self.rows[:devices].copy_(steps.rows[step])
            self.shares[:devices].copy_(steps.shares[step])
            self.rates[active:].zero_()
            self.replays[count]()
            self.slots += self.slots.numel()
        return {name: self._moved(name, devices) for name in self.task.trainable}

    def load(self, params: Params) -> None:
        """Put every device at ``params``, at rest."""
        for name, leaf in params.items():
            self.anchor[name].copy_(leaf)
        self._start()

    def _start(self) -> None:
        for name, own in self.own.items():
            own.copy_(self.anchor[name])
        for leaf in (*self.velocity.values(), *self.inputs.values(), self.shares):
            leaf.zero_()
        torch.arange(self.slots.numel(), out=self.slots)

    def _moved(self, name: str, devices: int) -> Tensor:
        """Return (devices, ...): what the steps have added to a leaf."""
        if not self.factors.keeps(name):
            return self.own[name][:devices] - self.anchor[name]
        own, inputs = ({key: leaf[:devices] for key, leaf in stack.items()} for stack in (self.own, self.inputs))
        shrunk = self.local.mu or self.local.weight_decay
        return self.factors.moved(name, own, inputs, self.anchor[name] if shrunk else None)

    def _recorded(self, count: int) -> Callable[[], None]:
        """Return the step of the first ``count`` devices as fast as asked for, or as possible (with a warning)."""
        own, velocity, inputs = (
            {name: tensor[:count] for name, tensor in stack.items()} for stack in (self.own, self.velocity, self.inputs)
        )
        given = (self.rows[:count], self.shares[:count], self.rates[:count], self.slots)

        def step() -> None:
            found = self.step(own, velocity, inputs, self.anchor, *given, self.task.features, self.task.labels)
            for layer, rows in found.items():  # not in the step: a compiler would copy all to change some
                inputs[layer].index_copy_(1, self.slots, rows)

        if self.speed == "plain":
            return step
        try:
            return _graph(step, self.graphs)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # compilers and drivers fail in many ways; the plain step does the same work
            warnings.warn(f"speed={self.speed!r} is not to be had here ({first_line(error)})", stacklevel=2)
            self.speed, self.step = "plain" if self.speed == "graph" else "graph", self._step
            return self._recorded(count)

    def _step(
        self,
        own: Stack,
        velocity: Stack,
        inputs: Stack,
        anchor: Stack,
        rows: Tensor,
        shares: Tensor,
        rates: Tensor,
        slots: Tensor,
        features: Tensor,
        labels: Tensor,
    ) -> Stack:
        """Take one local step in place, as `Local` describes it; a rate of 0 leaves a device where it is.

        Return the inputs of the layers that keep factors.
        """
        local = self.local
        found, kept, common = self.factors.given(own, inputs, anchor, size=rows.shape[1])
        moved = {name: leaf for name, leaf in own.items() if name not in kept} | found
        common |= {name: anchor[name] for name in self.task.constants}
        slopes = stacked_gradients(self.task, own=True)(moved, kept, common, features[rows], labels[rows], shares)
        scales = None
        if local.clip:
            plain = [slope for name, slope in slopes.items() if name not in found]
            scales = _clipping([_squares(slope) for slope in plain] + self.factors.squares(slopes), local.clip)
        taken = self.factors.take(slopes, own, slots)
        for name, tensor in own.items():
            slope = slopes[name] if scales is None else slopes[name] * _along(scales, tensor)
            if local.weight_decay:
                slope = slope + local.weight_decay * tensor
            if local.mu:
                slope = slope + local.mu * (tensor - anchor[name])
            if local.momentum:
                slope = velocity[name].mul_(local.momentum).add_(slope)
            tensor.addcmul_(slope, _along(rates, tensor), value=-1)
        return taken


def _graph(step: Callable[[], None], others: list[torch.cuda.CUDAGraph]) -> Callable[[], None]:
    """Return the replay of ``step`` as one CUDA graph, in the scratch memory of the ``others``; it runs before."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=others[0].pool() if others else None):
        step()
    others.append(graph)
    return graph.replay


def _squares(slope: Tensor) -> Tensor:
    """Return (C,) squared lengths."""
    return slope.flatten(1).square().sum(dim=1) if slope.ndim > 1 else slope.square()


def _clipping(squares: list[Tensor], clip: float) -> Tensor:
    """Return (C,) what each device's gradient is scaled by to have a norm of at most ``clip``."""
    norms = torch.stack(squares).sum(dim=0).sqrt()
    return (clip / (norms + NORM_FLOOR)).clamp(max=1)


def _along(values: Tensor, like: Tensor) -> Tensor:
    """Return (C,) values shaped to multiply (C, ...) ones."""
    return values.reshape(-1, *[1] * (like.ndim - 1))
