"""A small app in the shape of Flower's PyTorch quickstart, untouched by fedcontext."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.hidden(x))))


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    draw = torch.Generator().manual_seed(partition_id)
    labels = torch.randint(0, 3, (40,), generator=draw)
    inputs = torch.randn(40, 6, generator=draw) + torch.eye(3, 6)[labels] * 3
    train, test = TensorDataset(inputs[:30], labels[:30]), TensorDataset(inputs[30:], labels[30:])
    return DataLoader(train, batch_size=batch_size), DataLoader(test, batch_size=batch_size)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
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
