"""Whatever a file or a command line holds gives a result or a short `FedcontextError`, and takes little memory.

Every parser reads 1,000 mutated inputs; FEDCONTEXT_FUZZ=100000 is the long campaign. A failure prints the number of
the mutation, and the same number always gives the same input.
"""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest

import fedcontext as fc
from fedcontext import checkpoint
from fedcontext.algorithms import ALGORITHMS
from fedcontext.cli import main
from fedcontext.compression.codec import Codec
from fedcontext.datasets import load_dataset
from fedcontext.datasets.femnist import femnist
from fedcontext.datasets.leaf import leaf
from fedcontext.engines.base import engine_named
from fedcontext.experiment import experiment_from, settings_from_toml
from fedcontext.files.tensor_file import START, ZEROS
from fedcontext.files.toml import to_toml
from fedcontext.leaderboard.results import PUBLISHED, ratios, read_results
from fedcontext.report.html import to_json as page_json
from fedcontext.report.page_data import page_data
from fedcontext.results.export import to_table
from fedcontext.results.reader import read_runs
from mutations import (
    TOKENS,
    mutate_bytes,
    mutate_checkpoint,
    mutate_json,
    mutate_lines,
    mutate_npy,
    mutate_npz,
    mutate_safetensors,
    npy,
    npz,
    safetensors,
    to_json,
    with_checksum,
)

MUTATIONS = int(os.environ.get("FEDCONTEXT_FUZZ", "1000"))
MOST_MEMORY = 500e6  # bytes


@dataclass(frozen=True)
class Parser:
    """What reads a file, its valid contents, how they are changed, and the file's name."""

    read: Callable[[Path], object]
    valid: Callable[[Path], list[bytes]]  # made in a scratch folder
    mutate: Callable[[Random, bytes], bytes] = mutate_bytes
    name: str = "input"


def records(folder: Path) -> list[bytes]:
    rounds = fc.train(dataset="synthetic-iid", algorithm="fedavg-contextual", rounds=3, engine="reference").records
    fc.write_records(folder / "run.jsonl", fc.Experiment(rounds=3), rounds)
    return [(folder / "run.jsonl").read_bytes()]


def read_tolerantly(path: Path) -> None:
    runs, problems = read_runs([path])
    to_table(runs)
    page_json(page_data(runs, problems))


USERS = {"a": {"x": [[0, 1, 2]] * 4, "y": [0, 1, 2, 0]}, "b": {"x": [[1, 1, 0.5]], "y": [1.0]}}
LEAF = to_json({"users": list(USERS), "num_samples": [4, 1], "user_data": USERS})


def read_leaf(path: Path) -> None:
    (path.parents[1] / "test").mkdir(exist_ok=True)
    (path.parents[1] / "test" / "all.json").write_bytes(LEAF)
    engine = engine_named("reference", leaf(path.parents[1]))
    engine.evaluate(engine.initial_params())


IMAGES = {
    "x.npy": npy(np.zeros((4, 28, 28), np.uint8)),
    "y.npy": npy(np.arange(4)),
    "writer.npy": npy(np.arange(4) // 2),
    "is_test.npy": npy(np.zeros(4, bool)),
}


def claiming(content: bytes, rows: int) -> bytes:
    """Return an .npy file whose header claims another number of rows than its four."""
    more = b"(%d," % rows
    return content.replace(b"(4,", more).replace(b" " * (len(more) - 3), b"", 1)


def read_femnist(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCONTEXT_DATA", str(path.parent))
        patch.setenv("FEDCONTEXT_CACHE", "0")
        femnist()


TENSORS = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
}


PARAMS = {"w": np.ones((2, 2)), "b": np.zeros(2, np.float32)}


def checkpoints(folder: Path) -> list[bytes]:
    state = {"memory": {"m": np.ones(3), "names": ["a", (1, None)]}, "by device": {3: np.zeros(1)}}
    checkpoint.save(folder / "run.safetensors", PARAMS, state, {"number": 7, "loss": 0.5})
    return [(folder / "run.safetensors").read_bytes()]


def with_metadata(text: bytes) -> bytes:
    """Return a file with the checksum of a checkpoint and these metadata."""
    header = START + ZEROS.encode() + b'", "fedcontext": ' + to_json(text.decode()) + b"}}"
    return with_checksum(safetensors(header, b""))


def read_results_file(path: Path) -> None:
    ratios(read_results(path))


def results(folder: Path) -> list[bytes]:
    tasks = json.loads(PUBLISHED.read_text(encoding="utf-8"))[:2]
    return [to_json([{**task, "rows": dict(list(task["rows"].items())[:3])} for task in tasks])]


def read_settings(path: Path) -> None:
    experiment_from(settings_from_toml(path))


NAMES = ["synthetic-iid", "synthetic-1-1", "synthetic-0.5-2-40", "mnist", "leaf:folder"]
CODES = [Codec(2).encode(np.arange(300.0), (1, 2)), Codec(32).encode(np.arange(300.0), (1, 2))]

PARSERS = {
    "settings": Parser(read_settings, lambda folder: [to_toml(asdict(fc.Experiment())).encode(), b"rounds = 3\n"]),
    "records": Parser(fc.read_run, records, mutate_lines, "run.jsonl"),
    "tables": Parser(read_tolerantly, records, mutate_lines, "run.jsonl"),
    "leaf": Parser(read_leaf, lambda folder: [LEAF], mutate_json, "train/all.json"),
    "npz": Parser(read_femnist, lambda folder: [npz(IMAGES)], mutate_npz, "femnist.npz"),
    "npy": Parser(fc.open_memmap, lambda folder: [npy(np.ones((2, 3)))], mutate_npy, "update.npy"),
    "safetensors": Parser(
        fc.open_memmap,
        lambda folder: [safetensors(to_json(TENSORS), bytes(32))],
        mutate_safetensors,
        "update.safetensors",
    ),
    "checkpoint": Parser(
        lambda path: checkpoint.load(path, PARAMS, {"number": 7}), checkpoints, mutate_checkpoint, "run.safetensors"
    ),
    "leaderboard": Parser(read_results_file, results, mutate_json, "results.json"),
    "names": Parser(
        lambda path: load_dataset(path.read_bytes().decode(errors="surrogateescape")),
        lambda folder: [name.encode() for name in NAMES],
    ),
    "codes": Parser(lambda path: Codec(2).decode(path.read_bytes(), (1, 2), 300), lambda folder: CODES),
}


@contextmanager
def little_memory() -> Iterator[None]:
    """Make an allocation of more than `MOST_MEMORY` fail inside, where the system can; pages in use are not counted."""
    resource, status = pytest.importorskip("resource"), Path("/proc/self/statm")
    before = resource.getrlimit(resource.RLIMIT_AS)
    if status.exists():
        used = int(status.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (int(used + MOST_MEMORY), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def complaint(read: Callable[[], object]) -> str:
    """Return the error that a call raises, "" if none; any but a short FedcontextError fails the test."""
    message = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read()
        except fc.FedcontextError as error:
            message = str(error) or "no message"
    assert len(message) < 500
    return message


@pytest.mark.parametrize("name", PARSERS)
def test_mutated_files_give_a_result_or_a_short_error(name: str, tmp_path: Path, monkeypatch) -> None:
    parser = PARSERS[name]
    monkeypatch.chdir(tmp_path)
    valid = parser.valid(tmp_path)
    path = tmp_path / "mutated" / parser.name
    path.parent.mkdir(parents=True)
    refused = 0
    with little_memory():
        for number in range(MUTATIONS):
            random = Random(f"{name} {number}")
            path.unlink(missing_ok=True)  # much faster than truncating it
            path.write_bytes(parser.mutate(random, random.choice(valid)))
            try:
                refused += complaint(partial(parser.read, path)) != ""
            except BaseException:
                print(f"{name}, mutation {number}: {path.read_bytes()[:200]!r}")
                raise
    assert refused > MUTATIONS / 5
    path.write_bytes(valid[0])
    assert complaint(partial(parser.read, path)) == ""


HEAD = b'{"schema": 1, "settings": {}}\n'
DIGITS = b"9" * 5_000
SAID = [  # a parser, what it reads, and what it must say about it
    ("settings", b"mu = 1e400", "mu must be a number of at least 0, got inf"),
    ("settings", b"rounds = " + DIGITS, "cannot be read (Exceeds the limit (4300 digits)"),
    ("settings", b"rounds = 0x" + DIGITS, "rounds must be at most 1000000000, got a value too large to print"),
    ("settings", b'rounds = "' + DIGITS + b'"', "rounds must be an integer of at least 1, got '999"),
    ("settings", b"rounds = " + b"[" * 10_000, "it is nested too deeply"),
    ("settings", b"x" * 5_000 + b" = 1", "unknown setting 'xxx"),
    ("settings", b"rounds = 3\xff", "cannot be read ('utf-8' codec can't decode byte 0xff"),
    ("settings", b"epochs = 9223372036854775808", "epochs must be at most 1000000, got 9223372036854775808"),
    ("settings", b"gradient_bits = 12", "gradient_bits must be 1 to 8, 32 or auto, got 12"),
    ("settings", b"server_momentum = 1.5", "server_momentum must be a number of at least 0 and below 1, got 1.5"),
    ("settings", b"momentum = 1.0", "momentum must be a number of at least 0 and below 1, got 1.0"),
    ("records", HEAD + b'{"number": 1\xff}\n', "not a fedcontext run: byte 42 is not valid UTF-8"),
    ("records", HEAD + b'{"number": ' + DIGITS + b"}\n", "line 2 is not a JSON object"),
    ("records", HEAD + b'{"number": true}\n', "line 2: number must be int, got True"),
    ("records", HEAD + b'{"number": 1, "loss": 1' + b"0" * 400 + b"}\n", "line 2: loss must be float | None, got 100"),
    ("records", HEAD + b'{"number": 1, "devices": ["a"]}\n', "line 2: devices must be list[int], got ['a']"),
    ("records", HEAD + b'{"number": 1, "excluded": {"3": 4}}\n', "line 2: excluded must be dict[int, str], got {3: 4}"),
    (
        "records",
        HEAD + b'{"number": 1, "excluded": {"x": "late"}}\n',
        "line 2 is not a round's record (invalid literal",
    ),
    ("records", b'{"schema": 1, "settings": []}\n', "not a fedcontext run: settings must be an object, got []"),
    ("records", b"[" * 100_000, "not a fedcontext run: the first line must be a manifest"),
    ("leaf", LEAF.replace(b"[1.0]", b"[0.9]"), "user 'b': y must be whole numbers from 0 to 999999, got 0.9"),
    ("leaf", LEAF.replace(b"[1.0]", b'["cat"]'), "user 'b': y must be whole numbers from 0 to 999999, got 'cat'"),
    ("leaf", LEAF.replace(b"0]}", b"0, 1, 2]}"), "user 'a' has 4 x and 6 y, but num_samples 4"),
    ("leaf", LEAF.replace(b"[4, 1]", b"[3, 1]"), "user 'a' has 4 x and 4 y, but num_samples 3"),
    ("leaf", LEAF.replace(b"[4, 1]", b"[4, " + DIGITS + b"]"), "not LEAF JSON (ValueError: Exceeds the limit"),
    ("leaf", LEAF.replace(b'["a", "b"]', b'["a", "a"]'), "user 'a' occurs twice in"),
    ("leaf", b"[" * 100_000, "not LEAF JSON (RecursionError: maximum recursion depth exceeded"),
    ("npz", npz(IMAGES)[:-500], "not readable (BadZipFile: "),
    ("npz", npz({name: claiming(content, 2_000_000) for name, content in IMAGES.items()}), "headers claim 1602000000"),
    ("npz", npz({**IMAGES, "y.npy": b"\x93NUMPY\x01\x00\x64\x00" + b"(" * 100}), "femnist.npz: not readable ("),
    ("checkpoint", with_metadata(b"[]"), "metadata must be an object, got []"),
    ("checkpoint", with_metadata(b"{}"), "schema must be 3, got None"),
    ("checkpoint", with_metadata(b'{"schema": 3}'), "metadata must have facts, rule and versions, got ['schema']"),
    ("checkpoint", with_metadata(b'{"schema": ' + DIGITS + b"}"), "not a fedcontext checkpoint (ValueError: Exceeds"),
    ("checkpoint", with_metadata(b"[" * 100_000), "not a fedcontext checkpoint (RecursionError"),
    ("checkpoint", with_metadata(b"{}")[:-1], "its checksum is missing or wrong"),
    ("npy", npy(np.ones(2))[:8] + b"\xff\xff" + b"{" + b"-" * 65_534, "update.npy: cannot be memory-mapped ("),
    ("npy", b"\x93NUMPY\x03\x00\x00\x00\x00\x60{}", "the header cannot have 1610612736 bytes"),
    ("leaderboard", b"[1]", "no leaderboard results (TypeError"),
    ("leaderboard", b"[" * 100_000, "no leaderboard results (RecursionError"),
    ("names", b"synthetic-1-1-3000000000", "synthetic-A-B-N needs N from 1 to 10000000 devices, got 3000000000"),
    ("names", b"synthetic-" + DIGITS + b"-1", "synthetic-A-B needs finite A and B of 0 or more, got inf and 1.0"),
    ("names", b"leaf:" + b"x" * 5_000, "x/train: no LEAF .json file found"),
]


@pytest.mark.parametrize(
    ("name", "content", "message"), SAID, ids=[f"{name}{i}" for i, (name, _, _) in enumerate(SAID)]
)
def test_an_error_says_what_is_wrong(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / PARSERS[name].name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with little_memory():
        assert message in complaint(partial(PARSERS[name].read, path))


SIZE = 2_000_000
LARGE = [
    ("settings", b"a." * 8_000 + b"b = 1"),
    ("settings", b"a = 1\n" * (SIZE // 6)),
    ("tables", HEAD + b"{}\n" * (SIZE // 3)),
    ("leaf", b"[" + b"[]," * (SIZE // 3) + b"[]]"),
    ("leaf", b'{"users": ["a"], "user_data": {"a": {"x": [[' + b"1," * (SIZE // 2) + b'1]], "y": [999999]}}}'),
    ("leaf", LEAF.replace(b"[1.0]", b"[999999]").replace(b"[1, 1, 0.5]", b"[1, 1, 0.5]" + b" " * SIZE)),
    ("npz", npz({**IMAGES, "x.npy": npy(np.zeros((60_000, 28, 28), np.uint8))})),
    ("safetensors", safetensors(b'{"a":[' + b"[]," * (SIZE // 3) + b"[]]}", b"")),
    ("leaderboard", b"[" + b"[]," * (SIZE // 3) + b"[]]"),
    ("names", b"synthetic-1-1-10000000"),
    ("names", b"synthetic-1-1-" + b"9" * SIZE),
]


@pytest.mark.parametrize(("name", "content"), LARGE, ids=[f"{name}{i}" for i, (name, _) in enumerate(LARGE)])
def test_large_files_take_little_memory(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / PARSERS[name].name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with little_memory():
        complaint(partial(PARSERS[name].read, path))


TEXTS = [token.decode(errors="surrogateescape") for token in TOKENS if len(token) < 10_000 and b"\0" not in token]
NUMBERS = ["0", "1", "2", "3", "32", "12", "0.5", "1.5", "1e-320", "1e-30", "1e30", "1e308", "1000000000", "999999999"]
NUMBERS += ["9223372036854775807", "cohort", "all", "default", "1..2", "2..1", "1/lr", "measured", "0x10", "1_0", "+1"]
SMALL = {
    "dataset": "tiny",
    "devices_per_round": "2",
    "probes": "2",
    "epochs": "1",
    "rounds": "1",
    "engine": "reference",
}


def one_round(settings: dict[str, str], data: fc.FederatedData) -> None:
    """Run one round, if the settings ask for so little that it is quick."""
    experiment = experiment_from(settings)
    simulation = fc.prepare(experiment, data=data)
    if experiment.epochs[1] <= 20:
        simulation.step(simulation.start())


def test_mutated_settings_give_a_round_or_a_short_error() -> None:
    data = fc.federate(np.eye(20), np.arange(20) % 2, list(np.arange(20).reshape(4, 5)), name="tiny")
    refused = 0
    with little_memory():
        for number in range(MUTATIONS):
            random = Random(f"values {number}")
            names = random.sample([each.name for each in fields(fc.Experiment)], random.choice((1, 1, 2)))
            settings = {
                **SMALL,
                "algorithm": random.choice(list(ALGORITHMS)),
                **{name: random.choice(random.choice((TEXTS, NUMBERS, NUMBERS))) for name in names},
            }
            try:
                refused += complaint(partial(one_round, settings, data)) != ""
            except BaseException:
                print(f"mutation {number}: {settings}")
                raise
    assert MUTATIONS / 5 < refused < MUTATIONS


def command_line(*arguments: str) -> tuple[int, str]:
    """Return the exit code and standard error of the program."""
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as err:
        patch.setattr(sys, "argv", ["fedcontext", *arguments])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), err.getvalue()
    return 0, err.getvalue()


COMMANDS = [
    *(["run", "nowhere.toml"], ["compare", "--dataset", "leaf:nowhere"], ["report", "nowhere"], ["data", "where", "x"]),
    *(["tune", "--grid", "mu=x"], ["leaderboard", "--tasks", "x"], ["reproduce", "x"], ["recommend", "--results", "x"]),
    ["export", "nowhere", "-o", "x.csv"],
]


def test_mutated_command_lines_exit_with_a_short_error(tmp_path: Path, monkeypatch) -> None:
    """All of these name something that does not exist, so that none of them runs."""
    monkeypatch.chdir(tmp_path)
    options = [f"--{each.name.replace('_', '-')}" for each in fields(fc.Experiment) if each.name != "dataset"]
    for number in range(MUTATIONS // 10):
        random = Random(f"commands {number}")
        extra = [random.choice([*options, "--jobs", "--seeds", "--grid", "--k2", "--preset", random.choice(TEXTS)])]
        arguments = [*random.choice(COMMANDS), *extra, random.choice(TEXTS + NUMBERS)]
        code, printed = command_line(*arguments)
        assert code == 2, arguments
        assert len(" ".join(printed.split())) < 500, arguments
        assert "Traceback" not in printed, arguments
    assert list(tmp_path.iterdir()) == []
