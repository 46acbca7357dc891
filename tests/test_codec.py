"""The codec: no bias, the error that the theory gives, exact bytes, and no trust in what arrives."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedcontext.compression.codec import HEADER, IDENTITY, Codec
from fedcontext.compression.rotation import SMALLEST, hadamard
from fedcontext.errors import FedcontextError

KEY = (7, 3, 8, 5)
DISTORTION = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499, 6: 0.000646, 7: 0.000164, 8: 0.0000413}
BITS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 32])
VECTORS = hnp.arrays(
    st.sampled_from([np.float32, np.float64]),
    st.integers(0, 700),
    elements=st.floats(-(2.0**100), 2.0**100, width=32),
)
SPARSE = np.r_[1.0, 0.9, np.zeros(598)]
DECAYING = 0.7 ** np.arange(1500)


def keys(count, start=0):
    return [(7, 3, 8, start + device) for device in range(count)]


def restored(bits, vector, count):
    """(count, n): the vector coded with as many keys."""
    return Codec(bits).roundtrip(np.tile(vector, (count, 1)), keys(count)).astype(float)


@pytest.mark.parametrize("bits", [*range(1, 9), 32])
def test_the_noise_in_a_decoded_vector_is_the_share_that_the_codec_names(bits):
    vector = np.random.default_rng(0).standard_normal(1024)
    decoded = restored(bits, vector, 200)
    noise = ((decoded - vector) ** 2).sum() / (decoded**2).sum()
    assert noise == pytest.approx(Codec(bits).distortion, rel=0.1, abs=1e-6)


@pytest.mark.parametrize("length", [2**power for power in range(1, 16)])
def test_the_compiled_transform_gives_the_bits_of_numpys(length):
    compiled = pytest.importorskip("fedcontext.compression.compiled", reason="Numba is not installed")
    blocks = np.random.default_rng(length).standard_normal((3, length)).astype(np.float32)
    before = blocks.copy()
    np.testing.assert_array_equal(compiled.hadamard(blocks), hadamard(blocks))
    np.testing.assert_array_equal(blocks, before)


def test_many_long_vectors_are_coded_as_each_alone():
    vectors = np.random.default_rng(0).standard_normal((5, 2**17 + 300))
    together = Codec(2).roundtrip(vectors, keys(5))
    alone = [
        Codec(2).decode(Codec(2).encode(row, key), key, row.size) for row, key in zip(vectors, keys(5), strict=True)
    ]
    np.testing.assert_array_equal(together, alone)


def nmse(decoded, vector):
    return float(((decoded - vector) ** 2).sum(axis=1).mean() / (vector @ vector))


@given(VECTORS, BITS, st.lists(st.integers(0, 2**64), min_size=1, max_size=4))
def test_decoding_the_bytes_gives_what_roundtrip_gives(vector, bits, key):
    codec = Codec(bits)
    data = codec.encode(vector, key)
    assert len(data) == codec.nbytes(vector.size)
    decoded = codec.decode(data, key, vector.size)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, codec.roundtrip(vector, key))


@pytest.mark.parametrize("size", [1, 610, 7850, 300_000])
def test_a_matrix_is_coded_as_its_rows_are(size):
    vectors = np.random.default_rng(0).standard_normal((3, size))
    rows = [Codec(2).decode(Codec(2).encode(row, key), key, size) for row, key in zip(vectors, keys(3), strict=True)]
    np.testing.assert_array_equal(Codec(2).roundtrip(vectors, keys(3)), rows)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize(
    "vector",
    [np.array([1.0, -2.0, 0.5]), SPARSE, DECAYING, np.random.default_rng(1).standard_normal(1300) ** 3],
    ids=["three entries", "two large entries", "decaying", "heavy tails"],
)
def test_the_mean_over_keys_is_the_vector(vector, bits):
    count = 2000
    decoded = restored(bits, vector, count)
    squared_bias = ((decoded.mean(axis=0) - vector) ** 2).sum() / (vector @ vector)
    assert squared_bias < 1.5 * nmse(decoded, vector) / count + 0.005**2  # the mean's own error is nmse / count


@pytest.mark.parametrize("bits", DISTORTION)
def test_the_error_is_that_of_the_theory(bits):
    vector = np.random.default_rng(2).standard_normal(8192 + 512) ** 3
    expected = DISTORTION[bits] / (1 - DISTORTION[bits])
    assert nmse(restored(bits, vector, 20), vector) == pytest.approx(expected, rel=0.03)


def test_the_error_of_one_vector_does_not_depend_on_where_its_weight_lies():
    dense = np.random.default_rng(3).standard_normal(600)
    for vector in (dense, SPARSE, DECAYING[:600]):
        assert nmse(restored(1, vector, 200), vector) == pytest.approx(0.57, rel=0.1)


def test_padding_lowers_the_error_by_as_much_as_it_costs():
    vector = np.random.default_rng(4).standard_normal(SMALLEST // 4)
    assert nmse(restored(1, vector, 500), vector) == pytest.approx(0.57 / 4, rel=0.1)


@given(
    hnp.arrays(np.float64, st.integers(1, 128), elements=st.floats(-1, 1)),
    st.integers(1, 8),
    st.floats(-30, 30).map(lambda x: 10**x),
)
def test_a_block_keeps_its_length_along_itself_at_any_scale(vector, bits, scale):
    vector = vector * scale  # <x̂, x> = ‖x‖² is what the scale of a block is chosen for
    unit = np.abs(vector).max() or 1.0
    if 0 < unit < 1e-36:
        return  # float32 has too few digits there
    decoded = Codec(bits).roundtrip(vector, KEY).astype(float)
    assert decoded / unit @ (vector / unit) == pytest.approx((vector / unit) @ (vector / unit), rel=1e-4)


@given(st.integers(1, 8), st.sampled_from([1e-30, 1e-6, 1e6, 1e30]))
def test_the_code_is_equivariant_to_scale(bits, scale):
    vector = np.random.default_rng(5).standard_normal(300)
    expected = Codec(bits).roundtrip(vector, KEY).astype(float)
    np.testing.assert_allclose(Codec(bits).roundtrip(vector * scale, KEY) / scale, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [1, 8, 32])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 129])
def test_zeros_stay_zeros(bits, size):
    np.testing.assert_array_equal(Codec(bits).roundtrip(np.zeros(size), KEY), np.zeros(size))


def test_a_zero_block_does_not_disturb_the_others():
    vector = np.r_[np.zeros(512), np.ones(128)]
    decoded = Codec(8).roundtrip(vector, KEY)
    assert not decoded[:512].any()
    np.testing.assert_allclose(decoded[512:], 1, atol=0.05)


@pytest.mark.parametrize("size", [610, 7850, 2_000_000])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_overhead_is_a_few_bytes(size, bits):
    assert Codec(bits).nbytes(size) <= size * bits / 8 * 1.002 + SMALLEST * bits / 8 + 40


def test_one_key_gives_one_code_and_another_key_another():
    vector = np.random.default_rng(6).standard_normal(200)
    assert Codec(2).encode(vector, KEY) == Codec(2).encode(vector, list(np.array(KEY)))
    assert Codec(2).encode(vector, KEY) != Codec(2).encode(vector, (7, 3, 8, 6))


def test_the_random_state_of_numpy_is_left_alone():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    Codec(2).roundtrip(np.ones(200), KEY)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_version_1_of_the_format_can_be_read():
    """Recipe: ``Codec(2).encode(np.arange(5.0), key=(1, 2, 3, 4))``."""
    data = bytes.fromhex("010205000000000000007bed183f955d65599ae5da695d5179669723fed46964b93755d90d1a92eda456395476e9")
    decoded = Codec(2).decode(data, (1, 2, 3, 4), 5)
    np.testing.assert_allclose(decoded, [0.0378266, 0.9898579, 1.9176433, 3.2244539, 3.8753729], rtol=1e-5)


def test_float32_is_sent_as_it_is():
    vector = np.array([1.5, -2.0, 1e-40])
    np.testing.assert_array_equal(IDENTITY.decode(IDENTITY.encode(vector, KEY), KEY, 3), vector.astype(np.float32))


@given(st.integers(1, 8), st.integers(1, 400), st.data())
def test_changed_bytes_are_refused_or_decode_to_finite_numbers(bits, size, data):
    codec = Codec(bits)
    code = bytearray(codec.encode(np.ones(size), KEY))
    for position in data.draw(st.lists(st.integers(0, len(code) - 1), min_size=1, max_size=8)):
        code[position] = data.draw(st.integers(0, 255))
    try:
        decoded = codec.decode(bytes(code), KEY, size)
    except FedcontextError:
        return
    assert decoded.shape == (size,)
    assert np.isfinite(decoded).all()


@given(st.binary(max_size=300), BITS, st.integers(0, 10**8))
def test_arbitrary_bytes_are_refused(data, bits, size):
    with pytest.raises(FedcontextError):
        Codec(bits).decode(data[:5] + b"\xff" + data[5:], KEY, size)


@pytest.mark.parametrize("bits", [1, 3, 32])
def test_the_header_and_the_length_must_fit(bits):
    codec, vector = Codec(bits), np.ones(200)
    data = codec.encode(vector, KEY)
    for wrong in (data[:-1], data + b"\0", b"", data[: HEADER.size]):
        with pytest.raises(FedcontextError, match=r"200 entries at .* bytes, got"):
            codec.decode(wrong, KEY, 200)
    for position in range(3):
        flipped = bytearray(data)
        flipped[position] ^= 0x11
        with pytest.raises(FedcontextError, match="expected version, bits and entries"):
            codec.decode(bytes(flipped), KEY, 200)
    with pytest.raises(FedcontextError):
        codec.decode(data, KEY, 201)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, 3e38])
def test_a_scale_that_no_encoder_sends_is_refused(scale):
    data = bytearray(Codec(1).encode(np.ones(100), KEY))
    data[HEADER.size : HEADER.size + 4] = struct.pack("<f", scale)
    with pytest.raises(FedcontextError, match="scales of a coded vector must be between 0 and 1e\\+35"):
        Codec(1).decode(bytes(data), KEY, 100)


@pytest.mark.parametrize("bits", [1, 4, 32])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_vectors_that_are_not_finite_are_refused(bits, wrong):
    vector = np.ones(300)
    vector[290] = wrong
    for code in (Codec(bits).encode, Codec(bits).roundtrip):
        with pytest.raises(FedcontextError, match="not finite"):
            code(vector, KEY)


@pytest.mark.parametrize("bits", [1, 32])
def test_vectors_beyond_float32_are_refused_by_the_sender(bits):
    with pytest.raises(FedcontextError, match=r"not finite in float32|between 0 and 1e\+35"):
        Codec(bits).encode(np.full(300, 1e39), KEY)


@pytest.mark.parametrize("bits", [0, 9, 16, -1, 2.5, "2", True, None])
def test_bits_are_checked(bits):
    with pytest.raises(FedcontextError, match="bits must be 1 to 8, or 32 for float32"):
        Codec(bits)


@pytest.mark.parametrize("key", [(-1,), (0.5,), ("a",), 3])
def test_keys_are_checked(key):
    with pytest.raises(FedcontextError, match="whole numbers, 0 or more"):
        Codec(1).roundtrip(np.ones(3), key)


def test_each_vector_needs_a_key():
    with pytest.raises(FedcontextError, match="3 vectors need one key each, got 2 keys"):
        Codec(1).roundtrip(np.ones((3, 4)), keys(2))


@pytest.mark.parametrize("vector", [np.ones((2, 2)), np.float64(1.0), np.array(["a"]), np.ones(2, complex)])
def test_only_real_vectors_are_encoded(vector):
    with pytest.raises(FedcontextError, match="expected a vector of real numbers"):
        Codec(1).encode(vector, KEY)


def prototype(vector, bits, random):
    """EDEN as the study of the rule with memory used it: one padded block, one rotation, tabulated levels."""
    table = {1: [0.7979], 2: [0.4528, 1.5104], 3: [0.2451, 0.7560, 1.3439, 2.1520]}[bits]
    levels = np.array([-level for level in reversed(table)] + table)
    rotation = np.ones((1, 1))
    while len(rotation) < len(vector):
        rotation = np.block([[rotation, rotation], [rotation, -rotation]]) / np.sqrt(2)
    rotation = rotation * random.choice([-1.0, 1.0], len(rotation))
    z = rotation @ vector
    q = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, z / np.sqrt(z @ z / len(z)))]
    return rotation.T @ q * (z @ z) / (q @ z)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_the_error_is_that_of_the_prototype(bits):
    random = np.random.default_rng(8)
    vector = random.standard_normal(512)
    expected = nmse(np.stack([prototype(vector, bits, random) for _ in range(100)]), vector)
    assert nmse(restored(bits, vector, 100), vector) == pytest.approx(expected, rel=0.03)
