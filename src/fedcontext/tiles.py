"""Inner products of many rows, tile by tile: four rows times four others, in vector registers, straight from memory.

LLVM's vectoriser would add up the lanes of each of a tile's sixteen sums by itself, and fetches nothing ahead; so a tile
is written here in LLVM's own terms. Rows are handed over by address, and positions in them are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils, codegen
from numba.extending import intrinsic

from fedcontext.compiling import compiled, inner

Matrix = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
LINE = 64  # bytes that are read from memory together
PIECE = 2048  # bytes of a row that are multiplied at a time: eight rows stay in the first cache, hundreds in the second
LEAD = 16  # bytes by which the first piece is shorter: NumPy's large arrays begin that far into a line of memory
AHEAD = 2  # pieces between the one that is worked on and the one that is fetched
TILE = 4
PAGE = 4096  # bytes after which addresses fall on the same places of the first cache
SPACE = PIECE + 512  # bytes from one of four copied rows to the next
FEATURES = vars(codegen)["get_host_cpu_features"]().split(",")
REGISTER = 64 if "+avx512f" in FEATURES else 32 if "+avx" in FEATURES else 16  # bytes of a vector

# Which vectors of a tile are multiplied for each of its 16 places: rows are 0 to 3, columns 4 to 7. On the diagonal
# the columns are the rows again, and places below it are free for the products of the four rows with one column more.
FREE = ((1, 2, 2, 3), (0, 0, 1, 0))  # their rows, their columns
FOUND = {place: row for row, place in enumerate(zip(*FREE, strict=True))}
PLACES = [(row, column) for row in range(TILE) for column in range(TILE)]
SQUARE = [(row, TILE + column) for row, column in PLACES]
CORNER = [(FOUND[place], TILE) if place in FOUND else (min(place), place[1]) for place in PLACES]


@compiled
def add_products(
    addresses: IntArray, copied: bool, entry: Any, total: Any, cuts: IntArray, first: int, last: int, parts: Matrix
) -> None:
    """Write to each of ``parts`` from first to last the products of the rows' bytes between two ``cuts``."""
    count = addresses.size
    spare = np.zeros((count + 2 * TILE, PIECE // 4), np.int32)
    tables = np.empty((2, count + TILE), np.int64)
    tables[0, :count], tables[1, :count] = addresses, np.int64(spare.ctypes.data) + PIECE * np.arange(count)
    for part in range(first, last):
        parts[part] = 0
        _add_products(tables, copied, entry, total, cuts[part], cuts[part + 1], spare, parts[part])


@inner
def _add_products(
    tables: IntArray, copied: bool, entry: Any, total: Any, start: int, stop: int, spare: Matrix, sums: Matrix
) -> None:
    """Add to ``sums``, (rows / 4, columns / 4, 16), the products of the rows' bytes from ``start`` to ``stop``.

    The first table has the addresses of the rows, of the columns beyond the first (both in fours), and of the first
    column, four times. Tiles left of the diagonal stay as they are. ``entry`` is the arrays' type, ``total`` the one in
    which the entries of a piece are multiplied and added. A piece that is cut short is copied to ``spare``, where the
    second table leads. With ``copied``, the tiles of a line read their four rows from a copy behind it, which the first
    of them makes: rows that all fall on the same places of the first cache do not stay there while columns pass.
    """
    panels, width, _ = sums.shape
    tiles = panels * width - panels * (panels - 1) // 2
    last = TILE * width
    out, count = np.int64(sums.ctypes.data), len(spare) - 2 * TILE
    copy = (np.int64(spare.ctypes.data) + PIECE * count) // LINE * LINE + LINE
    begin = start
    while begin < stop:
        end = min((begin + LEAD) // PIECE * PIECE + PIECE - LEAD, stop)
        known, offset = tables[0], begin
        if end - begin < PIECE:  # what is missing from a piece counts as zero
            known, offset = tables[1], 0
            spare[:] = 0
            for row in range(count):
                values = entries(pointer(tables[0, row] + begin), ((end - begin) // 4,), np.int32)
                for x in range(values.size):
                    spare[row, x] = values[x]
        for row in range(TILE):
            known[count + row] = copy + SPACE * row - offset
        where, tile = np.int64(known.ctypes.data), 0
        further = offset + PIECE * (1 if copied else AHEAD)  # a second one would push crowded rows out of their cache
        for row in range(panels):
            source = count if copied else TILE * row
            for column in range(row, width):
                place = out + 8 * TILE * TILE * (row * width + column)
                ahead = (last + 1) * tile // tiles  # the row to fetch for a later piece
                if column > row:
                    _square(entry, total, where, source, TILE * column, ahead, further, offset, place)
                elif copied:
                    _copied_corner(entry, total, where, TILE * row, last, ahead, further, offset, place)
                else:
                    _corner(entry, total, where, TILE * row, last, ahead, further, offset, place)
                tile += 1
        begin = end


def _tile(pairs: Sequence[tuple[int, int]], copied: bool = False) -> Any:
    """Return the function that adds the products of these pairs of vectors, over one piece, to 16 sums at ``out``.

    If ``copied``, it also writes the rows to where the last four addresses of the table point.
    """

    def typed(
        context: Any,
        entry: Any,
        total: Any,
        table: Any,
        row: Any,
        column: Any,
        ahead: Any,
        further: Any,
        offset: Any,
        out: Any,
    ) -> tuple[Any, Callable[..., Any]]:
        size, lanes = entry.dtype.bitwidth // 8, 8 * REGISTER // total.dtype.bitwidth

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            _, _, table, row, column, ahead, further, offset, out = given
            read, summed, wide = (
                ir.VectorType(context.get_data_type(kind), lanes) for kind in (entry.dtype, total.dtype, types.float64)
            )
            starts = [_address(builder, table, row, i, offset) for i in range(TILE)]
            starts += [_address(builder, table, column, i, offset) for i in range(1 + max(j for _, j in pairs) - TILE)]
            later = [_address(builder, table, ahead, i, further) for i in range(2)]
            copies = [_address(builder, table, column, TILE + i, offset) for i in range(TILE)] if copied else []
            sums = [_variable(builder, ir.Constant(summed, [0.0] * lanes)) for _ in pairs]
            with cgutils.for_range(builder, _int64(PIECE // size // lanes), intp=ir.IntType(64)) as loop:
                place = builder.mul(loop.index, _int64(size * lanes))
                for start in later:
                    _fetched(builder, builder.add(start, place))
                values = [_read(builder, builder.add(start, place), read, size) for start in starts]
                for value, copy in zip(values, copies, strict=False):
                    builder.store(value, builder.inttoptr(builder.add(copy, place), read.as_pointer()), align=size)
                values = [value if read == summed else builder.fpext(value, summed) for value in values]
                for cell, (i, j) in zip(sums, pairs, strict=True):
                    product = builder.fmul(values[i], values[j], flags=("contract",))
                    builder.store(builder.fadd(builder.load(cell), product, flags=("contract",)), cell)
            for number, value in enumerate(_folded(builder, [builder.load(cell) for cell in sums], lanes)):
                target = builder.inttoptr(builder.add(out, _int64(8 * lanes * number)), wide.as_pointer())
                value = value if summed == wide else builder.fpext(value, wide)
                builder.store(builder.fadd(builder.load(target, align=8), value), target, align=8)
            return context.get_dummy_value()

        return types.void(entry, total, *[types.int64] * 7), generate

    return intrinsic(typed)


def _address(builder: Any, table: Any, first: Any, number: int, offset: Any) -> Any:
    place = builder.mul(builder.add(first, _int64(number)), _int64(8))
    return builder.add(builder.load(builder.inttoptr(builder.add(table, place), ir.IntType(64).as_pointer())), offset)


def _read(builder: Any, address: Any, kind: Any, align: int) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _folded(builder: Any, sums: list[Any], lanes: int) -> list[Any]:
    """Return vectors of the sums of the given vectors' lanes, in order.

    Lanes are added to their neighbours, then twos to twos and so on; each time two vectors become one. Lanes move within
    blocks of 16 bytes, then blocks as a whole: other ways to move them keep the units busy that multiply.
    """
    block, step = lanes * 16 // REGISTER, 1
    while step < lanes:
        unit, among = (1, block) if step < block else (block, lanes)
        sources = [[_source(lane, odd, unit, among, lanes) for lane in range(lanes)] for odd in range(2)]
        masks = [ir.Constant(ir.VectorType(ir.IntType(32), lanes), source) for source in sources]
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [builder.fadd(*(builder.shuffle_vector(one, two, mask) for mask in masks)) for one, two in pairs]
        step *= 2
    return sums


def _source(lane: int, odd: int, unit: int, among: int, lanes: int) -> int:
    """Return which lane of two vectors to take: of each two units of lanes one, first those of the first vector."""
    place = 2 * (lane % among // unit) + odd
    return lane - lane % among + lane % unit + place * unit % among + lanes * (place * unit >= among)


def _fetched(builder: Any, address: Any) -> Any:
    """Ask for the line at ``address``, which may be anywhere, into the second cache."""
    given = [cgutils.voidptr_t, *[ir.IntType(32)] * 3]
    function = builder.module.declare_intrinsic("llvm.prefetch", given[:1], ir.FunctionType(ir.VoidType(), given))
    numbers = [ir.Constant(ir.IntType(32), number) for number in (0, 2, 1)]
    return builder.call(function, [builder.inttoptr(address, cgutils.voidptr_t), *numbers])


def _int64(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


def _typed_fetch(context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        _fetched(builder, given[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _typed_pointer(context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


_variable: Any = cgutils.alloca_once_value
fetch: Any = intrinsic(_typed_fetch)
pointer: Any = intrinsic(_typed_pointer)
entries: Any = vars(numba)["carray"]
_square, _corner, _copied_corner = _tile(SQUARE), _tile(CORNER), _tile(CORNER, copied=True)
