"""A tiny federation, and rules as small as a rule can be."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.func import grad_and_value

from alone import pictures, small
from secateur import tree
from secateur.data.partition import iid
from secateur.federated.attacks.observer import Every
from secateur.federated.base_pruning import BasePruning
from secateur.federated.client_training import LocalTraining
from secateur.federated.federation import Federation
from secateur.federated.spec import FederationSpec
from secateur.interfaces import ClientResult

ROWS = 40
LOCAL = LocalTraining(steps=3, batch_size=4, learning_rate=0.1)


def plain_net(seed=0):
    """A network without BatchNorm."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parts = [nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 3)]
        return nn.Sequential(*parts).double()


def shares(clients=5):
    return iid(ROWS, clients, torch.Generator().manual_seed(0))


def federation(net=None, seed=0, execution="auto", observers=(), data=None, device="cpu", **terms):
    given = {"rounds": 4, "per_round": 3, "local": LOCAL, "evaluate_every": 2, "shares": shares()} | terms
    watching = [Every(*each) if isinstance(each, tuple) else each for each in observers]
    net = plain_net() if net is None else net
    return Federation(
        net, data or pictures(ROWS, 8), FederationSpec(**given), seed, device, execution=execution, observers=watching
    )


def run(fed):
    return [measure for done in fed.rounds() for measure in done.measures]


def bn_net():
    return small(dropout=0.3)


@dataclass(frozen=True)
class Half(BasePruning):
    """Keeps every other weight; at an adjustment the others. Clients of `moves` choose by |gradient|."""

    rate: float = 0.5
    every: int = 2

    def start(self, net, state, batch, rng):
        return {n: _alternating(state[n], 0) for n, p in net.named_parameters() if p.ndim > 1}

    def adjusts(self, round):
        return round % self.every == 0

    def adjust(self, weights, mask, squares, round, rng):
        changed = {name: ~keep for name, keep in mask.items()}
        return tree.mask_tree(weights, changed), changed


@dataclass(frozen=True)
class Stale(Half):
    """The same, with stale values and squares."""

    @property
    def wants_squares(self):
        return True

    @property
    def keeps_dropped(self):
        return True

    def adjust(self, weights, mask, squares, round, rng):
        return weights, {name: squares[name] >= squares[name].flatten().median() for name in mask}


@dataclass(frozen=True)
class Moving(Half):
    """Clients keep what is steep; the server what is large."""

    def local(self, weights, gradient, mask, round, rng=None):
        return {name: gradient[name].abs() >= gradient[name].abs().flatten().median() for name in mask}

    def adjust(self, weights, mask, squares, round, rng):
        chosen = {name: weights[name].abs() >= weights[name].abs().flatten().median() for name in mask}
        return tree.mask_tree(weights, chosen), chosen


@dataclass(frozen=True)
class Withhold:
    """Withholds what is steep."""

    pseudo: bool = True

    def noise(self, weights, rng):
        return {}

    def withheld(self, weights, gradient, mask, rng=None, noise=None):
        steep = {n: g.abs() >= g.abs().flatten().median() for n, g in gradient.items() if g.ndim > 1}
        return {n: where & mask[n] if n in mask else where for n, where in steep.items()}


@dataclass(frozen=True)
class Noisy:
    """A turn of its own: SGD, and each entry is withheld where its noise is above 0; counts its rounds."""

    def caution(self, weights):
        return None

    def init(self, params):
        return {"rounds": torch.zeros((), device=next(iter(params.values())).device)}

    def noise(self, params, steps, rng):
        return {n: torch.randn(steps, *v.shape, generator=rng, device=rng.device) for n, v in params.items()}

    def turn(self, loss, received, mask, state, batches, noise, learning_rate):
        weights, summed, total = tree.mask_tree(received, mask), None, 0.0
        for inputs, labels in zip(batches.inputs, batches.labels, strict=True):
            grads, value = grad_and_value(loss)(weights, inputs, labels)
            weights = {n: w - learning_rate * grads[n] for n, w in weights.items()}
            weights = tree.mask_tree(weights, mask)
            summed = grads if summed is None else {n: summed[n] + g for n, g in grads.items()}
            total = total + value
        withheld = {name: noise[name][-1] > 0 for name in weights}
        values = {name: torch.where(withheld[name], 0, weights[name]) for name in weights}
        return ClientResult(
            values, withheld, {"rounds": state["rounds"] + 1}, summed, grads, total / len(batches.labels)
        )


def _alternating(value, first):
    return (torch.arange(value.numel()) % 2 == first).view(value.shape)
