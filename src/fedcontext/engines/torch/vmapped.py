"""Training and gradients of all devices at once, in chunks that fit the memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcontext.engines.base import Work
from fedcontext.engines.torch.cuda_graph import Acceleration
from fedcontext.engines.torch.task import Params, Task, first_line, seeded
from fedcontext.engines.torch.vmapped_sgd import Stack, VmappedSGD, padded_batches, vmapped_gradients
from fedcontext.errors import FedcontextError
from fedcontext.plan import IntArray, Stream, generator


def batch_norm_in(module: nn.Module) -> str | None:
    """Return the first layer that updates running statistics, which `torch.vmap` does not support, or None.

    >>> batch_norm_in(nn.Sequential(nn.BatchNorm1d(3)))
    'BatchNorm1d (0)'
    """
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        if isinstance(layer, nn.modules.batchnorm._NormBase) and ("Batch" in kind or layer.track_running_stats):
            return f"{kind} ({name})"
    return None


def run_in_chunks(total: int, size: int, run: Callable[[int, int], None], action: str) -> int:
    """Call ``run(start, stop)`` over ``total`` items; return the chunk size, halved as often as memory ran out.

    >>> run_in_chunks(5, 2, lambda start, stop: print(start, stop), "training")
    0 2
    2 4
    4 5
    2
    """
    start, size = 0, max(1, min(size, total))
    while start < total:
        try:
            run(start, min(start + size, total))
            start += size
            continue
        except torch.cuda.OutOfMemoryError as error:
            reason = first_line(error)
        if size == 1:
            raise FedcontextError(
                f"out of GPU memory while {action}, one at a time ({reason}); use a smaller model or batch"
            )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        size = (size + 1) // 2
        warnings.warn(f"out of GPU memory while {action}; continuing with {size} at once", stacklevel=2)
    return size


class VmappedTrainer:
    """Trains cohorts in chunks of devices, and keeps the chunk size and the acceleration that worked."""

    def __init__(self, task: Task, chunk_size: int | None, acceleration: Acceleration) -> None:
        self.task, self.chunk_size, self.acceleration = task, chunk_size, acceleration
        self.sgd: VmappedSGD | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without stacked tensors and captured steps, which a copy makes anew."""
        return {**self.__dict__, "sgd": None}

    def train(self, params: Params, work: Work) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
        """Return each device's update of the trainable leaves, and whether all its entries are finite."""
        steps = work.local.steps(self.task.split.sizes[work.devices], work.epochs)
        order = np.argsort(-steps, kind="stable")
        updates: list[dict[str, Tensor]] = []
        finite: list[Tensor] = []

        def run(start: int, stop: int) -> None:
            try:
                stack = self._run(params, work, order[start:stop])
            except torch.cuda.OutOfMemoryError:
                self.sgd = None  # frees its memory before a smaller one is made
                raise
            updates.extend(unstack(stack))
            finite.extend(_finite(stack).unbind())

        size = run_in_chunks(len(order), self.chunk_size or len(order), run, "training devices")
        if size < len(order):
            self.chunk_size = size
        inverse = np.argsort(order).tolist()
        return [updates[at] for at in inverse], [finite[at] for at in inverse]

    @torch.no_grad()
    def _run(self, params: Params, work: Work, positions: IntArray) -> Stack:
        size = min(work.local.batch_size, int(self.task.split.sizes.max()))
        corrections = None if work.corrections is None else [work.corrections[at] for at in positions]
        corrected = corrections is not None
        if self.sgd is None or not self.sgd.fits(len(positions), size, work.local, corrected):
            self.sgd = None  # frees its memory first
            self.sgd = VmappedSGD(self.task, params, len(positions), size, work.local, self.acceleration, corrected)
        self.sgd.load(params, corrections)  # before the batches are drawn: a GPU copies meanwhile
        batches = padded_batches(work, positions, size, self.task)
        random = generator(work.seed, work.number, Stream.DROPOUT, int(work.devices[positions[0]]))
        with self.task.mode(training=True), seeded(self.task.device, int(random.integers(2**62))):
            updates = self.sgd.run(batches, work.local.learning_rate)
        self.acceleration = self.sgd.acceleration
        return updates

    @torch.no_grad()
    def gradients(self, params: Params, devices: IntArray, rows: int) -> list[dict[str, Tensor]]:
        """Return ∇F_k(params) of each device, about ``rows`` samples at a time."""
        order = np.argsort(-self.task.split.sizes[devices], kind="stable")
        gradients: list[dict[str, Tensor]] = []

        def run(start: int, stop: int) -> None:
            stack = self._gradients(params, devices[order[start:stop]], max(1, rows // (stop - start)))
            gradients.extend(unstack(stack))

        with self.task.mode(training=False):
            run_in_chunks(len(order), self.chunk_size or len(order), run, "computing gradients of devices")
        return [gradients[at] for at in np.argsort(order).tolist()]

    def _gradients(self, params: Params, devices: IntArray, rows: int) -> Stack:
        """Return the stacked gradients of devices in order of decreasing size, ``rows`` samples of each at a time."""
        task, sizes, offsets = self.task, self.task.split.sizes[devices], self.task.split.offsets[devices]
        trainable, buffers = ({name: params[name] for name in names} for names in (task.trainable, task.buffers))
        totals = {name: leaf.new_zeros((len(devices), *leaf.shape)) for name, leaf in trainable.items()}
        gradients_of = vmapped_gradients(task, stacked=False)
        for start in range(0, int(sizes[0]), rows):
            count = int((sizes > start).sum())
            within = np.arange(start, min(start + rows, int(sizes[0])))[None, :]
            real = within < sizes[:count, None]
            at = torch.from_numpy(offsets[:count, None] + np.where(real, within, 0)).to(task.device)
            weights = torch.from_numpy(real / sizes[:count, None]).to(task.device, task.dtype)
            parts = gradients_of(trainable, buffers, task.features[at], task.labels[at], weights)
            for name, total in totals.items():
                total[:count] += parts[name]
        return totals


def unstack(stack: Stack) -> list[dict[str, Tensor]]:
    """Return each device's leaves, views of the stack's rows.

    >>> unstack({"w": torch.tensor([[1, 2], [3, 4]])})
    [{'w': tensor([1, 2])}, {'w': tensor([3, 4])}]
    """
    rows = zip(*(leaf.unbind() for leaf in stack.values()), strict=True)
    return [dict(zip(stack, row, strict=True)) for row in rows]


def _finite(stack: Stack) -> Tensor:
    """Return (C,) whether all entries of a device are finite, with one kernel per leaf instead of one per device."""
    largest = [torch.linalg.vector_norm(leaf.reshape(len(leaf), -1), float("inf"), dim=1) for leaf in stack.values()]
    return torch.stack(largest).isfinite().all(dim=0)
