"""Memory-mapped files give the results of loaded arrays, and malformed files are reported by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedcontext as fc
from fedcontext.errors import FedcontextError


def test_updates_may_be_memory_mapped_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    params, gradient, *updates = [
        {"weight": random.standard_normal((4, 3)), "bias": random.standard_normal(3)}
        for random in map(np.random.default_rng, range(4))
    ]
    paths = [tmp_path / f"{k}.safetensors" for k in range(2)]
    for path, update in zip(paths, updates, strict=True):
        safetensors.save_file(update, path)
    mapped = [fc.open_memmap(path) for path in paths]
    assert all(isinstance(leaf.base, np.memmap) or isinstance(leaf, np.memmap) for leaf in mapped[0].values())
    plain = fc.aggregate(params, updates, gradient=gradient, rule=fc.contextual(2.0))
    result = fc.aggregate(params, mapped, gradient=gradient, rule=fc.contextual(2.0))
    for name in params:
        np.testing.assert_array_equal(result.params[name], plain.params[name])
    np.save(tmp_path / "one.npy", np.arange(3.0))
    np.testing.assert_array_equal(fc.open_memmap(tmp_path / "one.npy"), np.arange(3.0))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"", "must be a .npy or .safetensors file"),
        ("a.npy", b"junk", "cannot be memory-mapped"),
        ("a.safetensors", b"junk", "cannot be memory-mapped"),
        ("a.safetensors", (2).to_bytes(8, "little") + b"[]", "the header must be a mapping, got list"),
        ("a.safetensors", (2**62).to_bytes(8, "little") + b"{}", "cannot be memory-mapped"),
        (
            "a.safetensors",
            (57).to_bytes(8, "little") + b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}  ',
            "cannot be memory-mapped",
        ),
    ],
)
def test_files_that_cannot_be_mapped_are_reported(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FedcontextError, match=message):
        fc.open_memmap(tmp_path / name)


HEADER = b'{"w":{"dtype":"F64","shape":[3],"data_offsets":[0,24]}}'


@pytest.fixture(scope="module")
def valid_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mapped")
    np.save(folder / "a.npy", np.arange(3.0))
    (folder / "a.safetensors").write_bytes(len(HEADER).to_bytes(8, "little") + HEADER + np.arange(3.0).tobytes())
    return folder


@pytest.mark.parametrize("name", ["a.npy", "a.safetensors"])
def test_a_truncated_file_is_reported(valid_files, tmp_path, name):
    content = (valid_files / name).read_bytes()
    for length in range(len(content)):
        (tmp_path / name).write_bytes(content[:length])
        with pytest.raises(FedcontextError, match=f"{name}: cannot be memory-mapped"):
            fc.open_memmap(tmp_path / name)


@pytest.mark.filterwarnings("ignore")  # of NumPy, about the version that a broken header asks for
@pytest.mark.parametrize("name", ["a.npy", "a.safetensors"])
@given(changes=st.dictionaries(st.integers(0, 70), st.integers(0, 255) | st.sampled_from(b"(){}[]0,'"), min_size=1))
def test_a_file_with_changed_bytes_is_mapped_or_reported(valid_files, name, changes):
    content = bytearray((valid_files / name).read_bytes())
    for place, byte in changes.items():
        content[place] = byte
    (valid_files / f"changed-{name}").write_bytes(content)
    assert _error_of(valid_files / f"changed-{name}") in ("", f"changed-{name}: cannot be memory-mapped")


def _error_of(path):
    """Return the start of the error about a file, without its folder; empty if it was mapped."""
    try:
        fc.open_memmap(path)
    except FedcontextError as error:
        return str(error).removeprefix(f"{path.parent}/").partition(" (")[0]
    return ""


@pytest.mark.parametrize("dtype", ["?", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8))])
def test_booleans_and_all_integers_of_safetensors_are_mapped(tmp_path, dtype):
    safetensors = pytest.importorskip("safetensors.numpy")
    array = np.array([0, 1, 1], dtype)
    safetensors.save_file({"w": array}, tmp_path / "a.safetensors")
    mapped = fc.open_memmap(tmp_path / "a.safetensors")["w"]
    assert mapped.dtype == array.dtype
    assert (mapped == array).all()
