"""The entry point for other systems: any array library, any structure, and clear errors for what it refuses."""

from __future__ import annotations

import re
import tracemalloc
import warnings
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fedcontext as fc
from fedcontext.arrays import tree as arrays
from fedcontext.errors import FedcontextError
from fedcontext.measurement.geometry import Report

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

SHAPES = {"weight": (4, 3), "bias": (3,)}
RULE = fc.contextual(smoothness=2.0)


def model(seed, dtype=np.float32):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def flat(structure):
    return np.concatenate([np.asarray(structure[name], np.float64).ravel() for name in SHAPES])


def as_torch(structure):
    return OrderedDict((name, torch.from_numpy(leaf)) for name, leaf in structure.items())


def as_jax(structure):
    return {name: jnp.asarray(leaf) for name, leaf in structure.items()}


FORMS = {
    "one array": lambda m: np.concatenate([leaf.ravel() for leaf in m.values()]),
    "list": lambda m: list(m.values()),
    "tuple": lambda m: tuple(m.values()),
    "mapping": dict,
    "nested": lambda m: {"layer": dict(m)},
    "torch": as_torch,
    "torch list": lambda m: [torch.from_numpy(leaf) for leaf in m.values()],
    "jax": as_jax,
}


def test_a_stacked_array_of_updates_is_one_row_a_device():
    updates, gradients = np.arange(12.0).reshape(4, 3), -np.eye(2, 3)
    stacked = fc.aggregate(np.zeros(3), updates, gradients=gradients, rule=fc.contextual(2.0))
    listed = fc.aggregate(np.zeros(3), list(updates), gradients=list(gradients), rule=fc.contextual(2.0))
    assert np.array_equal(stacked.params, listed.params)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", [RULE, fc.folb(), fc.by_samples(), fc.mean()])
def test_every_form_gives_the_same_weights_and_params(form, rule):
    make = FORMS[form]
    params, updates, own = model(0), [model(k) for k in (1, 2, 3)], [model(k) for k in (4, 5, 6)]
    options = {"rule": rule, "samples": [1, 2, 3]}
    plain = fc.aggregate(params, updates, own_gradients=own, **options)
    other = fc.aggregate(make(params), [make(u) for u in updates], own_gradients=[make(g) for g in own], **options)
    np.testing.assert_allclose(other.weights, plain.weights, rtol=1e-9)
    assert type(other.params) is type(make(params))
    leaves = arrays.leaves(other.params)
    result = np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves.values()])
    np.testing.assert_allclose(result, flat(plain.params), rtol=1e-6)
    assert {str(leaf.dtype).removeprefix("torch.") for leaf in leaves.values()} == {"float32"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("library", ["torch", "jax", "numpy"])
def test_inner_products_accumulate_in_float64(dtype, library):
    if (library, dtype) in {("numpy", "bfloat16"), ("jax", "float64")}:
        pytest.skip(f"{library} has no {dtype} here")
    size = 70_000  # in half precision a running sum of ones stops at 2048 (float16) or 256 (bfloat16)
    ones = {
        "torch": lambda: torch.ones(size, dtype=getattr(torch, dtype)),
        "jax": lambda: jnp.ones(size, dtype=dtype),
        "numpy": lambda: np.ones(size, dtype=dtype),
    }[library]()
    result = fc.aggregate(ones, [ones, ones * 2], gradient=ones, rule=RULE)
    np.testing.assert_array_equal(result.geometry.gram, size * np.array([[1, 2], [2, 4]]))
    assert result.params.dtype == ones.dtype


def test_gradients_from_probes_are_averaged_with_their_weights():
    params, updates, probes = model(0), [model(1), model(2)], [model(3), model(4)]
    weighted = fc.aggregate(params, updates, gradients=probes, probe_weights=[1, 3], rule=RULE)
    mean = {name: 0.25 * probes[0][name] + 0.75 * probes[1][name] for name in SHAPES}
    single = fc.aggregate(params, updates, gradient=mean, rule=RULE)
    np.testing.assert_allclose(weighted.weights, single.weights, rtol=1e-5)
    assert weighted.geometry.slopes.shape == (2, 2)


def test_layers_choose_the_geometry_and_weights_apply_to_all():
    params, updates, gradient = model(0), [model(1), model(2)], model(3)
    last = fc.aggregate(params, updates, gradient=gradient, rule=RULE, layers=["bias"])
    alone = fc.aggregate(params["bias"], [u["bias"] for u in updates], gradient=gradient["bias"], rule=RULE)
    np.testing.assert_allclose(last.weights, alone.weights)
    by_place = fc.aggregate(params, updates, gradient={"bias": gradient["bias"]}, rule=RULE, layers=[-1])
    np.testing.assert_array_equal(by_place.weights, last.weights)
    expected = params["weight"] + sum(w * u["weight"] for w, u in zip(last.weights, updates, strict=True))
    np.testing.assert_allclose(last.params["weight"], expected, rtol=1e-5)


def test_buffers_and_integers_are_averaged_never_weighted():
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    params = {name: leaf.clone() for name, leaf in network.state_dict().items()}
    updates = [{n: torch.full_like(leaf, k) for n, leaf in params.items()} for k in (1, 4)]
    gradient = {name: torch.ones_like(leaf) for name, leaf in network.named_parameters()}
    result = fc.aggregate(
        params, updates, gradient=gradient, rule=RULE, samples=[3, 1], buffers=["1.running_mean", "1.running_var"]
    )
    assert int(result.params["1.num_batches_tracked"]) == round((3 * 1 + 1 * 4) / 4)
    torch.testing.assert_close(result.params["1.running_mean"], torch.full((4,), 1.75))
    assert (result.params["0.weight"] < params["0.weight"]).all()
    assert result.params["1.num_batches_tracked"].dtype == torch.int64
    network.load_state_dict(result.params)


def test_nothing_handed_in_is_changed():
    params, updates, gradient = model(0), [model(1), model(2)], model(3)
    fc.aggregate(params, updates, gradient=gradient, rule=RULE)
    for seed, structure in enumerate((params, *updates, gradient)):
        np.testing.assert_array_equal(flat(structure), flat(model(seed)))


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, jnp.asarray], ids=["numpy", "torch", "jax"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_little_scratch_memory_does_not_change_the_result(make, order):
    models = np.random.default_rng(0).standard_normal((4, 30, 40)).astype(np.float32)
    params, gradient, *updates = (make(np.asarray(model, order=order)) for model in models)
    whole = fc.aggregate(params, updates, gradient=gradient, rule=RULE)
    cut = fc.aggregate(params, updates, gradient=gradient, rule=RULE, scratch=0)
    np.testing.assert_allclose(cut.weights, whole.weights, rtol=1e-10)
    np.testing.assert_allclose(np.asarray(cut.params), np.asarray(whole.params), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("form", ["mapping", "torch", "list"])
def test_out_receives_the_result_even_in_place(form):
    make = FORMS[form]
    params, updates, gradient = make(model(0)), [make(model(1)), make(model(2))], make(model(3))
    fresh = fc.aggregate(params, updates, gradient=gradient, rule=RULE)
    same = fc.aggregate(params, updates, gradient=gradient, rule=RULE, out=params)
    for name, leaf in arrays.leaves(same.params).items():
        assert leaf is arrays.leaves(params)[name]
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(arrays.leaves(fresh.params)[name]))


@pytest.mark.parametrize(
    "out",
    [
        np.asfortranarray(np.ones((4, 3))),
        np.ones((8, 3))[::2],
        np.broadcast_to(1.0, (4, 3)),
        torch.ones(3, 4, dtype=torch.float64).T,
        jnp.ones((4, 3)),
    ],
    ids=["fortran", "strided", "read-only", "transposed tensor", "jax"],
)
def test_out_that_cannot_be_written_in_place_is_refused(out):
    make = {"torch": torch.ones, "jaxlib": jnp.ones}.get(type(out).__module__.split(".")[0], np.ones)
    params = make((4, 3)) if make is not torch.ones else torch.ones(4, 3, dtype=torch.float64)
    with pytest.raises(FedcontextError, match="cannot be written in place"):
        fc.aggregate(params, [params], rule=fc.mean(), out=out)


def test_a_networks_own_parameters_can_be_out():
    network = torch.nn.Linear(3, 2)
    params = {name: leaf.detach().clone() for name, leaf in network.named_parameters()}
    updates = [{name: torch.ones_like(leaf) for name, leaf in params.items()}]
    fc.aggregate(params, updates, rule=fc.mean(), layers=["bias"], out=dict(network.named_parameters()))
    torch.testing.assert_close(network.weight.detach(), params["weight"] + 1)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], [1.0, np.nan], [[1.0, 2.0]]])
def test_a_rule_that_gives_other_than_one_finite_weight_each_is_named(weights):
    odd = fc.stateless("odd", lambda geometry: np.array(weights))
    with pytest.raises(FedcontextError, match="rule 'odd': weigh must return 2 finite weights"):
        fc.aggregate(np.zeros(600_000), [np.ones(600_000)] * 2, rule=odd)


NONSENSE = ["text", None, 3, np.ones(3), np.ones((2, 1)), (np.ones(2),), ["0.5"] * 4, [1j, 1, 1, 1], [10**400, 1, 1, 1]]


@pytest.mark.parametrize("returned", NONSENSE, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize(
    ("make", "must"),
    [
        (lambda x: fc.stateless("odd", lambda geometry: x), "weigh must return 2 finite weights"),
        (lambda x: fc.Rule("odd", lambda geometry, state: x), "weigh must return (weights, state)"),
        (lambda x: fc.SumRule("odd", lambda *given: x), "step must return (step, state, info)"),
        (lambda x: fc.SumRule("odd", lambda *given: (x, None, {})), "step must return 4 finite entries"),
        (lambda x: fc.CoordinateRule("odd", lambda block: x), "combine must return 4 finite entries"),
    ],
    ids=["stateless", "weigh", "step", "vector", "combine"],
)
def test_a_rule_that_returns_something_else_is_named_with_what_it_must_return(make, must, returned):
    with pytest.raises(FedcontextError, match=rf"rule 'odd'.* {re.escape(must)}.*, got"):
        fc.aggregate(np.zeros(4), [np.ones(4)] * 2, rule=make(returned))


@pytest.mark.parametrize(
    "rule",
    [
        fc.stateless("odd", lambda geometry: torch.ones(2, requires_grad=True)),
        fc.SumRule("odd", lambda *given: (np.full(4, np.nan), None, {})),
        fc.CoordinateRule("odd", lambda block: np.full(4, np.nan)),
    ],
    ids=["tensor with a gradient", "NaN step", "NaN combination"],
)
def test_what_a_rule_returns_must_be_finite_numbers(rule):
    with pytest.raises(FedcontextError, match=r"rule 'odd': \w+ must return \d finite \w+, got"):
        fc.aggregate(np.zeros(4), [np.ones(4)] * 2, rule=rule)


@pytest.mark.parametrize("rule", [fc.coordinate_median(), fc.trimmed_mean()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("entry", [np.nan, np.inf])
def test_coordinate_rules_name_the_device_that_is_not_finite(rule, entry):
    updates = {"a": np.ones(4), "b": np.array([1, entry, 1, 1]), "c": np.array([1, entry, 1, 1])}
    with pytest.raises(FedcontextError, match="device b: the array has NaN or infinite entries"):
        fc.aggregate(np.zeros(4), updates, rule=rule, defences=None)


@pytest.mark.filterwarnings("ignore:overflow")
def test_updates_that_overflow_a_coordinate_rule_are_reported_as_too_large():
    with pytest.raises(FedcontextError, match="the updates are too large"):
        fc.aggregate(np.zeros(4), [np.full(4, 1e308)] * 3, rule=fc.trimmed_mean(), defences=None)


def test_two_leaves_of_one_name_are_refused():
    params = {"layer": {"bias": np.zeros(2)}, "layer/bias": np.zeros(2)}
    with pytest.raises(FedcontextError, match="two leaves are called 'layer/bias'"):
        fc.aggregate(params, [params], rule=fc.mean())


def test_an_overflow_leaves_out_untouched():
    params = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float16)}
    updates = [{"a": np.ones(2, np.float32), "b": np.ones(2, np.float16)}]
    gradient = {"a": np.full(2, -6e4, np.float32), "b": np.full(2, -6e4, np.float16)}
    with pytest.raises(FedcontextError, match="the step overflows float16 in leaf 'b'"):
        fc.aggregate(params, updates, gradient=gradient, rule=fc.contextual(1e-3), out=params)
    assert (params["a"] == 1).all()
    assert (params["b"] == 1).all()


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy, jnp.asarray], ids=["numpy", "torch", "jax"])
@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32])
def test_integers_that_overflow_are_refused_and_the_largest_are_kept(library, kind):
    def models(*counts):
        return [{"w": library(np.ones(2, np.float32)), "n": library(np.array([7, n], kind))} for n in counts]

    top = int(np.iinfo(kind).max)
    (params,) = models(top - 20)
    kept = fc.aggregate(params, models(10, 30), rule=fc.mean())
    assert [int(n) for n in kept.params["n"]] == [14, top]
    with pytest.raises(FedcontextError, match=rf"the step overflows .*{np.dtype(kind)} in leaf 'n'"):
        fc.aggregate(params, models(10, 33), rule=fc.mean())
    assert [int(n) for n in params["n"]] == [7, top - 20]


@pytest.mark.parametrize("order", ["C", "F"])
def test_extra_memory_is_bounded_whatever_the_size_and_the_order(order):
    shape = (40, 400_000)
    params, out = np.zeros(shape, np.float16, order), np.empty(shape, np.float16)  # half precision has no compiled way
    updates = [np.full(shape, k, np.float16, order) for k in (1, 2)]
    tracemalloc.start()
    fc.aggregate(params, updates, gradient=params, rule=RULE, out=out, scratch=2**20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * 2**20  # a copy of one of them has 32 MB


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=4))
def test_combine_is_base_plus_weighted_sum(weights):
    rows = np.random.default_rng(0).standard_normal((len(weights), 3, 2))
    base = np.ones((3, 2))
    result = arrays.framework(base).combine(base, list(rows), np.array(weights), arrays.SCRATCH)
    np.testing.assert_allclose(result, base + np.tensordot(weights, rows, 1))


def broken(change, leaf="weight"):
    update = model(1)
    update[leaf] = change(update[leaf])
    return update


def with_nan(leaf):
    leaf[0] = np.nan
    return leaf


BAD = {
    "no updates": ({"updates": []}, "there are no updates"),
    "same name": ({"updates": {1: model(1), "1": model(2)}}, "are the same as text"),
    "shape": ({"updates": [model(1), broken(lambda x: x[:2])]}, r"device 1: leaf 'weight' must have shape \(4, 3\), got \(2, 3\)"),
    "dtype": ({"updates": [broken(lambda x: x.astype(np.float64))]}, "device 0: leaf 'weight' must have dtype float32, got float64"),
    "named device": ({"updates": {"phone-7": broken(lambda x: x[:2])}}, "device phone-7: leaf 'weight'"),
    "missing leaf": ({"updates": [{"weight": model(1)["weight"]}]}, "device 0: the structure differs from params: it lacks leaf 'bias'"),
    "extra leaf": ({"updates": [{**model(1), "odd": np.zeros(1, np.float32)}]}, "it has leaf 'odd', unknown to params"),
    "other form": ({"updates": [list(model(1).values())]}, "device 0: the structure differs"),
    "library": ({"updates": [broken(torch.from_numpy)]}, "device 0: leaf 'weight' must be a NumPy array, got PyTorch"),
    "no array": ({"updates": [broken(lambda x: 3.0)]}, "device 0: leaf 'weight' must be a NumPy, PyTorch or JAX array, got float"),
    "module": ({"params": torch.nn.Linear(1, 1)}, r"got Linear; give its state_dict\(\)"),
    "NaN": ({"updates": [model(1), broken(with_nan, "bias")], "defences": None}, "device 1: leaf 'bias' has NaN or infinite entries"),
    "NaN in params": ({"params": broken(with_nan)}, "params: leaf 'weight' has NaN"),
    "NaN in the gradient": ({"gradient": broken(with_nan)}, "the gradient: leaf 'weight' has NaN"),
    "NaN in a probe": ({"gradient": None, "gradients": [model(1), broken(with_nan)], "defences": None}, "probe 1: leaf 'weight' has NaN"),
    "no gradient": ({"gradient": None}, "rule 'contextual' needs a gradient"),
    "unused pool": ({"pool": [model(1)]}, "rule 'contextual' does not use a pool: leave pool out"),
    "no probes": ({"gradient": None, "gradients": []}, "gradients is empty"),
    "both": ({"gradients": [model(1)]}, "give gradient or gradients, not both"),
    "a Report and more": ({"updates": Report([model(1)])}, "give a Report or keyword arguments, not both: got a Report and gradient$"),
    "one gradient for sums": ({"rule": fc.contextual_memory()}, "needs the gradient of each probe: give gradients or own_gradients in place of gradient$"),
    "no gradient for sums": ({"rule": fc.contextual_memory(), "gradient": None}, "needs the gradient of each probe: give gradients or own_gradients$"),
    "no own gradients": ({"rule": fc.folb()}, "rule 'folb' needs the gradient of each update's device"),
    "own gradients": ({"own_gradients": [model(1)]}, "own_gradients must be one for each of 2 updates, got 1"),
    "no rule": ({"rule": fc.contextual}, r"got a function; call it: contextual\(\.\.\.\)$"),
    "no call": ({"rule": fc.contextual_memory}, r"rule must be a rule such as .*; call it: contextual_memory\(\)$"),
    "no samples": ({"rule": fc.by_samples()}, "rule 'by_samples' needs the number of samples"),
    "samples": ({"samples": [1]}, "samples must hold 2 numbers, got 1"),
    "negative samples": ({"samples": [1, -1], "defences": None}, "samples must be non-negative"),
    "zero samples": ({"samples": [0, 0]}, "samples must be non-negative and not all zero"),
    "layers": ({"layers": ["conv"]}, "layers: no leaf 'conv'; there are weight, bias"),
    "buffers": ({"buffers": ["conv"]}, "buffers: no leaf 'conv'"),
    "nothing measured": ({"buffers": ["weight", "bias"]}, "no floating-point leaf enters the geometry"),
    "integer params": ({"params": np.zeros(2, int), "updates": [np.ones(2)]}, "params must be floating point, got int64 alone"),
    "integer leaf": (
        {"params": {"w": np.zeros(2, int), "b": np.zeros(1)}, "updates": [{"w": np.ones(2), "b": np.ones(1)}]},
        r"device 0: leaf 'w' must have dtype int64 \(or params floating point, if it is trained\), got float64",
    ),
    "boolean": ({"params": {"mask": np.ones(2, bool)}, "updates": [{"mask": np.ones(2, bool)}]}, "params: leaf 'mask' must be real floating point or integer, got bool"),
    "overflow": (
        {"params": np.ones(2, np.float16), "updates": [np.ones(2, np.float16)], "gradient": np.full(2, -6e4, np.float16), "rule": fc.contextual(1e-3)},
        "overflows float16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_aggregated_is_named(case):
    change, message = BAD[case]
    good = {"params": model(0), "updates": [model(1), model(2)], "gradient": model(3), "rule": RULE}
    with pytest.raises(FedcontextError, match=message):
        fc.aggregate(**{**good, **change})


def test_tensors_that_are_cut_give_the_sums_of_whole_ones():
    stack = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 50, 70))).bfloat16()  # NumPy cannot view it
    given = {"gradient": stack[0] + stack[2], "rule": fc.contextual(2.0)}
    whole = fc.aggregate(stack[3], list(stack), **given)
    cut = fc.aggregate(stack[3].clone().requires_grad_(), [row.requires_grad_() for row in stack], scratch=1, **given)
    torch.testing.assert_close(cut.params, whole.params)
    assert not cut.params.requires_grad
    np.testing.assert_allclose(cut.geometry.gram, whole.geometry.gram)


def test_tied_weights_cannot_be_written_in_place():
    tied = torch.randn(30, 30)
    params, update = {"emb": tied, "out": tied}, {"emb": torch.ones(30, 30), "out": torch.ones(30, 30)}
    with pytest.raises(fc.FedcontextError, match="out: leaf 'emb' shares memory with leaf 'out'"):
        fc.aggregate(params, [update], rule=fc.mean(), out=params)
    result = fc.aggregate(params, [update], rule=fc.mean()).params
    torch.testing.assert_close(result["out"], tied + 1)
    pair = {"a": np.zeros(3), "b": np.ones(3)}
    with pytest.raises(fc.FedcontextError, match="shares memory"):
        fc.aggregate(pair, [pair], rule=fc.mean(), out={"a": pair["b"], "b": pair["a"]})


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@given(starts=st.lists(st.integers(0, 30), min_size=3, max_size=3))
def test_out_is_apart_from_what_is_read_or_exactly_its_leaf_or_refused(library, starts):
    """All three are ten entries of one buffer: only a shift by less than ten can mix them."""
    buffer = np.random.default_rng(0).standard_normal(40)
    params, update, out = (library(buffer)[start : start + 10] for start in starts)
    fresh = fc.aggregate(params, [update], rule=fc.mean()).params
    if any(0 < abs(start - starts[2]) < 10 for start in starts):
        before = buffer.copy()
        with pytest.raises(FedcontextError, match=r"out: the array shares memory with the array of (params|device 0)"):
            fc.aggregate(params, [update], rule=fc.mean(), out=out)
        np.testing.assert_array_equal(buffer, before)
    else:
        fc.aggregate(params, [update], rule=fc.mean(), out=out)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(fresh))


@pytest.mark.parametrize("rows", [3, 2**9], ids=["small", "compiled"])
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_a_leaf_in_another_order_or_under_another_name_is_no_place_in_place(library, rows):
    square = library(np.arange(rows * rows, dtype=np.float32).reshape(rows, rows))
    moves = [library(np.full((rows, rows), k, np.float32)) for k in range(4)]
    with pytest.raises(FedcontextError, match="shares memory with the array of params"):
        fc.aggregate(square.T, moves, rule=fc.mean(), out=square)
    with pytest.raises(FedcontextError, match="shares memory with the array of device far"):
        fc.aggregate(square, {"near": moves[0], "far": moves[1].T}, rule=fc.mean(), out=moves[1])
    named = [{"a": moves[0], "b": moves[1]}, {"a": moves[2], "b": moves[3]}]
    with pytest.raises(FedcontextError, match="out: leaf 'a' shares memory with leaf 'b' of device 1"):
        fc.aggregate(named[0], named, rule=fc.mean(), out={"a": moves[3], "b": moves[1]})
    fc.aggregate(square, moves, rule=fc.mean(), out=moves[3])
    np.testing.assert_array_equal(np.asarray(moves[3]), np.asarray(square) + 1.5)


def test_leaves_of_one_buffer_can_be_written_in_place():
    """As in systems that keep the model and all updates as rows of one matrix."""
    rows = np.random.default_rng(1).standard_normal((3, 12))
    params, *updates = [{"weight": row[:9].reshape(3, 3), "none": row[9:9], "bias": row[9:]} for row in rows]
    fresh = fc.aggregate(params, updates, rule=fc.mean()).params
    fc.aggregate(params, updates, rule=fc.mean(), out=params)
    np.testing.assert_array_equal(flat(params), flat(fresh))


def test_a_rule_with_memory_says_what_it_misses():
    first = fc.aggregate(np.zeros(3), [np.ones(3)], gradients=[np.ones(3)], rule=fc.contextual_memory())
    given = {"gradients": [np.ones(3)], "rule": fc.contextual_memory(), "state": first.state}
    with pytest.raises(FedcontextError, match="needs differences from the second round on"):
        fc.aggregate(np.zeros(3), [np.ones(3)], **given)
    with pytest.raises(FedcontextError, match="in place of gradient"):
        fc.aggregate(
            np.zeros(3), [np.ones(3)], **{**given, "gradients": None}, gradient=np.ones(3), differences=[np.ones(3)]
        )
    two = np.ones(2)
    with pytest.raises(FedcontextError, match="is of a model with 3 parameters, got 2"):
        fc.aggregate(np.zeros(2), [two], **{**given, "gradients": [two]}, differences=[two])
    with pytest.raises(FedcontextError, match="does not support layers"):
        fc.aggregate(
            {"w": np.zeros(3)}, [{"w": np.ones(3)}], gradients=[{"w": np.ones(3)}], layers=["w"], rule=given["rule"]
        )
    with pytest.raises(FedcontextError, match="params: the array has NaN"):
        fc.aggregate(np.full(3, np.nan), [np.ones(3)], gradients=[np.ones(3)], rule=given["rule"])


def test_an_overflow_of_integers_leaves_out_untouched_with_a_rule_on_sums():
    params = {"w": np.zeros(2), "n": np.full(1, 250, np.uint8)}
    update = {"w": np.ones(2), "n": np.full(1, 10, np.uint8)}
    with pytest.raises(FedcontextError, match="overflows uint8"):
        fc.aggregate(params, [update], gradients=[{"w": np.ones(2)}], rule=fc.contextual_memory(), out=params)
    np.testing.assert_array_equal(params["w"], np.zeros(2))


def test_the_weights_of_a_rule_with_memory_are_those_of_its_step():
    random, params, state, last = np.random.default_rng(0), np.zeros(20), None, None
    for _ in range(6):
        updates = [random.standard_normal(20) - params for _ in range(4)]
        gradients = [-update for update in updates]
        differences = None if last is None else [params - last] * 4
        result = fc.aggregate(
            params, updates, gradients=gradients, differences=differences, rule=fc.contextual_memory(), state=state
        )
        d = np.mean(updates, axis=0)
        assert result.weights.sum() == pytest.approx(result.step @ d / (d @ d))
        state, last, params = result.state, params, result.params


@given(
    hnp.arrays(np.int64, 4, elements=st.integers(-5, 5)),
    hnp.arrays(np.int64, (3, 4), elements=st.integers(-5, 5)),
    st.sampled_from([fc.mean(), fc.contextual_memory()]),
)
def test_the_step_of_integers_is_what_params_moved_by(counts, changes, rule):
    updates = [{"w": np.ones(2), "count": change} for change in changes]
    params = {"w": np.zeros(2), "count": counts}
    result = fc.aggregate(params, updates, gradients=[{"w": -np.ones(2)}], rule=rule)
    assert (result.params["count"] == counts + result.step["count"]).all()
    assert result.step["count"].dtype == counts.dtype


@pytest.mark.parametrize(
    "rule", [fc.mean(), fc.contextual_memory(), fc.coordinate_median()], ids=lambda rule: rule.name
)
def test_a_step_that_out_has_overwritten_is_refused(rule):
    params, updates = np.zeros(2), [np.ones(2), np.ones(2)]
    result = fc.aggregate(params, updates, gradients=[-np.ones(2)], rule=rule, out=params)
    with pytest.raises(FedcontextError, match="step is not available where out was given"):
        _ = result.step


def test_mappings_are_matched_by_name():
    """Replies arrive in any order; their counts and gradients must find their own device."""
    rng = np.random.default_rng(0)
    updates, gradients = ({name: rng.normal(size=4) for name in "abc"} for _ in range(2))
    counts = dict(zip("abc", (1, 2, 3), strict=True))
    for rule, sent in (
        (fc.by_samples(), {"samples": counts}),
        (fc.fednova(), {"steps": counts, "samples": counts}),
        (fc.folb(), {"own_gradients": gradients}),
        (fc.contextual(2), {"gradients": gradients, "probe_weights": counts}),
    ):
        other = {name: {key: values[key] for key in "cab"} for name, values in sent.items() if name != "gradients"}
        expected = fc.aggregate(np.zeros(4), updates, rule=rule, **sent).params
        result = fc.aggregate(np.zeros(4), updates, rule=rule, **{**sent, **other}).params
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("what", ["samples", "steps", "own_gradients"])
def test_names_that_are_no_device_are_refused(what):
    sent = {"samples": [1, 1], "steps": [1, 1], "own_gradients": [np.ones(2)] * 2}
    sent[what] = dict(zip("xy", sent[what], strict=True))
    with pytest.raises(FedcontextError, match=f"{what}: the names must be those of the devices"):
        fc.aggregate(np.zeros(2), {"a": np.ones(2), "b": np.ones(2)}, rule=fc.mean(), **sent)


def test_the_error_for_missing_batch_statistics_names_buffers():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    params = module.state_dict()
    updates = [{name: torch.ones_like(leaf) for name, leaf in params.items()}] * 2
    gradients = [{name: torch.ones_like(leaf) for name, leaf in module.named_parameters()}] * 2
    given = {"own_gradients": gradients, "rule": RULE}
    with pytest.raises(FedcontextError, match=r"lacks leaf '1\.running_mean', .* belong in buffers$"):
        fc.aggregate(params, updates, **given)
    result = fc.aggregate(params, updates, **given, buffers=[name for name, _ in module.named_buffers()])
    assert result.params["1.running_mean"].tolist() == [1, 1]  # the average, whatever the weights


def rounds_of_memory(count, size=5):
    """Return the last of some aggregations of random vectors by the rule with memory."""
    random = np.random.default_rng(count)
    rule, params, result = fc.contextual_memory(), np.zeros(size), None
    for _ in range(count):
        updates, gradients, differences = random.standard_normal((3, 4, size))
        state, answers = result and result.state, None if result is None else list(differences)
        result = fc.aggregate(
            params, list(updates), gradients=list(gradients), differences=answers, rule=rule, state=state
        )
    return result


FOREIGN = [3, "text", [1, 2], (1,), {}, {"momentum": np.zeros(5)}, {"step": np.zeros(5)}, np.zeros(5)]


@pytest.mark.parametrize("state", FOREIGN, ids=lambda state: type(state).__name__)
def test_a_state_that_the_rule_did_not_return_is_refused(state):
    vectors, rule, streamed = [np.ones(5), np.arange(5.0)], fc.contextual_memory(), fc.StreamedRound(np.zeros(5))
    with pytest.raises(FedcontextError, match="state must be that of the last result of rule 'contextual memory'"):
        fc.aggregate(np.zeros(5), vectors, gradients=vectors, differences=vectors, rule=rule, state=state)
    streamed.add_update(vectors[0])
    streamed.add_probe(*vectors)
    with pytest.raises(FedcontextError, match="state must be that of the last result of rule 'contextual memory'"):
        streamed.aggregate(rule, state)


@pytest.mark.parametrize(
    "rule", [fc.mean(), fc.contextual(1.0), fc.geometric_median(), fc.coordinate_median()], ids=lambda rule: rule.name
)
def test_a_rule_that_keeps_no_state_refuses_one(rule):
    vectors, state = [np.ones(5), np.arange(5.0)], rounds_of_memory(2).state
    with pytest.raises(FedcontextError, match=f"the state is of another rule: rule '{rule.name}' keeps none"):
        fc.aggregate(np.zeros(5), vectors, gradients=vectors, rule=rule, state=state)
    result = fc.aggregate(np.zeros(5), vectors, gradients=vectors, rule=rule)
    fc.aggregate(result.params, vectors, gradients=vectors, rule=rule, state=result.state)


def test_differences_without_a_state_are_refused():
    """Without the state the rule would start again in every round, unnoticed."""
    vectors, rule, streamed = [np.ones(5), np.arange(5.0)], fc.contextual_memory(), fc.StreamedRound(np.zeros(5))
    with pytest.raises(FedcontextError, match=r"got differences but no state: give .* \(state=result.state\)"):
        fc.aggregate(np.zeros(5), vectors, gradients=vectors, differences=vectors, rule=rule)
    streamed.add_update(vectors[0])
    streamed.add_probe(*vectors)
    with pytest.raises(FedcontextError, match="got differences but no state"):
        streamed.aggregate(rule)


def test_a_state_with_other_directions_is_refused():
    vectors, state = [np.ones(5), np.arange(5.0)], rounds_of_memory(2, size=5).state
    other = fc.contextual_memory(fc.MemorySettings(scaled_gradient=False))
    with pytest.raises(FedcontextError, match="has 5 directions, expected 4: it is of other settings"):
        fc.aggregate(np.zeros(5), vectors, gradients=vectors, differences=vectors, rule=other, state=state)


def test_a_state_of_a_model_of_another_size_is_refused():
    vectors, state = [np.ones(5), np.arange(5.0)], rounds_of_memory(2, size=7).state
    with pytest.raises(FedcontextError, match="of a model with 7 parameters, got 5"):
        fc.aggregate(
            np.zeros(5), vectors, gradients=vectors, differences=vectors, rule=fc.contextual_memory(), state=state
        )


def test_rules_report_python_numbers():
    info = rounds_of_memory(3).info
    assert {type(value) for value in info.values()} <= {float, bool}
    assert "np." not in repr(info)


def test_differences_that_are_all_zero_after_a_step_are_warned_of():
    rule, model, update = fc.contextual_memory(), np.zeros(3), [np.ones(3)]
    first = fc.aggregate(model, update, gradients=[-np.ones(3)], rule=rule)
    sent = {"gradients": [-0.5 * np.ones(3)], "rule": rule, "state": first.state}
    with pytest.warns(UserWarning, match="all gradient differences are zero although the model moved"):
        fc.aggregate(first.params, update, differences=[np.zeros(3)], **sent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fc.aggregate(first.params, update, differences=[0.5 * np.ones(3)], **sent)
