"""A deployment for many rounds, in which SuperNodes and the server are killed at random moments and started again.

The federation of examples/deploy (a SuperLink with TLS, registered SuperNodes, all real processes) runs the app of
examples/flower-app with the default rule, records and a checkpoint. SIGKILL goes to SuperNodes, to the server app, and
to the SuperLink, without which the server app ends by itself. At the end no round may be missing, doubled or lost and
no file left over; the model is compared with that of a run that nobody disturbed.

    python benchmarks/soak.py --rounds 200 --nodes 8 --kills 5 --seed 0

`fast_flower` makes the rounds short; everything else is as in a deployment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import fast_flower
import numpy as np

import fedcontext as fc
from fedcontext import checkpoint

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples/deploy"), str(ROOT / "examples/flower-app"), str(ROOT / "tests/flower")]
from local_federation import APP, Federation, wait_until  # noqa: E402

FILES = {"run.jsonl", "run.safetensors", "run.safetensors.previous"}
SETTINGS = {"fraction-train": 0.5, "probes": "cohort", "fraction-evaluate": 0.0, "timeout": 20.0}
SETTINGS |= {"learning-rate": 0.05, "max-epochs": 5}
ABSENCE = (5, 40)  # seconds until a killed node is started again; Flower refuses it until its heartbeats expire
PATIENCE = 240  # seconds without a new round after which something hangs


class Soak:
    """A federation under kills: each comes at a seeded moment of a seeded round."""

    def __init__(self, at: Path, given: argparse.Namespace) -> None:
        self.local, self.rounds, self.nodes, self.files = Federation(at), given.rounds, given.nodes, at / "run"
        self.random, self.began = np.random.default_rng(given.seed), time.monotonic()
        self.until = self.began + 60 * given.minutes
        self.run: subprocess.Popen | None = None
        self.absent: dict[int, float] = {}  # killed nodes, and when they are started again
        self.kills = [*self._moments("node", given.node_kills), *self._moments("server", given.kills)]
        self.kills.sort()
        self.due: list[tuple[float, str]] = []  # kills of rounds that have begun, and when they come
        self.expected = set(FILES)
        self.told: Counter[str] = Counter()
        self.memory: list[tuple[int, float]] = []  # process and megabytes of the server app after each round
        self.files.mkdir()
        self.settings = {**SETTINGS, "seed": given.seed, "num-server-rounds": self.rounds, "min-nodes": self.nodes // 2}

    def _moments(self, what: str, kills: int) -> list[tuple[int, float, str]]:
        rounds = self.random.choice(np.arange(1, self.rounds - 1), kills, replace=kills > self.rounds - 2)
        return [(int(number), self.random.uniform(0, 8), what) for number in rounds]

    def start(self) -> None:
        """Start the process that forks client apps, the SuperLink and the nodes."""
        wait_until(fast_flower.prepare(self.local).exists, "client apps can be started")
        self.local.start_superlink()
        for k in range(self.nodes):
            self.local.register(self.local.make_key(f"node{k}"))
            self.local.start_supernode(k, self.nodes, self.local.at / f"node{k}")
        self.start_run()

    def start_run(self) -> None:
        files = {"records": self.files / "run.jsonl", "checkpoint": self.files / "run.safetensors"}
        self.run = self.local.start_run(**self.settings, **files)

    def tell(self, what: str, about: str = "") -> None:
        """Count an event and print it."""
        self.told[what] += 1
        self.say(f"{what} {about}")

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s, round {self.done()}: {what}", flush=True)

    def done(self) -> int:
        """Return the number of rounds in the records."""
        path = self.files / "run.jsonl"
        return max(path.read_bytes().count(b"\n") - 1, 0) if path.exists() else 0

    def last(self) -> None:
        """Kill and start processes until all rounds are done, or the time is up."""
        seen, since = 0, time.monotonic()
        while (done := self.done()) < self.rounds or self.run.poll() is None:
            now = time.monotonic()
            if done != seen:
                seen, since = done, now
                self.memory += [(pid, megabytes(pid)) for pid in self.server_apps()]
                if done % 10 == 0:
                    self.say(f"server app {self.memory[-1][1]:.0f} MB" if self.memory else "")
            if now > self.until:  # what was done counts
                self.rounds = self.settings["num-server-rounds"] = done
                self.expected |= {f"{name}.lock" for name in FILES}  # of a run that has not ended
                return
            if now - since > PATIENCE:
                raise RuntimeError(f"no round in {PATIENCE} s\n{self.local.log('run')[-3000:]}")
            while self.kills and done >= self.kills[0][0]:
                _, delay, what = self.kills.pop(0)
                self.due.append((now + delay, what))
            for moment, what in [*self.due]:
                if now >= moment:
                    self.due.remove((moment, what))
                    self.kill(what)
            self.revive(now)
            time.sleep(0.1)

    def kill(self, what: str) -> None:
        """Kill a random node, the server app, or the SuperLink, without which the server app ends too."""
        if what == "node":
            present = [k for k in self.local.supernodes if k not in self.absent] or [0]
            victim = int(self.random.choice(present))
            self.local.stop(self.local.supernodes[victim], signal.SIGKILL)
            self.absent[victim] = time.monotonic() + self.random.uniform(*ABSENCE)
            self.tell("SuperNode killed", f"node {victim}")
            return
        if self.random.random() < 0.5 and (apps := self.server_apps()):
            self.tell("server app killed")
            for pid in apps:
                os.kill(pid, signal.SIGKILL)
        else:
            self.tell("SuperLink killed")
            self.local.stop(self.local.superlink, signal.SIGKILL)
            self.local.start_superlink()
        self.local.stop(self.run)
        self.start_run()

    def revive(self, now: float) -> None:
        """Start killed nodes when it is time, and at once what ended by itself."""
        for k, node in list(self.local.supernodes.items()):
            if node.poll() is None or now < self.absent.get(k, 0):
                continue
            if k in self.absent:
                del self.absent[k]
                self.local.start_supernode(k, self.nodes, self.local.at / f"node{k}")
            else:
                refused = "Failed to activate" in self.local.log(f"supernode-node{k}")[-1500:]
                self.tell("SuperNode refused by Flower" if refused else "SuperNode ended by itself", f"node {k}")
                self.absent[k] = now + 10
        if self.run.poll() is not None and self.done() < self.rounds:
            self.tell("run ended by itself", self.local.log("run")[-1500:])
            self.start_run()

    def server_apps(self) -> list[int]:
        """Return the processes of the server app."""
        found, address = [], f"127.0.0.1:{self.local.port}"
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                command = path.read_text().split("\0")
                if address in command and any(word.endswith("flwr-serverapp") for word in command):
                    found.append(int(path.parent.name))
        return found


def megabytes(pid: int) -> float:
    """Return the resident memory of a process."""
    try:
        return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024
    except (OSError, IndexError):  # it has ended
        return float("nan")


def undisturbed(soak: Soak, at: Path) -> Any:
    """Return the model of the same app and settings on a grid in memory, with nobody killed."""
    from fedcontext_app import server_app, task
    from flower_grid import MemoryGrid
    from flwr.app import Context, RecordDict

    config = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= soak.settings | {"checkpoint": str(at / "undisturbed.safetensors")}
    app = fc.flower.numpy_client(task.train, task.gradient, task.evaluate)
    server_app.app(MemoryGrid(app, range(soak.nodes), config), Context(1, 1, {}, RecordDict(), config))
    return model(at / "undisturbed.safetensors")


def model(path: Path) -> Any:
    return checkpoint.load(path, {"softmax": np.zeros((61, 10), np.float32)}).params["softmax"]


def loss_and_accuracy(params: Any, nodes: int) -> list[float]:
    """Return the loss and accuracy of the nodes' data, weighted by samples."""
    from fedcontext_app.task import SoftmaxReference, subset

    data = fc.load_dataset("synthetic-1-1")
    each = [SoftmaxReference(subset(data, k)).evaluate(params) for k in range(nodes)]
    return [round(float(x), 4) for x in np.average(each, axis=0, weights=data.train.sizes[:nodes])]


def growth(memory: list[tuple[int, float]]) -> float:
    """Return the largest growth of a server app from its third round to its last, in megabytes."""
    lives = {pid: [size for other, size in memory if other == pid and size == size][2:] for pid, _ in memory}
    return round(max((sizes[-1] - sizes[0] for sizes in lives.values() if sizes), default=0.0), 1)


def results(soak: Soak) -> dict[str, Any]:
    """Return the figures of a run that has ended."""
    records = fc.read_run(soak.files / "run.jsonl")[1]
    numbers, seconds = [record.number for record in records], [record.seconds for record in records]
    excluded = Counter(reason for record in records for reason in record.excluded.values())
    with contextlib.redirect_stderr(None):
        reference = undisturbed(soak, soak.local.at)
    return {
        "rounds": len(numbers),
        "missing or doubled": [number for number in range(1, soak.rounds + 1) if numbers.count(number) != 1],
        "lost": [record.number for record in records if record.lost],
        "events": dict(soak.told),
        "devices excluded": dict(excluded),
        "loss and accuracy": loss_and_accuracy(model(soak.files / "run.safetensors"), soak.nodes),
        "undisturbed": loss_and_accuracy(reference, soak.nodes),
        "server app: MB, and growth": [round(np.nanmax([x for _, x in soak.memory])), growth(soak.memory)],
        "files left over": sorted({path.name for path in soak.files.iterdir()} - soak.expected),
        "seconds a round: median, longest": [round(float(np.median(seconds)), 1), round(max(seconds), 1)],
        "minutes": round((time.monotonic() - soak.began) / 60, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--kills", type=int, default=5, help="kills of the server")
    parser.add_argument("--node-kills", type=int, default=12, help="kills of SuperNodes")
    parser.add_argument("--minutes", type=float, default=60, help="end after so long, with the rounds done by then")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="12 rounds, 4 nodes, 1 server kill, 2 node kills")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.nodes, given.kills, given.node_kills = 12, 4, 1, 2
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), given)
        try:
            soak.start()
            soak.last()
        finally:
            soak.local.stop_all()
        print(json.dumps(found := results(soak), indent=1))
    bad = [name for name in ("missing or doubled", "lost", "files left over") if found[name]]
    sys.exit(f"not as it should be: {', '.join(bad)}" if bad or found["rounds"] != soak.rounds else 0)


if __name__ == "__main__":
    main()
