"""Random crops and flips of training pictures: dgp does not say that it uses them, and its 93 % need them."""

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
        count, _, height, width = inputs.shape
        shifts = torch.randint(2 * self.padding + 1, (2, count, 1), generator=rng, device=rng.device)
        mirrored = torch.randint(2, (count, 1), generator=rng, device=rng.device) == 1
        across = torch.arange(width, device=rng.device)
        rows = shifts[0] + torch.arange(height, device=rng.device)  # (N, H), in the padded picture
        columns = shifts[1] + torch.where(mirrored, across.flip(0), across)  # (N, W)
        picture = torch.arange(count, device=rng.device)
        padded = self._padded(inputs).permute(0, 2, 3, 1)
        return padded[picture[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

    def _padded(self, inputs: Tensor) -> Tensor:
        count, channels, height, width = inputs.shape
        edge = self.padding
        black = torch.tensor(self.black, dtype=inputs.dtype, device=inputs.device).view(1, -1, 1, 1)
        whole = black.expand(count, channels, height + 2 * edge, width + 2 * edge).clone()
        whole[:, :, edge : edge + height, edge : edge + width] = inputs
        return whole


def crop_and_flip(data: Dataset, padding: int = 4) -> CropAndFlip:
    """The one for a data set: black is what its normalisation makes of a pixel of 0."""
    if len(data.input_shape) != 3:
        raise WrongInput("augment", f"{data.name} has no pictures; crops and flips need (channels, height, width)")
    if not data.mean:
        return CropAndFlip(padding)
    return CropAndFlip(padding, tuple(-mean / std for mean, std in zip(data.mean, data.std, strict=True)))
