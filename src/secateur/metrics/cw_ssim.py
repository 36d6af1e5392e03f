"""Complex-wavelet SSIM: a structural similarity that is robust to small shifts and changes of brightness.

The wavelets are Kingsbury's dual-tree complex wavelets: six orientations a scale, symmetric extension at the borders.
N. Kingsbury, "Complex wavelets for shift invariant analysis and filtering of signals", 2001 (13,19-tap near-symmetric
filters first, then the 14-tap quarter-shift ones); I. Selesnick, R. Baraniuk, N. Kingsbury, "The dual-tree complex
wavelet transform", 2005.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from secateur.metrics.pictures import to_float64

SCALES = 5
STABILITY = 1e-6  # K of the formula

# Filters of the first scale, from the left end to the centre. The taps are exact fractions; a test proves in integers
# that the pair is biorthogonal.
_FIRST_LOW = [tap / 5120 for tap in (-9, 0, 114, -240, -247, 1520, 2844)]
_FIRST_HIGH = [tap / 1146880 for tap in (-81, 0, 1539, -2160, -8208, 27360, 63816, -59280, -343786, 641600)]
# Orthonormal low-pass filter of all later scales; its delay is a quarter sample off its middle.
_QUARTER_SHIFT = [
    *(0.00325314276365318, -0.00388321199915849, 0.03466034684485350, -0.03887280126882780, -0.11720388769911500),
    *(0.27529538466888200, 0.75614564389252300, 0.56881042071212300, 0.01186609203379700, -0.10671180468666500),
    *(0.02382538479492030, 0.01702522388155400, -0.00543947593727412, -0.00455689562847549),
]


class CwSsim(NamedTuple):
    """Similarity of each pair, and the number of scales."""

    values: Tensor  # (N,)
    scales: int


def cw_ssim(truth: Tensor, guess: Tensor) -> CwSsim:
    """Return the complex-wavelet SSIM (Wang and Simoncelli 2005; Sampat et al. 2009, Eq. 6), DGP's "SSIM".

    Let x and y be the complex coefficients at one position of one scale and colour, and sum over the six orientations:
    S = (2 |sum x conj(y)| + K) / (sum |x|^2 + sum |y|^2 + K), K = 1e-6. S is averaged over all positions and colours of
    a scale, then over scales. The published index sums over a window of one orientation instead. DGP's tables fit this
    global form: unlike windowed SSIM, noise scores about 0.23 against a natural picture of 32x32 pixels.

    Fewer than five scales are used if a band would be smaller than one coefficient: five from 17 pixels a side, three
    at 8. The result holds the number of scales.

    Example:
        >>> picture = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
        >>> round(cw_ssim(picture, picture).values.item(), 9), cw_ssim(picture, picture).scales
        (1.0, 3)
        >>> round(cw_ssim(picture, picture / 2).values.item(), 3)  # 2 * 1/2 / (1 + 1/4)
        0.8
    """
    x, y = to_float64(truth, guess)
    used = min(SCALES, max(1, (min(x.shape[-2:]) - 1).bit_length()))
    values = [_similarity(a, b) for a, b in zip(bands(x, used), bands(y, used), strict=True)]
    return CwSsim(torch.stack(values).mean(0), used)


def _similarity(x: Tensor, y: Tensor) -> Tensor:
    common = (x * y.conj()).sum(2).abs()
    energy = (x.abs().square() + y.abs().square()).sum(2)
    return ((2 * common + STABILITY) / (energy + STABILITY)).mean((1, 2, 3))


def bands(pictures: Tensor, scales: int) -> list[Tensor]:
    """Return the dual-tree complex wavelet transform: for each scale (N, C, 6, about H / 2^s, W / 2^s) complex."""
    low = pad(pictures, (0, pictures.shape[-1] % 2, 0, pictures.shape[-2] % 2), mode="replicate")
    coefficients = []
    for scale in range(scales):
        split = _filter_later if scale else _filter_first
        # Filters with mirrored borders are matrices, and a product is many times faster than a convolution.
        down, across = (split(torch.eye(size, dtype=low.dtype, device=low.device)) for size in low.shape[-2:])
        low, *details = (rows.mT @ low @ columns for rows in down for columns in across)
        coefficients.append(torch.cat([_combine_trees(detail) for detail in details], 2))
    return coefficients


def _combine_trees(band: Tensor) -> Tensor:
    """Return two opposite orientations, (N, C, 2, h, w), from the four trees that are interleaved in a band."""
    a, b = band[..., 0::2, 0::2], band[..., 0::2, 1::2]
    c, d = band[..., 1::2, 0::2], band[..., 1::2, 1::2]
    return torch.stack([torch.complex(a - d, b + c), torch.complex(a + d, b - c)], 2) / 2**0.5


def _filter_first(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return low and high part of the first scale along the last axis; odd and even samples are the two trees."""

    def symmetric(half: list[float]) -> Tensor:
        return _filter(_mirror(x, len(half) - 1), half + half[-2::-1])

    return symmetric(_FIRST_LOW), symmetric(_FIRST_HIGH)


def _filter_later(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return low and high part of a later scale, half as long: each tree filters and decimates its own samples."""
    x = _mirror(x, 1) if x.shape[-1] % 4 else x  # four samples yield one of each tree
    wide = _mirror(x, len(_QUARTER_SHIFT) - 2)
    high = [tap * (-1) ** i for i, tap in enumerate(reversed(_QUARTER_SHIFT))]  # quadrature mirror filter

    def trees(taps: list[float]) -> Tensor:
        even = _filter(wide, taps, stride=4, dilation=2)
        # reversed taps: a quarter-sample delay of the opposite sign
        odd = _filter(wide[..., 1:], taps[::-1], stride=4, dilation=2)
        return torch.stack([even, odd], -1).flatten(-2)

    return trees(_QUARTER_SHIFT), trees(high)


def _mirror(x: Tensor, margin: int) -> Tensor:
    """Return the last axis extended on both sides by reflection with repeated end samples; `margin` may exceed it."""
    size = x.shape[-1]
    position = torch.arange(-margin, size + margin, device=x.device) % (2 * size)
    return x[..., torch.where(position < size, position, 2 * size - 1 - position)]


def _filter(x: Tensor, taps: list[float], stride: int = 1, dilation: int = 1) -> Tensor:
    kernel = x.new_tensor(taps).view(1, 1, -1)
    filtered = conv1d(x.reshape(-1, 1, x.shape[-1]), kernel, stride=stride, dilation=dilation)
    return filtered.view(*x.shape[:-1], -1)
