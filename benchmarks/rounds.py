"""Rows (a) and (b): rounds of local training in fedcontext and its peers, interleaved, on exactly the same steps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedcontext.datasets import load_dataset
from fedcontext.engines.softmax import SoftmaxReference
from fedcontext.plan import orders, plan_round

HERE = Path(__file__).parent
EPOCHS = {"a": (1, 1), "b": (1, 20)}
OURS = "fedcontext, numba"
SIDE = 1024  # of the square matrices whose product measures the machine's peak


@dataclass(frozen=True)
class Peer:
    """How to run one peer: its script and arguments, and the packages of its virtual environment (none: this one)."""

    script: str
    arguments: tuple[str, ...] = ()
    environment: str = ""
    packages: tuple[tuple[str, ...], ...] = ()  # groups, installed in this order


PEERS = {
    OURS: Peer("fedcontext_rounds.py", ("numba",)),
    "fedcontext, numba, through aggregate": Peer("fedcontext_rounds.py", ("numba+aggregate",)),
    "fedcontext, reference (NumPy)": Peer("fedcontext_rounds.py", ("reference",)),
    "FedJAX 0.0.17": Peer(
        "fedjax_rounds.py",
        environment="fedjax",
        packages=(("fedjax==0.0.17", "jax==0.4.30", "jaxlib==0.4.30", "dm-haiku==0.0.12", "numpy<2"),),
    ),
    "plain PyTorch loop": Peer("torch_rounds.py", environment="pfl", packages=(("torch==2.13.0",), ("pfl==0.6.0",))),
    "pfl-research 0.6.0": Peer("pfl_rounds.py", environment="pfl", packages=(("torch==2.13.0",), ("pfl==0.6.0",))),
    "Flower 1.41, Ray": Peer(
        "flower_rounds.py",
        environment="flower",
        packages=(("torch==2.13.0", "flwr[simulation]>=1.41,<1.42"),),
    ),
}


def write_work(folder: Path, rounds: int) -> None:
    """Write the data and the plans that all peers follow."""
    folder.mkdir(parents=True, exist_ok=True)
    data = load_dataset("mnist")
    for name in ("features", "labels", "offsets"):
        np.save(folder / f"{name}.npy", getattr(data.train, name))
    for row, epochs in EPOCHS.items():
        plans = [plan_round(0, number + 1, data.population, epochs=epochs) for number in range(rounds)]
        drawn = [
            orders(0, plan.number, int(device), int(data.train.sizes[device]), int(count)).ravel()
            for plan in plans
            for device, count in zip(plan.devices, plan.epochs, strict=True)
        ]
        np.save(folder / f"{row}-devices.npy", np.stack([plan.devices for plan in plans]))
        np.save(folder / f"{row}-epochs.npy", np.stack([plan.epochs for plan in plans]))
        np.save(folder / f"{row}-orders.npy", np.concatenate(drawn))


def python_of(peer: Peer, home: Path) -> str:
    """Return the interpreter of the peer's virtual environment, created at the first call."""
    if not peer.environment:
        return sys.executable
    folder = home / peer.environment
    if not (folder / "done").exists():
        print(f"installing {peer.environment} into a virtual environment ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for group in peer.packages:
            subprocess.run([str(folder / "bin/pip"), "install", "--quiet", *group], check=True)
        (folder / "done").touch()
    return str(folder / "bin/python")


def log_of(name: str, home: Path) -> Path:
    """Return the log file for the output of all runs of a peer."""
    return home / "logs" / f"{re.sub('[^a-z0-9.]+', '-', name.lower())}.log"


def run_peer(name: str, row: str, rounds: int, home: Path) -> dict[str, object] | None:
    """Return the measurements and final params of one run of a peer; None if it failed."""
    peer, out = PEERS[name], home / "result.json"
    out.unlink(missing_ok=True)
    environment = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(home / "flwr")}
    environment["PYTHONPATH"] = str(HERE / "peers")
    command = [python_of(peer, home), str(HERE / "peers" / peer.script), str(home / "work"), row, str(rounds), str(out)]
    log_of(name, home).parent.mkdir(parents=True, exist_ok=True)
    with log_of(name, home).open("a") as log:
        print(f"row {row}, {rounds} rounds", file=log, flush=True)
        done = subprocess.run([*command, *peer.arguments], env={**os.environ, **environment}, stdout=log, stderr=log)
    if done.returncode or not out.exists():
        print(f"{name}, row {row}: failed with status {done.returncode}, see {log_of(name, home)}", file=sys.stderr)
        return None
    return {**json.loads(out.read_text()), "params": np.load(out.with_suffix(".npy"))}


def measure(home: Path, rounds: int, repeats: int, names: list[str]) -> dict[str, object]:
    """Return the figures of each row and peer, and the machine's limit. Every repeat runs all peers, one after another."""
    write_work(home / "work", rounds)
    for name in names:
        log_of(name, home).unlink(missing_ok=True)
    runs: dict[tuple[str, str], list[dict[str, object]]] = {}
    highest_peak = 0.0
    for repeat in range(repeats):
        highest_peak = max(highest_peak, peak())
        for row in EPOCHS:
            for name in names:
                print(f"repeat {repeat + 1} of {repeats}, row {row}: {name}", file=sys.stderr)
                if result := run_peer(name, row, rounds, home):
                    runs.setdefault((row, name), []).append(result)
    limits = {row: 1000 * multiply_adds(home / "work", row) / highest_peak for row in EPOCHS}
    cells = {row: {name: summary(runs[row, name]) for name in names if (row, name) in runs} for row in EPOCHS}
    return {"peak": highest_peak, "limit_ms": limits, **cells}


def multiply_adds(folder: Path, row: str) -> float:
    """Return the multiply-adds of a round's training: n d C for the scores and as many for the gradient."""
    sizes, features = np.diff(np.load(folder / "offsets.npy")), np.load(folder / "features.npy", mmap_mode="r")
    devices, epochs = (np.load(folder / f"{row}-{name}.npy") for name in ("devices", "epochs"))
    passes = (sizes[devices] * epochs).sum(axis=1).mean()  # over a sample, per round
    return float(2 * passes * features.shape[1] * (np.load(folder / "labels.npy").max() + 1))


def peak(side: int = SIDE, tries: int = 20) -> float:
    """Return the float32 multiply-adds a second that NumPy's matrix product reaches on all cores, best of ``tries``."""
    left, right, out = (np.ones((side, side), np.float32) for _ in range(3))
    times = []
    for _ in range(tries + 1):  # the first starts the threads
        start = time.perf_counter()
        np.matmul(left, right, out=out)
        times.append(time.perf_counter() - start)
    return side**3 / min(times[1:])


def summary(runs: list[dict[str, object]]) -> dict[str, float]:
    """Return the figures of one table cell; loss and accuracy are computed here from the final params."""
    loss, accuracy = SoftmaxReference(load_dataset("mnist")).evaluate(runs[-1]["params"])
    means = [float(np.mean(run["ms"])) for run in runs]
    return {
        "ms_per_round": float(np.median([run["ms"] for run in runs], axis=0).mean()),
        "lowest": min(means),
        "highest": max(means),
        "start_s": float(np.median([run["start_s"] for run in runs])),
        "peak_mb": float(np.median([run["peak_mb"] for run in runs])),
        "loss": loss,
        "accuracy": accuracy,
    }


def unequal(cells: dict[str, dict[str, float]]) -> list[str]:
    """Return the peers whose loss differs by more than 1 %, or whose accuracy by half a point, from fedcontext's."""
    ours = cells[OURS]
    return [
        name
        for name, cell in cells.items()
        if abs(cell["loss"] - ours["loss"]) > 0.01 * ours["loss"] or abs(cell["accuracy"] - ours["accuracy"]) > 0.005
    ]
