"""Framework arrays, block by block: with `tensors`, the only room that touches NumPy, PyTorch and JAX arrays alike.

A model is a structure of leaves: one array, or lists, tuples and mappings of them. `leaves` lays it out as
one flat mapping from names to arrays, `rebuild` undoes that. The arithmetic is in float64 (but for products of
float32, where the caller can do with less), in blocks, so that the extra memory does not grow with the model.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcontext.errors import FedcontextError

FloatArray: TypeAlias = npt.NDArray[np.float64]
Array: TypeAlias = Any  # numpy.ndarray, torch.Tensor or jax.Array
Structure: TypeAlias = Any  # an Array, or a list, tuple or mapping of Structures
Leaves: TypeAlias = dict[str, Array]

SCRATCH = 16 * 2**20  # bytes of a float64 block; at most four of them are in memory at once
COMPILED_FROM = 2**20  # entries in all, from which compiled sums pay for being loaded


def leaves(structure: Structure, name: str = "") -> Leaves:
    """Return the arrays of ``structure`` by name, in order; nested names are joined with '/'.

    >>> leaves({"weight": np.zeros((2, 2)), "bias": np.zeros(2)}).keys()
    dict_keys(['weight', 'bias'])
    >>> leaves([np.zeros(3), {"a": np.ones(1)}]).keys()
    dict_keys(['0', '1/a'])
    """
    found: Leaves = {}
    _lay_out(structure, name, found)
    return found


def _lay_out(structure: Structure, name: str, found: Leaves) -> None:
    if isinstance(structure, list | tuple):
        children: Iterable[tuple[object, Structure]] = enumerate(structure)
    elif not hasattr(structure, "shape") and isinstance(structure, Mapping):  # which takes long to ask of an array
        children = structure.items()
    else:
        framework(structure, name)  # refuses what is no array
        if name in found:
            raise FedcontextError(f"two leaves are called {name!r}")
        found[name] = structure
        return
    for key, child in children:
        _lay_out(child, f"{name}/{key!s}" if name else str(key), found)


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
    """What one array library must offer: inner products summed in float64, and a sum written back in its own type."""

    name: str

    def place(self, array: Array) -> object:
        """Return where the array lives: arrays of one model must live together."""
        ...

    def products(
        self, rows: Sequence[Array], columns: Sequence[Array], scratch: int, quick: bool = False
    ) -> tuple[FloatArray, bool]:
        """Return (K, K + P), the inner products of the rows with themselves and with the columns, summed in float64.

        And whether they are exact to float64: with ``quick``, float32 may be multiplied in float32.
        """
        ...

    def combine(
        self, base: Array, rows: Sequence[Array], weights: FloatArray, scratch: int, out: Array | None = None
    ) -> Array:
        """Return ``base + Σ weights · rows`` in the type and place of ``base``, in ``out`` if given; integers rounded.

        Whole numbers that the type cannot hold are an OverflowError: they would come out as others.
        """
        ...

    def vectors(self, arrays: Sequence[Array]) -> FloatArray:
        """Return the arrays as the rows of a NumPy matrix."""
        ...

    def largest(self, array: Array, scratch: int) -> float:
        """Return the largest absolute value, or a larger finite number (or 0 for less than 1e-19); NaN where one is NaN."""
        ...

    def writable(self, array: Array) -> bool:
        """Return whether results can be written into the array."""
        ...


class _NumPy:
    name = "NumPy"

    def place(self, array: Array) -> object:
        return "cpu"

    def products(
        self, rows: Sequence[Array], columns: Sequence[Array], scratch: int, quick: bool = False
    ) -> tuple[FloatArray, bool]:
        if compiled := _compiled([*rows, *columns]):
            return compiled.products(rows, columns, quick), not quick or rows[0].dtype != np.float32
        total = np.zeros((len(rows), len(rows) + len(columns)))
        for start, stop in blocks(rows[0].size, len(rows) + len(columns), scratch):
            block = self._load([*rows, *columns], start, stop)
            total += block[: len(rows)] @ block.T
        return total, True

    def combine(
        self, base: Array, rows: Sequence[Array], weights: FloatArray, scratch: int, out: Array | None = None
    ) -> Array:
        result = np.empty(base.shape, base.dtype) if out is None else out
        if compiled := _compiled([base, result, *rows]):
            compiled.combine(base, rows, weights, result)
            return result
        flat = result.reshape(-1)
        for start, stop in blocks(base.size, len(rows) + 1, scratch):
            block = self._load([base, *rows], start, stop)
            total = block[0] + weights @ block[1:]
            with np.errstate(over="ignore"):  # the door refuses a result that overflows
                flat[start:stop] = total if kind_of(base) == "floating" else held(np.rint(total), base)
        return result

    def vectors(self, arrays: Sequence[Array]) -> FloatArray:
        return self._load(arrays, 0, arrays[0].size)

    def largest(self, array: Array, scratch: int) -> float:
        if array.dtype in (np.float32, np.float64) and array.flags.c_contiguous:
            with np.errstate(over="ignore", invalid="ignore"):
                length = math.sqrt(np.vdot(array, array))  # one pass instead of two
            if math.isfinite(length):
                return length
        pieces = (_piece(array, start, stop) for start, stop in blocks(array.size, 1, scratch))
        ends = (float(end) for piece in pieces for end in (piece.max(), -piece.min()))
        return max(ends, key=lambda end: np.inf if np.isnan(end) else end, default=0.0)

    def writable(self, array: Array) -> bool:
        return bool(array.flags.writeable and array.flags.c_contiguous)

    def _load(self, arrays: Sequence[Array], start: int, stop: int) -> FloatArray:
        block = np.empty((len(arrays), stop - start))
        for row, array in zip(block, arrays, strict=True):
            row[:] = _piece(array, start, stop)
        return block


def _piece(array: Array, start: int, stop: int) -> Array:
    """Return some of an array's entries, in C order; where they lie in another one, only these are copied."""
    return array.reshape(-1)[start:stop] if array.flags.c_contiguous else array.flat[start:stop]


class _JAX(_NumPy):
    """JAX arrays are read as NumPy arrays (float64 needs no switch there) and put back where they were."""

    name = "JAX"

    def place(self, array: Array) -> object:
        return array.sharding

    def products(
        self, rows: Sequence[Array], columns: Sequence[Array], scratch: int, quick: bool = False
    ) -> tuple[FloatArray, bool]:
        hosts = [np.asarray(row) for row in rows], [np.asarray(column) for column in columns]
        return super().products(*hosts, scratch, quick)

    def combine(
        self, base: Array, rows: Sequence[Array], weights: FloatArray, scratch: int, out: Array | None = None
    ) -> Array:
        import jax

        host = super().combine(np.asarray(base), [np.asarray(row) for row in rows], weights, scratch)
        return jax.device_put(host, base.sharding)

    def vectors(self, arrays: Sequence[Array]) -> FloatArray:
        return super().vectors([np.asarray(array) for array in arrays])

    def largest(self, array: Array, scratch: int) -> float:
        return super().largest(np.asarray(array), scratch)

    def writable(self, array: Array) -> bool:
        return False


def held(whole: Array, base: Array) -> Array:
    """Return float64 whole numbers if the integer type of ``base`` can hold them; else an OverflowError.

    >>> held(np.array([255.0]), np.zeros(1, np.uint8))
    array([255.])
    """
    limits = np.iinfo(str(base.dtype).removeprefix("torch."))
    if whole.min() < limits.min or whole.max() >= float(limits.max) + 1:  # 2^63 - 1 itself is no float64
        raise OverflowError
    return whole


def _compiled(arrays: Sequence[Array]) -> Any:
    """Return the compiled sums where they are installed, pay, and can read these arrays; else None."""
    if arrays[0].size * len(arrays) < COMPILED_FROM or find_spec("numba") is None:
        return None
    if any(a.dtype not in (np.float32, np.float64) or a.dtype != arrays[0].dtype for a in arrays):
        return None
    if not all(a.flags.c_contiguous and a.flags.aligned for a in arrays):
        return None
    from fedcontext.arrays import gram

    return gram


_FRAMEWORKS: dict[str, Framework] = {"numpy": _NumPy(), "jax": _JAX(), "jaxlib": _JAX()}


@cache
def _of_module(name: str) -> Framework | None:
    library = name.split(".")[0]
    if library == "torch":
        from fedcontext.arrays.torch import TORCH  # which builds on this module

        return TORCH
    return _FRAMEWORKS.get(library)


def framework(array: Array, name: str = "") -> Framework:
    """Return the arithmetic for this array's library.

    >>> framework(np.zeros(2)).name
    'NumPy'
    >>> framework(3.0, "bias")
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: leaf 'bias' must be a NumPy, PyTorch or JAX array, got float
    """
    found = _of_module(type(array).__module__) if hasattr(array, "shape") else None
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
    dtype = _dtype_name(array.dtype)
    if dtype.startswith(("float", "bfloat")):
        return "floating"
    return "integer" if dtype.startswith(("int", "uint")) else "other"


def largest_number(array: Array) -> float:
    """Return the largest finite number that the array's dtype can hold.

    >>> largest_number(np.zeros(1, np.float16))
    65504.0
    """
    limits = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.40e38, "float64": 1.79e308}
    return limits.get(_dtype_name(array.dtype), 0.0)


@cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def size_of(array: Array) -> int:
    """Return the number of entries.

    >>> size_of(np.zeros((2, 3)))
    6
    """
    return math.prod(array.shape)


def blocks(size: int, rows: int, scratch: int = SCRATCH) -> Iterator[tuple[int, int]]:
    """Yield the bounds that cut ``size`` entries so that ``rows`` float64 rows fit ``scratch`` bytes.

    >>> list(blocks(5, 1))
    [(0, 5)]
    """
    width = max(256, scratch // (8 * max(rows, 1)))
    for start in range(0, size, width):
        yield start, min(start + width, size)


def all_finite(array: Array, scratch: int = SCRATCH) -> bool:
    """Return whether no entry is NaN or infinite.

    >>> all_finite(np.array([1.0, np.nan]))
    False
    """
    return bool(np.isfinite(framework(array).largest(array, scratch)))
