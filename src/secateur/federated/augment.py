"""Random crops and flips of training pictures.

The dgp paper does not mention them, but its accuracy of 93 % needs them. The mapp_fl paper does not mention them
either, but its public configuration uses them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from secateur.data.dataset import Dataset
from secateur.errors import WrongInput, check_wholes


@dataclass(frozen=True)
class CropAndFlip:
    """Transform that shifts every picture by up to `padding` pixels, filled with black, and mirrors half of them."""

    padding: int = 4
    black: tuple[float, ...] = (0.0,)  # a black pixel in the model's units: one value a channel, or one for all

    def __post_init__(self) -> None:
        check_wholes(self, "padding", least=0)

    def __call__(self, inputs: Tensor, rng: Generator) -> Tensor:
        """Return new pictures (N, C, H, W); each picture has separate draws, on the generator's device."""
        moves = self.draw(len(inputs), rng).to(inputs.device)
        return move_pictures(inputs, torch.arange(len(inputs), device=inputs.device), moves, self.colour(inputs))

    def draw(self, count: int, rng: Generator) -> Tensor:
        """Return moves (count, 3) for `move_pictures`: the window's offsets down and right, and 1 if mirrored."""
        shifts = torch.randint(2 * self.padding + 1, (2, count), generator=rng, device=rng.device)
        mirrored = torch.randint(2, (count,), generator=rng, device=rng.device)
        return torch.stack([*(shifts - self.padding), mirrored], 1)

    def colour(self, inputs: Tensor) -> Tensor:
        """Return black, (C,) or (1,), in the dtype and on the device of the inputs."""
        return torch.tensor(self.black, dtype=inputs.dtype, device=inputs.device)

    def check(self, data: Dataset) -> None:
        """Raise WrongInput for data without pictures, or if the number of channels differs from that of black."""
        if len(data.input_shape) != 3:
            raise WrongInput("augment", f"{data.name} has no pictures; crops and flips need (channels, height, width)")
        if len(self.black) not in (1, data.input_shape[0]):
            channels = f"black has {len(self.black)} channels and {data.name} {data.input_shape[0]}"
            raise WrongInput("augment", f"{channels}; use one value a channel, or one for all")


def move_pictures(inputs: Tensor, rows: Tensor, moves: Tensor, black: Tensor) -> Tensor:
    """Return shifted and mirrored windows (..., C, H, W) of the selected pictures, in one gather.

    Only the selected pictures are copied, so a CUDA graph can run this on `rows` that change between replays.

    Args:
        inputs: all pictures (N, C, H, W).
        rows: (...) indices of the selected pictures.
        moves: (..., 3) offset down, offset right, 1 if mirrored.
        black: (C,) or (1,) fill value outside of a picture.

    Example:
        >>> picture, black = torch.tensor([[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]]), torch.zeros(1)
        >>> move_pictures(picture, torch.tensor([0]), torch.tensor([[1, 1, 0]]), black)[0, 0].tolist()
        [[5.0, 6.0, 0.0], [0.0, 0.0, 0.0]]
        >>> move_pictures(picture, torch.tensor([0]), torch.tensor([[1, 1, 1]]), black)[0, 0].tolist()
        [[0.0, 6.0, 5.0], [0.0, 0.0, 0.0]]
    """
    height, width = inputs.shape[-2:]
    down, right, mirrored = (move.unsqueeze(-1) for move in moves.unbind(-1))
    across = torch.arange(width, device=moves.device)
    lines = torch.arange(height, device=moves.device) + down  # (..., H)
    columns = torch.where(mirrored == 1, width - 1 - across, across) + right  # (..., W)
    line, column = lines.clamp(0, height - 1), columns.clamp(0, width - 1)
    pixels = inputs[rows[..., None, None], :, line[..., :, None], column[..., None, :]]  # (..., H, W, C)
    inside = (line == lines)[..., :, None] & (column == columns)[..., None, :]
    return torch.where(inside[..., None], pixels, black).movedim(-1, -3)


def crop_and_flip(data: Dataset, padding: int = 4) -> CropAndFlip:
    """Return the transform for a data set; black is the normalised value of a pixel of 0."""
    black = tuple(-mean / std for mean, std in zip(data.mean, data.std, strict=True))
    transform = CropAndFlip(padding, black or (0.0,))
    transform.check(data)
    return transform
