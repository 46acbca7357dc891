"""A killed run that is started again ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import load_file

import fedcontext as fc
from fedcontext import checkpoint, runner
from fedcontext.arrays.tree import leaves, to_numpy
from fedcontext.datasets import FederatedData, federate
from fedcontext.files import storage
from fedcontext.files.model_file import save_params

shapes = st.sampled_from([(), (3,), (2, 2), (0,)])
leaf = arrays(st.sampled_from([np.float32, np.float64, np.int64]), shapes)
finite = leaf.map(np.nan_to_num)
memory = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5) | leaf,
    lambda child: (
        st.lists(child, max_size=3) | st.tuples(child, child) | st.dictionaries(st.text(max_size=3), child, max_size=3)
    ),
    max_leaves=8,
)


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if type(one) in (list, tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other and type(one) is type(other)


def test_a_path_can_be_a_string(tmp_path):
    path = str(tmp_path / "run.safetensors")
    checkpoint.save(path, np.ones(2), None, {"number": 1})
    assert checkpoint.load(path, np.zeros(2)).facts == {"number": 1}


@given(params=st.dictionaries(st.text(max_size=4), finite, min_size=1, max_size=3), rule=memory)
def test_what_is_loaded_is_what_was_saved_to_the_bit(tmp_path_factory, params: dict, rule: object) -> None:
    path = tmp_path_factory.mktemp("saved") / "run.safetensors"
    checkpoint.save(path, params, rule, {"number": 3, "loss": 0.1})
    found = checkpoint.load(path, params)
    assert same(found.params, params)
    assert same(found.rule, rule)
    assert found.facts == {"number": 3, "loss": 0.1}
    assert [file.name for file in path.parent.iterdir()] == ["run.safetensors"]


def test_params_come_back_in_the_library_they_came_from(tmp_path: Path) -> None:
    params = [torch.arange(3.0), {"w": torch.ones(2, 2, dtype=torch.float64)}]
    checkpoint.save(tmp_path / "run", params, None, {})
    found = checkpoint.load(tmp_path / "run", params).params
    assert torch.equal(found[0], params[0])
    assert found[1]["w"].dtype == torch.float64


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    checkpoint.save(path, np.ones(2), None, {"number": 1})
    with pytest.raises(fc.FedcontextError, match="state must consist of numbers, strings, NumPy arrays"):
        checkpoint.save(path, np.zeros(2), object(), {"number": 2})
    assert checkpoint.load(path, np.zeros(2)).facts == {"number": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("facts", [None, {"a": 1j}, {(1, 2): 3}], ids=str)
def test_facts_that_json_does_not_have_are_refused(tmp_path: Path, facts: object) -> None:
    with pytest.raises(fc.FedcontextError, match="facts must be a mapping of JSON values"):
        checkpoint.save(tmp_path / "run", np.ones(2), None, facts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"\x02\x00\x00\x00\x00\x00\x00\x00{}", b"pickle"])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run").write_bytes(content)
    with pytest.raises(fc.FedcontextError, match="not a fedcontext checkpoint"):
        checkpoint.load(tmp_path / "run", np.zeros(2))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "run", {"w": np.zeros(2), "b": np.zeros(1)}, None, {})
    narrow = {"w": np.zeros(2, np.float32), "b": np.zeros(1)}
    for like in ({"w": np.zeros(3), "b": np.zeros(1)}, narrow, {"v": np.zeros(2)}, {"w": np.zeros(2)}):
        with pytest.raises(fc.FedcontextError, match=r"leaf '[wv]' must be float|different model"):
            checkpoint.load(tmp_path / "run", like)


def test_memory_with_names_that_look_alike_comes_back(tmp_path: Path) -> None:
    rule = {"a/b": np.zeros(1), "a": {"b": np.ones(1)}}
    checkpoint.save(tmp_path / "run", np.zeros(2), rule, {})
    assert same(checkpoint.load(tmp_path / "run", np.zeros(2)).rule, rule)


def test_a_leaf_that_numpy_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(fc.FedcontextError, match=r"leaf 'w' must be real numbers to be saved, got torch\.complex64"):
        checkpoint.save(tmp_path / "run", {"w": torch.zeros(2, dtype=torch.complex64)}, None, {})
    with pytest.raises(fc.FedcontextError, match=r"leaf 'w' has a dtype that NumPy does not have: torch\.float8_e5m2"):
        checkpoint.save(tmp_path / "run", {"w": torch.zeros(2, dtype=torch.float8_e5m2)}, None, {})


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_bfloat16_comes_back_to_the_bit(tmp_path: Path, library: str) -> None:
    numbers = np.random.default_rng(0).standard_normal(50)
    if library == "torch":
        params = {"w": torch.from_numpy(numbers).bfloat16()}
    else:
        params = {"w": pytest.importorskip("jax").numpy.asarray(numbers, "bfloat16")}
    checkpoint.save(tmp_path / "run", params, {"m": params["w"]}, {})
    saved = checkpoint.load(tmp_path / "run", params)
    for found in (saved.params["w"], saved.rule["m"]):
        assert (type(found), found.dtype) == (type(params["w"]), params["w"].dtype)
        assert bool((found == params["w"]).all())
    for suffix in (".npz", ".safetensors"):
        save_params(tmp_path / f"model{suffix}", params)
        load = np.load if suffix == ".npz" else load_file
        np.testing.assert_array_equal(load(tmp_path / f"model{suffix}")["w"], to_numpy(params["w"]))


def test_what_a_killed_writer_left_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / ".run.part").write_bytes(b"half a checkpoint")
    checkpoint.save(tmp_path / "run", np.ones(2), None, {})
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_the_records_are_on_the_disk_before_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, part = [], tmp_path / ".run.part"
    monkeypatch.setattr(
        os, "fsync", lambda handle: synced.append((Path(f"/proc/self/fd/{handle}").resolve().name, part.exists()))
    )
    (tmp_path / "run.jsonl").touch()
    checkpoint.save(tmp_path / "run", np.ones(2), None, {}, after=tmp_path / "run.jsonl")
    assert synced == [("run.jsonl", False), (".run.part", True), (tmp_path.name, False)]


HOLD = "import sys, time; from pathlib import Path; from fedcontext.files import storage\n"
HOLD += "with storage.lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


def test_a_checkpoint_held_by_another_process_is_refused_until_that_process_ends(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "run"], stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        with (
            pytest.raises(fc.FedcontextError, match=rf"run: process {holder.pid} is already running"),
            storage.lock(tmp_path / "run"),
        ):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with storage.lock(tmp_path / "run"):
        assert (tmp_path / "run.lock").read_text() == str(os.getpid())
    assert not (tmp_path / "run.lock").exists()


def test_a_run_waits_for_a_process_that_is_ending(tmp_path: Path) -> None:
    ending = HOLD.replace("time.sleep(60)", "time.sleep(0.5)")
    with subprocess.Popen([sys.executable, "-c", ending, tmp_path / "run"], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with storage.lock(tmp_path / "run", patience=60):
            assert (tmp_path / "run.lock").read_text() == str(os.getpid())


def test_without_posix_locks_the_process_id_in_the_file_is_the_lock(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    for _ in range(2):
        with (
            storage.lock(tmp_path / "run"),
            pytest.raises(fc.FedcontextError, match=rf"process {os.getpid()} is .* delete .*run.lock"),
            storage.lock(tmp_path / "run"),
        ):
            pass


@pytest.mark.parametrize("resume", [False, True])
def test_a_simulation_is_not_run_while_another_process_runs_it(tmp_path: Path, resume: bool) -> None:
    with (
        storage.lock(tmp_path / f"{EXPERIMENT.name}.jsonl"),
        pytest.raises(fc.FedcontextError, match="is already running on this file"),
    ):
        runner.run(EXPERIMENT, tmp_path, resume=resume)


EXPERIMENT = fc.Experiment(rounds=6, epochs=(1, 2), eval_every=2)


def files(path: Path, experiment: fc.Experiment = EXPERIMENT) -> tuple[list[fc.RoundRecord], bytes]:
    return fc.read_run(path / f"{experiment.name}.jsonl")[1], (path / f"{experiment.name}.safetensors").read_bytes()


@pytest.mark.parametrize("stop", range(1, 6))
def test_an_interrupted_simulation_goes_on_to_the_same_bits(tmp_path: Path, stop: int, caplog) -> None:
    class Killed(BaseException): ...

    def kill(experiment: fc.Experiment, record: fc.RoundRecord) -> None:
        if record.number == stop:  # its record is written, its checkpoint is not
            raise Killed

    runner.run(EXPERIMENT, tmp_path / "whole", resume=True)
    with pytest.raises(Killed):
        runner.run(EXPERIMENT, tmp_path / "cut", kill, resume=True)
    with (tmp_path / "cut" / f"{EXPERIMENT.name}.jsonl").open("a") as file:
        file.write('{"number": 99, "lo')  # and the next line was cut short
    seen = []
    records = runner.run(EXPERIMENT, tmp_path / "cut", lambda _, record: seen.append(record.number), resume=True)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert (f"continuing after round {stop - 1} of" in caplog.text) is (
        stop > 1
    )  # the first has no checkpoint before it
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert records == files(tmp_path / "whole")[0]


@pytest.mark.parametrize("settings", [{"engine": "reference"}, {"engine": "torch", "model": "softmax"}])
def test_every_engine_goes_on_to_the_same_bits(tmp_path: Path, settings: dict) -> None:
    simulation = fc.prepare(fc.Experiment(rounds=3, epochs=(1, 1), **settings))
    states = [state for state, _ in simulation.run()]
    checkpoint.save(tmp_path / "run", states[0].params, states[0].carried, {})
    found = checkpoint.load(tmp_path / "run", simulation.engine.initial_params())
    again = [state for state, _ in simulation.run(fc.State(1, found.params, loss=states[0].loss, **found.rule))]
    assert [state.number for state in again] == [2, 3]
    for one, other in zip(leaves(again[-1].params).values(), leaves(states[-1].params).values(), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_a_finished_simulation_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = runner.run(EXPERIMENT, tmp_path, resume=True)
    monkeypatch.setattr(fc.Simulation, "step", lambda *_: pytest.fail("no round is left to run"))
    assert runner.run(EXPERIMENT, tmp_path, resume=True) == first


@pytest.mark.parametrize("eval_every", [1, 2, 4])  # 4: the shorter run evaluates a round that the longer one does not
@pytest.mark.parametrize("stop", [3, 4])
def test_more_rounds_continue_after_those_of_a_shorter_run(tmp_path: Path, stop: int, eval_every: int) -> None:
    class Killed(BaseException): ...

    def kill(experiment: fc.Experiment, record: fc.RoundRecord) -> None:
        if record.number == stop:
            raise Killed

    long = replace(EXPERIMENT, eval_every=eval_every)
    runner.run(long, tmp_path / "whole", resume=True)
    short = replace(long, rounds=2)
    first = runner.run(short, tmp_path / "cut", resume=True)
    for on_round in (kill, lambda *_: None):  # also where it is killed before and after its own first checkpoint
        with suppress(Killed):
            runner.run(long, tmp_path / "cut", on_round, resume=True)
    assert files(tmp_path / "cut", long) == files(tmp_path / "whole", long)
    assert fc.read_run(tmp_path / "cut" / f"{short.name}.jsonl")[1] == first


def test_rounds_that_were_done_are_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    runner.run(replace(EXPERIMENT, rounds=2), tmp_path, resume=True)
    runner.run(replace(EXPERIMENT, rounds=3), tmp_path)  # a record without a checkpoint
    done, step = [], fc.Simulation.step
    monkeypatch.setattr(fc.Simulation, "step", lambda self, state: done.append(state.number + 1) or step(self, state))
    runner.run(EXPERIMENT, tmp_path, resume=True)
    assert done == [3, 4, 5, 6]
    assert "continuing after round 2 of" in caplog.text
    runner.run(replace(EXPERIMENT, rounds=5), tmp_path, resume=True)  # a longer run is of no use to a shorter one
    assert done == [3, 4, 5, 6, 3, 4, 5]


@pytest.mark.parametrize("change", [{"seed": 5}, {"batch_size": 7}])
def test_no_other_setting_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict) -> None:
    runner.run(replace(EXPERIMENT, rounds=2), tmp_path, resume=True)
    records = runner.run(replace(EXPERIMENT, **change), tmp_path, resume=True)
    assert records == runner.run(replace(EXPERIMENT, **change), tmp_path / "alone")


@pytest.mark.parametrize("rounds", [2, 6])
def test_records_without_a_checkpoint_are_named_where_a_run_starts_again(tmp_path: Path, rounds: int, caplog) -> None:
    short = replace(EXPERIMENT, rounds=rounds)
    runner.run(short, tmp_path)
    runner.run(EXPERIMENT, tmp_path, resume=True)
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path / short.name}.jsonl has no checkpoint")
    assert line.endswith("starting at round 1")


def own_data(label: int) -> FederatedData:
    labels = np.arange(20) % 2
    labels[0] = label
    return federate(np.eye(20), labels, [np.arange(10), np.arange(10, 20)], name="mine")


@pytest.mark.parametrize(
    "reason",
    ["data digest", "not a fedcontext checkpoint", "are not all in the file", "is already running", "it evaluated"],
)
def test_a_shorter_run_of_no_use_is_named_and_not_continued(tmp_path: Path, reason: str, caplog) -> None:
    every = 4 if reason == "it evaluated" else 1
    long = fc.Experiment("mine", "fedavg", rounds=4, devices_per_round=2, epochs=(1, 1), eval_every=every)
    short = replace(long, rounds=2)
    runner.run(short, tmp_path / "out", data=own_data(1 if reason == "data digest" else 0), resume=True)
    records = tmp_path / "out" / f"{short.name}.jsonl"
    if reason == "not a fedcontext checkpoint":
        for path in tmp_path.glob("out/*.safetensors*"):
            path.write_bytes(b"damaged")
    if reason == "are not all in the file":
        records.write_text("".join(line for line in records.open() if '"number": 1,' not in line))
    with storage.lock(records) if reason == "is already running" else nullcontext():
        made = runner.run(long, tmp_path / "out", data=own_data(0), resume=True)
    assert made == runner.run(long, tmp_path / "alone", data=own_data(0))
    assert any(line.startswith(f"{records} is not continued: ") and reason in line for line in caplog.messages)
    assert "has no checkpoint" not in caplog.text
    assert caplog.messages[-1] == f"starting at round 1 of {tmp_path / 'out' / long.name}.jsonl"
    assert "start anew" not in caplog.text
    assert "start again" not in caplog.text


def test_where_the_longest_run_is_of_no_use_the_next_is_continued(tmp_path: Path, caplog) -> None:
    for rounds in (2, 4):
        runner.run(replace(EXPERIMENT, rounds=rounds), tmp_path / "cut", resume=True)
    for path in tmp_path.glob(f"cut/{replace(EXPERIMENT, rounds=4).name}.safetensors*"):
        path.write_bytes(b"damaged")
    runner.run(EXPERIMENT, tmp_path / "cut", resume=True)
    runner.run(EXPERIMENT, tmp_path / "whole", resume=True)
    assert "continuing after round 2 of" in caplog.text
    assert "starting at round 1" not in caplog.text
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_records_that_are_gone_are_missed(tmp_path: Path) -> None:
    runner.run(EXPERIMENT, tmp_path, resume=True)
    (tmp_path / f"{EXPERIMENT.name}.jsonl").unlink()
    with pytest.raises(fc.FedcontextError, match="cannot resume after round 6: the file does not exist"):
        runner.run(EXPERIMENT, tmp_path, resume=True)


def test_cut_records_leave_no_scratch_file(tmp_path: Path) -> None:
    runner.run(EXPERIMENT, tmp_path, resume=True)
    (tmp_path / f".{EXPERIMENT.name}.jsonl.part").write_text("half a file")
    runner.run(EXPERIMENT, tmp_path, resume=True)
    assert not list(tmp_path.glob(".*"))


def test_without_resume_a_run_starts_anew_and_keeps_no_checkpoint(tmp_path: Path) -> None:
    runner.run(EXPERIMENT, tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".jsonl", ".toml"}


@pytest.mark.slow
def test_a_killed_command_started_again_ends_as_if_never_killed(tmp_path: Path) -> None:
    options = ["--rounds", "40", "--epochs", "1..3", "--resume", "--quiet", "--json", "--out"]
    command = [sys.executable, "-c", "from fedcontext.cli import main; main()", "run", *options]
    subprocess.run([*command, tmp_path / "whole"], check=True, capture_output=True)
    (whole,) = (tmp_path / "whole").glob("*.safetensors")
    killed = subprocess.Popen([*command, tmp_path / "cut"], stdout=subprocess.DEVNULL)
    cut = tmp_path / "cut" / whole.name
    try:
        until = time.monotonic() + 60
        while not cut.exists() and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
    assert 0 < checkpoint.load(cut, np.zeros((61, 10), np.float32)).facts["number"] < 40
    subprocess.run([*command, tmp_path / "cut"], check=True, capture_output=True)
    assert cut.read_bytes() == whole.read_bytes()
    assert cut.with_suffix(".jsonl").read_text() == whole.with_suffix(".jsonl").read_text()


CARRIED = ["fedavg-memory", "fedadam", "scaffold", "feddyn"]


@pytest.mark.parametrize("engine", ["reference", "numba", "torch"])
@pytest.mark.parametrize("algorithm", CARRIED)
def test_whatever_an_algorithm_carries_is_resumed_to_the_same_bits(tmp_path: Path, algorithm: str, engine: str) -> None:
    class Killed(BaseException): ...

    def kill(experiment: fc.Experiment, record: fc.RoundRecord) -> None:
        if record.number == 3:
            raise Killed

    experiment = fc.Experiment(algorithm=algorithm, engine=engine, rounds=5, epochs=(1, 2), probes=5)
    runner.run(experiment, tmp_path / "whole", resume=True)
    with pytest.raises(Killed):
        runner.run(experiment, tmp_path / "cut", kill, resume=True)
    runner.run(experiment, tmp_path / "cut", resume=True)
    for suffix in ("jsonl", "safetensors"):
        cut, whole = ((tmp_path / run / f"{experiment.name}.{suffix}").read_bytes() for run in ("cut", "whole"))
        assert cut == whole
