"""Kills runs at random moments, and inside the saves of large checkpoints, and starts them again.

Each run must end with the files of a run that nobody killed, to the bit, and with no other file beside them.

    python benchmarks/kills.py --kills 80 --inside 20 --megabytes 100
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import fedcontext as fc
from fedcontext.runner import run

DEVICES = 6
SIMULATED = fc.Experiment("kills", "fedavg-memory", engine="reference", rounds=150, epochs=(1, 2), devices_per_round=3)
LARGE = fc.Experiment("kills", "fedavg", engine="reference", rounds=12, epochs=(1, 1), devices_per_round=2)
PATIENCE = 600  # seconds until a run must have started
DIFFERENT = "files that differ or are left over"


class Drift:
    """An engine whose model is as large as asked, and whose devices move it by a number each."""

    buffers = ()

    def __init__(self, megabytes: float) -> None:
        self.size = int(megabytes * 250_000)

    def initial_params(self) -> Any:
        return np.zeros(self.size, np.float32)

    def train(self, params: Any, work: Any) -> list[Any]:
        return [np.full_like(params, np.sin(work.number * DEVICES + device)) for device in work.devices]

    def evaluate(self, params: Any) -> tuple[float, float]:
        return float(params[-1]), 0.0


def simulate(out: Path, megabytes: float) -> None:
    """Run, or resume, what is killed: a small simulation, or one with a model of so many megabytes."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 120)
    features = random.standard_normal((120, 5)) + np.eye(3, 5)[labels]
    data = fc.federate(features, labels, np.split(np.arange(120), DEVICES), name="kills")
    if megabytes:
        run(LARGE, out, data=data, engine=Drift(megabytes), resume=True)
    else:
        run(SIMULATED, out, data=data, resume=True)


def start(out: Path, megabytes: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--resume", str(out), "--megabytes", str(megabytes)])


def kill_once(out: Path, megabytes: float, wait: float, rounds: int) -> bool:
    """Start a run and kill it ``wait`` seconds after it holds its files; a large run after a save of a later round began.

    Return whether that was in time: before its end, and in a large run inside the save.
    """
    left, lines, until = saves(out), count(out), time.monotonic() + PATIENCE
    process = start(out, megabytes)

    def began() -> bool:
        return saves(out) > left and count(out) >= lines + rounds if megabytes else holder(out) == process.pid

    try:
        while process.poll() is None and not began() and time.monotonic() < until:
            time.sleep(0.0005)
        time.sleep(wait)
    finally:
        process.kill()
    return process.wait() != 0 and (not megabytes or saves(out) > left)


def saves(out: Path) -> int:
    """Return when the save that is under way, or was interrupted, began to write; 0 if there is none."""
    try:
        return max((path.stat().st_mtime_ns for path in out.glob(".*.safetensors.part")), default=0)
    except FileNotFoundError:  # renamed meanwhile
        return 0


def count(out: Path) -> int:
    """Return the number of rounds in the records, and one."""
    return sum(path.read_bytes().count(b"\n") for path in out.glob("*.jsonl"))


def holder(out: Path) -> int:
    """Return the process that holds, or held, the files of the run."""
    try:
        return max((int(path.read_text() or 0) for path in out.glob("*.lock")), default=0)
    except FileNotFoundError:
        return 0


def differences(whole: Path, cut: Path) -> list[str]:
    """Return the files that are in one folder alone, or not the same in both."""
    names = {path.name for folder in (whole, cut) for path in folder.iterdir()}
    pairs = {name: (whole / name, cut / name) for name in sorted(names)}
    return [
        name
        for name, (one, other) in pairs.items()
        if not (one.exists() and other.exists() and one.read_bytes() == other.read_bytes())
    ]


def campaign(folder: Path, kills: int, megabytes: float, longest: float, seed: int = 0) -> dict[str, Any]:
    """Kill runs so many times, each up to ``longest`` seconds after its sign, and compare every finished one."""
    random, whole, cut = np.random.default_rng(seed), folder / "whole", folder / "cut"
    assert start(whole, megabytes).wait() == 0
    killed, runs, wrong, rounds = 0, 0, [], []
    while killed < kills:
        while killed < kills and kill_once(cut, megabytes, random.uniform(0, longest), random.integers(1, 6)):
            killed, rounds = killed + 1, [*rounds, count(cut) - 1]
        assert start(cut, megabytes).wait() == 0
        runs, wrong = runs + 1, wrong + differences(whole, cut)
        shutil.rmtree(cut)
    shutil.rmtree(whole)
    return {"kills": killed, "after rounds": rounds, "runs": runs, "megabytes": megabytes, DIFFERENT: wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=80, help="kills at random moments of a small run")
    parser.add_argument("--inside", type=int, default=20, help="kills inside the save of a large checkpoint")
    parser.add_argument("--megabytes", type=float, default=100, help="size of the large model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="the run itself, in a process of its own")
    given = parser.parse_args()
    if given.resume:
        simulate(given.resume, given.megabytes)
        return
    with tempfile.TemporaryDirectory() as folder:
        for kills, megabytes, longest in (
            (given.kills, 0, 0.5),
            (given.inside, given.megabytes, given.megabytes / 500),
        ):
            print(json.dumps(campaign(Path(folder), kills, megabytes, longest, given.seed)), flush=True)


if __name__ == "__main__":
    main()
