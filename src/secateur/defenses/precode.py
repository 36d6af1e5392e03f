"""PRECODE: features before the classifier are sampled, so a gradient depends on noise as well as on the pictures."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import Generator, Tensor, fx, nn
from torch.nn.functional import softplus

from secateur.catalogue import method
from secateur.defenses import NATURAL
from secateur.errors import check_number, check_whole
from secateur.functional import Noisy, classifier
from secateur.interfaces import Loss, Params
from secateur.seeding import initialise


@method(
    "defense",
    "precode",
    "dgp",
    acts_on="model",
    adaptive=("layer",),
    strongest=f"adaptive=layer, {NATURAL}, which leaves the noisy bottleneck out",
)
@dataclass(frozen=True)
class Precode:
    """Puts a variational bottleneck before the last fully connected layer (PRECODE, Scheliga et al. 2022).

    Acts on: the model. The features become the mean and the deviation of `size` normal variables. A sample of these is
    decoded again, in evaluation too. Training adds beta times their divergence from N(0, 1). The gradient that
    `secateur invert` attacks is without that term, as dgp's authors ran it, unless `divergence` is set.

    The noise never leaves the client. A plain attacker draws one sample for all trials. An adaptive attacker uses the
    mean, and excludes the layers whose gradients are products of the noise from the matching.

    Equation: `z = mu(h) + sigma(h) N(0, 1); output = W decode(z) + b; L = CE + beta KL(z || N(0, 1))`.
    """

    size: int = 256  # K
    beta: float = 1e-3
    divergence: bool = False  # True: the attacked gradient is of the loss with beta KL

    def __post_init__(self) -> None:
        check_whole("size", self.size)
        check_number("beta", self.beta, "[0, inf)")


class Bottleneck(Noisy):
    """Layer from features to a sample of N(mean, deviation^2) of size K and back to features; both maps are linear.

    `noise` (rows, K) is a buffer that is neither saved nor sent; it is set with each batch. Row i of a batch uses row i
    of the noise, which repeats if the batch is longer. The initial zeros make the sample the mean.
    """

    def __init__(self, features: int, size: int) -> None:
        super().__init__(size)
        self.encoder = nn.Linear(features, 2 * size)
        self.decoder = nn.Linear(size, features)

    def forward(self, features: Tensor) -> Tensor:
        """Return the decoded sample."""
        decoded: Tensor = self.decoder(sample(self.encoder(features), self.noise))
        return decoded


@fx.wrap
def sample(encoded: Tensor, noise: Tensor) -> Tensor:
    """Return mean + deviation * noise, (B, K), for encoded features (B, 2K)."""
    mean, deviation = moments(encoded)
    rows, times = len(encoded), -(-len(encoded) // len(noise))
    return mean + deviation * noise.repeat(times, 1)[:rows]


def moments(encoded: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean, the first half of (B, 2K), and the deviation, the softplus of the second half."""
    mean, raw = encoded.chunk(2, -1)
    return mean, softplus(raw)


def divergence(encoded: Tensor) -> Tensor:
    """Return KL(N(mean, deviation^2) || N(0, 1)) in nats, averaged over the batch.

    It is the sum over K of (m^2 + s^2 - 1 - ln s^2) / 2. The authors' code uses bits, so a beta of theirs is 1.44 of
    ours.
    """
    mean, deviation = moments(encoded)
    return (mean.square() + deviation.square() - 1 - 2 * deviation.log()).sum(-1).mean() / 2


def with_bottleneck(net: nn.Module, classes: int, rng: Generator, size: int = 256) -> nn.Module:
    """Return a copy with a bottleneck before the last fully connected layer, initialised from `rng` alone.

    The layer NAME becomes NAME.0 (the bottleneck) and NAME.1 (the layer itself).
    """
    name, wrapped = classifier(net, classes), copy.deepcopy(net)
    last = wrapped.get_submodule(name)
    assert isinstance(last, nn.Linear)
    bottleneck = initialise(lambda: Bottleneck(last.in_features, size), rng, 2**31)
    both = nn.Sequential(bottleneck.to(last.weight.device, last.weight.dtype), last).train(last.training)
    if not name:
        return both
    wrapped.set_submodule(name, both)
    return wrapped


def bottleneck_of(net: nn.Module) -> str | None:
    """Return the name of a network's bottleneck, or None; the structure of the network reveals it."""
    return next((name for name, module in net.named_modules() if isinstance(module, Bottleneck)), None)


def with_noise(net: nn.Module, noise: Params) -> nn.Module:
    """Return a copy whose bottlenecks have this noise."""
    copied = copy.deepcopy(net)
    for name, value in noise.items():
        copied.get_submodule(name.rpartition(".")[0]).register_buffer("noise", value, persistent=False)
    return copied


def with_divergence(net: nn.Module, loss: Loss, beta: float) -> tuple[nn.Module, Loss]:
    """Return a copy of the network, and a loss that adds beta times the divergence of the last forward pass.

    Copies of the copy report to the same loss, so both can be passed to any trainer.
    """
    copied, last = copy.deepcopy(net), list[Tensor]()

    def record(module: nn.Module, inputs: tuple[Tensor, ...], encoded: Tensor) -> None:
        last[:] = [encoded]

    bottlenecks = [module for module in copied.modules() if isinstance(module, Bottleneck)]
    for bottleneck in bottlenecks:
        bottleneck.encoder.register_forward_hook(record)

    def regularise(outputs: Tensor, labels: Tensor) -> Tensor:
        return loss(outputs, labels) + beta * divergence(last.pop())

    return copied, regularise
