"""Framework arrays, block by block: the only room that touches NumPy, PyTorch and JAX arrays alike.

A model is a structure of leaves: one array, or lists, tuples and mappings of them. `leaves` lays it out as
one flat mapping from names to arrays, `rebuild` undoes that. The arithmetic is in float64, in blocks, so that
the extra memory does not grow with the model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcontext.errors import FedcontextError

FloatArray: TypeAlias = npt.NDArray[np.float64]
Array: TypeAlias = Any  # numpy.ndarray, torch.Tensor or jax.Array
Structure: TypeAlias = Any  # an Array, or a list, tuple or mapping of Structures
Leaves: TypeAlias = dict[str, Array]

BLOCK_BYTES = 16 * 2**20  # float64 scratch of one pass, whatever the size of the model


def leaves(structure: Structure, name: str = "") -> Leaves:
    """Return the arrays of ``structure`` by name, in order; nested names are joined with '/'.

    >>> leaves({"weight": np.zeros((2, 2)), "bias": np.zeros(2)}).keys()
    dict_keys(['weight', 'bias'])
    >>> leaves([np.zeros(3), {"a": np.ones(1)}]).keys()
    dict_keys(['0', '1/a'])
    """
    if isinstance(structure, Mapping):
        children = [(str(key), child) for key, child in structure.items()]
    elif isinstance(structure, list | tuple):
        children = [(str(index), child) for index, child in enumerate(structure)]
    else:
        framework(structure, name)  # refuses what is no array
        return {name: structure}
    found: Leaves = {}
    for key, child in children:
        found |= leaves(child, f"{name}/{key}" if name else key)
    return found


def rebuild(like: Structure, values: Mapping[str, Array]) -> Structure:
    """Return ``values`` in the structure of ``like``: the inverse of `leaves`.

    >>> rebuild([0, (1, 2)], {"0": "a", "1/0": "b", "1/1": "c"})
    ['a', ('b', 'c')]
    """
    remaining = iter(values.values())

    def build(node: Structure) -> Structure:
        if isinstance(node, Mapping):
            kind = OrderedDict if isinstance(node, OrderedDict) else dict
            return kind((key, build(child)) for key, child in node.items())
        if isinstance(node, list):
            return [build(child) for child in node]
        if isinstance(node, tuple):
            children = [build(child) for child in node]
            return type(node)(*children) if hasattr(node, "_fields") else tuple(children)
        return next(remaining)

    return build(like)


class Framework(Protocol):
    """What one array library must offer: read rows as float64, and write a sum back in its own type."""

    name: str

    def place(self, array: Array) -> str:
        """Return where the array lives: arrays of one model must live together."""
        ...

    def load(self, arrays: Sequence[Array], start: int, stop: int) -> Any:
        """Return entries ``start`` to ``stop`` of each array as the rows of a float64 matrix in the same place."""
        ...

    def number(self, product: Any) -> FloatArray:
        """Return a small result of matrix products as a NumPy array."""
        ...

    def combine(self, base: Array, rows: Sequence[Array], weights: FloatArray) -> Array:
        """Return ``base + Σ weights · rows`` in the type and place of ``base``; integers are rounded."""
        ...


class _NumPy:
    name = "NumPy"

    def place(self, array: Array) -> str:
        return "cpu"

    def load(self, arrays: Sequence[Array], start: int, stop: int) -> Any:
        block = np.empty((len(arrays), stop - start))
        for row, array in zip(block, arrays, strict=True):
            row[:] = array.reshape(-1)[start:stop]
        return block

    def number(self, product: Any) -> FloatArray:
        return np.asarray(product, dtype=np.float64)

    def combine(self, base: Array, rows: Sequence[Array], weights: FloatArray) -> Array:
        result = np.empty(base.shape, base.dtype)
        flat = result.reshape(-1)
        for start, stop in blocks(base.size, len(rows) + 1):
            total = self.load([base], start, stop)[0] + weights @ self.load(rows, start, stop)
            with np.errstate(over="ignore"):  # the door refuses a result that overflows
                flat[start:stop] = total if kind_of(base) == "floating" else np.rint(total)
        return result


class _JAX(_NumPy):
    """JAX arrays are read as NumPy arrays (float64 needs no switch there) and put back where they were."""

    name = "JAX"

    def place(self, array: Array) -> str:
        return str(array.sharding)

    def load(self, arrays: Sequence[Array], start: int, stop: int) -> Any:
        return super().load([np.asarray(array) for array in arrays], start, stop)

    def combine(self, base: Array, rows: Sequence[Array], weights: FloatArray) -> Array:
        import jax

        host = super().combine(np.asarray(base), [np.asarray(row) for row in rows], weights)
        return jax.device_put(host, base.sharding)


class _Torch:
    name = "PyTorch"

    def place(self, array: Array) -> str:
        return str(array.device)

    def load(self, arrays: Sequence[Array], start: int, stop: int) -> Any:
        import torch

        return torch.stack([array.detach().reshape(-1)[start:stop].double() for array in arrays])

    def number(self, product: Any) -> FloatArray:
        return np.asarray(product.cpu().numpy(), dtype=np.float64)

    def combine(self, base: Array, rows: Sequence[Array], weights: FloatArray) -> Array:
        import torch

        result = torch.empty(base.shape, dtype=base.dtype, device=base.device)
        flat, factors = result.reshape(-1), torch.from_numpy(weights).to(base.device)
        for start, stop in blocks(base.numel(), len(rows) + 1):
            total = self.load([base], start, stop)[0] + factors @ self.load(rows, start, stop)
            flat[start:stop] = total if kind_of(base) == "floating" else total.round()
        return result


_FRAMEWORKS: dict[str, Framework] = {"numpy": _NumPy(), "torch": _Torch(), "jax": _JAX(), "jaxlib": _JAX()}


def framework(array: Array, name: str = "") -> Framework:
    """Return the arithmetic for this array's library.

    >>> framework(np.zeros(2)).name
    'NumPy'
    >>> framework(3.0, "bias")
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: leaf 'bias' must be a NumPy, PyTorch or JAX array, got float
    """
    found = _FRAMEWORKS.get(type(array).__module__.split(".")[0]) if hasattr(array, "shape") else None
    if found is None and isinstance(array, np.ndarray):
        found = _FRAMEWORKS["numpy"]  # subclasses, such as a memory-mapped file's
    if found is None:
        raise FedcontextError(f"{leaf_name(name)} must be a NumPy, PyTorch or JAX array, got {type(array).__name__}")
    return found


def leaf_name(name: str) -> str:
    """Return how errors call a leaf.

    >>> leaf_name("fc.weight"), leaf_name("")
    ("leaf 'fc.weight'", 'the array')
    """
    return f"leaf '{name}'" if name else "the array"


def kind_of(array: Array) -> str:
    """Return 'floating', 'integer' or 'other' (boolean, complex, ...).

    >>> kind_of(np.zeros(1, np.float16)), kind_of(np.zeros(1, np.int32)), kind_of(np.zeros(1, bool))
    ('floating', 'integer', 'other')
    """
    dtype = str(array.dtype).removeprefix("torch.")
    if dtype.startswith(("float", "bfloat")):
        return "floating"
    return "integer" if dtype.startswith(("int", "uint")) else "other"


def size_of(array: Array) -> int:
    """Return the number of entries.

    >>> size_of(np.zeros((2, 3)))
    6
    """
    return int(np.prod(array.shape, dtype=np.int64))


def blocks(size: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds that cut ``size`` entries so that ``rows`` float64 rows fit the scratch memory.

    >>> list(blocks(5, 1))
    [(0, 5)]
    """
    width = max(256, BLOCK_BYTES // (8 * max(rows, 1)))
    for start in range(0, size, width):
        yield start, min(start + width, size)


def all_finite(array: Array) -> bool:
    """Return whether no entry is NaN or infinite.

    >>> all_finite(np.array([1.0, np.nan]))
    False
    """
    ways = framework(array)
    for start, stop in blocks(size_of(array), 1):
        with np.errstate(invalid="ignore"):
            if not np.isfinite(ways.number((ways.load([array], start, stop) * 0).sum())):
                return False
    return True
