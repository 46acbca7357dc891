"""PyTorch tensors: through NumPy where it can view them without a copy, else in PyTorch on the tensors' device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fedcontext.arrays.numpy import NUMPY
from fedcontext.arrays.tree import (
    Array,
    FloatArray,
    Framework,
    blocks,
    check_integers,
    flat_on_host,
    kind_of,
    split_like,
    unflat_each,
)

GPU_SCRATCH = 16  # times the scratch memory on a GPU, where each block costs kernel launches


class _Torch:
    name = "PyTorch"

    def place(self, array: Array) -> object:
        return array.device

    def products(self, rows: Sequence[Array], columns: Sequence[Array], scratch: int) -> FloatArray:
        count, tensors = len(rows), [*rows, *columns]
        if views := _numpy_views(tensors):
            return NUMPY.products(views[:count], views[count:], scratch)
        total = torch.zeros(count, len(tensors), dtype=torch.float64, device=rows[0].device)
        for _, _, block in _float64_blocks(tensors, scratch):
            total += block[:count] @ block.T
        return np.asarray(total.cpu().numpy())

    def combine(
        self, base: Array, rows: Sequence[Array], weights: FloatArray, scratch: int, out: Array | None = None
    ) -> Array:
        result = torch.empty(base.shape, dtype=base.dtype, device=base.device) if out is None else out
        if views := _numpy_views([base, result, *rows]):
            NUMPY.combine(views[0], views[2:], weights, scratch, views[1])
            return result
        flat, factors = result.detach().view(-1), torch.from_numpy(weights).to(base.device)
        for start, stop, block in _float64_blocks([base, *rows], scratch):
            total = block[0] + factors @ block[1:]
            flat[start:stop] = total if kind_of(base) == "floating" else check_integers(total.round(), base)
        return result

    def largest(self, array: Array, scratch: int) -> float:
        if views := _numpy_views([array]):
            return NUMPY.largest(views[0], scratch)
        return float(torch.linalg.vector_norm(array.detach(), float("inf"))) if array.numel() else 0.0

    def writable(self, array: Array) -> bool:
        return bool(array.is_contiguous())

    def from_numpy(self, values: Array, dtype: str, like: Array) -> Array:
        return torch.tensor(values, dtype=getattr(torch, dtype), device=like.device)

    def flat(self, arrays: Sequence[Array]) -> FloatArray:
        if arrays[0].device.type == "cpu":
            return flat_on_host(arrays)
        joined = torch.cat([array.detach().reshape(-1) for array in arrays])  # one transfer in place of one for each
        return np.asarray(joined.cpu().double().numpy())

    def unflat(self, vector: FloatArray, like: Sequence[Array]) -> list[Array]:
        if like[0].device.type == "cpu":
            return unflat_each(self, vector, like)
        dtype = like[0].dtype if all(array.dtype == like[0].dtype for array in like) else torch.float64
        # one transfer; the pieces share its memory
        pieces = zip(split_like(torch.tensor(vector, dtype=dtype, device=like[0].device), like), like, strict=True)
        return [piece.to(array.dtype) for piece, array in pieces]


def _float64_blocks(tensors: Sequence[Array], scratch: int) -> Iterator[tuple[int, int, Array]]:
    """Yield start, stop and these entries of each tensor as rows of a float64 matrix, until all entries are done."""
    size, budget = tensors[0].numel(), scratch if tensors[0].device.type == "cpu" else scratch * GPU_SCRATCH
    bounds = list(blocks(size, len(tensors), budget))
    if len(bounds) == 1:  # one call for all tensors instead of several for each
        yield 0, size, torch.stack(list(tensors)).detach().reshape(len(tensors), -1).double()
        return
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    for start, stop in bounds:
        yield start, stop, torch.stack([row[start:stop] for row in flat]).double()


def _numpy_views(tensors: Sequence[Array]) -> list[Array] | None:
    """Return the tensors as NumPy arrays over the same memory, or None where NumPy cannot view all of them."""
    if any(t.device.type != "cpu" or t.dtype == torch.bfloat16 or not t.is_contiguous() for t in tensors):
        return None
    return [tensor.detach().numpy() for tensor in tensors]


TORCH: Framework = _Torch()
