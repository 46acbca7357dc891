"""Models as trees of arrays, and the `Framework` that computes with the arrays of one library.

A model is an array, or nested lists, tuples and mappings of arrays. `leaves` returns its arrays by name, `rebuild` is
the inverse.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcontext.errors import FedcontextError

FloatArray: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Array: TypeAlias = Any  # numpy.ndarray, torch.Tensor or jax.Array
Structure: TypeAlias = Any  # an Array, or a list, tuple or mapping of Structures
Leaves: TypeAlias = dict[str, Array]

SCRATCH = 16 * 2**20  # bytes of a float64 block; at most four of them are in memory at once
LARGEST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.40e38, "float64": 1.79e308}


def leaves(structure: Structure) -> Leaves:
    """Return the arrays of ``structure`` by name, in order; nested names are joined with '/'.

    >>> leaves({"weight": np.zeros((2, 2)), "bias": np.zeros(2)}).keys()
    dict_keys(['weight', 'bias'])
    >>> leaves([np.zeros(3), {"a": np.ones(1)}]).keys()
    dict_keys(['0', '1/a'])
    """
    collected: Leaves = {}
    _collect(structure, "", collected)
    return collected


def _collect(structure: Structure, name: str, collected: Leaves) -> None:
    if isinstance(structure, list | tuple):
        children: Iterable[tuple[object, Structure]] = enumerate(structure)
    elif not hasattr(structure, "shape") and isinstance(structure, Mapping):  # the first test is faster for arrays
        children = structure.items()
    else:
        framework(structure, name)  # raises unless it is an array
        if name in collected:
            raise FedcontextError(f"two leaves are called {name!r}")
        collected[name] = structure
        return
    for key, child in children:
        _collect(child, _child_name(name, key), collected)


def _child_name(name: str, key: object) -> str:
    return f"{name}/{key!s}" if name else str(key)


def rebuild(like: Structure, values: Mapping[str, Any]) -> Structure:
    """Return ``values`` in the structure of ``like``: the inverse of `leaves`.

    >>> rebuild([0, (1, 2)], {"0": "a", "1/0": "b", "1/1": "c"})
    ['a', ('b', 'c')]
    """

    def build(node: Structure, name: str) -> Structure:
        if isinstance(node, Mapping):
            kind = OrderedDict if isinstance(node, OrderedDict) else dict
            return kind((key, build(child, _child_name(name, key))) for key, child in node.items())
        if isinstance(node, list | tuple):
            children = [build(child, _child_name(name, index)) for index, child in enumerate(node)]
            if isinstance(node, list):
                return children
            return type(node)(*children) if hasattr(node, "_fields") else tuple(children)
        return values[name]

    return build(like, "")


class Framework(Protocol):
    """The operations that each array library provides; all sums are in float64.

    ``scratch`` is the number of bytes of a block of temporary float64 values.
    """

    name: str

    def place(self, array: Array) -> object:
        """Return the device (or sharding) of the array; all arrays of a model must be on the same one."""
        ...

    def products(self, rows: Sequence[Array], columns: Sequence[Array], scratch: int) -> FloatArray:
        """Return (K, K + P), the inner products of the rows with themselves, then with the columns."""
        ...

    def combine(
        self, base: Array, rows: Sequence[Array], weights: FloatArray, scratch: int, out: Array | None = None
    ) -> Array:
        """Return ``base + Σ weights · rows`` with the dtype and device of ``base``, written to ``out`` if given.

        Integers are rounded; raises OverflowError if the dtype cannot represent one.
        """
        ...

    def largest(self, array: Array, scratch: int) -> float:
        """Return the largest absolute value or a finite upper bound; 0 for an empty array, NaN if an entry is NaN."""
        ...

    def writable(self, array: Array) -> bool:
        """Return whether results can be written into the array: it must be contiguous and mutable."""
        ...

    def from_numpy(self, values: npt.NDArray[Any], dtype: str, like: Array) -> Array:
        """Return a copy of NumPy's values as this library's array, with the named dtype, on the device of ``like``."""
        ...

    def flat(self, arrays: Sequence[Array]) -> FloatArray:
        """Return the entries of all arrays as one float64 NumPy vector."""
        ...

    def unflat(self, vector: FloatArray, like: Sequence[Array]) -> list[Array]:
        """Return a vector's entries as arrays of the shapes, dtypes and devices of those in ``like``: undoes `flat`."""
        ...


@cache
def _framework_of_module(module: str) -> Framework | None:
    """Return the framework whose arrays are defined in ``module``; each is imported when its arrays are first seen."""
    library = module.partition(".")[0]
    if library == "numpy":
        from fedcontext.arrays.numpy import NUMPY

        return NUMPY
    if library == "torch":
        from fedcontext.arrays.torch import TORCH

        return TORCH
    if library in ("jax", "jaxlib"):
        from fedcontext.arrays.jax import JAX

        return JAX
    return None


def framework(array: Array, name: str = "") -> Framework:
    """Return the `Framework` of an array; ``name`` is the leaf's name in the error if it is not an array.

    >>> framework(np.zeros(2)).name
    'NumPy'
    >>> framework(3.0, "bias")
    Traceback (most recent call last):
    ...
    fedcontext.errors.FedcontextError: leaf 'bias' must be a NumPy, PyTorch or JAX array, got float
    """
    known = _framework_of_module(type(array).__module__) if hasattr(array, "shape") else None
    if known is None and isinstance(array, np.ndarray):  # a subclass defined outside NumPy
        known = _framework_of_module("numpy")
    if known is None:
        advice = "; give its state_dict()" if hasattr(array, "state_dict") else ""
        raise FedcontextError(
            f"{leaf_name(name)} must be a NumPy, PyTorch or JAX array, got {type(array).__name__}{advice}"
        )
    return known


def leaf_name(name: str) -> str:
    """Return the name of a leaf for error messages.

    >>> leaf_name("fc.weight"), leaf_name("")
    ("leaf 'fc.weight'", 'the array')
    """
    return f"leaf '{name}'" if name else "the array"


def kind_of(array: Array) -> str:
    """Return 'floating', 'integer' or 'other' (boolean, complex, ...).

    >>> kind_of(np.zeros(1, np.float16)), kind_of(np.zeros(1, np.int32)), kind_of(np.zeros(1, bool))
    ('floating', 'integer', 'other')
    """
    dtype = dtype_name(array)
    if dtype.startswith(("float", "bfloat")):
        return "floating"
    return "integer" if dtype.startswith(("int", "uint")) else "other"


def largest_number(array: Array) -> float:
    """Return the largest finite number that the array's dtype can represent; 0 if it is not floating point.

    >>> largest_number(np.zeros(1, np.float16))
    65504.0
    """
    return LARGEST.get(dtype_name(array), 0.0)


def dtype_name(array: Array) -> str:
    """Return the name of an array's dtype, which is the same in all libraries.

    >>> dtype_name(np.zeros(1, np.float16))
    'float16'
    """
    return _name_of(array.dtype)


@cache
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def to_numpy(array: Array, name: str = "") -> npt.NDArray[Any]:
    """Return an array of any library as a contiguous NumPy array; bfloat16, which NumPy does not have, as float32.

    >>> to_numpy(np.zeros((2, 3)).T).flags.c_contiguous
    True
    """
    host = array.detach().cpu() if hasattr(array, "detach") else array
    if dtype_name(array) == "bfloat16":
        host = host.float() if hasattr(host, "float") else host.astype(np.float32)
    try:
        result = np.asarray(host)
    except TypeError:
        raise FedcontextError(f"{leaf_name(name)} has a dtype that NumPy does not have: {array.dtype}") from None
    return np.ascontiguousarray(result).reshape(result.shape)  # which would otherwise lose a shape of ()


def flat_on_host(arrays: Sequence[Array]) -> FloatArray:
    """Return `Framework.flat` of arrays that NumPy can read.

    >>> flat_on_host([np.ones((2, 1)), np.zeros(1)])
    array([1., 1., 0.])
    """
    return np.concatenate([to_numpy(array).astype(np.float64, copy=False).ravel() for array in arrays])


def split_like(vector: Array, like: Sequence[Array]) -> list[Array]:
    """Return consecutive pieces of a flat array, in the shapes of the arrays in ``like``.

    >>> split_like(np.arange(3.0), [np.zeros((2, 1)), np.zeros(1)])[1]
    array([2.])
    """
    ends = np.cumsum([size_of(array) for array in like]).tolist()
    return [
        vector[end - size_of(array) : end].reshape(tuple(array.shape)) for end, array in zip(ends, like, strict=True)
    ]


def unflat_each(library: Framework, vector: FloatArray, like: Sequence[Array]) -> list[Array]:
    """Return `Framework.unflat` with a copy of its own for each array.

    >>> [array.dtype.name for array in unflat_each(framework(np.ones(1)), np.ones(2), [np.ones(2, np.float32)])]
    ['float32']
    """
    pieces = zip(split_like(vector, like), like, strict=True)
    return [library.from_numpy(piece, dtype_name(array), array) for piece, array in pieces]


def size_of(array: Array) -> int:
    """Return the number of entries.

    >>> size_of(np.zeros((2, 3)))
    6
    """
    return math.prod(array.shape)


def all_finite(array: Array, scratch: int = SCRATCH) -> bool:
    """Return whether no entry is NaN or infinite.

    >>> all_finite(np.array([1.0, np.nan]))
    False
    """
    return bool(np.isfinite(framework(array).largest(array, scratch)))


def is_finite(structure: Structure) -> bool:
    """Return whether no floating-point leaf has a NaN or infinite entry.

    >>> is_finite({"w": np.ones(2), "count": np.ones(1, int)}), is_finite([np.array([np.inf])])
    (True, False)
    """
    return all(all_finite(leaf) for leaf in leaves(structure).values() if kind_of(leaf) == "floating")


def zeros_like(named: Leaves) -> Leaves:
    """Return leaves of zeros.

    >>> zeros_like({"w": np.ones(2)})
    {'w': array([0., 0.])}
    """
    return {name: leaf * 0 for name, leaf in named.items()}


def trained_leaves(structure: Structure, buffers: Collection[str]) -> Leaves:
    """Return the floating-point leaves that gradients move: not the buffers, which are averaged.

    >>> list(trained_leaves({"w": np.ones(2), "mean": np.ones(2), "count": np.ones(1, int)}, ["mean"]))
    ['w']
    """
    named = leaves(structure).items()
    return {name: leaf for name, leaf in named if name not in buffers and kind_of(leaf) == "floating"}


def blocks(size: int, rows: int, scratch: int = SCRATCH) -> Iterator[tuple[int, int]]:
    """Yield consecutive (start, stop) blocks of ``size`` entries whose ``rows`` float64 rows fit in ``scratch`` bytes.

    >>> list(blocks(5, 1))
    [(0, 5)]
    """
    width = max(256, scratch // (8 * max(rows, 1)))
    for start in range(0, size, width):
        yield start, min(start + width, size)


def check_integers(values: Array, like: Array) -> Array:
    """Return float64 integers unchanged if the dtype of ``like`` can represent them; else raise OverflowError.

    >>> check_integers(np.array([255.0]), np.zeros(1, np.uint8))
    array([255.])
    """
    limits = np.iinfo(dtype_name(like))
    if values.min() < limits.min or values.max() >= float(limits.max) + 1:  # float64 cannot represent 2^63 - 1
        raise OverflowError(f"{like.dtype} cannot represent {values.min():g} to {values.max():g}")
    return values
