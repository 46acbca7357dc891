"""The compiled sums agree with NumPy's in float64, and have the same bits on any number of cores."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedcontext as fc
from fedcontext.arrays import numpy as numpy_arrays
from fedcontext.errors import FedcontextError

gram = pytest.importorskip("fedcontext.arrays.gram")
torch = pytest.importorskip("torch")

RULE = fc.contextual(smoothness=2.0)
COUNTS = {"rows": st.integers(1, 18), "columns": st.integers(0, 6), "seed": st.integers(0, 99)}
DTYPES = st.sampled_from([np.float32, np.float64])


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.fixture
def compiled_from_one_entry(monkeypatch):
    monkeypatch.setattr(numpy_arrays, "COMPILED_FROM", 1)


@given(size=st.integers(0, 5_000), dtype=DTYPES, **COUNTS)
def test_products_agree_with_numpy_in_float64(rows, columns, size, dtype, seed):
    arrays = list(normal(seed, rows + columns, size, dtype=dtype))
    exact = np.array(arrays, np.float64)
    np.testing.assert_allclose(
        gram.products(arrays[:rows], arrays[rows:]), exact[:rows] @ exact.T, rtol=1e-12, atol=1e-11
    )


@given(size=st.integers(0, 10_000), dtype=DTYPES, **COUNTS)
def test_weighted_sums_agree_with_numpy(rows, columns, size, dtype, seed):
    arrays, weights = list(normal(seed, rows + 1, size, dtype=dtype)), normal(seed, rows, dtype=np.float64)
    result = np.empty(size, dtype)
    gram.combine(arrays[-1], arrays[:-1], weights, result)
    exact = np.array(arrays, np.float64)
    tolerance = np.finfo(dtype).eps * 4
    np.testing.assert_allclose(result, exact[-1] + weights @ exact[:-1], rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("target", [0, 1, 2])
def test_a_weighted_sum_can_replace_its_base_or_a_row(target):
    arrays, weights = normal(0, 3, 10_000), np.array([2.0, -3.0])
    expected = np.empty(10_000, np.float32)
    gram.combine(arrays[0], [*arrays[1:]], weights, expected)
    gram.combine(arrays[0], [*arrays[1:]], weights, arrays[target])
    np.testing.assert_array_equal(arrays[target], expected)


SCALES = {
    "rows of very different lengths": lambda rows: rows * np.logspace(-12, 12, len(rows), dtype=np.float32)[:, None],
    "entries of very different sizes": lambda rows: rows * np.logspace(-12, 12, rows.shape[1], dtype=np.float32),
    "squares that overflow float32": lambda rows: rows * np.float32(1e25),
    "squares that underflow float32": lambda rows: rows * np.float32(1e-25),
    "nearly parallel rows": lambda rows: rows[:1] + np.float32(1e-4) * rows,
}


@pytest.mark.parametrize("scale", SCALES)
def test_float32_entries_are_multiplied_and_added_in_float64(scale):
    rows = SCALES[scale](normal(0, 8, 5_000))
    exact = rows.astype(np.float64) @ rows.astype(np.float64).T
    lengths = np.sqrt(np.diag(exact))
    assert (np.abs(gram.products([*rows], []) - exact) <= 1e-13 * np.outer(lengths, lengths)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_affects_only_its_own_row(value):
    rows = normal(0, 9, 4_000)
    clean = gram.products([*rows[:8]], [rows[8]])
    rows[3, 77] = value
    products = gram.products([*rows[:8]], [rows[8]])
    others = np.ix_(np.arange(8) != 3, np.arange(9) != 3)
    np.testing.assert_array_equal(products[others], clean[others])
    assert not np.isfinite(products[3]).any()


@given(offsets=st.lists(st.integers(0, 31), min_size=6, max_size=6), size=st.integers(1, 3_000))
def test_the_bits_do_not_depend_on_alignment(offsets, size):
    rows = normal(0, 6, size)
    moved = [np.empty(size + offset, np.float32)[offset:] for offset in offsets]
    for row, copy in zip(rows, moved, strict=True):
        copy[:] = row
    np.testing.assert_array_equal(gram.products(moved[:5], moved[5:]), gram.products([*rows[:5]], [rows[5]]))


def test_the_bits_do_not_depend_on_the_order_in_which_parts_finish(monkeypatch):
    rows, weights, results = [*normal(0, 6, 90_000)], np.arange(5.0), [np.empty(90_000, np.float32) for _ in range(2)]
    products = gram.products(rows[:5], rows[5:])
    gram.combine(rows[5], rows[:5], weights, results[0])
    monkeypatch.setattr(gram, "on_all_cores", lambda task, items: [task(item) for item in reversed(items)])
    np.testing.assert_array_equal(gram.products(rows[:5], rows[5:]), products)
    gram.combine(rows[5], rows[:5], weights, results[1])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("count", [300, 1_500])
def test_working_memory_is_bounded_for_many_rows(count):
    rows = [*normal(0, count, 600)]
    gram.products(rows[:2], [])
    tracemalloc.start()
    gram.products(rows, [])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * gram.PARTS_BYTES + 4 * 8 * count**2


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_large_models_have_the_same_result_with_and_without_numba(library, monkeypatch):
    make = np.asarray if library == "numpy" else torch.from_numpy
    params, gradient, *updates = (make(row) for row in normal(0, 6, 300_001))
    compiled = fc.aggregate(params, updates, gradient=gradient, rule=RULE)
    monkeypatch.setattr(numpy_arrays, "COMPILED_FROM", 2**60)
    plain = fc.aggregate(params, updates, gradient=gradient, rule=RULE)
    np.testing.assert_allclose(compiled.geometry.gram, plain.geometry.gram, rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(compiled.weights, plain.weights, rtol=1e-10)
    np.testing.assert_allclose(np.asarray(compiled.params), np.asarray(plain.params), rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("compiled_from_one_entry")
def test_entries_that_are_not_finite_and_squares_that_overflow_are_reported():
    rows = normal(0, 4, 2_000)
    for value in (np.nan, np.inf):
        broken = rows.copy()
        broken[2, 77] = value
        with pytest.raises(FedcontextError, match="device 1: the array has NaN or infinite entries"):
            fc.aggregate(rows[0], [broken[1], broken[2]], gradient=rows[3], rule=RULE, defences=None)
    huge = rows.astype(np.float64) * 1e200
    with pytest.raises(FedcontextError, match="overflow float64"):
        fc.aggregate(huge[0], [*huge[1:3]], gradient=huge[3], rule=RULE, defences=None)
