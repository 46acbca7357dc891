"""Data: the published recipes, the partitioners, LEAF folders, and files that are checked before they are used."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import json
import shutil
import subprocess
import sys
import tarfile
import threading
import tracemalloc
import warnings
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcontext import datasets
from fedcontext.datasets import cache, files
from fedcontext.datasets.federated import FederatedData, Split, gather, join
from fedcontext.datasets.mnist import standardiser, two_digits_per_device
from fedcontext.datasets.synthetic import synthetic
from fedcontext.errors import FedcontextError


def test_synthetic_follows_the_published_recipe():
    data = synthetic(1, 1)
    sizes = data.train.sizes + data.test.sizes
    assert (data.population, data.dimension, data.classes) == (30, 60, 10)
    many = np.concatenate([(d.train.sizes + d.test.sizes) for d in (synthetic(1, 1, seed=s) for s in range(40))])
    assert sizes.min() >= 50
    logs = np.log(many - 49)  # sizes are whole parts of lognormal(4, 2), plus 50
    assert logs.mean() == pytest.approx(4, abs=0.25)
    assert logs.std() == pytest.approx(2, abs=0.25)
    big = int(sizes.argmax())
    features = data.train.features[data.train.rows(big)]
    np.testing.assert_allclose(features.var(axis=0), np.arange(1, 61) ** -1.2, rtol=0.25)


def test_synthetic_iid_devices_share_one_model_and_zero_means():
    data = synthetic(0, 0, iid=True)
    features, labels = data.train.features.astype(float), data.train.labels
    assert np.abs(features.mean(axis=0)).max() < 0.1
    first = np.array([(labels[data.train.rows(k)] == 0).mean() for k in np.argsort(-data.train.sizes)[:5]])
    assert first.std() < 0.05  # the same classes everywhere; with (1, 1) they differ
    other = synthetic(1, 1)
    parts = [(other.train.labels[other.train.rows(k)] == 0).mean() for k in np.argsort(-other.train.sizes)[:5]]
    assert np.std(parts) > 0.1


def test_names_reach_the_generators():
    assert datasets.load_dataset("synthetic-0.5-0.25").name == "synthetic-0.5-0.25"
    for name in ("synthetic--1-1", "synthetic-1", "mnists", ""):
        with pytest.raises(FedcontextError, match="dataset must be one of"):
            datasets.load_dataset(name)


@given(st.integers(1, 600), st.integers(0, 5))
def test_pixels_are_standardised_by_their_own_mean_and_deviation(count, seed):
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (count, 4), dtype=np.uint8)
    pixels[:, 1], pixels[1:, 2] = 255, 255  # a constant column, and one that is nearly
    exact = pixels.astype(np.longdouble)
    centre, spread = exact.mean(axis=0).astype(np.float32), (exact.std(axis=0) + 0.001).astype(np.float32)
    np.testing.assert_allclose(standardiser(pixels)(pixels), (pixels - centre) / spread, rtol=1e-6)


@given(st.lists(st.lists(st.integers(0, 19), min_size=1), min_size=1), st.sampled_from(["C", "F"]))
def test_data_are_the_joined_rows_of_the_devices(parts, order):
    features, labels = np.random.default_rng(0).standard_normal((20, 3)).astype(">f4", order=order), np.arange(20)
    kinds = [np.uint64, *[np.int64] * (len(parts) - 1)]  # which together would be float64
    rows = [np.array(part, kind) for part, kind in zip(parts, kinds, strict=True)]
    data = datasets.federate(features, labels, rows, test_share=0)
    expected = join([(features[part], labels[part]) for part in parts])
    assert data.train.features.dtype == np.float32
    for name in ("features", "labels", "offsets"):
        np.testing.assert_array_equal(getattr(data.train, name), getattr(expected, name))


def test_images_are_partitioned_with_little_memory_beside_the_result():
    pixels, labels = np.ones((10_000, 784), np.uint8), np.arange(10_000)
    tracemalloc.start()
    gather(pixels, labels, np.split(labels, 100), standardiser(pixels))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * 4 * pixels.size


def test_data_are_printed_in_one_line():
    for name in ("synthetic-iid", "synthetic-1-1-1000"):
        data = datasets.load_dataset(name)
        printed = repr(data)
        assert len(printed) < 150
        for part in (f"'{name}'", f"devices={data.population},", "classes=10", "features=60"):
            assert part in printed


def test_every_device_keeps_a_tenth_for_test():
    data = synthetic(1, 1)
    share = data.test.sizes / (data.train.sizes + data.test.sizes)
    assert ((share >= 0.09) & (share <= 0.12)).all()


def test_the_fedprox_partition_gives_two_digits_and_a_power_law():
    labels = np.random.default_rng(0).permutation(np.arange(70_000) % 10)
    parts = two_digits_per_device(labels, np.random.default_rng(1))
    for device, part in enumerate(parts):
        assert set(labels[part].tolist()) == {device % 10, (device + 1) % 10}
    everything = np.concatenate(parts)
    assert len(everything) == len(set(everything.tolist()))
    sizes = np.array([len(part) for part in parts])
    assert sizes.min() >= 10
    assert sizes.mean() == pytest.approx(69, abs=1)
    assert sizes.std() > 70


@pytest.mark.data("mnist")
def test_mnist_is_standardised_and_spread_over_a_thousand_devices():
    data = datasets.load_dataset("mnist")
    assert (data.population, data.dimension, data.classes) == (1000, 784, 10)
    pixels = np.vstack([data.train.features, data.test.features])
    assert abs(pixels.mean()) < 0.01
    assert np.isfinite(pixels).all()
    assert len(data.train.labels) + len(data.test.labels) == pytest.approx(69_000, rel=0.01)


@pytest.mark.data("femnist")
def test_femnist_has_a_device_for_each_writer():
    data = datasets.load_dataset("femnist")
    assert (data.dimension, data.classes) == (784, 62)
    assert data.population == (328 if files.find("femnist").name == "femnist_leaf_writers.npz" else 3400)
    assert data.train.features.min() == 0
    assert data.train.features.max() == 1
    assert data.train.features.mean() < 0.5  # ink on paper 0
    assert len(data.test.labels) / (len(data.train.labels) + len(data.test.labels)) == pytest.approx(0.1, abs=0.02)


PARTITIONERS = {
    "iid": datasets.iid,
    "shards": functools.partial(datasets.shards, per_device=2),
    "dirichlet": functools.partial(datasets.dirichlet, alpha=0.2),
    "power_law": datasets.power_law,
}


@pytest.mark.parametrize("name", PARTITIONERS)
@given(devices=st.integers(1, 30), samples=st.integers(60, 300), seed=st.integers(0, 100))
def test_partitions_lose_nothing_share_nothing_and_leave_nobody_empty(name, devices, samples, seed):
    random = np.random.default_rng(seed)
    labels = random.integers(0, 5, samples)
    parts = PARTITIONERS[name](labels, devices, random)
    assert len(parts) == devices
    assert min(len(part) for part in parts) >= 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(samples))


@pytest.mark.parametrize("name", PARTITIONERS)
@pytest.mark.parametrize("devices", ["12", 2.5, 0, 100])
def test_a_number_of_devices_that_cannot_be_is_refused(name, devices):
    with pytest.raises(FedcontextError, match=r"devices must be a whole number, got|cannot be split into"):
        PARTITIONERS[name](np.zeros(60, int), devices, 0)


@pytest.mark.parametrize("name", PARTITIONERS)
def test_more_devices_than_samples_are_refused(name):
    with pytest.raises(FedcontextError, match="cannot be split"):
        PARTITIONERS[name](np.zeros(3, int), 10, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("features", "labels", "parts", "message"),
    [
        (np.zeros(4), np.zeros(4, int), [[0]], "features must be floats or uint8"),
        (
            np.zeros((4, 2), int),
            np.zeros(4, int),
            [[0]],
            r"features must be floats or uint8 .* use features\.astype\(float\)",
        ),
        (np.zeros((4, 2)), np.zeros(3, int), [[0]], "labels must have shape"),
        (np.zeros((4, 2)), np.zeros(4), [[0]], "labels must be whole numbers"),
        (np.full((4, 2), np.nan), np.zeros(4, int), [[0]], "NaN"),
        (np.zeros((4, 2)), np.zeros(4, int), [[0], []], "device 1 has no samples"),
        (np.zeros((4, 2)), np.zeros(4, int), [], "there are no devices"),
    ],
)
def test_arrays_that_cannot_be_trained_on_are_refused(features, labels, parts, message):
    with pytest.raises(FedcontextError, match=message):
        datasets.federate(features, labels, [np.array(part, int) for part in parts])


def test_a_test_sample_that_is_trained_on_is_warned_about_with_both_devices():
    features, labels, both = np.zeros((20, 2)), np.zeros(20, int), np.arange(10)
    with pytest.warns(UserWarning, match="device 0 tests on sample 9, and device 1 trains on it") as seen:
        datasets.federate(features, labels, [both, both[::-1]])
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match="device 1 tests on sample 9, and device 1 trains on it"):
        datasets.federate(features, labels, [both + 10, np.append(9, both)])
    with warnings.catch_warnings(action="error"):
        datasets.federate(features, labels, [both, np.append(both[:5], 10)])  # a public set for training


EVEN = {"features": np.zeros((4, 2)), "labels": np.array([0, 1, 2, 0]), "parts": [[0, 1], [2, 3]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": [[0, 1], [2, 4]]}, "the samples of device 1 must be from 0 to 3, got 2 to 4"),
        ({"parts": [[0, 1], [-1, 3]]}, "the samples of device 1 must be from 0 to 3, got -1 to 3"),
        ({"parts": [[0.0, 1.0]]}, r"the samples of device 0 must be indices \(n,\), got float64 \(2,\)"),
        ({"parts": [[0, np.nan]]}, "the samples of device 0 must be indices"),
        ({"parts": [[True, False, True, True]]}, "the samples of device 0 must be indices .* got bool"),
        ({"parts": [[[0, 1]]]}, "the samples of device 0 must be indices"),
        ({"parts": [[0], [[1], [2, 3]]]}, "the samples of device 1 must be an array"),
        (
            {"parts": np.array([0, 1, 0, 1])},
            "the samples of device 0 must be indices",
        ),  # whose sample, not whose samples
        ({"parts": None}, "parts must list the samples of each device"),
        ({"parts": 3}, "parts must list the samples of each device"),
        ({"labels": np.array([0, 1, np.nan, 0])}, "labels must be whole numbers from 0, got float64"),
        (
            {"labels": np.array(["a", "b", "c", "a"])},
            r"labels must be whole numbers from 0, got <U1; use np\.unique\(labels, return_inverse=True\)\[1\]",
        ),
        ({"labels": np.array([0, 1, None, 0])}, "labels must be whole numbers from 0, got object"),
        ({"labels": np.array([0, 1, -2, 0])}, "labels must be whole numbers from 0, got int64 with minimum -2"),
        ({"labels": np.zeros((4, 1), int)}, r"labels must have shape \(4,\)"),
        ({"labels": [0, [1], 2, 0]}, "labels must be an array"),
        ({"features": [[1.0], [2.0, 3.0], [4.0], [5.0]]}, "features must be an array"),
        ({"features": np.array([["a"]] * 4)}, "features must be floats or uint8"),
        ({"classes": 2}, "classes must be a whole number above the largest label 2, got 2"),
        ({"classes": 3.5}, "classes must be a whole number above the largest label 2"),
        ({"test_share": np.nan}, "test_share must be from 0 to below 1, got nan"),
        ({"test_share": 1.5}, "test_share must be from 0 to below 1"),
        ({"test_share": "half"}, "test_share must be from 0 to below 1, got 'half'"),
    ],
)
def test_arguments_that_cannot_be_partitioned_are_named(change, message):
    datasets.federate(**EVEN, classes=3, test_share=0.5)
    with pytest.raises(FedcontextError, match=message):
        datasets.federate(**{**EVEN, **change})


def write_leaf(folder, split, users, counts=None):
    (folder / split).mkdir(parents=True)
    counts = [len(user["y"]) for user in users.values()] if counts is None else counts
    content = {"users": list(users), "num_samples": counts, "user_data": users}
    (folder / split / "all.json").write_text(json.dumps(content))


def test_leaf_folders_load(tmp_path):
    write_leaf(
        tmp_path,
        "train",
        {"a": {"x": [[0, 1], [1, 0]], "y": [0, 1]}, "b": {"x": [[1, 1]], "y": [2]}, "c": {"x": [], "y": []}},
    )
    write_leaf(tmp_path, "test", {"a": {"x": [[1, 1]], "y": [2]}})
    data = datasets.load_dataset(f"leaf:{tmp_path}")
    assert (data.population, data.dimension, data.classes) == (2, 2, 3)
    assert data.train.sizes.tolist() == [2, 1]
    assert data.test.sizes.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not LEAF JSON"),
        ('{"users": ["a"]}', "not LEAF JSON"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1, 2], [3]], "y": [0, 1]}}}', "user 'a'"),
        ('{"users": ["a"], "user_data": {"a": {"x": [["one"]], "y": [0]}}}', "user 'a'"),
        (
            '{"users": ["a", "b"], "user_data": {"a": {"x": [[1]], "y": [0]}, "b": {"x": [[1, 2]], "y": [0]}}}',
            "different numbers of features",
        ),
        ('{"users": [], "user_data": {}}', "no device has training samples"),
    ],
)
def test_broken_leaf_files_are_named(tmp_path, text, message):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "all.json").write_text(text)
    with pytest.raises(FedcontextError, match=message):
        datasets.load_dataset(f"leaf:{tmp_path}")


def test_leaf_users_without_test_samples_and_other_widths(tmp_path):
    users = {"a": {"x": [[0, 1], [1, 0]], "y": [0, 1]}}
    write_leaf(tmp_path / "empty", "train", users)
    write_leaf(tmp_path / "empty", "test", {"a": {"x": [], "y": []}})
    assert datasets.load_dataset(f"leaf:{tmp_path}/empty").test.sizes.tolist() == [0]
    write_leaf(tmp_path / "wide", "train", users)
    write_leaf(tmp_path / "wide", "test", {"a": {"x": [[0, 1, 2]], "y": [0]}})
    with pytest.raises(FedcontextError, match=r"different numbers of features: \[2, 3\]"):
        datasets.load_dataset(f"leaf:{tmp_path}/wide")


@pytest.mark.data("mnist")
@pytest.mark.parametrize("count", [0, 1_001, 100_000])
def test_more_devices_than_mnist_has_are_refused_as_such(count):
    with pytest.raises(FedcontextError, match=f"'mnist-{count}': devices must be from 1 to 1000, got {count}"):
        datasets.load_dataset(f"mnist-{count}")


def test_a_missing_leaf_folder_is_named(tmp_path):
    with pytest.raises(FedcontextError, match=r"no LEAF \.json file found"):
        datasets.load_dataset(f"leaf:{tmp_path}/nowhere")


@pytest.fixture
def no_data(tmp_path, monkeypatch):
    monkeypatch.delenv(files.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_without_files_the_error_says_what_to_do(no_data):
    with pytest.raises(FedcontextError) as error:
        files.find("mnist")
    for way in ("fedcontext data fetch mnist", "FEDCONTEXT_DATA", "mnist.npz", str(no_data)):
        assert way in str(error.value)


def test_the_users_directory_is_searched_before_the_cache(no_data, monkeypatch):
    files.cache_folder().mkdir(parents=True)
    (files.cache_folder() / "mnist.npz").touch()
    assert files.where("mnist") == files.cache_folder() / "mnist.npz"
    own = no_data / "own"
    own.mkdir()
    monkeypatch.setenv(files.VARIABLE, str(own))
    assert files.where("mnist") == files.cache_folder() / "mnist.npz"
    (own / "mnist.npz").touch()
    assert files.where("mnist") == own / "mnist.npz"


@pytest.fixture
def publisher(no_data, monkeypatch):
    """Serve a folder on loopback; the function returned makes a file of it a source, with its hash or another."""
    folder = no_data / "published"
    folder.mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *args: None)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def publish(name, path, sha256=None):
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if sha256 is None else sha256
        known = files.SOURCES[name]
        url = f"http://127.0.0.1:{server.server_port}/{path.name}"
        monkeypatch.setitem(files.SOURCES, name, files.Source(known.names, url, digest))

    yield folder, publish
    server.shutdown()


def test_a_download_is_kept_only_if_its_hash_is_right(publisher):
    folder, publish = publisher
    (folder / "mnist.npz").write_bytes(b"digits")
    publish("mnist", folder / "mnist.npz", sha256="0" * 64)
    with pytest.raises(FedcontextError, match="SHA-256 must be 0000"):
        files.fetch("mnist")
    assert list(files.cache_folder().iterdir()) == []
    publish("mnist", folder / "mnist.npz")
    seen = []
    path = files.fetch("mnist", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == b"digits"
    assert seen == [(6, 6)]
    assert files.find("mnist") == path


def test_an_unreachable_publisher_is_a_clear_error(publisher, monkeypatch):
    folder, publish = publisher
    (folder / "mnist.npz").write_bytes(b"digits")
    publish("mnist", folder / "mnist.npz")
    (folder / "mnist.npz").unlink()
    with pytest.raises(FedcontextError, match="cannot be downloaded"):
        files.fetch("mnist")


def test_the_published_femnist_archive_is_unpacked_and_loads(publisher):
    h5py = pytest.importorskip("h5py")
    folder, publish = publisher
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        with h5py.File(folder / f"fed_emnist_{split}.h5", "w") as file:
            for writer in ("f0000_14", "f0001_41"):
                file[f"examples/{writer}/pixels"] = random.random((3, 28, 28), dtype=np.float32)
                file[f"examples/{writer}/label"] = np.array([0, 35, 61], np.int32)
    with tarfile.open(folder / "fed_emnist.tar.bz2", "w:bz2") as tar:
        for split in ("train", "test"):
            tar.add(folder / f"fed_emnist_{split}.h5", arcname=f"fed_emnist_{split}.h5")
    publish("femnist", folder / "fed_emnist.tar.bz2")
    assert files.fetch("femnist").name == "femnist.npz"
    datasets.load_dataset.cache_clear()
    data = datasets.load_dataset("femnist")
    datasets.load_dataset.cache_clear()
    assert (data.population, data.train.sizes.tolist(), data.test.sizes.tolist()) == (2, [3, 3], [3, 3])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 28, 28), np.uint8)}, "lacks y"),
        ({"x": np.zeros((2, 27, 28), np.uint8), "y": np.zeros(2, int)}, "x must be uint8 of shape"),
        ({"x": np.zeros((2, 28, 28)), "y": np.zeros(2, int)}, "x must be uint8 of shape"),
        ({"x": np.zeros((2, 28, 28), np.uint8), "y": np.zeros(3, int)}, "different lengths"),
        ({"x": np.zeros((2, 28, 28), np.uint8), "y": np.zeros(2)}, "y must be integers of shape"),
        ({"x": np.zeros((2, 28, 28), np.uint8), "y": np.array([{}, {}])}, "y must be integers of shape"),
    ],
)
def test_files_are_checked_before_they_are_loaded(tmp_path, arrays, message):
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(FedcontextError, match=message):
        files.read_arrays(tmp_path / "data.npz", {"x": (-1, 28, 28), "y": (-1,)})


def test_a_file_that_is_no_archive_is_named(tmp_path):
    (tmp_path / "data.npz").write_bytes(b"not a zip")
    with pytest.raises(FedcontextError, match=r"data\.npz: not readable"):
        files.read_arrays(tmp_path / "data.npz", {"x": (-1,)})


def small_images(count=6):
    random = np.random.default_rng(0)
    return random.integers(0, 256, (count, 28, 28), dtype=np.uint8), np.arange(count) % 3


@pytest.mark.parametrize("shape", [(6, 8), (6, 2, 4), (6, 2, 2, 2)])
def test_images_are_flattened_and_bytes_scaled_to_one(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    data = datasets.federate(pixels, np.arange(6) % 3, [[0, 2, 4], [5, 3, 1]], test_share=0)
    assert data.train.features.dtype == np.float32
    np.testing.assert_allclose(data.train.features, pixels.reshape(6, -1)[[0, 2, 4, 5, 3, 1]] / 255, rtol=1e-6)
    floats = datasets.federate(pixels / 255, np.arange(6) % 3, [[0, 2, 4], [5, 3, 1]], test_share=0)
    np.testing.assert_array_equal(floats.train.features, pixels.reshape(6, -1)[[0, 2, 4, 5, 3, 1]] / 255)


def test_cpu_tensors_are_taken_as_arrays():
    torch = pytest.importorskip("torch")
    pixels, labels = small_images()
    parts = datasets.shards(torch.from_numpy(labels), 3, np.random.default_rng(0))
    expected = datasets.federate(pixels, labels, parts)
    data = datasets.federate(torch.from_numpy(pixels), torch.from_numpy(labels), list(map(torch.from_numpy, parts)))
    np.testing.assert_array_equal(data.train.features, expected.train.features)
    with pytest.raises(FedcontextError, match=r"features must be an array, got Tensor: .*grad"):
        datasets.federate(torch.zeros(6, 2, requires_grad=True), labels, parts)


@pytest.fixture
def writers(tmp_path, monkeypatch):
    """Return a function that writes a FEMNIST file; the cache of prepared data is in the same folder."""
    monkeypatch.setenv(files.VARIABLE, str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(cache.SWITCH, raising=False)
    pixels, labels = small_images(12)

    def write(**change):
        arrays = {"x": pixels, "y": labels, "writer": np.repeat([4, 7], 6), "is_test": np.arange(12) % 6 == 5}
        np.savez_compressed(tmp_path / "femnist.npz", **(arrays | change))

    write()
    return write


def load(name="femnist", seed=0):
    return datasets.load_dataset.__wrapped__(name, seed)


def assert_same(one: FederatedData, other: FederatedData):
    assert (one.name, one.classes) == (other.name, other.classes)
    for mine, its in ((one.train, other.train), (one.test, other.test)):
        for array in ("features", "labels", "offsets"):
            left, right = getattr(mine, array), getattr(its, array)
            assert left.dtype == right.dtype
            assert left.flags.writeable
            np.testing.assert_array_equal(left, right)


def entries():
    return sorted(path.name for path in cache.prepared_folder().glob("*"))


def built_again(monkeypatch):
    """Return a list that grows each time arrays are read from the original file."""
    reads, read = [], files.read_arrays
    monkeypatch.setattr(
        sys.modules["fedcontext.datasets.femnist"], "read_arrays", lambda *a: reads.append(1) or read(*a)
    )
    return reads


def test_prepared_data_are_the_same_from_the_cache(writers, monkeypatch):
    reads = built_again(monkeypatch)
    first, second = load(), load()
    monkeypatch.setenv(cache.SWITCH, "0")
    assert_same(first, second)
    assert_same(first, load())
    assert len(reads) == 2  # the first time, and without the cache
    assert len(entries()) == 1


@pytest.mark.data("mnist")
def test_mnist_is_the_same_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built, cached = load("mnist", seed=1), load("mnist", seed=1)
    assert len(entries()) == 1
    assert_same(built, cached)
    shutil.rmtree(cache.prepared_folder())  # 220 MB


def test_writing_to_cached_arrays_changes_no_file(writers):
    load()
    changed = load()
    changed.train.features[:] = 7
    assert load().train.features.max() <= 1


def test_another_source_file_is_not_served_from_the_cache(writers):
    before = load()
    writers(y=np.arange(12) % 4)
    assert load().train.labels.max() == 3 > before.train.labels.max()


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-8]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "not an array": lambda path: path.write_text("hello"),
    "pickled": lambda path: np.save(path, np.array([{}]), allow_pickle=True),
    "other type": lambda path: np.save(path, np.load(path).astype(np.float16)),
    "other shape": lambda path: np.save(path, np.load(path)[:-1]),
    "other values": lambda path: np.save(path, np.load(path) - 3),
}


@pytest.mark.parametrize(
    ("damage", "array"),
    [(damage, array) for damage in DAMAGE for array in ("train_features", "test_labels", "train_offsets")],
)
def test_a_damaged_entry_is_rebuilt_with_a_warning(writers, damage, array):
    expected, (entry,) = load(), entries()
    DAMAGE[damage](cache.prepared_folder() / entry / f"{array}.npy")
    with pytest.warns(UserWarning, match="damaged cache entry is rebuilt"):
        assert_same(load(), expected)
    assert entries() == [entry]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(load(), expected)


def test_without_a_writable_cache_nothing_is_said(writers, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load().population == 2


def test_the_cache_keeps_few_entries_and_no_scraps(writers):
    for top in range(1, cache.MAX_ENTRIES + 3):
        writers(y=np.arange(12) % top)
        load()
    assert len(entries()) == cache.MAX_ENTRIES
    assert all(name.startswith("femnist-") for name in entries())


def test_what_a_killed_process_left_in_the_cache_is_removed_and_is_no_entry(writers):
    for number in range(cache.MAX_ENTRIES):
        (cache.prepared_folder() / f".femnist-{number}.part").mkdir(parents=True)
    load()
    assert [name.partition("-")[0] for name in entries()] == ["femnist"]


def test_a_copy_of_the_cache_is_used_if_it_is_the_same(writers, tmp_path, monkeypatch):
    expected, reads = load(), built_again(monkeypatch)
    shutil.copytree(tmp_path / "cache", tmp_path / "copy", copy_function=shutil.copy)  # with other times
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "copy"))
    assert load().digest == expected.digest
    assert not reads
    (cache.prepared_folder() / entries()[0] / "summary.json").unlink()
    with pytest.warns(UserWarning, match=r"damaged cache entry is rebuilt \(summary.json is missing"):
        assert_same(load(), expected)


def test_the_digest_of_data_is_that_of_their_content(writers, monkeypatch, small_data):
    built, cached = load(), load()
    monkeypatch.setenv(cache.SWITCH, "0")
    assert built.digest == cached.digest == load().digest
    order = np.arange(len(small_data.train.labels))[::-1]
    features, labels, offsets = small_data.train.features, small_data.train.labels, small_data.train.offsets.copy()
    offsets[1] += 1
    others = [Split(features[order], labels, small_data.train.offsets), Split(features, labels, offsets)]
    digests = {replace(small_data, train=train).digest for train in (small_data.train, *others)}
    assert len(digests) == 3
    on_demand = [synthetic(1, 1, devices=200, seed=seed, on_demand=True).digest for seed in (0, 0, 1)]
    assert on_demand[0] == on_demand[1] != on_demand[2]


def test_processes_may_fill_the_cache_at_the_same_time(writers):
    code = "import fedcontext as fc; print(float(fc.load_dataset('femnist').train.features.sum(dtype=float)))"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = [process.communicate()[0] for process in running]
    assert [float(text) for text in printed] == [load().train.features.sum(dtype=float)] * 3
    assert len(entries()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": np.full(12, 62)}, "y must be from 0 to 61"),
        ({"is_test": np.ones(12, bool)}, "with a training sample of some writer"),
        (
            {name: np.zeros((0, 28, 28) if name == "x" else 0, np.uint8) for name in ("x", "y", "writer", "is_test")},
            "training sample",
        ),
    ],
)
def test_femnist_files_with_wrong_values_are_named(writers, change, message):
    writers(**change)
    with pytest.raises(FedcontextError, match=message):
        load()


def test_mnist_with_too_few_samples_of_a_digit_is_named():
    with pytest.raises(FedcontextError, match="at least 1000 of each"):
        two_digits_per_device(np.zeros(70_000, int), np.random.default_rng(0))


def short_error(call, match):
    """Assert that a call raises a short FedcontextError and allocates little memory."""
    tracemalloc.start()
    with pytest.raises(FedcontextError, match=match) as error:
        call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(str(error.value)) < 500
    assert peak < 100e6


LEAF_USER = {"x": [[1, 2, 3]] * 4, "y": [0, 1, 2, 0]}


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"y": [0, 1, 2, 0.9]}, "user 'a': y must be whole numbers"),
        ({"y": ["cat"] * 4}, "user 'a': y must be whole numbers"),
        ({"y": ["word " * 1000] * 4}, "user 'a': y must be whole numbers"),
        ({"y": [0, 1, 2, 10**30]}, "user 'a': y must be whole numbers"),
        ({"y": [0, 1, 2, float("nan")]}, "user 'a': y must be whole numbers"),
        ({"y": [0, 1, 2, None]}, "user 'a': y must be whole numbers"),
        ({"y": 3}, "not LEAF JSON"),
        ({"y": [0, 1, 2, 0, 1, 2]}, "user 'a' has 4 x and 6 y"),
        ({"x": ["long text " * 1000] * 4}, "user 'a': x: could not convert"),
        (
            {"x": [[1, 2, 3]] * 3 + [[1, 2]]},
            r"user 'a': x: samples must be of the same size, got lists of lengths \[2, 3\]$",
        ),
        ({"x": [[[1, 2], [3]]] * 4}, r"user 'a': x: samples must .* lengths \[1, 2\]$"),
        ({"x": [[1e300, 0, 0]] * 4}, "user 'a': x: features have NaN or infinite"),
        ({"x": [[], [], [], []]}, "user 'a': x: features must not be empty"),
    ],
)
def test_leaf_users_with_wrong_samples_are_named(tmp_path, user, message):
    for split in ("train", "test"):
        write_leaf(tmp_path, split, {"a": LEAF_USER | user}, counts=[4] if user.get("y") == 3 else None)
    short_error(lambda: load(f"leaf:{tmp_path}"), message)


def test_leaf_labels_may_be_whole_floats(tmp_path):
    for split in ("train", "test"):
        write_leaf(tmp_path, split, {"a": LEAF_USER | {"y": [0.0, 1.0, 2.0, 0.0]}})
    assert load(f"leaf:{tmp_path}").train.labels.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("counts", [[3], [4, 4], ["four"], 4])
def test_a_wrong_num_samples_is_named(tmp_path, counts):
    for split in ("train", "test"):
        write_leaf(tmp_path, split, {"a": LEAF_USER}, counts=counts)
    short_error(lambda: load(f"leaf:{tmp_path}"), "num_samples|not LEAF JSON")


def test_a_leaf_user_in_two_files_is_named(tmp_path):
    for split in ("train", "test"):
        write_leaf(tmp_path, split, {"a": LEAF_USER})
    (tmp_path / "train" / "more.json").write_text((tmp_path / "train" / "all.json").read_text())
    short_error(lambda: load(f"leaf:{tmp_path}"), "user 'a' occurs twice")


def test_deeply_nested_leaf_json_is_named(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "all.json").write_text("[" * 100_000)
    short_error(lambda: load(f"leaf:{tmp_path}"), "not LEAF JSON")


def npz_with_header(path, shape, content=b""):
    """Write an .npz whose one array x claims a shape, whatever its content."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header.getvalue() + content)


def test_an_npz_that_claims_too_much_is_refused_before_memory_is_taken(tmp_path):
    path = tmp_path / "data.npz"
    for content in (b"", bytes(60_000_000)):  # a wrong header; data that compress by a thousand
        npz_with_header(path, (2_000_000, 28, 28) if not content else (60_000_000 // 784, 28, 28), content)
        short_error(lambda: files.read_arrays(path, {"x": (-1, 28, 28)}), "headers claim .* bytes, too many")
    npz_with_header(path, (-1, 28, 28))
    short_error(lambda: files.read_arrays(path, {"x": (-1, 28, 28)}), "x must be uint8")


def test_a_truncated_npz_is_named(tmp_path):
    path = tmp_path / "data.npz"
    np.savez_compressed(path, x=small_images(40)[0])
    whole = path.read_bytes()
    for length in range(0, len(whole), 997):
        path.write_bytes(whole[:length])
        short_error(lambda: files.read_arrays(path, {"x": (-1, 28, 28)}), "not readable")
    for place in range(60, len(whole) - 200, 499):  # damaged in the middle
        path.write_bytes(whole[:place] + bytes(20) + whole[place + 20 :])
        short_error(lambda: files.read_arrays(path, {"x": (-1, 28, 28)}), "data")


def test_a_missing_data_directory_is_named_with_each_path_searched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(files.VARIABLE, "missing")
    with pytest.raises(FedcontextError) as error:
        load("femnist")
    for path in ("missing", str(tmp_path / "fedcontext")):
        assert f"{path}/femnist_leaf_writers.npz, {path}/femnist.npz" in str(error.value)
    assert "FEDCONTEXT_DATA=missing is not a directory" in str(error.value)
    assert "fedcontext data fetch femnist" in str(error.value)


@pytest.mark.parametrize(
    "partition", [datasets.iid, datasets.shards, datasets.dirichlet, datasets.power_law], ids=lambda each: each.__name__
)
def test_partitioners_take_a_seed_in_place_of_a_generator(partition):
    labels = np.repeat(np.arange(3), 20)
    seeded, drawn = partition(labels, 5, 7), partition(labels, 5, np.random.default_rng(7))
    assert [list(part) for part in seeded] == [list(part) for part in drawn]
