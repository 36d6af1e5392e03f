"""A small class-conditional WGAN-GP (Gulrajani et al. 2017): a picture of the right kind from noise and a label.

It is what a server with public data knows beforehand of its clients' pictures. The data it is trained on must be of
the same kind as the targets and must not hold them; then whatever an attack finds of a target came from the update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from secateur.attacks.inversion.wgan import LATENT, Box, Critic, Generator
from secateur.errors import WrongInput
from secateur.interfaces import Batch


def train_generator(
    data: Batch,
    classes: int,
    input_shape: tuple[int, ...],
    box: Box,
    steps: int,
    rng: torch.Generator,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] = lambda _: None,
    *,
    width: int = 64,
    batch_size: int = 64,
    learning_rate: float = 2e-4,
    critic_steps: int = 5,
    penalty: float = 10.0,
) -> Generator:
    """Train on public pictures (in the model's units) for so many steps of the generator; returns its running mean.

    Adam with betas 0 and .9 and a rate that falls linearly to zero, five steps of the critic for one of the
    generator, gradient penalty 10: Gulrajani et al.'s for CIFAR-10. `progress` is told of every step.
    """
    check_public(data, classes, input_shape)
    chance = torch.Generator(device).manual_seed(_seed(rng))
    generator, critic = _networks(input_shape, classes, box, width, rng)
    averaged = copy.deepcopy(generator.to(device)).eval().requires_grad_(False)
    critic.to(device)
    data = data.to(device)
    adam = [torch.optim.Adam(part.parameters(), learning_rate, (0.0, 0.9)) for part in (generator, critic)]
    rates = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 - step / (steps + 1)) for one in adam]
    for step in range(steps):
        for _ in range(critic_steps):
            real = data.take(_rows(data, batch_size, chance))
            with torch.no_grad():
                fake = generator(_noise(batch_size, chance), real.labels)
            _descend(adam[1], critic_loss(critic, real, fake, penalty, chance))
        labels = data.labels[_rows(data, batch_size, chance)]
        _descend(adam[0], -critic(generator(_noise(batch_size, chance), labels), labels).mean())
        for rate in rates:
            rate.step()
        _average(averaged, generator, min(0.999, (1 + step) / (10 + step)))
        progress(1)
    if not all(bool(torch.isfinite(value).all()) for value in averaged.state_dict().values()):
        raise WrongInput("generator", f"its training became NaN within {steps} steps; lower the learning rate")
    return averaged


def critic_loss(critic: nn.Module, real: Batch, fake: Tensor, penalty: float, chance: torch.Generator) -> Tensor:
    """D(fake) - D(real) + penalty (|grad D(between)| - 1)^2, the mean over the batch (Gulrajani et al., eq. 3)."""
    share = torch.rand(real.size, 1, 1, 1, generator=chance, device=chance.device, dtype=fake.dtype)
    between = (share * real.inputs + (1 - share) * fake).requires_grad_()
    # Apart from the others, so that the double backward goes through a third of the rows.
    (slope,) = torch.autograd.grad(critic(between, real.labels).sum(), between, create_graph=True)
    scores = critic(torch.cat([fake, real.inputs]), real.labels.repeat(2)).chunk(2)
    lengths = torch.linalg.vector_norm(slope.flatten(1), dim=1)
    loss: Tensor = (scores[0] - scores[1] + penalty * (lengths - 1).square()).mean()
    return loss


def check_public(data: Batch, classes: int, input_shape: tuple[int, ...]) -> None:
    """Refuse data that no generator of such pictures can be trained on."""
    shape = tuple(data.inputs.shape[1:])
    if len(input_shape) != 3:
        raise WrongInput("generator", f"makes pictures (channels, height, width), and the data is {input_shape}")
    if not data.size or shape != tuple(input_shape):
        found = f"{data.size} public pictures of the shape {shape}"
        raise WrongInput("generator", f"{found}; give at least one of the shape {tuple(input_shape)}")
    low, high = int(data.labels.min()), int(data.labels.max())
    if low < 0 or high >= classes:
        raise WrongInput("generator", f"public labels from {low} to {high}; allowed: 0 to {classes - 1}")


def _networks(
    input_shape: tuple[int, ...], classes: int, box: Box, width: int, rng: torch.Generator
) -> tuple[Generator, Critic]:
    seed = _seed(rng)
    with torch.random.fork_rng(devices=[]):  # layers draw their weights from the global generator
        torch.default_generator.manual_seed(seed)
        return Generator(input_shape, classes, box, width), Critic(input_shape, classes, width)


def _seed(rng: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=rng, device=rng.device))


def _rows(data: Batch, number: int, chance: torch.Generator) -> Tensor:
    return torch.randint(data.size, (number,), generator=chance, device=chance.device)


def _noise(number: int, chance: torch.Generator) -> Tensor:
    return torch.randn(number, LATENT, generator=chance, device=chance.device)


def _descend(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()


@torch.no_grad()
def _average(averaged: nn.Module, generator: nn.Module, decay: float) -> None:
    """The running mean of the generator's tensors: its pictures are steadier than those of any one step."""
    for mean, value in zip(averaged.state_dict().values(), generator.state_dict().values(), strict=True):
        if mean.is_floating_point():
            mean.lerp_(value, 1 - decay)
