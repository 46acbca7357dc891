"""Real processes: Flower's simulation, and a SuperLink with TLS and registered nodes that is killed and comes back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import fast_flower
import numpy as np
import pytest
from fedcontext_app import server_app, task
from flower_grid import MemoryGrid
from flwr.app import Context, RecordDict
from local_federation import APP, Federation, listens, running, wait_until

import fedcontext as fc
from fedcontext import checkpoint
from fedcontext.flower import numpy_client

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("federation")]  # many processes: never two at a time
SETTINGS = {"num_server_rounds": 2, "min_nodes": 3, "fraction_train": 1.0, "learning_rate": 0.05, "max_epochs": 3}
LIMIT = 240  # seconds for a run, many times what it takes


def model(path: Path) -> np.ndarray:
    return checkpoint.load(path, {"softmax": np.zeros((61, 10), np.float32)}).params["softmax"]


def in_this_process(at: Path, **settings: object) -> tuple[np.ndarray, list[fc.RoundRecord]]:
    """Return the model and records of the same app on a grid in memory, never interrupted."""
    config = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    files = {"records": str(at / "here.jsonl"), "checkpoint": str(at / "here.st")}
    config |= files | {name.replace("_", "-"): value for name, value in settings.items()}
    grid = MemoryGrid(numpy_client(task.train, task.gradient, task.evaluate), range(int(config["min-nodes"])), config)
    server_app.app(grid, Context(1, 1, {}, RecordDict(), config))
    return model(at / "here.st"), fc.read_run(at / "here.jsonl")[1]


class FastFederation(Federation):
    """Client apps of the first two nodes are forked from a process that has imported Flower, which saves most of the time.

    All others start as in a deployment, in the process group of their SuperNode.
    """

    def start_superlink(self) -> None:
        if not hasattr(self, "forking"):
            deployed = self.env["PATH"]
            wait_until(fast_flower.prepare(self).exists, "client apps can be forked")
            self.forking, self.env["PATH"] = self.env["PATH"], deployed
        super().start_superlink()

    def start_supernode(self, partition: int, partitions: int, key: Path) -> subprocess.Popen:
        with mock.patch.dict(self.env, {"PATH": self.forking} if partition < 2 else {}):
            return super().start_supernode(partition, partitions, key)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    at = tmp_path_factory.mktemp("federation")
    with running(FastFederation(at), 3) as local:
        yield local
    shutil.rmtree(at, ignore_errors=True)  # private keys


def finish(local: Federation, run: subprocess.Popen) -> None:
    assert run.wait(LIMIT) == 0, local.log("run")


def test_two_rounds_over_tls_with_registered_nodes_and_a_stranger_refused(local: Federation, tmp_path: Path) -> None:
    run = local.start_run(**SETTINGS, records=tmp_path / "run.jsonl", checkpoint=tmp_path / "run.st")
    stranger = local.start_supernode(9, 10, local.make_key("stranger"))
    assert stranger.wait(LIMIT) != 0
    assert "412" in local.log("supernode-stranger") or "305" in local.log("supernode-stranger")
    finish(local, run)
    records = fc.read_run(tmp_path / "run.jsonl")[1]
    expected_model, expected = in_this_process(tmp_path, **SETTINGS)
    assert [record.number for record in records] == [1, 2]
    assert all(sorted(record.devices) == [0, 1, 2] and not record.excluded for record in records)
    assert [(r.loss, r.accuracy, r.weights) for r in records] == [(r.loss, r.accuracy, r.weights) for r in expected]
    assert records[-1].accuracy > 0.4
    assert records[-1].loss < records[0].loss
    assert model(tmp_path / "run.st").tobytes() == expected_model.tobytes()


def test_a_killed_server_started_again_ends_with_the_identical_model(local: Federation, tmp_path: Path) -> None:
    settings = {**SETTINGS, "fraction_evaluate": 0.0}
    files = {"records": tmp_path / "run.jsonl", "checkpoint": tmp_path / "run.st"}
    run = local.start_run(**settings, **files)
    wait_until((tmp_path / "run.st").exists, "the first round is done", LIMIT, alive=run)
    assert local.superlink is not None
    local.stop(local.superlink, signal.SIGKILL)  # the SuperLink, and the server app that it runs
    local.stop(run)
    assert len(fc.read_run(tmp_path / "run.jsonl")[1]) == 1
    local.start_superlink()
    finish(local, local.start_run(**settings, **files))
    expected, _ = in_this_process(tmp_path, **settings)
    assert model(tmp_path / "run.st").tobytes() == expected.tobytes()
    assert [record.number for record in fc.read_run(tmp_path / "run.jsonl")[1]] == [1, 2]


def test_a_supernode_killed_in_mid_round_is_named_and_the_round_completes(local: Federation, tmp_path: Path) -> None:
    settings = {**SETTINGS, "fraction_evaluate": 0.0, "timeout": 90.0}
    run = local.start_run(**settings, records=tmp_path / "run.jsonl", checkpoint=tmp_path / "run.st")
    wait_until((tmp_path / "run.st").exists, "the first round is done", LIMIT, alive=run)
    victim = local.supernodes[2]
    try:
        wait_until(lambda: works(victim), "device 2 has started to work on the second round", LIMIT, alive=run)
        local.stop(victim, signal.SIGKILL)
        finish(local, run)
    finally:
        local.start_supernode(2, 3, local.at / "node2")
    second = fc.read_run(tmp_path / "run.jsonl")[1][-1]
    assert (second.number, sorted(second.devices), second.lost) == (2, [0, 1], False)
    assert second.excluded in ({2: "no reply before the timeout"}, {2: "node unavailable"})


def works(node: subprocess.Popen) -> bool:
    """Return whether a SuperNode's client app runs."""
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.getpgid(int(line.parent.name)) == node.pid and b"flwr-clientapp" in line.read_bytes():
                return True
        except OSError:
            continue
    return False


def test_flowers_simulation_agrees_with_the_simulator_and_repeats_itself_to_the_bit(tmp_path: Path) -> None:
    ray = Federation(tmp_path)
    ray.env |= fast_flower.short_intervals(tmp_path / "fast")
    (tmp_path / "home" / "config.toml").write_text(
        f'[superlink.local]\naddress = "127.0.0.1:{ray.port}"\ninsecure = true\n'
    )
    options = ["--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(ray.port), "--database", "sim.db"]
    size = ["--federation-config", "num-supernodes=30 client-resources-num-cpus=1 init-args-num-cpus=2"]
    config = (
        "num-server-rounds=2 fraction-evaluate=0.0 max-epochs=2 learning-rate=0.05 seed=7 min-nodes=30 gradient-bits=32"
    )
    try:
        link = ray.start("superlink", "flower-superlink", *options, "--disable-runtime-dependency-installation")
        wait_until(lambda: listens(ray.port), "the SuperLink listens", alive=link)
        for name in ("first", "second"):
            file = f'checkpoint="{tmp_path / name}"'
            finish(ray, ray.start("run", "flwr", "run", str(APP), "local", "--stream", "-c", f"{config} {file}", *size))
    finally:
        ray.stop_all()
    settings = {
        "rounds": 2,
        "seed": 7,
        "epochs": (1, 2),
        "learning_rate": 0.05,
        "algorithm": "fedavg-memory",
        "probes": 20,
        "gradient_bits": 32,
        "engine": "reference",
    }
    simulator = fc.prepare(fc.Experiment(**settings))
    expected = [state.params for state, _ in simulator.run()][-1]
    assert model(tmp_path / "first").tobytes() == model(tmp_path / "second").tobytes()
    np.testing.assert_allclose(model(tmp_path / "first"), expected, rtol=2e-4, atol=2e-6)
