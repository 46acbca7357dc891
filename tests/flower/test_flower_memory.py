"""The server's extra memory does not grow with the number of devices."""

from __future__ import annotations

import gc
import time
import tracemalloc

import numpy as np
import pytest
from flower_grid import MemoryGrid
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg

import fedcontext as fc
from fedcontext.arrays.tree import SCRATCH
from fedcontext.flower import ContextualStrategy, numpy_client
from fedcontext.flower.protocol import record_of

SIZE, DEVICES = 1_000_000, 60
START = {name: np.zeros(SIZE // 4, np.float32) for name in "abcd"}


def gradient(params, context):
    k = context.node_config["partition-id"]
    return {name: np.full_like(array, k + 1) for name, array in params.items()}, 5


def train(params, config, context):
    return {name: array - gradient(params, context)[0][name] for name, array in params.items()}, 5


@pytest.mark.parametrize("stock", [False, True], ids=["updates", "weights of stock clients"])
def test_extra_memory_is_bounded_by_the_model_and_the_blocks(stock: bool) -> None:
    app = numpy_client(train, gradient)
    strategy = ContextualStrategy(FedAvg(fraction_evaluate=0.0), fc.mean() if stock else fc.contextual(1))
    grid = MemoryGrid(app.app if stock else app, range(DEVICES))
    messages = list(strategy.configure_train(1, record_of(START), ConfigRecord(), grid))
    large = np.zeros(2**20, np.float32)
    fc.aggregate(large, [large], rule=fc.mean())  # loads Numba, whose own memory is not that of a round
    tracemalloc.start()
    try:
        replies = grid.send_and_receive(messages)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        arrays, _ = strategy.aggregate_train(1, replies)
        peak = tracemalloc.get_traced_memory()[1] - before
        del replies, messages
        for _ in range(20):  # Flower's records are in reference cycles, and its threads may hold one for a moment
            gc.collect()
            kept = tracemalloc.get_traced_memory()[0]
            if kept < 5 * 4 * SIZE:
                break
            time.sleep(0.1)
    finally:
        tracemalloc.stop()
    assert arrays is not None
    model, everyone = 4 * SIZE, 4 * SIZE * DEVICES
    assert peak < 5 * model + 4 * SCRATCH < everyone / 2
    assert kept < 5 * model, "the strategy keeps no update"
