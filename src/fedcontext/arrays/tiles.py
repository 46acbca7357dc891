"""Inner products of rows, tile by tile: four rows times four others, in vector registers.

LLVM's vectoriser would add up the lanes of each of a tile's sixteen sums by itself, and fetches nothing ahead; so a tile
is written here in LLVM's own terms. Rows are handed over by address, and positions in them are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, codegen
from numba.extending import intrinsic

from fedcontext.jit import compiled, inner

Matrix = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
LINE = 64  # bytes that are read from memory together
PIECE = 3072  # bytes of a row that are multiplied at a time: eight rows stay in the first cache, hundreds in the second
LEAD = 16  # bytes by which the first piece is shorter: NumPy's large arrays begin that far into a line of memory
TILE = 4
FEATURES = vars(codegen)["get_host_cpu_features"]().split(",")
CPU = binding.get_host_cpu_name()
REGISTER = 64 if "+avx512f" in FEATURES else 32 if "+avx" in FEATURES else 16  # bytes of a vector

# Which vectors of a tile are multiplied for each of its 16 places: rows are 0 to 3, columns 4 to 7. On the diagonal
# the columns are the rows again, and places below it are free for the products of the four rows with one column more.
FREE = ((1, 2, 2, 3), (0, 0, 1, 0))  # their rows, their columns
FOUND = {place: row for row, place in enumerate(zip(*FREE, strict=True))}
PLACES = [(row, column) for row in range(TILE) for column in range(TILE)]
SQUARE = [(row, TILE + column) for row, column in PLACES]
CORNER = [(FOUND[place], TILE) if place in FOUND else (min(place), place[1]) for place in PLACES]

# One product can stand for two: ab + cd = (a + d)(b + c) - ac - bd, where ac and bd are each a matter of one row. On
# processors that add beside their multipliers both are busiest if ten of a tile's 16 places are found so.
CROSSED = frozenset(16 * n // 10 for n in range(10)) if CPU.startswith("znver") and REGISTER == 64 else frozenset()
BY_ROW, BY_COLUMN, PRODUCTS = 0, REGISTER, 2 * REGISTER  # what a corner notes for the tiles that cross its rows
NOTE = 3 * REGISTER
ALIKE = 16.0  # the largest of eight rows' squares over the smallest, at most: crossing errs as the largest does


@compiled
def add_products(
    addresses: IntArray,
    packed: bool,
    entry: Matrix,
    total: Matrix,
    cuts: IntArray,
    first: int,
    last: int,
    parts: Matrix,
) -> None:
    """Write to each of ``parts`` from first to last the products of the rows' bytes between two ``cuts``.

    Types are told by empty arrays: Numba takes as long as for a small product to see which class it was given.
    """
    spare = np.zeros(addresses.size * PIECE + LINE, np.uint8)
    notes = np.zeros((len(parts[0]), NOTE // 4), np.float32)
    for part in range(first, last):
        parts[part] = 0
        _add_products(addresses, spare, packed, entry, total, cuts[part], cuts[part + 1], notes, parts[part])


@inner
def _add_products(
    addresses: IntArray,
    spare: Matrix,
    packed: bool,
    entry: Any,
    total: Any,
    start: int,
    stop: int,
    notes: Matrix,
    sums: Matrix,
) -> None:
    """Add to ``sums``, (rows / 4, columns / 4, 16), the products of the rows' bytes from ``start`` to ``stop``.

    Addresses are those of the rows, of the columns beyond the first (both in fours), and of the first column, four
    times. Tiles left of the diagonal stay as they are. ``entry`` has the arrays' type, ``total`` the one in which the
    entries of a piece are multiplied and added. A piece that is cut short is brought to ``spare``. If ``packed``, the
    corners bring the pieces of all rows there, side by side: lines of tiles go upwards, so that a row's corner comes
    before its other tiles.
    """
    panels, width, _ = sums.shape
    tiles = panels * width - panels * (panels - 1) // 2
    last = TILE * width
    low, high = np.zeros(panels, np.float32), np.zeros(panels, np.float32)
    near = np.int64(spare.ctypes.data) // LINE * LINE + LINE + PIECE * np.arange(addresses.size)
    far, used, coming = addresses.copy(), addresses.copy(), addresses.copy()
    ahead = PIECE if packed else 2 * PIECE  # a second one would push packed rows out of their cache
    begin = start
    while begin < stop:
        end = min((begin + LEAD) // PIECE * PIECE + PIECE - LEAD, stop)
        for number, address in enumerate(addresses):
            far[number], coming[number] = address + begin, address + begin + ahead
            if end - begin < PIECE:
                _bring(far[number], end - begin, near[number])
                far[number] = near[number]
            used[number] = near[number] if packed and number < TILE * panels else far[number]
        tile, given = 0, np.int64(far.ctypes.data)
        for row in range(panels - 1, -1, -1):
            ours, note = np.int64(used.ctypes.data) + 8 * TILE * row, np.int64(notes.ctypes.data) + NOTE * row
            for column in range(row, width):
                theirs, other = ours + 8 * TILE * (column - row), note + NOTE * (column - row)
                out = np.int64(sums.ctypes.data) + 8 * TILE * TILE * (row * width + column)
                fetched = np.int64(coming.ctypes.data) + 8 * ((last + 1) * tile // tiles)
                if column == row and packed:
                    _packing(entry, total, given + 8 * TILE * row, given + 8 * last, fetched, out, note, ours)
                    squares = notes[row, PRODUCTS // 4 :: TILE + 1]
                    low[row], high[row] = squares.min(), squares.max()  # zeros where nothing is ever crossed
                elif column == row:
                    _corner(entry, total, ours, given + 8 * last, fetched, out, note, other)
                elif packed and column < panels and max(high[row], high[column]) <= ALIKE * min(low[row], low[column]):
                    _crossed(entry, total, ours, theirs, fetched, out, note, other)
                else:
                    _square(entry, total, ours, theirs, fetched, out, note, other)
                tile += 1
        begin = end


@inner
def _bring(source: int, size: int, target: int) -> None:
    """Copy so many bytes from one address to another; what is missing from a piece there counts as zero."""
    values, copy = entries(pointer(source), (size // 4,), np.int32), entries(pointer(target), (PIECE // 4,), np.int32)
    copy[size // 4 :] = 0
    for x in range(values.size):
        copy[x] = values[x]


def _tile(pairs: Sequence[tuple[int, int]], crossed: frozenset[int] = frozenset(), packing: bool = False) -> Any:
    """Return the function that adds the products of these pairs of vectors, over one piece, to 16 sums at ``out``.

    Its rows, columns, and rows to fetch are given by where their addresses stand. If ``packing``, it also writes the
    rows to the four addresses at ``other``, and what ``crossed`` tiles take from their sums to ``note``. Nothing is
    crossed unless the sums are in float32: what is in float64 is to be exact.
    """

    def typed(
        context: Any, entry: Any, total: Any, rows: Any, columns: Any, fetched: Any, out: Any, note: Any, other: Any
    ) -> tuple[Any, Callable[..., Any]]:
        size, lanes = entry.dtype.bitwidth // 8, 8 * REGISTER // total.dtype.bitwidth
        across = crossed if total.dtype == types.float32 else frozenset()
        noting = packing and bool(CROSSED) and total.dtype == types.float32

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            _, _, rows, columns, fetched, out, note, other = given
            read, summed, wide = (
                ir.VectorType(context.get_data_type(kind), lanes) for kind in (entry.dtype, total.dtype, types.float64)
            )
            starts = [_address(builder, rows, i) for i in range(TILE)]
            starts += [_address(builder, columns, i) for i in range(1 + max(j for _, j in pairs) - TILE)]
            later = [_address(builder, fetched, i) for i in range(1 if across else 2)]
            copies = [_address(builder, other, i) for i in range(TILE)] if packing else []
            zero = ir.Constant(summed, [0.0] * lanes)
            sums = {pair: _variable(builder, zero) for pair in pairs}
            owns = [_variable(builder, zero) for _ in range(TILE)] if noting else []
            step = size * lanes
            with cgutils.for_range(builder, _int64(PIECE // step // 2), intp=ir.IntType(64)) as loop:
                place = builder.mul(loop.index, _int64(2 * step))
                places = [place, builder.add(place, _int64(step))]
                for start in later:
                    for place in places:
                        _fetched(builder, builder.add(start, place))
                values = [[_read(builder, start, place, read, size) for place in places] for start in starts]
                for copy, value in zip(copies, values, strict=False):
                    for place, half in zip(places, value, strict=True):
                        _write(builder, copy, place, half, size)
                values = [[h if read == summed else builder.fpext(h, summed) for h in value] for value in values]
                for (i, j), cell in sums.items():
                    _multiply(builder, cell, values[i], values[j], crossed=pairs.index((i, j)) in across)
                for cell, (half, other_half) in zip(owns, values, strict=False):
                    _add(builder, cell, half, other_half)
            found = _folded(builder, [builder.load(sums[pair]) for pair in pairs], lanes)
            if across:
                for start, place in ((note, BY_ROW), (other, BY_COLUMN)):
                    found[0] = builder.fsub(found[0], _read(builder, start, _int64(place), summed, 4))
            if noting:
                _leave(builder, note, [builder.load(cell) for cell in owns], found[0])
            for number, value in enumerate(found):
                place = _int64(8 * lanes * number)
                value = value if summed == wide else builder.fpext(value, wide)
                _write(builder, out, place, builder.fadd(_read(builder, out, place, wide, 8), value), 8)
            return context.get_dummy_value()

        return types.void(entry, total, *[types.int64] * 6), generate

    return intrinsic(typed)


def _address(builder: Any, table: Any, number: int) -> Any:
    return _read(builder, table, _int64(8 * number), ir.IntType(64), 8)


def _read(builder: Any, start: Any, place: Any, kind: Any, align: int) -> Any:
    return builder.load(builder.inttoptr(builder.add(start, place), kind.as_pointer()), align=align)


def _write(builder: Any, start: Any, place: Any, value: Any, align: int) -> None:
    builder.store(value, builder.inttoptr(builder.add(start, place), value.type.as_pointer()), align=align)


def _multiply(builder: Any, cell: Any, one: Any, other: Any, crossed: bool) -> None:
    """Add to a sum the products of two rows' vectors, of which each row has a pair."""
    (a, c), (b, d) = one, other
    factors = [(builder.fadd(a, d), builder.fadd(b, c))] if crossed else [(a, b), (c, d)]
    for factor in factors:
        _add(builder, cell, *factor)


def _leave(builder: Any, note: Any, owns: list[Any], products: Any) -> None:
    """Write what tiles that cross these rows take off, as their rows or as their columns, and the corner's products."""
    lanes = products.type.count
    own, zero = _folded(builder, owns * TILE, lanes)[0], ir.Constant(products.type, [0.0] * lanes)
    for place, apart in ((BY_ROW, TILE), (BY_COLUMN, 1)):
        sources = [lane // apart if lane in CROSSED else lanes for lane in range(lanes)]
        _write(builder, note, _int64(place), _shuffled(builder, own, zero, sources), 4)
    _write(builder, note, _int64(PRODUCTS), products, 4)


def _add(builder: Any, cell: Any, one: Any, other: Any) -> None:
    product = builder.fmul(one, other, flags=("contract",))
    builder.store(builder.fadd(builder.load(cell), product, flags=("contract",)), cell)


def _shuffled(builder: Any, one: Any, other: Any, lanes: Sequence[int]) -> Any:
    """Return the vector of these lanes, numbered through both given vectors."""
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def _folded(builder: Any, sums: list[Any], lanes: int) -> list[Any]:
    """Return vectors of the sums of the given vectors' lanes, in order.

    Lanes are added to their neighbours, then twos to twos and so on; each time two vectors become one. Lanes move within
    blocks of 16 bytes, then blocks as a whole: other ways to move them keep the units busy that multiply.
    """
    block, step = lanes * 16 // REGISTER, 1
    while step < lanes:
        unit, among = (1, block) if step < block else (block, lanes)
        sources = [[_source(lane, odd, unit, among, lanes) for lane in range(lanes)] for odd in range(2)]
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [builder.fadd(*(_shuffled(builder, one, two, source) for source in sources)) for one, two in pairs]
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
_square, _crossed = _tile(SQUARE), _tile(SQUARE, crossed=CROSSED)
_corner, _packing = _tile(CORNER), _tile(CORNER, packing=True)
