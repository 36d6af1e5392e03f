"""PRECODE: the features before the classifier become a sample, so a gradient is of chance as much as of pictures."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, fx, nn
from torch.nn.functional import softplus

from secateur.catalogue import method
from secateur.errors import WrongInput
from secateur.functional import Noisy, classifier
from secateur.interfaces import Loss, Params


@method("defense", "precode", "dgp", acts_on="model", adaptive=("layer",))
@dataclass(frozen=True)
class Precode:
    """Puts a variational bottleneck before the last fully connected layer (PRECODE, Scheliga et al. 2022).

    Acts on: the model. Features become the mean and the deviation of `size` normal variables, of which a sample, in
    evaluation too, is decoded again. Training adds beta times their divergence from N(0, 1); the gradient that
    `secateur invert` attacks is without that term, as dgp's authors ran it, unless `divergence` asks for it. The noise
    never leaves the client: a plain attacker draws one sample of its own for all trials, and an adaptive one takes the
    mean and leaves the layers out of the matching whose gradients are products of the noise.
    """

    size: int = 256  # K
    beta: float = 1e-3
    divergence: bool = False  # whether the attacked gradient is of the loss with beta KL

    def __post_init__(self) -> None:
        if self.size < 1:
            raise WrongInput("size", f"{self.size} is not allowed; give a whole number from 1")
        if not 0 <= self.beta < float("inf"):
            raise WrongInput("beta", f"{self.beta} is not allowed; give a number from 0")


class Bottleneck(Noisy):
    """Features -> a sample of N(mean, deviation^2) of size K -> features; both are linear in theirs.

    `noise` (rows, K) is a buffer that is neither saved nor sent, and is given with each batch: row i of a batch takes
    row i of it, again from its start. Zeros, as it is made, make the sample the mean.
    """

    def __init__(self, features: int, size: int) -> None:
        super().__init__(size)
        self.encoder = nn.Linear(features, 2 * size)
        self.decoder = nn.Linear(size, features)

    def forward(self, features: Tensor) -> Tensor:
        """The decoded sample."""
        decoded: Tensor = self.decoder(sample(self.encoder(features), self.noise))
        return decoded


@fx.wrap
def sample(encoded: Tensor, noise: Tensor) -> Tensor:
    """Mean + deviation * noise, (B, K) of (B, 2K)."""
    mean, deviation = moments(encoded)
    rows, times = len(encoded), -(-len(encoded) // len(noise))
    return mean + deviation * noise.repeat(times, 1)[:rows]


def moments(encoded: Tensor) -> tuple[Tensor, Tensor]:
    """The mean, the first half of (B, 2K), and the deviation, the softplus of the second."""
    mean, raw = encoded.chunk(2, -1)
    return mean, softplus(raw)


def divergence(encoded: Tensor) -> Tensor:
    """KL(N(mean, deviation^2) || N(0, 1)) in nats: the sum over K of (m^2 + s^2 - 1 - ln s^2) / 2, mean of the batch.

    The authors' code has it in bits, so that a beta of theirs is 1.44 of ours.
    """
    mean, deviation = moments(encoded)
    return (mean.square() + deviation.square() - 1 - 2 * deviation.log()).sum(-1).mean() / 2


def with_bottleneck(net: nn.Module, classes: int, rng: Generator, size: int = 256) -> nn.Module:
    """A copy of the network with a bottleneck before its last fully connected layer, initialised from `rng` alone.

    The layer NAME becomes NAME.0 (the bottleneck) and NAME.1 (itself).
    """
    name, wrapped = classifier(net, classes), copy.deepcopy(net)
    last = wrapped.get_submodule(name)
    assert isinstance(last, nn.Linear)
    with torch.random.fork_rng(devices=[]):  # layers draw their weights from the global generator
        torch.default_generator.manual_seed(int(torch.randint(2**31, (), generator=rng, device=rng.device)))
        made = Bottleneck(last.in_features, size).to(last.weight.device, last.weight.dtype)
    both = nn.Sequential(made, last).train(last.training)
    if not name:
        return both
    wrapped.set_submodule(name, both)
    return wrapped


def bottleneck_of(net: nn.Module) -> str | None:
    """The name of a network's bottleneck, which everybody sees who knows its structure."""
    return next((name for name, module in net.named_modules() if isinstance(module, Bottleneck)), None)


def with_noise(net: nn.Module, noise: Params) -> nn.Module:
    """A copy whose bottlenecks have this noise."""
    copied = copy.deepcopy(net)
    for name, value in noise.items():
        copied.get_submodule(name.rpartition(".")[0]).register_buffer("noise", value, persistent=False)
    return copied


def with_divergence(net: nn.Module, loss: Loss, beta: float) -> tuple[nn.Module, Loss]:
    """A copy of the network and a loss that adds beta times the divergence of the forward just before it.

    Copies of the copy tell the same loss, so that both can be handed to whatever trains or differentiates.
    """
    copied, last = copy.deepcopy(net), list[Tensor]()

    def note(module: nn.Module, given: tuple[Tensor, ...], encoded: Tensor) -> None:
        last[:] = [encoded]

    bottlenecks = [module for module in copied.modules() if isinstance(module, Bottleneck)]
    for bottleneck in bottlenecks:
        bottleneck.encoder.register_forward_hook(note)

    def regularised(outputs: Tensor, labels: Tensor) -> Tensor:
        return loss(outputs, labels) + beta * divergence(last.pop())

    return copied, regularised
