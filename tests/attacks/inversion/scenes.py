"""A small scene that the tests of gradient matching share."""

import torch
from torch import nn

from secateur import tree
from secateur.attacks.inversion.updates import gradient_update, statistics_of, weights_update
from secateur.interfaces import Batch, Knowledge, ServerView

SHAPE, CLASSES = (1, 4, 4), 4


class Diary:
    """A watch that keeps everything it is told."""

    def __init__(self, saved=None):
        self.saved, self.iterations, self.states, self.pictures = saved, 0, [], []

    def advance(self, iterations):
        self.iterations += iterations

    def load(self):
        return self.saved

    def save(self, state, pictures):
        self.states.append(tree.clone(state))
        self.pictures.append(pictures)


def network(seed=0, batchnorm=False, dtype=torch.float64):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4) if batchnorm else nn.Identity(), nn.Sigmoid()]
        net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, CLASSES)).to(dtype)
        for value in net.parameters():
            nn.init.uniform_(value, -0.5, 0.5)
    return net.eval()


def batch(number, size=1, dtype=torch.float64):
    rng = torch.Generator().manual_seed(100 + number)
    inputs = torch.rand(size, *SHAPE, generator=rng) * 2 - 1
    return Batch(inputs.to(dtype), torch.randint(CLASSES, (size,), generator=rng))


def knowledge(net, **known):
    return Knowledge(net, SHAPE, CLASSES, torch.full((1, 1, 1), 0.5), torch.full((1, 1, 1), 0.5), **known)


def view(net, truth, batchnorm="eval"):
    state = tree.state_of(net)
    return ServerView(state, gradient_update(net, state, truth, batchnorm))


def weights_view(net, truth, **local):
    state = tree.state_of(net)
    return ServerView(state, weights_update(net, state, truth, **local))


def statistics(net, truth):
    return statistics_of(net, tree.state_of(net), truth)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def mse(found, truth):
    return float((found.batch.inputs - truth.inputs).square().mean())
