"""A small class-conditional WGAN-GP (Gulrajani et al. 2017): pictures from noise and a label.

The generator is the prior knowledge of a server with public data about its clients' pictures. Its training data must
be of the same kind as the targets and must not contain them: only then does a found target come from the update. Both
networks take pictures of any size.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secateur.errors import WrongInput
from secateur.interfaces import Batch, Params, Watch
from secateur.seeding import initialise, spawn

LATENT = 128
Box = tuple[Tensor, Tensor]  # the lowest and the highest input of a valid picture, (C, 1, 1) each


class Generator(nn.Module):
    """A DCGAN-like generator: a linear layer, then upsampling convolutions with a class-conditional BatchNorm."""

    low: Tensor
    high: Tensor

    def __init__(self, input_shape: tuple[int, ...], classes: int, box: Box, width: int = 64) -> None:
        super().__init__()
        colours, *sides = input_shape
        stages = doublings(input_shape)
        widths = [min(2**i, 4) * width for i in reversed(range(stages + 1))]
        self.base = tuple(-(-side // 2**stages) for side in sides)
        self.sides = sides
        self.first = nn.Linear(LATENT, widths[0] * self.base[0] * self.base[1])
        self.norms = nn.ModuleList(ClassNorm(wide, classes) for wide in widths)
        pairs = pairwise(widths)
        self.convs = nn.ModuleList(nn.Conv2d(before, after, 3, padding=1) for before, after in pairs)
        self.last = nn.Conv2d(widths[-1], colours, 3, padding=1)
        for name, value in zip(("low", "high"), box, strict=True):
            self.register_buffer(name, value.detach().clone().reshape(colours, 1, 1))

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """Return pictures (N, C, H, W) inside the box for noise (N, 128) and labels (N,)."""
        x = self.first(z.to(self.first.weight.dtype)).unflatten(1, (-1, *self.base))
        x = self.norms[0](x, labels).relu()
        for conv, norm in zip(self.convs, list(self.norms)[1:], strict=True):
            x = norm(conv(F.interpolate(x, scale_factor=2)), labels).relu()
        x = self.last(x)[..., : self.sides[0], : self.sides[1]]
        pictures: Tensor = self.low + (self.high - self.low) * x.sigmoid()
        return pictures


class ClassNorm(nn.Module):
    """BatchNorm whose scale and shift belong to the class."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False)
        self.scale = nn.Parameter(torch.ones(classes, channels))
        self.shift = nn.Parameter(torch.zeros(classes, channels))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Normalise x (N, C, H, W), then scale and shift it by the labels (N,)."""
        normalised: Tensor = self.norm(x) * self.scale[labels, :, None, None] + self.shift[labels, :, None, None]
        return normalised


class Critic(nn.Module):
    """A critic of strided convolutions and a projection by the class, unnormalised: the penalty is per example."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, width: int = 64) -> None:
        super().__init__()
        stages = doublings(input_shape)
        widths = [min(2**i, 4) * width for i in range(stages + 1)]
        layers: list[nn.Module] = [nn.Conv2d(input_shape[0], width, 3, padding=1), nn.LeakyReLU(0.2)]
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.features = nn.Sequential(*layers, nn.Flatten())
        rows, columns = (side // 2**stages for side in input_shape[1:])
        self.score = nn.Linear(widths[-1] * rows * columns, 1)
        self.of_class = nn.Embedding(classes, widths[-1] * rows * columns)
        nn.init.zeros_(self.of_class.weight)

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        """Return the scores (N,); a high score means real."""
        features = self.features(pictures)
        scores: Tensor = self.score(features)[:, 0] + (features * self.of_class(labels)).sum(1)
        return scores


def doublings(input_shape: tuple[int, ...]) -> int:
    """Return how often a side can be halved and keep at least four pixels.

    Example:
        >>> [doublings((1, side, side)) for side in (5, 8, 28, 32)]
        [0, 1, 2, 3]
    """
    return max(0, (min(input_shape[1:]) // 4).bit_length() - 1)


def train_generator(
    data: Batch,
    classes: int,
    input_shape: tuple[int, ...],
    box: Box,
    steps: int,
    rng: torch.Generator,
    device: torch.device | str = "cpu",
    watch: Watch | None = None,
    *,
    width: int = 64,
    batch_size: int = 64,
    learning_rate: float = 2e-4,
    critic_steps: int = 5,
    penalty: float = 10.0,
) -> Generator:
    """Train on public pictures (in the model's units) for `steps` generator steps, and return the running mean.

    The settings are those of Gulrajani et al. for CIFAR-10: five critic steps for one of the generator and gradient
    penalty 10. Adam has betas 0 and .9 and a learning rate that falls linearly to zero. `watch` counts the steps, and
    keeps the state from which a killed training continues.
    """
    check_public(data, classes, input_shape)
    chance = spawn(rng, device)
    generator, critic = initialise(
        lambda: (Generator(input_shape, classes, box, width), Critic(input_shape, classes, width)), rng
    )
    course = GeneratorTraining(generator.to(device), critic.to(device), chance, learning_rate)
    data = data.to(device)
    kept = None if watch is None else watch.load()
    for step in range(0 if kept is None else course.restore(kept), steps):
        course.set_learning_rate(learning_rate * (1 - step / (steps + 1)))
        for _ in range(critic_steps):
            real = data.take(_rows(data, batch_size, chance))
            with torch.no_grad():
                fake = generator(_noise(batch_size, chance), real.labels)
            _descend(course.adam["critic"], critic_loss(critic, real, fake, penalty, chance))
        labels = data.labels[_rows(data, batch_size, chance)]
        _descend(course.adam["generator"], -critic(generator(_noise(batch_size, chance), labels), labels).mean())
        _average(course.averaged, generator, min(0.999, (1 + step) / (10 + step)))
        if watch is not None:
            watch.advance(1)
            watch.save(course.tensors(step + 1), ())
    if not all(bool(torch.isfinite(value).all()) for value in course.averaged.state_dict().values()):
        raise WrongInput("generator", f"its training became NaN within {steps} steps; lower the learning rate")
    return course.averaged


def check_public(data: Batch, classes: int, input_shape: tuple[int, ...]) -> None:
    """Refuse data that no generator of such pictures can be trained on."""
    shape = tuple(data.inputs.shape[1:])
    if len(input_shape) != 3:
        raise WrongInput("generator", f"makes pictures (channels, height, width), and the data is {input_shape}")
    if not data.size or shape != tuple(input_shape):
        pictures = f"{data.size} public pictures of the shape {shape}"
        raise WrongInput("generator", f"{pictures}; use at least one of the shape {tuple(input_shape)}")
    low, high = int(data.labels.min()), int(data.labels.max())
    if low < 0 or high >= classes:
        raise WrongInput("generator", f"public labels from {low} to {high}; allowed: 0 to {classes - 1}")


class GeneratorTraining:
    """State of a training: both networks, the generator's running mean, Adam's moments and the random generator."""

    def __init__(self, generator: Generator, critic: Critic, chance: torch.Generator, rate: float) -> None:
        self.generator, self.critic, self.chance = generator, critic, chance
        self.averaged = copy.deepcopy(generator).eval().requires_grad_(False)
        parts: dict[str, nn.Module] = {"generator": generator, "critic": critic}
        self.adam = {name: torch.optim.Adam(part.parameters(), rate, (0.0, 0.9)) for name, part in parts.items()}
        self.networks = parts | {"averaged": self.averaged}

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of both Adams."""
        for optimiser in self.adam.values():
            optimiser.param_groups[0]["lr"] = rate

    def tensors(self, step: int) -> Params:
        """Return by name all tensors that the steps from `step` on depend on."""
        tensors = {"step": torch.tensor(step), "chance": self.chance.get_state()}
        for part, net in self.networks.items():
            tensors |= {f"{part}/{name}": value for name, value in net.state_dict().items()}
        for part, optimiser in self.adam.items():
            for index, moments in optimiser.state_dict()["state"].items():
                tensors |= {f"adam.{part}/{index}/{name}": value for name, value in moments.items()}
        return tensors

    def restore(self, kept: Params) -> int:
        """Load the tensors that `tensors` returned, and return their step."""
        self.chance.set_state(kept["chance"])
        for part, net in self.networks.items():
            net.load_state_dict(_select_part(kept, part))
        for part, optimiser in self.adam.items():
            moments: dict[int, Params] = {}
            for name, value in _select_part(kept, f"adam.{part}").items():
                index, _, which = name.partition("/")
                moments.setdefault(int(index), {})[which] = value
            optimiser.load_state_dict(optimiser.state_dict() | {"state": moments})
        return int(kept["step"])


def _select_part(kept: Params, part: str) -> Params:
    """Return the entries of one part, without its prefix."""
    return {name.removeprefix(f"{part}/"): value for name, value in kept.items() if name.startswith(f"{part}/")}


def _rows(data: Batch, number: int, chance: torch.Generator) -> Tensor:
    return torch.randint(data.size, (number,), generator=chance, device=chance.device)


def _noise(number: int, chance: torch.Generator) -> Tensor:
    return torch.randn(number, LATENT, generator=chance, device=chance.device)


def _descend(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()


def critic_loss(critic: nn.Module, real: Batch, fake: Tensor, penalty: float, chance: torch.Generator) -> Tensor:
    """Return the mean of D(fake) - D(real) + penalty (|grad D(between)| - 1)^2 (Gulrajani et al., eq. 3)."""
    share = torch.rand(real.size, 1, 1, 1, generator=chance, device=chance.device, dtype=fake.dtype)
    between = (share * real.inputs + (1 - share) * fake).requires_grad_()
    # A call for `between` alone, so that the double backward goes through a third of the rows.
    (slope,) = torch.autograd.grad(critic(between, real.labels).sum(), between, create_graph=True)
    scores = critic(torch.cat([fake, real.inputs]), real.labels.repeat(2)).chunk(2)
    lengths = torch.linalg.vector_norm(slope.flatten(1), dim=1)
    loss: Tensor = (scores[0] - scores[1] + penalty * (lengths - 1).square()).mean()
    return loss


@torch.no_grad()
def _average(averaged: nn.Module, generator: nn.Module, decay: float) -> None:
    """Update the running mean of the generator's tensors: its pictures are steadier than those of any one step."""
    for mean, value in zip(averaged.state_dict().values(), generator.state_dict().values(), strict=True):
        if mean.is_floating_point():
            mean.lerp_(value, 1 - decay)
