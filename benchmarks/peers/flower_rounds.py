"""Flower: its simulation on Ray with one actor a core, its FedAvg aggregation, and a PyTorch client.

A message names the device it stands for, so ten virtual nodes do for a thousand devices: that favours Flower, which
would otherwise have a thousand nodes to register and look through.
"""

import os
import sys
import time

import numpy as np
from flower_device import client
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from harness import BORN, CLASSES, arguments, write

COHORT = 10
RESOURCES = {"init_args": {"num_cpus": len(os.sched_getaffinity(0))}, "client_resources": {"num_cpus": 1.0}}
server = ServerApp()


class Planned(FedAvg):
    """FedAvg on the planned devices, with a clock around each round."""

    def __init__(self, words, rounds):
        super().__init__(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=COHORT, min_available_nodes=COHORT)
        self.words, self.rounds, self.ends, self.begins = words, rounds, [], []

    def configure_train(self, server_round, arrays, config, grid):
        self.begins.append(time.perf_counter())
        nodes = sorted(grid.get_node_ids())
        while len(nodes) < COHORT:
            time.sleep(0.1)
            nodes = sorted(grid.get_node_ids())
        number = (server_round - 1) % self.rounds
        for place, node in enumerate(nodes):
            told = ConfigRecord({**self.words, "number": number, "place": place})
            yield Message(RecordDict({"arrays": arrays, "config": told}), node, "train")

    def aggregate_train(self, server_round, replies):
        result = super().aggregate_train(server_round, replies)
        self.ends.append(time.perf_counter())
        return result


@server.main()
def main(grid, context):
    work, out = arguments()
    words = {"folder": sys.argv[1], "row": sys.argv[2], "rounds": work.rounds}
    strategy = Planned(words, work.rounds)
    start = ArrayRecord([np.zeros((CLASSES, work.features.shape[1]), np.float32), np.zeros(CLASSES, np.float32)])
    strategy.start(grid=grid, initial_arrays=start, num_rounds=work.rounds)  # to warm up, as all peers do
    started, strategy.begins, strategy.ends = strategy.ends[0] - BORN, [], []
    result = strategy.start(grid=grid, initial_arrays=start, num_rounds=work.rounds)
    seconds = [end - begin for begin, end in zip(strategy.begins, strategy.ends, strict=True)]
    weight, bias = result.arrays.to_numpy_ndarrays()
    write(out, seconds, started, np.vstack([weight.T, bias]))


if __name__ == "__main__":
    run_simulation(server, client, num_supernodes=COHORT, backend_config=RESOURCES)
