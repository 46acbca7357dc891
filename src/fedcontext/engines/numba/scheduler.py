"""All devices of a round in one compiled call for each core: threads that meet in no Python, and share one queue.

Going back to Python between two devices costs more than training a small one: threads wait for each other there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcontext.engines.numba.draws import Words, shuffles
from fedcontext.engines.numba.kernels import by_class, descend, descend_in_span, gram
from fedcontext.engines.numba.sparse import Sparse
from fedcontext.engines.numba.sparse_kernels import descend_sparsely, laid_out
from fedcontext.engines.numba.vectors import look, take
from fedcontext.jit import compiled, inner
from fedcontext.plan import IntArray

Matrix = npt.NDArray[Any]
TAKEN, DONE = 0, 1  # counters
PATIENCE = 200_000  # looks at the counter: less than a tenth of a millisecond


class Step(NamedTuple):
    """One local step: samples of a batch, learning rate, and the pull of the proximal term."""

    size: int
    rate: float
    mu: float


class Cohort(NamedTuple):
    """The devices that train, one entry each."""

    order: IntArray  # their rows, in the order in which they are begun
    devices: IntArray  # their numbers, on which their draws depend
    firsts: IntArray  # where their samples begin
    counts: IntArray  # how many samples they have
    epochs: IntArray
    spans: npt.NDArray[np.bool_]  # whether steps are taken in the span of their samples
    places: IntArray  # where the inner products of their samples are kept; -1: nowhere
    known: npt.NDArray[np.bool_]  # whether they are there already


@inner
def _orders(cohort: Cohort, row: int, words: Words, given: IntArray) -> IntArray:
    """Return the batch orders of one device, drawn or given."""
    count, epochs = cohort.counts[row], cohort.epochs[row]
    if given.size:
        begin = 0
        for other in range(row):
            begin += cohort.counts[other] * cohort.epochs[other]
        return given[begin : begin + epochs * count].reshape((epochs, count))
    entropy = words.copy()
    entropy[-1] = cohort.devices[row]
    return shuffles(entropy, count, epochs)


@inner
def _inner_products(cohort: Cohort, row: int, features: Matrix, kept: Matrix) -> Matrix:
    """Return the inner products of a device's samples, from where they are kept or are to be."""
    count, place = cohort.counts[row], cohort.places[row]
    room = kept[place : place + count * count] if place >= 0 else np.empty(count * count, kept.dtype)
    found = room.reshape((count, count))
    if not cohort.known[row]:
        gram(features, found)
    return found


@compiled
def descend_all(
    counters: IntArray,
    cohort: Cohort,
    step: Step,
    words: Words,
    given: IntArray,
    features: Matrix,
    labels: IntArray,
    found: Sparse,
    params: Matrix,
    kept: Matrix,
    updates: Matrix,
) -> bool:
    """Write the updates of the devices that this call takes from the queue, until it is empty.

    Return whether all devices are done, also those that other threads took: they are waited for, for a moment.
    ``counters`` are the devices taken, and those done. Batch orders are drawn from ``words`` and a device's number,
    unless they are ``given``, one device after another.
    """
    everyone, sparsely = cohort.order.size, found.leans.size > 0
    weights, bias = by_class(params if not sparsely or cohort.spans.any() else params[:1])
    start = laid_out(params if sparsely else params[:1], found)
    turn = take(counters, TAKEN)
    while turn < everyone:
        row = cohort.order[turn]
        first, count = cohort.firsts[row], cohort.counts[row]
        own, mine, out = features[first : first + count], labels[first : first + count], updates[row]
        size = min(step.size, count)
        orders = _orders(cohort, row, words, given)
        if cohort.spans[row]:
            inner_products = _inner_products(cohort, row, own, kept)
            descend_in_span(own, mine, orders, size, step.rate, step.mu, weights, bias, out, inner_products)
        elif sparsely:
            descend_sparsely(found, first, mine, orders, size, step.rate, step.mu, start, out)
        else:
            descend(own, mine, orders, size, step.rate, step.mu, weights, bias, out)
        take(counters, DONE)
        turn = take(counters, TAKEN)
    looks = 0
    while looks < PATIENCE and look(counters, DONE) < everyone:
        looks += 1
    return looks < PATIENCE
