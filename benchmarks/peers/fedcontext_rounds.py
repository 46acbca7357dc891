"""fedcontext: an engine's local training, and the same average by samples that the peers compute.

The fifth argument is the engine. With ``+aggregate`` after it the updates are averaged by `fc.aggregate`, with its input
validation and geometry, instead of one line of NumPy.
"""

import sys

import numpy as np
from harness import BATCH, CLASSES, RATE, arguments, play

import fedcontext as fc
from fedcontext.datasets.federated import FederatedData, Split
from fedcontext.engines.base import Work, engine_named
from fedcontext.local_sgd import sgd


class Fedcontext:
    def __init__(self, work, engine, through_aggregate):
        train = Split(work.features, work.labels, work.offsets)
        self.work, self.engine_name, self.through_aggregate = work, engine, through_aggregate
        self.data = FederatedData(
            "mnist", train, Split(train.features[:0], train.labels[:0], 0 * work.offsets), CLASSES
        )

    def reset(self):
        self.engine = engine_named(self.engine_name, self.data)
        self.state = self.engine.initial_params()

    def round(self, number):
        devices, epochs = self.work.devices[number], self.work.epochs[number]
        updates = self.engine.train(self.state, Work(0, number + 1, devices, epochs, sgd(RATE, BATCH)))
        samples = self.work.samples(number)
        if self.through_aggregate:
            rule = fc.by_samples()  # without defences, which would cap the sample counts
            self.state = fc.aggregate(self.state, updates, rule=rule, samples=samples, defences=None).params
        else:
            self.state = self.state.copy()
            for share, update in zip((samples / samples.sum()).astype(np.float32), updates, strict=True):
                self.state += share * update

    def params(self):
        return self.state


if __name__ == "__main__":
    work, out = arguments()
    engine, _, suffix = sys.argv[5].partition("+")
    play(Fedcontext(work, engine, bool(suffix)), work, out)
