"""An imprint block and its gradient: how Rob's server makes it, and what can be read off what comes back."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn
from torch.distributions import Laplace, Normal

from secateur.interfaces import Params

LOWEST = -10.0  # deviations: all pictures lie above the first threshold
FEW = 0.01  # of a row's entries: where fewer change, equal entries at a pruning's threshold were parted
STRETCHED = 0.9  # of a picture's entries lie inside the box when its slope is not known


class Imprinted(nn.Module):
    """A network behind an imprint block: it is given x + mean_i relu(w_i x + b_i) in place of x."""

    def __init__(self, net: nn.Module, pixels: int, bins: int) -> None:
        super().__init__()
        self.imprint = nn.Linear(pixels, bins)
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        """Add the mean activation to every pixel, so that all rows get the same gradient."""
        active = torch.relu(self.imprint(inputs.flatten(1))).mean(1)
        output: Tensor = self.net(inputs + active.view(-1, *[1] * (inputs.ndim - 1)))
        return output


def measure(measurement: str, shape: tuple[int, ...], rng: Generator) -> Tensor:
    """The row (D,) that a picture is multiplied with, float64.

    randn: its mean is taken out, since pictures differ most in brightness and one draw would weigh that ten times as
    much as another. dct: the mean over pixels of sqrt(2) cos(pi (column + 1/2) / width).
    """
    pixels = math.prod(shape)
    if measurement == "dct":
        columns = (torch.arange(shape[-1], dtype=torch.double) + 0.5) / shape[-1]
        return (math.sqrt(2) * torch.cos(math.pi * columns)).expand(shape).flatten() / pixels
    row = torch.randn(pixels, generator=rng, dtype=torch.double, device=rng.device).cpu()
    row = row - row.mean()
    unit: Tensor = row / row.norm()
    return unit


def thresholds(measurement: str, bins: int) -> Tensor:
    """(bins,) ascending: the lower ends of bins of equal mass under the unit Gaussian, or the Laplace for dct."""
    law = Laplace(0.0, math.sqrt(0.5)) if measurement == "dct" else Normal(0.0, 1.0)
    ends = law.icdf(torch.arange(1, bins, dtype=torch.double) / bins)  # type: ignore[no-untyped-call]
    return torch.cat([torch.tensor([LOWEST], dtype=torch.double), ends])


def read_out(weight: Tensor, bias: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Row i less row i + 1, the last as it is: (P, D) pictures dgW / dgb of the full bins, and their (P,) dgb."""
    below = torch.zeros_like(weight[:1])
    rows = weight - torch.cat([weight[1:], below])
    slopes = bias - torch.cat([bias[1:], below[0, :1]])
    full = slopes.abs() > threshold * slopes.abs().max()
    return rows[full] / slopes[full, None], slopes[full]


def read_surviving(
    weight: Tensor, bias: Tensor, sent: Params, reach: Tensor, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of a gradient of which entries were dropped, which are 0 here; (P,) sizes of the jumps come third.

    Rows of which no picture lies between are equal, so a picture still shows as a jump from one row of weights to the
    next, on the entries that survived in either; those that did in neither are 0. Where the bias gradient of both rows
    survived it gives the slope; where both survived and are equal there is no picture. Elsewhere the slope's sign is
    that of the bias entry that survived, or else the one by which the picture's measurement has the sign of its bin's,
    and its size is such that the picture fills the box, `reach` (D,) to both sides of 0.
    """
    nothing = torch.zeros_like(weight[:1])
    jumps = weight - torch.cat([weight[1:], nothing])
    slopes = bias - torch.cat([bias[1:], nothing[0, :1]])
    there = bias != 0
    if torch.equal(there, (weight != 0).any(1)):  # rows above all pictures are empty of themselves
        there = torch.ones_like(there)
    known = there & torch.cat([there[1:], there.new_ones(1)])
    sizes = jumps.norm(dim=1)
    full = ((jumps != 0).double().mean(1) >= FEW) & (sizes > threshold * sizes.max())
    full &= ~known | (slopes.abs() > threshold * slopes.abs().max())
    edges = -sent["imprint.bias"]
    middle = edges + torch.cat([edges[1:], edges[-1:]])
    by_measurement = (jumps @ sent["imprint.weight"][0]).sign() * middle.sign()
    signs = torch.where(slopes != 0, slopes.sign(), by_measurement)
    stretch = (jumps.abs() / reach).kthvalue(math.ceil(STRETCHED * len(reach)), dim=1).values.clamp_min(1e-30)
    taken = torch.where(known, slopes, torch.where(signs == 0, 1, signs) * stretch)
    return jumps[full] / taken[full, None], taken[full], sizes[full]


def expected_isolated(masses: Tensor, batch: int) -> float:
    """The share of a batch's pictures that are alone in their bin: sum_b p_b (1 - p_b)^(batch - 1).

    Example:
        >>> round(expected_isolated(torch.full((128,), 1 / 128), 9), 3)
        0.939
    """
    return float((masses * (1 - masses) ** (batch - 1)).sum())


def bin_masses(sent: Params, pictures: Tensor) -> Tensor:
    """The share of pictures in every bin of a tampered model, (bins,)."""
    measured = pictures.flatten(1).to(sent["imprint.weight"]) @ sent["imprint.weight"][0]
    place = torch.bucketize(measured, -sent["imprint.bias"]) - 1
    return torch.bincount(place[place >= 0], minlength=len(sent["imprint.bias"])) / len(pictures)
