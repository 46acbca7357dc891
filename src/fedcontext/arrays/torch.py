"""PyTorch's tensors, block by block: where NumPy can view them its way, else PyTorch's own, on the tensors' device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from fedcontext.arrays.tree import Array, FloatArray, Framework, blocks, framework, held, kind_of

GPU_ROOM = 16  # times as much on a GPU, which has the room and pays for every launch


class _Torch:
    """Tensors stay on their device; on a CPU, those that NumPy can view take its way."""

    name = "PyTorch"

    def place(self, array: Array) -> object:
        return array.device

    def products(
        self, rows: Sequence[Array], columns: Sequence[Array], scratch: int, quick: bool = False
    ) -> tuple[FloatArray, bool]:
        everyone = [*rows, *columns]
        if views := _views(everyone):
            return framework(views[0]).products(views[: len(rows)], views[len(rows) :], scratch, quick)
        import torch

        total = torch.zeros(len(rows), len(everyone), dtype=torch.float64, device=rows[0].device)
        ours, theirs = _Rows(rows), _Rows(columns)
        for start, stop in blocks(rows[0].numel(), len(everyone), self._room(rows[0], scratch)):
            block = ours.block(start, stop)
            total[:, : len(rows)] += block @ block.T
            if columns:
                total[:, len(rows) :] += block @ theirs.block(start, stop).T
        return np.asarray(total.cpu().numpy()), True

    def combine(
        self, base: Array, rows: Sequence[Array], weights: FloatArray, scratch: int, out: Array | None = None
    ) -> Array:
        import torch

        result = torch.empty(base.shape, dtype=base.dtype, device=base.device) if out is None else out
        if views := _views([base, result, *rows]):
            framework(views[0]).combine(views[0], views[2:], weights, scratch, views[1])
            return result
        flat, factors = result.detach().view(-1), torch.from_numpy(weights).to(base.device)
        first, others = _Rows([base]), _Rows(rows)
        for start, stop in blocks(base.numel(), len(rows) + 1, self._room(base, scratch)):
            total = first.block(start, stop)[0] + factors @ others.block(start, stop)
            flat[start:stop] = total if kind_of(base) == "floating" else held(total.round(), base)
        return result

    def vectors(self, arrays: Sequence[Array]) -> FloatArray:
        return np.asarray(_Rows(arrays).block(0, arrays[0].numel()).cpu().numpy())

    def largest(self, array: Array, scratch: int) -> float:
        if views := _views([array]):
            return framework(views[0]).largest(views[0], scratch)
        import torch

        return float(torch.linalg.vector_norm(array.detach(), float("inf"))) if array.numel() else 0.0

    def writable(self, array: Array) -> bool:
        return bool(array.is_contiguous())

    def _room(self, array: Array, scratch: int) -> int:
        return scratch if array.device.type == "cpu" else scratch * GPU_ROOM


class _Rows:
    """Tensors as the rows of a matrix, in blocks of float64; each of them is touched only where it must be cut."""

    def __init__(self, tensors: Sequence[Array]) -> None:
        self.tensors = tensors

    @cached_property
    def flat(self) -> list[Array]:
        return [tensor.detach().reshape(-1) for tensor in self.tensors]

    def block(self, start: int, stop: int) -> Any:
        import torch

        if stop - start == self.tensors[0].numel():
            with torch.no_grad():
                return torch.stack(list(self.tensors)).reshape(len(self.tensors), -1).double()
        return torch.stack([row[start:stop] for row in self.flat]).double()


def _views(tensors: Sequence[Array]) -> list[Array] | None:
    """Return CPU tensors as NumPy arrays over the same memory, or None where that cannot be."""
    if any(t.device.type != "cpu" or str(t.dtype) == "torch.bfloat16" or not t.is_contiguous() for t in tensors):
        return None
    return [tensor.detach().numpy() for tensor in tensors]


TORCH: Framework = _Torch()
