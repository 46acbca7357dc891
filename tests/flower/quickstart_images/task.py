"""The task of Flower's PyTorch quickstart on MNIST, or on generated images where the file is missing."""

from functools import cache

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedcontext.datasets import files

SEED, SAMPLES, OPTIMIZER = 0, 6_000, "momentum"  # a test may set other ones


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(784, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.hidden(x)))


@cache
def images() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return training images and labels, then those of the test."""
    if path := files.where("mnist"):
        with np.load(path) as file:
            parts = [file[name] for name in ("x_train", "y_train", "x_test", "y_test")]
        train, labels, test, truth = (torch.from_numpy(part) for part in parts)
        flat = [(part.reshape(len(part), -1).float() / 255 - 0.13) / 0.31 for part in (train, test)]
        return flat[0], labels.long(), flat[1], truth.long()
    draw = torch.Generator().manual_seed(7)
    digits = torch.randn(10, 8, 784, generator=draw)  # eight shapes of each digit
    truth = torch.randint(0, 10, (22_000,), generator=draw)
    shapes = digits[truth, torch.randint(0, 8, (22_000,), generator=draw)]
    pictures = 0.6 * shapes + torch.randn(22_000, 784, generator=draw)
    return pictures[:20_000], truth[:20_000], pictures[20_000:], truth[20_000:]


class Images(TensorDataset):
    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        return self[indices]  # a batch at once: to stack single images takes as long as to train on them


@cache
def partition(partition_id: int, num_partitions: int, seed: int, samples: int) -> Images:
    inputs, labels, *_ = images()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:samples]
    own = order[partition_id::num_partitions]
    return Images(inputs[own], labels[own])


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[DataLoader, None]:
    data = partition(partition_id, num_partitions, SEED, SAMPLES)
    return DataLoader(data, batch_size=batch_size, shuffle=True, collate_fn=tuple), None


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    if OPTIMIZER == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), lr=lr, fused=True)
    else:
        momentum = 0.9 if OPTIMIZER == "momentum" else 0.0
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum, fused=True)
    total = 0.0
    net.train()
    for _ in range(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / len(loader) / epochs


def accuracy(state: dict[str, torch.Tensor]) -> float:
    net, (*_, inputs, labels) = Net(), images()
    net.load_state_dict(state)
    with torch.no_grad():
        return float((net(inputs).argmax(1) == labels).float().mean())
