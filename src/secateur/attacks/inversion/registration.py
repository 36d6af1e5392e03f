"""Registration of the candidates of group consistency: affine alignment to their mean (GI, Yin et al. 2021, Eq. 11).

The authors align by RANSAC-flow, a network trained on photographs. This module stands in for it, without a network: it
maximises the correlation of the two pictures, as ECC does (Evangelidis and Psarakis 2008). The best whole shift comes
from a cross-correlation by FFT. Gauss-Newton steps then refine it to an affine map. An alignment that does not raise
the correlation is not used, so noise stays where it is. No value goes to the host: a CUDA graph can hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

SMALLEST = 4  # pixels of a side, below which nothing is aligned
STEPS = 8  # of Gauss-Newton
DAMPING = 1e-3  # of the mean of the diagonal
GAIN = 1e-3  # of the correlation, for which a picture is moved, and again for which it is more than shifted


def register(pictures: Tensor, target: Tensor) -> Tensor:
    """Return pictures (N, C, H, W), each aligned to its target (N, C, H, W); edges are continued."""
    if min(pictures.shape[-2:]) < SMALLEST:
        return pictures
    goal = standardise(target)
    shifted = find_shift(standardise(pictures), goal)
    warped = [pictures, warp(pictures, shifted), warp(pictures, refine(pictures, goal, shifted))]
    likeness = torch.stack([(standardise(one) * goal).mean((1, 2)) for one in warped]).nan_to_num(-1.0)
    best = torch.stack([likeness[0] + 2 * GAIN, likeness[1] + GAIN, likeness[2]]).argmax(0).view(-1, 1, 1, 1)
    return torch.where(best == 0, pictures, torch.where(best == 1, warped[1], warped[2]))


def standardise(pictures: Tensor) -> Tensor:
    """Return grey pictures (N, H, W) of mean 0 and deviation 1; a flat picture is 0."""
    grey = pictures.mean(1)
    grey = grey - grey.mean((1, 2), keepdim=True)
    return grey / grey.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-6)


def find_shift(grey: Tensor, goal: Tensor) -> Tensor:
    """Return the map (N, 2, 3) of the whole shift at which the cross-correlation is largest; edges meet."""
    height, width = grey.shape[1:]
    product = torch.fft.rfft2(grey) * torch.fft.rfft2(goal).conj()
    peak = torch.fft.irfft2(product, s=(height, width)).flatten(1).argmax(1)
    down, across = peak // width, peak % width
    down, across = (x - n * (2 * x > n) for x, n in ((down, height), (across, width)))
    maps = _unit(grey).repeat(len(grey), 1, 1)
    maps[:, 0, 2], maps[:, 1, 2] = 2 * across / width, 2 * down / height
    return maps


def refine(pictures: Tensor, goal: Tensor, maps: Tensor) -> Tensor:
    """Return affine maps after Gauss-Newton steps on the squared difference of standardised pictures."""
    height, width = goal.shape[1:]
    across = (2 * torch.arange(width, device=goal.device, dtype=goal.dtype) + 1) / width - 1
    down = ((2 * torch.arange(height, device=goal.device, dtype=goal.dtype) + 1) / height - 1)[:, None]
    places = torch.stack([across.expand(height, -1), down.expand(-1, width), torch.ones_like(goal[0])])  # (3, H, W)
    for _ in range(STEPS):
        grey = standardise(warp(pictures, maps))
        slopes = (_difference(grey, 2) * width / 2, _difference(grey, 1) * height / 2)
        columns = torch.stack([slope[:, None] * places for slope in slopes], 1).flatten(3).flatten(1, 2)  # (N, 6, HW)
        square = columns @ columns.mT
        damping = DAMPING * square.diagonal(dim1=1, dim2=2).mean(1) + 1e-6
        square = square + damping[:, None, None] * torch.eye(6, device=goal.device, dtype=goal.dtype)
        step = solve(square, (columns @ (goal - grey).flatten(1)[:, :, None])[:, :, 0]).view(-1, 2, 3)
        maps = compose(maps, step)
    return maps


def compose(maps: Tensor, step: Tensor) -> Tensor:
    """Return the maps (N, 2, 3) that go by identity + step first, then by `maps`."""
    inner = step + _unit(step)
    return torch.cat([maps[:, :, :2] @ inner[:, :, :2], maps[:, :, :2] @ inner[:, :, 2:] + maps[:, :, 2:]], 2)


def solve(square: Tensor, right: Tensor) -> Tensor:
    """Return x (N, K) of positive definite systems (N, K, K) x = (N, K), by elimination on the device alone."""
    table = torch.cat([square, right[:, :, None]], 2)
    for k in range(square.shape[1]):
        row = table[:, k] / table[:, k, k, None]
        table = table - table[:, :, k, None] * row[:, None]
        table[:, k] = row
    return table[:, :, -1]


def warp(pictures: Tensor, maps: Tensor) -> Tensor:
    """Return the pictures sampled through affine maps, in coordinates from -1 to 1."""
    grid = affine_grid(maps, list(pictures.shape), align_corners=False)
    return grid_sample(pictures, grid, padding_mode="border", align_corners=False)


def _difference(grey: Tensor, dim: int) -> Tensor:
    """Return half the difference of the two neighbours of each pixel; 0 at the edges, where there is one."""
    inner = (grey.narrow(dim, 2, grey.shape[dim] - 2) - grey.narrow(dim, 0, grey.shape[dim] - 2)) / 2
    edge = torch.zeros_like(grey.narrow(dim, 0, 1))
    return torch.cat([edge, inner, edge], dim)


def _unit(like: Tensor) -> Tensor:
    """Return the identity map (1, 2, 3)."""
    return torch.eye(2, 3, device=like.device, dtype=like.dtype)[None]
