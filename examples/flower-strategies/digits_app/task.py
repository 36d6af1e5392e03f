"""The network, the data and a client's training: nothing here knows of a federation."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CLIENTS, SHAPE, TRAIN = 4, (1, 8, 8), 1400


def network() -> nn.Module:
    """A small convolutional network for 8x8 digits."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16, 10)
        )


@cache
def digits() -> tuple[Tensor, Tensor]:
    """1797 pictures in [0, 1], and what they show; those from number 1400 on are the server's, for tests."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


def train(net: nn.Module, client: int, learning_rate: float) -> int:
    """One epoch over a client's pictures; returns their number."""
    inputs, labels = (part[:TRAIN][client::CLIENTS] for part in digits())
    optimiser = torch.optim.SGD(net.parameters(), learning_rate, momentum=0.9)
    for start in range(0, len(labels), 32):
        optimiser.zero_grad()
        cross_entropy(net(inputs[start : start + 32]), labels[start : start + 32]).backward()
        optimiser.step()
    return len(labels)


def accuracy(net: nn.Module) -> float:
    """The share of test pictures that are recognised."""
    inputs, labels = (part[TRAIN:] for part in digits())
    with torch.no_grad():
        return float((net(inputs).argmax(1) == labels).float().mean())
