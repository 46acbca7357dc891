"""All devices of a cohort at once: chunks that fit the memory, each a stack of models on one `Stage`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcontext.datasets.federated import Split
from fedcontext.engines.torch.factors import Stack
from fedcontext.engines.torch.stage import Speed, Stage, plan_steps, stacked_gradients
from fedcontext.engines.torch.task import Params, Task, first_line, seeded
from fedcontext.errors import FedcontextError, require
from fedcontext.plan import Stream, generator

require("torch", extra="torch")
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

if TYPE_CHECKING:
    from fedcontext.engines.base import Work


def obstacle(module: nn.Module) -> str | None:
    """Return why a module cannot train all at once, or None.

    >>> obstacle(nn.Sequential(nn.BatchNorm1d(3)))
    'BatchNorm1d (0) cannot train all at once: use GroupNorm or at_once=False'
    """
    for name, child in module.named_modules():
        kind = type(child).__name__
        if isinstance(child, nn.modules.batchnorm._NormBase) and ("Batch" in kind or child.track_running_stats):
            return f"{kind} ({name}) cannot train all at once: use GroupNorm or at_once=False"
    return None


def in_chunks(total: int, width: int, attempt: Callable[[int, int], None], what: str) -> int:
    """Call ``attempt(start, stop)`` over ``total`` items in chunks; return the width that fitted the memory.

    A chunk that does not fit is tried again at half the width, down to one.

    >>> in_chunks(5, 2, lambda start, stop: print(start, stop), "training")
    0 2
    2 4
    4 5
    2
    """
    start, width = 0, max(1, min(width, total))
    while start < total:
        try:
            attempt(start, min(start + width, total))
            start += width
            continue
        except torch.cuda.OutOfMemoryError as error:
            said = first_line(error)
        if width == 1:
            raise FedcontextError(
                f"out of GPU memory while {what}, one at a time ({said}): take a smaller model or batch"
            )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        width = (width + 1) // 2
    return width


class AtOnce:
    """Trains cohorts in chunks of stacked models, and remembers what fitted."""

    def __init__(self, task: Task, split: Split, chunk: int | None, speed: Speed) -> None:
        self.task, self.split, self.chunk = task, split, chunk
        self.speed: Speed = speed if speed != "auto" else "graph" if task.device.type == "cuda" else "plain"
        self.stage: Stage | None = None
        self.length = 0  # steps of the longest work so far

    def train(self, params: Params, work: Work) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
        """Return each device's update of the trainable leaves, and whether all of it is finite."""
        lengths = work.epochs * -(-self.split.sizes[work.devices] // work.local.batch_size)
        order = np.argsort(-lengths, kind="stable").tolist()
        moved: dict[int, dict[str, Tensor]] = {}
        sound: dict[int, Tensor] = {}

        def attempt(start: int, stop: int) -> None:
            chosen = order[start:stop]
            try:
                moves = self._run(params, work, chosen)
            except torch.cuda.OutOfMemoryError:
                self.stage = None  # its places are what must shrink
                raise
            moved.update(zip(chosen, rows_of(moves), strict=True))
            sound.update(zip(chosen, _finite(moves).unbind(), strict=True))

        width = in_chunks(len(order), self.chunk or len(order), attempt, "training devices")
        if width < len(order):
            self.chunk = width
        return [moved[at] for at in range(len(order))], [sound[at] for at in range(len(order))]

    @torch.no_grad()
    def _run(self, params: Params, work: Work, chosen: list[int]) -> Stack:
        size = min(work.local.batch_size, int(self.split.sizes.max()))
        self.length = max(self.length, int(work.epochs.max()) * self._epoch(size))
        stage = self.stage
        if stage is None or not stage.fits(len(chosen), size, self.length, work.local):
            self.stage = stage = None  # free its places before new ones are taken
            stage = Stage(self.task, params, len(chosen), size, self.length, work.local, self.speed)
        stage.load(params)  # the GPU works on this while the steps are planned
        steps = plan_steps(work, chosen, self.split, size, self.task)
        draw = generator(work.seed, work.number, Stream.DROPOUT, int(work.devices[chosen[0]]))
        with self.task.mode(training=True), seeded(self.task.device, int(draw.integers(2**62))):
            result = stage.run(steps, work.local.learning_rate)
        self.stage, self.speed = stage, stage.speed  # what could not be had is not tried again
        return result

    def _epoch(self, size: int) -> int:
        """Return the steps of the largest device's epoch: no cohort then needs more, and other places."""
        return -(-int(self.split.sizes.max()) // size)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: room and recordings are made anew."""
        return {**self.__dict__, "stage": None}

    @torch.no_grad()
    def gradients(self, params: Params, devices: list[int], rows: int) -> list[dict[str, Tensor]]:
        """Return ∇F_k(params) of each device, ``rows`` samples of some devices in one pass."""
        order = sorted(range(len(devices)), key=lambda at: -int(self.split.sizes[devices[at]]))
        found: dict[int, dict[str, Tensor]] = {}

        def attempt(start: int, stop: int) -> None:
            chosen = order[start:stop]
            totals = self._gradients(params, [devices[at] for at in chosen], max(1, rows // len(chosen)))
            found.update(zip(chosen, rows_of(totals), strict=True))

        with self.task.mode(training=False):
            in_chunks(len(order), self.chunk or len(order), attempt, "taking gradients of devices")
        return [found[at] for at in range(len(order))]

    def _gradients(self, params: Params, devices: list[int], rows: int) -> Stack:
        own, constants = (
            {name: params[name] for name in names} for names in (self.task.trainable, self.task.constants)
        )
        sizes, offsets = self.split.sizes[devices], self.split.offsets[devices]
        totals = {
            name: torch.zeros((len(devices), *leaf.shape), dtype=leaf.dtype, device=leaf.device)
            for name, leaf in own.items()
        }
        of_each = stacked_gradients(self.task, own=False)
        for start in range(0, int(sizes[0]), rows):
            count = int((sizes > start).sum())
            within = np.arange(start, min(start + rows, int(sizes[0])))[None, :]
            real = within < sizes[:count, None]
            at = torch.from_numpy(offsets[:count, None] + np.where(real, within, 0)).to(self.task.device)
            shares = torch.from_numpy(real / sizes[:count, None]).to(self.task.device, self.task.dtype)
            slopes = of_each(own, {}, constants, self.task.features[at], self.task.labels[at], shares)
            for name, total in totals.items():
                total[:count] += slopes[name]
        return totals


def rows_of(stack: Stack) -> list[dict[str, Tensor]]:
    """Return each device's leaves: views of the stack's rows.

    >>> rows_of({"w": torch.tensor([[1, 2], [3, 4]])})
    [{'w': tensor([1, 2])}, {'w': tensor([3, 4])}]
    """
    return [
        dict(zip(stack, rows, strict=True)) for rows in zip(*(leaf.unbind() for leaf in stack.values()), strict=True)
    ]


def _finite(stack: Stack) -> Tensor:
    """Return (C,) whether all of a device's numbers are finite."""
    largest = [torch.linalg.vector_norm(leaf.reshape(len(leaf), -1), float("inf"), dim=1) for leaf in stack.values()]
    return torch.stack(largest).isfinite().all(dim=0)
