"""The network, the data and one step of training: what any app has."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CLIENTS, RATE = 4, 0.1


def network() -> nn.Module:
    """A small convolutional network for 8x8 digits."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 12, 5, padding=2, stride=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(12 * 16, 10)
        )


def digits() -> tuple[Tensor, Tensor]:
    """1797 pictures in [0, 1], and what they show."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)


def picture_of(client: int, number: int) -> tuple[Tensor, Tensor]:
    """The one picture that a client trains on in a round: an update of one picture gives the most away."""
    inputs, labels = digits()
    own = torch.arange(client, len(inputs), CLIENTS)
    row = own[number % len(own)][None]
    return inputs[row], labels[row]


def train(net: nn.Module, inputs: Tensor, labels: Tensor, learning_rate: float) -> float:
    """One step."""
    loss = cross_entropy(net(inputs), labels)
    loss.backward()
    torch.optim.SGD(net.parameters(), learning_rate).step()
    return loss.item()
