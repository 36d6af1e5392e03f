"""Random crops and flips of training pictures.

dgp does not say that it uses them, and its 93 % need them; nor does mapp_fl, whose public configuration has them on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from secateur.data.dataset import Dataset
from secateur.errors import WrongInput


@dataclass(frozen=True)
class CropAndFlip:
    """Shifts every picture by up to `padding` pixels, black coming in, and mirrors half of them; a Transform."""

    padding: int = 4
    black: tuple[float, ...] = (0.0,)  # a black pixel in the model's units, a channel each or one for all

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise WrongInput("padding", f"{self.padding} is not allowed; give a whole number from 0")

    def __call__(self, inputs: Tensor, rng: Generator) -> Tensor:
        """New pictures (N, C, H, W); every one has draws of its own, made on the generator's device."""
        moves = self.draw(len(inputs), rng).to(inputs.device)
        return moved(inputs, torch.arange(len(inputs), device=inputs.device), moves, self.colour(inputs))

    def draw(self, count: int, rng: Generator) -> Tensor:
        """(count, 3) for `moved`: how far a picture's window lies below and right of it, and 1 where it is mirrored."""
        shifts = torch.randint(2 * self.padding + 1, (2, count), generator=rng, device=rng.device)
        mirrored = torch.randint(2, (count,), generator=rng, device=rng.device)
        return torch.stack([*(shifts - self.padding), mirrored], 1)

    def colour(self, inputs: Tensor) -> Tensor:
        """(C,) or (1,) black, of the inputs' kind and on their device."""
        return torch.tensor(self.black, dtype=inputs.dtype, device=inputs.device)

    def check(self, data: Dataset) -> None:
        """Refuse data without pictures, or with other channels than black has."""
        if len(data.input_shape) != 3:
            raise WrongInput("augment", f"{data.name} has no pictures; crops and flips need (channels, height, width)")
        if len(self.black) not in (1, data.input_shape[0]):
            channels = f"black has {len(self.black)} channels and {data.name} {data.input_shape[0]}"
            raise WrongInput("augment", f"{channels}; give a value for each, or one for all")


def moved(inputs: Tensor, rows: Tensor, moves: Tensor, black: Tensor) -> Tensor:
    """(..., C, H, W): windows of the pictures `rows` (...) of all (N, C, H, W), by `moves` (..., 3), one gather.

    Nothing is copied but what is asked for, so a CUDA graph can do it to rows that it is given.

    Example:
        >>> picture, black = torch.tensor([[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]]), torch.zeros(1)
        >>> moved(picture, torch.tensor([0]), torch.tensor([[1, 1, 0]]), black)[0, 0].tolist()
        [[5.0, 6.0, 0.0], [0.0, 0.0, 0.0]]
        >>> moved(picture, torch.tensor([0]), torch.tensor([[1, 1, 1]]), black)[0, 0].tolist()
        [[0.0, 6.0, 5.0], [0.0, 0.0, 0.0]]
    """
    height, width = inputs.shape[-2:]
    down, right, mirrored = (each.unsqueeze(-1) for each in moves.unbind(-1))
    across = torch.arange(width, device=moves.device)
    lines = torch.arange(height, device=moves.device) + down  # (..., H)
    columns = torch.where(mirrored == 1, width - 1 - across, across) + right  # (..., W)
    line, column = lines.clamp(0, height - 1), columns.clamp(0, width - 1)
    found = inputs[rows[..., None, None], :, line[..., :, None], column[..., None, :]]  # (..., H, W, C)
    inside = (line == lines)[..., :, None] & (column == columns)[..., None, :]
    return torch.where(inside[..., None], found, black).movedim(-1, -3)


def crop_and_flip(data: Dataset, padding: int = 4) -> CropAndFlip:
    """The one for a data set: black is what its normalisation makes of a pixel of 0."""
    black = tuple(-mean / std for mean, std in zip(data.mean, data.std, strict=True))
    made = CropAndFlip(padding, black or (0.0,))
    made.check(data)
    return made
