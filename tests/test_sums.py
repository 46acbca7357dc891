"""The compiled sums: as good as plain ones, quick where that is good enough, and the same bits every time."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedcontext as fc
from fedcontext.arrays import tree as arrays
from fedcontext.errors import FedcontextError
from fedcontext.geometry import Report, float32_suffices, measure

sums = pytest.importorskip("fedcontext.arrays.gram")
tiles = pytest.importorskip("fedcontext.arrays.tiles")
torch = pytest.importorskip("torch")

RULE = fc.contextual(smoothness=2.0)
COUNTS = {"rows": st.integers(1, 9), "columns": st.integers(0, 6), "seed": st.integers(0, 99)}
FEW_OR_MANY = (10**6, 0)  # from how many rows on they are packed


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.fixture
def asked(monkeypatch):
    """Small arrays go the compiled way too; what comes back fills with the ``quick`` of each call."""
    calls = []
    monkeypatch.setattr(arrays, "COMPILED_FROM", 1)
    monkeypatch.setattr(sums, "products", lambda *args, way=sums.products: calls.append(args[2]) or way(*args))
    return calls


def exactly(**given):
    """What `fc.aggregate` gives when products are never formed in float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedcontext.geometry.float32_suffices", lambda *_: False)
        return fc.aggregate(**given)


def products(everyone, rows, quick=False, many=sums.MANY):
    """The products of the first ``rows`` of everyone with themselves and the others, packed from ``many`` rows on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "MANY", many)
        return sums.products(everyone[:rows], everyone[rows:], quick)


@given(size=st.integers(0, 5_000), **COUNTS)
def test_sums_agree_with_plain_ones(rows, columns, size, seed):
    for dtype in (np.float32, np.float64):
        everyone = list(normal(seed, rows + columns, size, dtype=dtype))
        exact = np.array(everyone, np.float64)
        np.testing.assert_allclose(sums.products(everyone[:rows], everyone[rows:]), exact[:rows] @ exact.T, atol=1e-9)
        weights, result = normal(seed, rows, dtype=np.float64), np.empty(size, dtype)
        sums.combine(everyone[0], everyone[:rows], weights, result)
        np.testing.assert_allclose(result, exact[0] + weights @ exact[:rows], rtol=1e-5, atol=1e-5)


KINDS = {
    "random": lambda rows: rows,
    "constant": lambda rows: np.repeat(rows[:, :1], rows.shape[1], axis=1),
    "repeating": lambda rows: np.resize(rows[:, :16], rows.shape),
    "rows of other lengths": lambda rows: rows * np.logspace(-12, 12, len(rows))[:, None],
    "entries of other sizes": lambda rows: rows * np.logspace(-12, 12, rows.shape[1]),
    "large": lambda rows: rows * 1e15,
    "small": lambda rows: rows * 1e-14,
    "sparse": lambda rows: rows * (rows > 2),
}


@pytest.mark.parametrize("many", FEW_OR_MANY)
@given(size=st.integers(16, 5_000), kind=st.sampled_from(list(KINDS)), **COUNTS)
def test_quick_products_are_off_by_little_beside_the_lengths(rows, columns, size, kind, seed, many):
    everyone = list(KINDS[kind](normal(seed, rows + columns, size)).astype(np.float32))
    quick, exact = (products(everyone, rows, quick, many) for quick in (True, False))
    lengths = np.linalg.norm(np.array(everyone, np.float64), axis=1)
    assert (np.abs(quick - exact) <= 1e-5 * np.outer(lengths[:rows], lengths)).all()


LENGTHS = {
    "unlike in each four": np.resize([1, 1, 1, 1e-6], 16),
    "alike in each four": np.repeat([1, 1e-6], 8),
    "some thirty times as long": np.repeat([1, 30], 8) * np.linspace(0.9, 1, 16),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("by_length", [True, False])
@pytest.mark.parametrize("constant", [True, False])
def test_rows_of_other_lengths_do_not_stand_in_for_each_other(lengths, by_length, constant, monkeypatch):
    if not by_length:
        monkeypatch.setattr(sums, "_by_length", lambda rows: np.arange(len(rows)))
    rows = (np.full((16, 5_000), 1 / 3) if constant else normal(0, 16, 5_000)) * lengths[:, None]
    everyone = [*rows.astype(np.float32)]
    found, exact = (products(everyone, 16, quick, many=0) for quick in (True, False))
    scale = np.sqrt(np.diag(exact))
    assert (np.abs(found - exact) / np.outer(scale, scale)).max() < (3e-6 if constant else 1e-7)


def test_one_product_stands_for_two_where_the_processor_gains_by_it():
    everyone = [*normal(0, 8, 5_000)]
    few, many = (products(everyone, 8, True, many) for many in FEW_OR_MANY)
    assert (few != many).any() == bool(tiles.CROSSED)


def test_many_rows_make_quick_products_no_less_exact():
    everyone = [*normal(0, 101, 20_000)]
    exact, few, many = products(everyone, 100), *(products(everyone, 100, True, many) for many in FEW_OR_MANY)
    assert np.abs(many - exact).std() < 3 * np.abs(few - exact).std()
    assert np.abs(many - exact).max() < 1e-7 * exact.max()


def test_many_rows_of_different_lengths_have_the_same_products_in_any_order():
    rows = normal(0, 60, 3_000) * np.logspace(0, 2, 60, dtype=np.float32)[:, None]
    turned = np.random.default_rng(1).permutation(60)
    found, other = (sums.products([*some], [rows[0]], quick=True) for some in (rows, rows[turned]))
    np.testing.assert_array_equal(found[np.ix_(turned, [*turned, 60])], other)


@pytest.mark.parametrize("spoilt", [np.nan, np.inf, 1e30])
def test_a_row_that_is_spoilt_spoils_no_product_of_others(spoilt):
    rows = normal(0, 9, 4_000)
    rows[3, 77] = spoilt
    found, exact = (products([*rows], 8, quick, many=0) for quick in (True, False))
    sound = np.ix_(np.arange(8) != 3, np.arange(9) != 3)
    np.testing.assert_allclose(found[sound], exact[sound], atol=1e-2)


@given(**COUNTS)
def test_float64_is_never_multiplied_in_less(rows, columns, seed):
    everyone = list(normal(seed, rows + columns, 1_000, dtype=np.float64))
    quick, exact = (sums.products(everyone[:rows], everyone[rows:], quick) for quick in (True, False))
    np.testing.assert_array_equal(quick, exact)


@given(dtype=st.sampled_from([np.float32, np.float64]), **COUNTS)
def test_a_vectors_lanes_are_added_to_their_neighbours_and_these_sums_to_theirs(rows, columns, dtype, seed):
    lanes = tiles.REGISTER // np.dtype(dtype).itemsize
    everyone = normal(seed, rows, lanes, dtype=dtype)
    wanted = everyone
    while wanted.shape[1] > 1:
        wanted = wanted[:, ::2] + wanted[:, 1::2]
    found = sums.products([*everyone], [np.ones(lanes, dtype)] * columns, quick=True)[:, rows:]
    np.testing.assert_array_equal(found, np.repeat(wanted, columns, axis=1))


@pytest.mark.parametrize("many", FEW_OR_MANY)
@given(places=st.lists(st.integers(0, 31), min_size=6, max_size=6), size=st.integers(1, 3_000), quick=st.booleans())
def test_the_same_bits_wherever_the_arrays_lie(places, size, quick, many):
    rows = normal(0, 6, size)
    moved = [np.empty(size + place, np.float32)[place:] for place in places]
    for row, copy in zip(rows, moved, strict=True):
        copy[:] = row
    np.testing.assert_array_equal(products(moved, 5, quick, many), products([*rows], 5, quick, many))


@given(size=st.integers(1, 5_000), dtype=st.sampled_from([np.float32, np.float64]), **COUNTS)
def test_the_same_bits_in_float64_from_few_rows_and_from_many(rows, columns, size, dtype, seed):
    everyone = [*normal(seed, rows + columns, size, dtype=dtype)]
    np.testing.assert_array_equal(*(products(everyone, rows, many=many) for many in FEW_OR_MANY))


@pytest.mark.parametrize("many", FEW_OR_MANY)
@pytest.mark.parametrize("quick", [True, False])
def test_the_same_bits_whichever_core_is_first(quick, many, monkeypatch):
    rows = [*normal(0, 6, 9_000)]
    together = products(rows, 5, quick, many)
    monkeypatch.setattr(sums, "on_all_cores", lambda task, items: [task(item) for item in reversed(items)])
    np.testing.assert_array_equal(products(rows, 5, quick, many), together)


@pytest.mark.parametrize("many", FEW_OR_MANY)
@pytest.mark.parametrize("quick", [True, False])
def test_the_same_bits_on_any_number_of_cores(quick, many, monkeypatch):
    rows, found = [*normal(0, 6, 90_000)], []
    for cores in (1, 2, 3, 5, 100):
        monkeypatch.setattr(sums, "workers", lambda cores=cores: cores)
        found.append(products(rows, 5, quick, many))
    assert all(np.array_equal(found[0], other) for other in found)


def test_room_for_sums_does_not_grow_with_cores(monkeypatch):
    rows, peaks = [*normal(0, 300, 600)], []
    for cores in (1, 64):
        monkeypatch.setattr(sums, "workers", lambda cores=cores: cores)
        sums.products(rows, [])
        tracemalloc.start()
        sums.products(rows, [])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 64e6
    assert peaks[1] < 1.1 * peaks[0]


def test_probes_that_cancel_each_other_are_multiplied_in_float64(asked):
    rows = normal(0, 6, 3_000)
    given = {"params": rows[4].copy(), "updates": [*rows[:4]], "rule": RULE}
    nearly = [rows[5], np.float32(1e-5) * rows[4] - rows[5]]
    result = fc.aggregate(**given, gradients=nearly)
    assert asked == [True, False]
    np.testing.assert_array_equal(result.weights, exactly(**given, gradients=nearly).weights)
    asked.clear()
    fc.aggregate(**given, gradients=[rows[5], rows[4]])
    assert asked == [True]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_large_models_take_the_quick_way_to_the_same_result(library, monkeypatch):
    make = np.asarray if library == "numpy" else torch.from_numpy
    params, gradient, *updates = (make(row) for row in normal(0, 6, 300_001))
    calls = []
    monkeypatch.setattr(sums, "products", lambda *args, way=sums.products: calls.append(args[2]) or way(*args))
    fast = fc.aggregate(params, updates, gradient=gradient, rule=RULE)
    assert calls == [True]
    monkeypatch.setattr(arrays, "COMPILED_FROM", 2**60)
    plain = fc.aggregate(params, updates, gradient=gradient, rule=RULE)
    np.testing.assert_allclose(fast.weights, plain.weights, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(fast.params), np.asarray(plain.params), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda rows: rows.__setitem__(1, rows[0]), id="repeated"),
        pytest.param(lambda rows: rows.__setitem__(1, rows[0] * np.float32(1 + 1e-4)), id="parallel"),
        pytest.param(lambda rows: rows.__setitem__(1, rows[0] + np.float32(1e-3) * rows[1]), id="nearly repeated"),
        pytest.param(lambda rows: rows.__setitem__(3, rows[0] + rows[1] - rows[2]), id="dependent"),
        pytest.param(lambda rows: rows.__setitem__(2, 0), id="one is zero"),
        pytest.param(lambda rows: rows.__imul__(np.float32(1e25)), id="squares overflow float32"),
        pytest.param(lambda rows: rows.__imul__(np.float32(1e-25)), id="squares underflow float32"),
        pytest.param(lambda rows: rows[2].__imul__(np.float32(1e-22)), id="one underflows"),
        pytest.param(lambda rows: rows[5].__imul__(np.float32(1e-30)), id="the gradient underflows"),
    ],
)
def test_where_float32_would_not_do_the_weights_are_those_of_float64(spoil, asked):
    rows = normal(0, 6, 3_000)
    spoil(rows)
    given = {"params": rows[4].copy(), "updates": [*rows[:5]], "gradient": rows[5], "rule": RULE}
    result = fc.aggregate(**given)
    assert asked == [True, False]
    np.testing.assert_array_equal(result.weights, exactly(**given).weights)


@given(seed=st.integers(0, 999), spread=st.floats(0, 3))
def test_where_float32_will_do_the_step_is_that_of_float64(seed, spread):
    rows = normal(seed, 7, 3_000)
    rows[:5] += np.float32(spread) * rows[6]  # the larger, the more alike the updates
    report = Report(updates=[{"": row} for row in rows[:5]], samples=np.ones(5), gradients=[{"": rows[5]}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "COMPILED_FROM", 1)
        quick = measure(report)
    exact = measure(report)
    assert float32_suffices(np.hstack([exact.gram, exact.slopes.T]), 3_000, np.ones(1))
    steps = [RULE.weigh(geometry, None)[0] @ rows[:5].astype(np.float64) for geometry in (quick, exact)]
    assert np.linalg.norm(steps[0] - steps[1]) <= 1e-5 * np.linalg.norm(steps[1])


def test_all_leaves_decide_together(asked):
    rows = normal(0, 5, 2_000)
    rows[:, :1_000] = rows[0, :1_000]  # all alike in the first leaf, not as a whole
    first, *updates, gradient = ({"a": row[:1_000], "b": row[1_000:]} for row in rows)
    fc.aggregate(first, updates, gradient=gradient, rule=RULE)
    assert asked == [True, True]
    asked.clear()
    fc.aggregate(first, [*updates, updates[0]], gradient=gradient, rule=RULE)
    assert asked == [True, True, False, False]


def test_what_is_not_finite_is_named_and_what_is_too_large_is_told(asked):
    rows = normal(0, 4, 2_000)
    for value in (np.nan, np.inf):
        holed = rows.copy()
        holed[2, 77] = value
        with pytest.raises(FedcontextError, match="device 1: the array has NaN or infinite entries"):
            fc.aggregate(rows[0], [holed[1], holed[2]], gradient=rows[3], rule=RULE)
    huge = rows.astype(np.float64) * 1e200
    with pytest.raises(FedcontextError, match="overflow float64"):
        fc.aggregate(huge[0], [*huge[1:3]], gradient=huge[3], rule=RULE)
