"""No crash, second process, full disk or damaged file costs more than the round it interrupts."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedcontext as fc
from commands import call
from fedcontext import checkpoint, runner
from fedcontext.datasets import FederatedData
from fedcontext.errors import FedcontextError, FileError
from fedcontext.files import storage
from fedcontext.files.model_file import save_params
from fedcontext.files.tensor_file import is_intact, write_tensors
from fedcontext.paper import figures
from fedcontext.report import write_report
from fedcontext.results.export import export
from fedcontext.results.run_file import open_run, write_records

PROGRAM = [sys.executable, "-c", "from fedcontext.cli import main; main()"]
SHORT = fc.Experiment("small", "fedavg-memory", engine="reference", rounds=5, epochs=(1, 2), devices_per_round=4)


@pytest.fixture(autouse=True)
def warnings_are_logged(caplog) -> None:
    caplog.set_level(logging.WARNING, "fedcontext")  # --quiet raises it


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Kills


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import kills

    yield kills
    sys.modules.pop("kills", None)


@pytest.mark.parametrize(("count", "megabytes"), [(5, 0), (3, 12)])
def test_killed_runs_end_as_if_never_killed_and_leave_no_other_file(
    tmp_path: Path, kills, count: int, megabytes: int
) -> None:
    found = kills.campaign(tmp_path, count, megabytes, longest=0.01 if megabytes else 0.2, seed=time.time_ns())
    assert found["kills"] == count
    assert found["files that differ or are left over"] == []


class Killed(BaseException): ...


def kill_after(rounds: int):
    def on_round(experiment: fc.Experiment, record: fc.RoundRecord) -> None:
        if record.number == rounds:
            raise Killed

    return on_round


KILLED_RERUN = """
import os, sys
import fedcontext as fc

experiment = fc.Experiment("synthetic-iid", "fedavg", rounds=4, engine="numba")
fc.runner.run(experiment, sys.argv[1], lambda _, record: record.number == 2 and os._exit(9), resume=sys.argv[2] == "True")
"""


@pytest.mark.parametrize("resume", [False, True])
def test_a_finished_record_survives_reruns_that_are_killed(tmp_path: Path, resume: bool) -> None:
    # The last bits of the reference engine depend on the threads of BLAS, which earlier tests in this process limit.
    experiment = fc.Experiment("synthetic-iid", "fedavg", rounds=4, engine="numba")
    runner.run(experiment, tmp_path)
    path = tmp_path / f"{experiment.name}.jsonl"
    finished = path.read_bytes()
    for _ in range(2):
        command = [sys.executable, "-c", KILLED_RERUN, str(tmp_path), str(resume)]
        assert subprocess.run(command, timeout=120, check=False).returncode == 9
        assert path.read_bytes() == finished
    runner.run(experiment, tmp_path, resume=resume)
    assert path.read_bytes() == finished
    assert f"{path.name}.new" not in names(tmp_path)


def test_a_shorter_rerun_is_kept_beside_the_longer_record(tmp_path: Path, small_data: FederatedData, caplog) -> None:
    runner.run(SHORT, tmp_path, data=small_data)
    with pytest.raises(Killed):
        runner.run(SHORT, tmp_path, kill_after(2), data=small_data)
    assert "is of an earlier run that got further, and is kept" in caplog.text
    assert len(fc.read_run(tmp_path / f"{SHORT.name}.jsonl")[1]) == 5
    assert len(fc.read_run(tmp_path / f"{SHORT.name}.jsonl.new")[1]) == 2


def test_the_file_beside_a_record_is_not_taken_for_that_of_another_run(tmp_path: Path) -> None:
    path, mine, other = tmp_path / "run.jsonl", {"algorithm": "mine"}, {"algorithm": "other"}
    records = [fc.RoundRecord(number) for number in (1, 2, 3)]
    write_records(path, mine, records)
    write_records(tmp_path / "run.jsonl.new", other, records)
    with open_run(path, mine, done=2) as (active, found):
        assert (active, found) == (path, records[:2])
    assert names(tmp_path) == ["run.jsonl"]


# Damage


def two_checkpoints(path: Path) -> None:
    for number in (1, 2):
        checkpoint.save(path, {"w": np.full(3, float(number))}, {"m": np.ones(2)}, {"number": number, "loss": 0.5})


def test_every_flipped_bit_is_noticed_and_the_checkpoint_before_is_used(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.CRITICAL, "fedcontext")
    path = tmp_path / "run.safetensors"
    two_checkpoints(path)
    before, last = checkpoint.previous(path).read_bytes(), path.read_bytes()
    bits = np.random.default_rng().integers(0, 8, len(last))
    for place, bit in enumerate(bits.tolist()):
        damaged = bytearray(last)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        checkpoint.previous(path).write_bytes(before)
        assert checkpoint.load(path, {"w": np.zeros(3)}).facts["number"] == 1, (place, bit)
        assert path.read_bytes() == before


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_a_truncated_checkpoint_is_noticed(tmp_path: Path, cut: int, caplog) -> None:
    path = tmp_path / "run.safetensors"
    two_checkpoints(path)
    path.write_bytes(path.read_bytes()[:cut])
    assert checkpoint.load(path, {"w": np.zeros(3)}).facts["number"] == 1
    assert "run.safetensors: not a fedcontext checkpoint" in caplog.text
    assert "trying the one before it" in caplog.text


def test_without_a_good_checkpoint_the_error_says_what_to_delete(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    two_checkpoints(path)
    path.write_bytes(b"")
    checkpoint.previous(path).write_bytes(b"")
    with pytest.raises(fc.FedcontextError, match=r"previous: not a fedcontext .* delete it and run.safetensors"):
        checkpoint.load(path, {"w": np.zeros(3)})
    assert names(tmp_path) == ["run.safetensors", "run.safetensors.previous"]


def test_a_run_whose_last_checkpoint_is_damaged_ends_with_the_same_files(
    tmp_path: Path, small_data: FederatedData
) -> None:
    runner.run(SHORT, tmp_path, data=small_data, resume=True)
    expected = contents(tmp_path)
    (tmp_path / f"{SHORT.name}.safetensors").write_bytes(b"damaged")
    runner.run(SHORT, tmp_path, data=small_data, resume=True)
    assert contents(tmp_path) == expected


def test_params_that_are_not_finite_replace_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    two_checkpoints(path)
    expected = contents(tmp_path)
    for value in (np.nan, np.inf):
        with pytest.raises(fc.FedcontextError, match="leaf 'w' has NaN or infinite entries"):
            checkpoint.save(path, {"w": np.array([0, value, 1])}, None, {"number": 3})
    assert contents(tmp_path) == expected


def test_changed_data_and_settings_are_refused(tmp_path: Path, small_data: FederatedData) -> None:
    with pytest.raises(Killed):
        runner.run(SHORT, tmp_path, kill_after(3), data=small_data, resume=True)
    expected = contents(tmp_path)
    train = small_data.train
    other = train.features.copy()
    other[7, 1] += 1e-3
    changed = replace(small_data, train=replace(train, features=other))
    with pytest.raises(fc.FedcontextError, match=r"data digest must be '\w+' as in this run, got '\w+': use the data"):
        runner.run(SHORT, tmp_path, data=changed, resume=True)
    for path in list(tmp_path.iterdir()):
        path.rename(path.with_name(path.name.replace(SHORT.name, replace(SHORT, seed=7).name)))
    with pytest.raises(fc.FedcontextError, match="seed must be 7 as in this run, got 0"):
        runner.run(replace(SHORT, seed=7), tmp_path, data=small_data, resume=True)
    kept = [
        [each for name, each in files.items() if not name.endswith(".toml")] for files in (contents(tmp_path), expected)
    ]
    assert sorted(kept[0]) == sorted(kept[1])  # all but the new settings


def test_another_version_is_said_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    path = tmp_path / "run.safetensors"
    two_checkpoints(path)
    monkeypatch.setattr(checkpoint, "versions", lambda: {"fedcontext": "99"})
    assert checkpoint.load(path, {"w": np.zeros(3)}).facts["number"] == 2
    assert "resumed with {'fedcontext': '99'}" in caplog.text


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", ">f4"])
def test_the_library_reads_what_is_written_here(tmp_path: Path, dtype: str) -> None:
    from safetensors.numpy import load_file

    arrays = {
        "a": np.arange(6).reshape(2, 3).astype(dtype),
        "ü": np.array(1).astype(dtype),
        "none": np.zeros((0, 2), dtype),
    }
    write_tensors(tmp_path / "file", {**arrays, "b": np.ones(3, np.int8)}, {"about": "ß"})
    found = load_file(tmp_path / "file")
    assert is_intact(tmp_path / "file")
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found[name], array)


# Other processes


@contextmanager
def started(*arguments: object, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a command that would run for hours, and wait until it has written a few rounds."""
    options = ["--rounds", "100000", "--engine", "reference", "--quiet"]
    command = [*PROGRAM, *map(str, arguments), *options]
    process = subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 90
        while not any(path.read_bytes().count(b"\n") > 2 for path in cwd.glob("runs/*.jsonl")):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_run_into_the_same_files_is_refused_until_the_first_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--rounds", "100000", "--engine", "reference", "--quiet")
    with started("run", "--algorithm", "fedavg", cwd=tmp_path) as first:
        for command in (
            ("run", "--algorithm", "fedavg"),
            ("compare", "--algorithms", "fedprox,fedavg", "--seeds", "0"),
        ):
            done = call(*command, *options)
            assert done.returncode == 2
            assert f"process {first.pid} is already running on this file" in " ".join(done.stderr.split())
            assert len(done.stderr) < 500
        assert first.poll() is None
        assert [path.suffix for path in sorted((tmp_path / "runs").iterdir())] == [".jsonl", ".lock", ".toml"]
    (path,) = (tmp_path / "runs").glob("*.jsonl")
    with storage.lock(path):  # what a killed process held is free
        pass
    assert not list(tmp_path.rglob("*.lock"))


def test_where_locks_are_missing_a_warning_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with storage.lock(tmp_path / "run.jsonl"):
        assert "has no locks (Operation not supported): make sure that no other run writes here" in caplog.text


def children(pid: int) -> set[int]:
    """Return the processes that a process started, and those that they started."""
    own = {int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()}
    return own.union(*(children(child) for child in own))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_ends_with_all_its_workers(tmp_path: Path, number: signal.Signals) -> None:
    with started("compare", "--jobs", "2", "--algorithms", "fedavg,fedprox", "--seeds", "0", cwd=tmp_path) as process:
        workers = children(process.pid)
        assert len(workers) >= 2
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        until = time.monotonic() + 30
        while any(map(alive, workers)) and time.monotonic() < until:
            time.sleep(0.05)
    assert not [worker for worker in workers if alive(worker)]
    assert process.returncode == (143 if number == signal.SIGTERM else -number)
    assert ("terminated: completed rounds are in runs" in errors) == (number == signal.SIGTERM)
    assert "Traceback" not in errors
    for path in (tmp_path / "runs").glob("*.jsonl"):
        with storage.lock(path):
            pass


# What is there instead of a file


def link(path: Path) -> None:
    path.symlink_to(path.with_name("target"))


KINDS = {"a symbolic link": link, "a directory": Path.mkdir, "a named pipe": os.mkfifo}


def outputs(small_data: FederatedData) -> dict[str, object]:
    """Return what writes each kind of output, given a path with its suffix."""

    def records(folder: Path) -> Path:
        write_records(folder / "source.jsonl", {}, [fc.RoundRecord(1, loss=0.5, accuracy=0.5)])
        return folder / "source.jsonl"

    def simulated(path: Path) -> None:
        runner.run(SHORT, path.parent, data=small_data, resume=True)

    return {
        f"{SHORT.name}.jsonl": simulated,
        f"{SHORT.name}.toml": simulated,
        f"{SHORT.name}.safetensors": simulated,
        f"{SHORT.name}.safetensors.previous": simulated,
        f"{SHORT.name}.jsonl.lock": simulated,
        "own.jsonl": lambda path: write_records(path, {}, [fc.RoundRecord(1)]),
        "model.npz": lambda path: save_params(path, np.ones(2)),
        "model.safetensors": lambda path: save_params(path, np.ones(2)),
        "page.html": lambda path: write_report([records(path.parent)], path),
        "table.csv": lambda path: export([records(path.parent)], path),
        "figure.png": lambda path: figures.draw_curves(path, {"data": {"fedavg": [[fc.RoundRecord(1, 0.5, 0.5)]]}}),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_never_replaces_anything_but_a_file(tmp_path: Path, small_data: FederatedData, kind: str) -> None:
    (tmp_path / "target").write_text("precious")
    for name, write in outputs(small_data).items():
        KINDS[kind](tmp_path / name)
        before = (tmp_path / name).lstat()
        with pytest.raises(FileError, match=rf"{name}: an output must be a regular file, and this is {kind}"):
            write(tmp_path / name)
        assert os.path.samestat((tmp_path / name).lstat(), before)
        (tmp_path / name).rmdir() if kind == "a directory" else (tmp_path / name).unlink()
    assert (tmp_path / "target").read_text() == "precious"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_device_is_no_directory_for_records(command: str) -> None:
    few = ("--rounds", "1", "--engine", "reference", "--out", "/dev/null")
    done = call(command, *few)
    assert done.returncode == 2
    assert "error: /dev/null: must be a directory for output files, and is not" in " ".join(done.stderr.split())


# A full disk


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``size`` bytes: the write fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_run_resumes_identical_wherever_the_disk_was_full(tmp_path: Path, small_data: FederatedData) -> None:
    def run(folder: str) -> None:
        runner.run(SHORT, tmp_path / folder, data=small_data, resume=True, save=tmp_path / folder / "model.npz")

    run("whole")
    expected, named = contents(tmp_path / "whole"), set()
    for size in range(0, max(map(len, expected.values())), 150):
        with files_limited_to(size), pytest.raises(FileError, match=r"cannot be written \(File too large\)") as error:
            run(f"cut {size}")
        named.add(str(error.value).partition(": ")[0].rpartition(SHORT.name)[2])
        assert not list((tmp_path / f"cut {size}").glob(".*"))
        run(f"cut {size}")
        assert contents(tmp_path / f"cut {size}") == expected
    assert named == {".jsonl.lock", ".toml", ".jsonl", ".safetensors"}


def test_a_full_disk_ends_a_command_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few = ("--rounds", "3", "--epochs", "1", "--engine", "reference", "--quiet")
    options = {"--resume": "the run resumes where it was", "--save=model.npz": "has the rounds until now"}
    for option, advice in options.items():
        with files_limited_to(5_000 if option == "--resume" else 3_000):
            done = call("run", *few, option)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert (
            "cannot be written (File too large). When it can be written, start the same command again:" in done.stderr
        )
        assert done.stderr.endswith(f"{advice}\n")
        assert done.stderr.count("\n") == 1


def test_a_full_disk_does_not_count_as_divergence(tmp_path: Path) -> None:
    with files_limited_to(700), pytest.raises(FileError, match="cannot be written"):
        runner.run_until_error(fc.Experiment(rounds=5, epochs=(1, 1), engine="reference"), tmp_path)
    assert not list(tmp_path.glob("*.error"))


@pytest.mark.parametrize("damage", ["deleted", "a line that is not JSON", "a round is missing"])
def test_records_that_a_run_cannot_resume_from_are_named_with_the_way_out(tmp_path: Path, damage: str) -> None:
    experiment = fc.Experiment(rounds=3, algorithm="fedavg", engine="reference")
    runner.run(experiment, tmp_path, resume=True)
    path = tmp_path / f"{experiment.name}.jsonl"
    lines = path.read_text().splitlines()
    if damage == "deleted":
        path.unlink()
    else:
        lines[1:2] = ["{"] if damage.endswith("JSON") else []
        path.write_text("\n".join(lines) + "\n")
    with pytest.raises(FedcontextError, match=r"cannot resume after round 3: .*delete the run's checkpoint"):
        runner.run(experiment, tmp_path, resume=True)


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([fc.RoundRecord(number=0)], "rounds count from 1 and go up: got number 0 after 0"),
        ([fc.RoundRecord(number=1), fc.RoundRecord(number=1)], "got number 1 after 1"),
        ([fc.RoundRecord(number="1")], "got number '1' after 0"),
        ([{"number": 1}], "records must be RoundRecord objects"),
        ([fc.RoundRecord(number=1), 3], "records must be RoundRecord objects, got 3"),
        (fc.RoundRecord(number=1), "records must be RoundRecord objects in a list or generator, got RoundRecord"),
        (None, "records must be RoundRecord objects in a list or generator, got None"),
        ([fc.RoundRecord(number=1, loss="a")], "the record of round 1: loss must be float | None, got 'a'"),
        ([fc.RoundRecord(number=1, excluded={"a": "late"})], "the record of round 1 is not a round's record"),
        ([fc.RoundRecord(number=1, loss=1j)], "numbers, text, lists and mappings only: Object of type complex"),
    ],
    ids=str,
)
def test_records_that_could_not_be_read_back_are_refused(tmp_path, records, reason):
    with pytest.raises(fc.FedcontextError, match=re.escape(reason)):
        fc.write_records(tmp_path / "new" / "run.jsonl", {"dataset": "hospitals"}, records)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("settings", [None, "mnist", {"seed": 1j}], ids=str)
def test_settings_that_could_not_be_read_back_are_refused(tmp_path, settings):
    with pytest.raises(fc.FedcontextError, match=r"settings must be an Experiment or a mapping|run files have numbers"):
        fc.write_records(tmp_path / "new" / "run.jsonl", settings, [fc.RoundRecord(number=1)])
    assert not list(tmp_path.iterdir())


def test_a_report_is_a_page_whose_name_says_so(tmp_path):
    fc.write_records(tmp_path / "run.jsonl", {"dataset": "hospitals"}, [fc.RoundRecord(number=1, loss=0.5)])
    with pytest.raises(fc.FedcontextError, match="a report is an HTML page"):
        write_report(str(tmp_path), tmp_path / "report.pdf")
    assert write_report(str(tmp_path), tmp_path / "report.html") == []


def test_a_missing_checkpoint_is_named_without_advice_to_delete_it(tmp_path):
    with pytest.raises(fc.FedcontextError, match=r"run.safetensors: no such checkpoint$"):
        checkpoint.load(tmp_path / "run.safetensors", like=np.zeros(2))
