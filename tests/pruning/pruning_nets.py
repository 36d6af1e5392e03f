"""Small networks with the shapes that matter: a shortcut, a concatenation, a normalised sum."""

from __future__ import annotations

import copy

import torch
from torch import nn

from secateur.interfaces import Batch
from secateur.tree import apply_mask


class Residual(nn.Module):
    """A stem, one block with an identity shortcut, and a head."""

    def __init__(self, width: int = 6, classes: int = 4) -> None:
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv1, self.norm1 = nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width)
        self.conv2, self.norm2 = nn.Conv2d(2 * width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = torch.relu(self.norm0(self.stem(x)))
        inner = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(inner)) + x)
        return self.head(x.mean((2, 3)))


class PreActivation(nn.Module):
    """A BatchNorm that reads the sum of two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.norm, self.after = nn.BatchNorm2d(4), nn.Conv2d(4, 5, 3)
        self.head = nn.Linear(5 * 4, 3)

    def forward(self, x):
        x = self.after(nn.functional.relu(self.norm(self.left(x) + self.right(x))))
        x = nn.functional.max_pool2d(x, 2)
        return self.head(x.view(x.size(0), -1))


class Dense(nn.Module):
    """Two BatchNorms that read a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv1 = nn.Conv2d(6, 4, 3, padding=1, bias=False)
        self.norm1, self.conv2 = nn.BatchNorm2d(10), nn.Conv2d(10, 4, 3, padding=1, bias=False)
        self.norm2, self.head = nn.BatchNorm2d(14), nn.Linear(14, 4)

    def forward(self, x):
        x = torch.relu(self.norm0(self.stem(x)))
        x = torch.cat([x, self.conv1(x)], 1)
        x = torch.cat([x, self.conv2(torch.relu(self.norm1(x)))], dim=1)
        return self.head(torch.flatten(nn.functional.adaptive_avg_pool2d(torch.relu(self.norm2(x)), 1), 1))


def made(make, seed: int = 0, **arguments) -> nn.Module:
    """A network with random gammas and betas."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = make(**arguments)
        for module in net.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)) and module.affine:
                nn.init.uniform_(module.weight, 0.2, 1.5)
                nn.init.uniform_(module.bias, -0.5, 0.5)
    return net.eval()


def rows_of(shape: tuple[int, ...], count: int = 6, seed: int = 1, classes: int = 3) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(count, *shape, generator=rng), torch.arange(count) % classes)


def tuned(net: nn.Module, mask, inputs) -> nn.Module:
    """A masked copy whose BatchNorm statistics fit what it sees, with noise: dead channels have a mean too."""
    net = apply_mask(copy.deepcopy(net), mask).train()
    norms = [m for m in net.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)) and m.track_running_stats]
    for norm in norms:
        norm.momentum = 1.0
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        net(inputs)
        for norm in norms:
            noise = torch.randn(norm.num_features, generator=rng).to(norm.running_mean)
            norm.running_mean += 0.3 * norm.running_var.sqrt().clamp_min(1e-2) * noise
            norm.running_var *= 1 + 0.5 * torch.tanh(noise)
    return net.eval()
