"""A plain PyTorch training loop without a framework, on one thread, which is faster here than two."""

import numpy as np
import torch
from harness import CLASSES, RATE, arguments, play


class PlainLoop:
    def __init__(self, work):
        torch.set_num_threads(1)
        self.work = work
        self.features = torch.from_numpy(np.array(work.features))
        self.labels = torch.from_numpy(work.labels)

    def reset(self):
        self.model = torch.nn.Linear(self.features.shape[1], CLASSES)
        for parameter in self.model.parameters():
            torch.nn.init.zeros_(parameter)

    def round(self, number):
        start = [parameter.detach().clone() for parameter in self.model.parameters()]
        total = [torch.zeros_like(parameter) for parameter in start]
        shares = self.work.samples(number) / self.work.samples(number).sum()
        for place, share in enumerate(shares.tolist()):
            self.train(start, number, place)
            for total_, parameter in zip(total, self.model.parameters(), strict=True):
                total_.add_(parameter.detach(), alpha=share)
        self.set_parameters(total)

    def train(self, start, number, place):
        self.set_parameters(start)
        optimiser = torch.optim.SGD(self.model.parameters(), lr=RATE)
        for batch in self.work.batches(number, place):
            rows = torch.from_numpy(batch)
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(self.model(self.features[rows]), self.labels[rows]).backward()
            optimiser.step()

    def set_parameters(self, values):
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), values, strict=True):
                parameter.copy_(value)

    def params(self):
        weight, bias = (parameter.detach().numpy() for parameter in self.model.parameters())
        return np.vstack([weight.T, bias])


if __name__ == "__main__":
    work, out = arguments()
    play(PlainLoop(work), work, out)
