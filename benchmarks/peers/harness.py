"""The loop that every peer runs in: the same rounds, read from files and timed the same way. Needs NumPy alone.

A work folder holds features.npy, labels.npy, offsets.npy and, for each row of the table, devices, epochs and the order
in which each device visits its samples, so that all peers take exactly the same steps.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

STARTED = time.perf_counter()
RATE, BATCH, CLASSES = 0.03, 10, 10


class Work:
    """The rounds of one row: the devices that train, and their batches as rows of the data."""

    def __init__(self, folder, row, rounds):
        folder = Path(folder)
        self.features, self.labels, self.offsets = (
            np.load(folder / f"{name}.npy", mmap_mode="r" if name == "features" else None)
            for name in ("features", "labels", "offsets")
        )
        self.devices, self.epochs = np.load(folder / f"{row}-devices.npy"), np.load(folder / f"{row}-epochs.npy")
        self.orders = np.load(folder / f"{row}-orders.npy")
        self.rounds, self.sizes = rounds, np.diff(self.offsets)
        counts = self.epochs * self.sizes[self.devices]
        self.starts = np.concatenate([[0], np.cumsum(counts)])[:-1].reshape(counts.shape)

    def samples(self, number):
        """Return (K,) the sizes of a round's devices."""
        return self.sizes[self.devices[number]]

    def batches(self, number, place):
        """Return the batches of one device in one round, as rows of ``features``."""
        device, epochs = self.devices[number, place], self.epochs[number, place]
        size, start = self.sizes[device], self.starts[number, place]
        orders = self.orders[start : start + epochs * size].reshape(epochs, size) + self.offsets[device]
        return [order[first : first + BATCH] for order in orders for first in range(0, size, BATCH)]


def arguments():
    """Return the work and the result file named on the command line."""
    folder, row, rounds, out = sys.argv[1:5]
    return Work(folder, row, int(rounds)), Path(out)


def play(peer, work, out):
    """Run all rounds once to warm up and once timed, and write the result."""
    peer.reset()
    peer.round(0)
    started = time.perf_counter() - STARTED
    for number in range(1, work.rounds):
        peer.round(number)
    peer.reset()
    seconds = []
    for number in range(work.rounds):
        before = time.perf_counter()
        peer.round(number)
        seconds.append(time.perf_counter() - before)
    write(out, seconds, started, peer.params())


def write(out, seconds, started, params):
    """Write the times and the final (785, 10) params."""
    np.save(out.with_suffix(".npy"), np.asarray(params, np.float32))
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
    result = {"ms": [1000 * second for second in seconds], "start_s": started, "peak_mb": peak}
    out.write_text(json.dumps(result))
