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
from fedcontext.flower.protocol import DIFFERENCE, record_of

SIZE, DEVICES = 1_000_000, 60
START = {name: np.zeros(SIZE // 4, np.float32) for name in "abcd"}


def gradient(params, context):
    k = context.node_config["partition-id"]
    return {name: np.full_like(array, k + 1) for name, array in params.items()}, 5


def train(params, config, context):
    return {name: array - gradient(params, context)[0][name] for name, array in params.items()}, 5


def memory_after_it_is_freed(limit: int) -> int:
    """Return the traced bytes; Flower's records are in reference cycles, and its threads may hold one for a moment."""
    for _ in range(20):
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
        if kept < limit:
            break
        time.sleep(0.1)
    return kept


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
        kept = memory_after_it_is_freed(5 * 4 * SIZE)
    finally:
        tracemalloc.stop()
    assert arrays is not None
    model, everyone = 4 * SIZE, 4 * SIZE * DEVICES
    assert peak < 5 * model + 4 * SCRATCH < everyone / 2
    assert kept < 5 * model, "the strategy keeps no update"


def test_updates_are_freed_before_the_step_is_corrected() -> None:
    grid = MemoryGrid(numpy_client(train, gradient), range(DEVICES))
    send, models, seen = grid.send_and_receive, 40, list[int]()  # the rule keeps about ten models in float64

    def watched(messages, *, timeout=None):
        messages = list(messages)
        if {message.content["config"]["fedcontext.request"] for message in messages} == {DIFFERENCE}:
            seen.append(memory_after_it_is_freed(models * 4 * SIZE))
        replies = send(messages, timeout=timeout)
        grid.sent.clear()
        return replies

    strategy = ContextualStrategy(FedAvg(fraction_evaluate=0.0), probes=2)
    strategy._roster._device = dict(grid.partitions)  # nobody is asked who it is
    grid.send_and_receive = watched
    tracemalloc.start()
    try:
        strategy.start(grid, record_of(START), 1)
    finally:
        tracemalloc.stop()
    assert len(seen) == 1
    assert seen[0] < models * 4 * SIZE < DEVICES * 4 * SIZE
