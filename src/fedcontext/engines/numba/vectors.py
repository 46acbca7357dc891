"""What compiled Python cannot say itself: products with sixteen classes in one vector, and counters shared by threads.

A vectoriser that meets a loop over ten classes makes scalar code of it. Written as one vector of sixteen, a stored
entry of a sample costs one multiplication for all its classes; LLVM splits the vector where a machine's are shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16  # classes in a vector
TOGETHER = 4  # entries that are multiplied side by side, each into sums of its own: no one waits for the one before
_FUSED = ("contract",)


def _put_products(
    context: Any, values: Any, columns: Any, begin: Any, end: Any, weights: Any, origin: Any, out: Any, place: Any
) -> tuple[Any, Callable[..., Any]]:
    """out[place:] = Σ values[t] · weights[origin + 16 columns[t]:] over t from begin to end, TOGETHER at a time.

    Arrays are taken flat, and sixteen numbers of them are meant where a colon stands.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        entries = _Entries(context, builder, signature.args, arguments)
        sums = [entries.variable() for _ in range(TOGETHER)]
        with entries.loop(TOGETHER) as (position, _):
            for ahead, total in enumerate(sums):
                place = builder.add(position, ir.Constant(position.type, ahead))
                term = builder.fmul(entries.value(place), entries.load(entries.row(place)), flags=_FUSED)
                builder.store(builder.fadd(builder.load(total), term, flags=_FUSED), total)
        first, second, third, fourth = map(builder.load, sums)
        entries.store(builder.fadd(builder.fadd(first, second), builder.fadd(third, fourth)), entries.other)
        return context.get_dummy_value()

    return types.void(values, columns, types.intp, types.intp, weights, types.intp, out, types.intp), generate


def _add_to_rows(
    context: Any, values: Any, columns: Any, begin: Any, end: Any, weights: Any, origin: Any, factors: Any, place: Any
) -> tuple[Any, Callable[..., Any]]:
    """weights[origin + 16 columns[t]:] += values[t] · factors[place:] over t from begin to end, read in the same way."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        entries = _Entries(context, builder, signature.args, arguments)
        factors = entries.load(entries.other)
        with entries.loop(1) as (position, _):
            row = entries.row(position)
            term = builder.fmul(entries.value(position), factors, flags=_FUSED)
            entries.store(builder.fadd(entries.load(row), term, flags=_FUSED), row)
        return context.get_dummy_value()

    return types.void(values, columns, types.intp, types.intp, weights, types.intp, factors, types.intp), generate


def _put_row(
    context: Any, weights: Any, origin: Any, row: Any, factors: Any, place: Any, factor: Any, out: Any, target: Any
) -> tuple[Any, Callable[..., Any]]:
    """out[target:] = weights[row:] - origin[row:] + factor · factors[place:], read in the same way."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors, kinds = _Vectors(context, builder, signature.args[0]), signature.args
        own, other = (vectors.load(vectors.at(kinds[array], arguments[array], arguments[2])) for array in (0, 1))
        many = vectors.load(vectors.at(kinds[3], arguments[3], arguments[4]))
        term = builder.fmul(vectors.filled(arguments[5]), many, flags=_FUSED)
        total = builder.fadd(builder.fsub(own, other), term, flags=_FUSED)
        vectors.store(total, vectors.at(kinds[6], arguments[6], arguments[7]))
        return context.get_dummy_value()

    whole = types.intp
    return types.void(weights, origin, whole, factors, whole, weights.dtype, out, whole), generate


def _move(
    context: Any, source: Any, row: Any, factors: Any, place: Any, out: Any, target: Any
) -> tuple[Any, Callable[..., Any]]:
    """out[target:] = source[row:] · factors[place:], read in the same way."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = _Vectors(context, builder, signature.args[0])
        source, factors, out = (vectors.at(signature.args[i], arguments[i], arguments[i + 1]) for i in (0, 2, 4))
        vectors.store(builder.fmul(vectors.load(source), vectors.load(factors)), out)
        return context.get_dummy_value()

    whole = types.intp
    return types.void(source, whole, factors, whole, out, whole), generate


def _take(context: Any, counts: Any, place: Any) -> tuple[Any, Callable[..., Any]]:
    """Return counts[place] and add one to it, in one step, so that no two threads get the same number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [arguments[1]]), ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(counts, types.intp), generate


def _look(context: Any, counts: Any, place: Any) -> tuple[Any, Callable[..., Any]]:
    """Return counts[place], as other threads have left it just now."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load_atomic(builder.gep(data, [arguments[1]]), "acquire", 8)

    return types.int64(counts, types.intp), generate


class _Vectors:
    """Vectors of sixteen in the code generator's terms: where they are in an array, and how they are read and written."""

    def __init__(self, context: Any, builder: Any, array: Any) -> None:
        self.context, self.builder = context, builder
        self.vector = ir.VectorType(context.get_data_type(array.dtype), LANES)
        self.bytes = array.dtype.bitwidth // 8

    def data(self, kind: Any, array: Any) -> Any:
        return self.context.make_array(kind)(self.context, self.builder, array).data

    def at(self, kind: Any, array: Any, place: Any) -> Any:
        return self.pointer(self.builder.gep(self.data(kind, array), [place]))

    def pointer(self, number: Any) -> Any:
        return self.builder.bitcast(number, self.vector.as_pointer())

    def variable(self) -> Any:
        """Return where a vector is kept that starts with zeros: a register, once LLVM has seen it."""
        make: Any = cgutils.alloca_once_value
        return make(self.builder, ir.Constant(self.vector, None))

    def filled(self, value: Any) -> Any:
        """Return a value sixteen times."""
        nothing, number = ir.Constant(self.vector, ir.Undefined), ir.IntType(32)
        one = self.builder.insert_element(nothing, value, ir.Constant(number, 0))
        return self.builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(number, LANES), None))

    def load(self, pointer: Any) -> Any:
        loaded = self.builder.load(pointer)
        loaded.align = self.bytes
        return loaded

    def store(self, vector: Any, pointer: Any) -> None:
        self.builder.store(vector, pointer).align = self.bytes


class _Entries(_Vectors):
    """The stored entries of one sample: values, columns, the rows of weights they meet, and one more vector."""

    def __init__(self, context: Any, builder: Any, kinds: Any, arguments: Any) -> None:
        super().__init__(context, builder, kinds[0])
        self.values, self.columns, weights, other = (self.data(kinds[i], arguments[i]) for i in (0, 1, 4, 6))
        self.begin, self.end, origin, place = (arguments[i] for i in (2, 3, 5, 7))
        self.weights, self.other = builder.gep(weights, [origin]), self.pointer(builder.gep(other, [place]))

    def loop(self, step: int) -> Any:
        number = self.begin.type
        return cgutils.for_range_slice(self.builder, self.begin, self.end, ir.Constant(number, step), intp=number)

    def value(self, position: Any) -> Any:
        """Return the value of an entry, sixteen times."""
        return self.filled(self.builder.load(self.builder.gep(self.values, [position])))

    def row(self, position: Any) -> Any:
        """Return where the weights of an entry's column are."""
        column = self.builder.zext(self.builder.load(self.builder.gep(self.columns, [position])), position.type)
        offset = self.builder.mul(column, ir.Constant(position.type, LANES))
        return self.pointer(self.builder.gep(self.weights, [offset]))


put_products: Any = intrinsic(_put_products)
add_to_rows: Any = intrinsic(_add_to_rows)
put_row: Any = intrinsic(_put_row)
move: Any = intrinsic(_move)
take: Any = intrinsic(_take)
look: Any = intrinsic(_look)
