"""Flower: its simulation on Ray with one actor a core, its FedAvg aggregation, and a PyTorch client.

A message names the device that it trains, so ten virtual nodes suffice for a thousand devices. That favours Flower, which
would otherwise register and search a thousand nodes.
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
from harness import CLASSES, STARTED, arguments, write

COHORT = 10
RESOURCES = {"init_args": {"num_cpus": len(os.sched_getaffinity(0))}, "client_resources": {"num_cpus": 1.0}}
server = ServerApp()


class Planned(FedAvg):
    """FedAvg on the planned devices, with each round timed."""

    def __init__(self, settings, rounds):
        super().__init__(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=COHORT, min_available_nodes=COHORT)
        self.settings, self.rounds, self.ends, self.begins = settings, rounds, [], []

    def configure_train(self, server_round, arrays, config, grid):
        self.begins.append(time.perf_counter())
        nodes = sorted(grid.get_node_ids())
        while len(nodes) < COHORT:
            time.sleep(0.1)
            nodes = sorted(grid.get_node_ids())
        number = (server_round - 1) % self.rounds
        for place, node in enumerate(nodes):
            config = ConfigRecord({**self.settings, "number": number, "place": place})
            yield Message(RecordDict({"arrays": arrays, "config": config}), node, "train")

    def aggregate_train(self, server_round, replies):
        result = super().aggregate_train(server_round, replies)
        self.ends.append(time.perf_counter())
        return result


@server.main()
def main(grid, context):
    work, out = arguments()
    settings = {"folder": sys.argv[1], "row": sys.argv[2], "rounds": work.rounds}
    strategy = Planned(settings, work.rounds)
    start = ArrayRecord([np.zeros((CLASSES, work.features.shape[1]), np.float32), np.zeros(CLASSES, np.float32)])
    strategy.start(grid=grid, initial_arrays=start, num_rounds=work.rounds)  # warm-up, as for all peers
    started, strategy.begins, strategy.ends = strategy.ends[0] - STARTED, [], []
    result = strategy.start(grid=grid, initial_arrays=start, num_rounds=work.rounds)
    seconds = [end - begin for begin, end in zip(strategy.begins, strategy.ends, strict=True)]
    weight, bias = result.arrays.to_numpy_ndarrays()
    write(out, seconds, started, np.vstack([weight.T, bias]))


if __name__ == "__main__":
    run_simulation(server, client, num_supernodes=COHORT, backend_config=RESOURCES)
