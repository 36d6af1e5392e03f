"""One client of a federation, small enough to compute by hand: its network, what it receives and its batches."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from secateur import tree
from secateur.interfaces import Batch

with torch.random.fork_rng():
    NET = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
WEIGHTS = ["0.weight", "3.weight"]
RATE = 0.25


def loss(params, inputs, labels):
    return cross_entropy(functional_call(NET, params, (inputs,)), labels)


def drawn(seed, steps=2, dtype=torch.float64):
    """A received model, a base mask that drops some, and a client's batches."""
    rng = torch.Generator().manual_seed(seed)
    params = {n: torch.randn(v.shape, generator=rng, dtype=dtype) for n, v in NET.named_parameters()}
    mask = {n: torch.rand(params[n].shape, generator=rng) < 0.7 for n in WEIGHTS}
    inputs = torch.randn(steps, 4, 1, 4, 4, generator=rng, dtype=dtype)
    return tree.mask_tree(params, mask), mask, Batch(inputs, torch.randint(3, (steps, 4), generator=rng))
