"""Measures of reconstructed pictures: MSE, PSNR and SSIM, all measures at once, a denoiser, summaries over targets.

Every measure takes two stacks (N, C, H, W) with values in [0, 1], grey or colour, on any device, and returns (N,)
values. The other measures have modules of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from secateur.errors import WrongInput
from secateur.interfaces import Params
from secateur.metrics.estimates import student_quantile
from secateur.metrics.lpips import ABSENT, lpips
from secateur.metrics.membership import Estimate
from secateur.metrics.pictures import cw_ssim, nmi, to_float64

WINDOW = 11  # pixels: 3.5 sigma to each side, as in scikit-image
SIGMA = 1.5
FEW = 10  # number of targets below which the resampled interval is too narrow
LEVELS = (256, 100)  # of NMI: those of an 8-bit picture, and fewer, with a low chance level
ABOVE_ZERO = (0.0, math.inf)
RANGES = {  # of measures by the start of their names; an interval never leaves its range
    "mse": (0.0, 1.0),
    "psnr": ABOVE_ZERO,  # of pixels in [0, 1]
    "ssim": (-1.0, 1.0),
    "cw_ssim": (0.0, 1.0),
    "nmi": (0.0, 1.0),
    "ami": (-1.0, 1.0),
    "lpips": ABOVE_ZERO,
    "attack_loss": ABOVE_ZERO,
}
SMOOTHING = 0.1  # weight of total variation in the denoiser: a light one


class PictureScores(NamedTuple):
    """Values (N,) by measure, and notes by measure; an absent measure has a note only."""

    values: dict[str, Tensor]
    notes: dict[str, str]


class Summary(NamedTuple):
    """Statistics of a measure over all targets."""

    mean: Estimate
    median: Estimate
    minimum: float
    maximum: float
    targets: int


def mse(truth: Tensor, guess: Tensor) -> Tensor:
    """Return the mean squared error over pixels and colours, (N,).

    Example:
        >>> mse(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.1)).item()  # doctest: +ELLIPSIS
        0.0100...
    """
    x, y = to_float64(truth, guess)
    return (x - y).square().mean((1, 2, 3))


def psnr(truth: Tensor, guess: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB, (N,): -10 log10 MSE for data range 1; infinite for equal pictures.

    Example:
        >>> round(psnr(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.1)).item(), 4)
        20.0
    """
    return -10 * mse(truth, guess).log10()


def ssim(truth: Tensor, guess: Tensor) -> Tensor:
    """Return the structural similarity, (N,), in an 11-pixel Gaussian window of sigma 1.5 (Wang et al. 2004, Eq. 13).

    SSIM = (2 m_x m_y + C1) (2 s_xy + C2) / ((m_x^2 + m_y^2 + C1) (s_x^2 + s_y^2 + C2)), C1 = 0.01^2, C2 = 0.03^2, with
    weighted means m, variances s^2 and covariance s_xy. It is averaged over all windows inside the picture and over
    colours, as scikit-image does with gaussian_weights=True, use_sample_covariance=False, data_range=1. The "SSIM" of
    the DGP paper is `cw_ssim`.

    Example:
        >>> round(ssim(torch.zeros(1, 1, 16, 16), torch.full((1, 1, 16, 16), 0.1)).item(), 4)  # C1 / (0.01 + C1)
        0.0099
    """
    x, y = to_float64(truth, guess)
    if min(x.shape[-2:]) < WINDOW:
        raise WrongInput("ssim", f"{x.shape[-2]}x{x.shape[-1]} pixels are too few; use at least {WINDOW} a side")
    mean_x, mean_y, xx, yy, xy = _blur(torch.stack([x, y, x * x, y * y, x * y]))
    c1, c2 = 0.01**2, 0.03**2
    structure = (2 * (xy - mean_x * mean_y) + c2) / (xx - mean_x**2 + yy - mean_y**2 + c2)
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    similarity: Tensor = luminance * structure
    return similarity.mean((1, 2, 3))


def _blur(stacks: Tensor) -> Tensor:
    """Return the weighted means over all windows inside the pictures."""
    offset = torch.arange(WINDOW, dtype=stacks.dtype, device=stacks.device) - WINDOW // 2
    weights = (-(offset**2) / (2 * SIGMA**2)).softmax(0)
    down, across = (torch.eye(n, dtype=stacks.dtype, device=stacks.device) for n in stacks.shape[-2:])
    return (down.unfold(0, WINDOW, 1) @ weights) @ stacks @ (across.unfold(0, WINDOW, 1) @ weights).mT


@torch.no_grad()
def denoise(pictures: Tensor, weight: float = SMOOTHING, iterations: int = 50) -> Tensor:
    """Return pictures (N, C, H, W) without noise: total-variation denoising of each channel (Chambolle 2004, Eq. 9).

    A person looks through noise that squared error counts. The steps are those of scikit-image's denoise_tv_chambolle.

    Example:
        >>> denoise(torch.full((1, 1, 4, 4), 0.5)).unique()
        tensor([0.5000], dtype=torch.float64)
    """
    whole = pictures.double()
    dual, step, smooth = whole.new_zeros(2, *whole.shape), 0.25, whole
    for _ in range(iterations):
        down = torch.nn.functional.pad(smooth.diff(dim=-2), (0, 0, 0, 1))
        across = torch.nn.functional.pad(smooth.diff(dim=-1), (0, 1))
        slope = torch.stack([down, across])
        dual = (dual - step * slope) / (1 + step / weight * slope.square().sum(0).sqrt())
        divergence = -dual.sum(0)
        divergence[..., 1:, :] += dual[0][..., :-1, :]
        divergence[..., :, 1:] += dual[1][..., :, :-1]
        smooth = whole + divergence
    return smooth


@torch.no_grad()
def picture_scores(
    truth: Tensor, guess: Tensor, weights: Params | None, levels: Sequence[int] = LEVELS
) -> PictureScores:
    """Return all measures of reconstructions that are matched to their truths.

    `weights` are those of LPIPS, None if absent. Reconstructed values are first clamped to [0, 1], as in a viewer.

    Example:
        >>> truth = torch.linspace(0, 1, 256).view(1, 1, 16, 16)
        >>> scores = picture_scores(truth, truth, weights=None, levels=[16])
        >>> list(scores.values)
        ['mse', 'psnr', 'cw_ssim', 'nmi_16', 'nmi_16_chance', 'ami_16', 'ssim']
        >>> scores.notes["cw_ssim"]
        '4 scales'
    """
    if not (truth.isfinite().all() and guess.isfinite().all()):
        raise WrongInput("pictures", "NaN or infinite values cannot be scored; leave the diverged trials out")
    if truth.min() < 0 or truth.max() > 1:
        raise WrongInput("pictures", "the truths have values outside [0, 1]; undo their normalisation first")
    guess = guess.clamp(0, 1)
    wavelet = cw_ssim(truth, guess)
    values = {"mse": mse(truth, guess), "psnr": psnr(truth, guess), "cw_ssim": wavelet.values}
    notes = {"cw_ssim": f"{wavelet.scales} scales"}
    for level in levels:
        info = nmi(truth, guess, level)
        values |= {f"nmi_{level}": info.nmi, f"nmi_{level}_chance": info.chance, f"ami_{level}": info.ami}
    if min(truth.shape[-2:]) < WINDOW:
        notes["ssim"] = f"absent: its window has {WINDOW} pixels a side"
    else:
        values["ssim"] = ssim(truth, guess)
    if weights is None:
        notes["lpips"] = ABSENT
    else:
        values["lpips"], enlarged = lpips(truth, guess, weights)
        if enlarged:
            notes["lpips"] = f"of pictures enlarged to {enlarged[0]}x{enlarged[1]}"
    return PictureScores(values, notes)


def summary(
    values: Mapping[str, Tensor], rng: Generator, resamples: int = 1000, sizes: Sequence[int] | None = None
) -> dict[str, Summary]:
    """Return mean and median with 95 % percentile intervals from resampled targets, minimum and maximum.

    Resampling fewer than 10 targets does not reach 95 % (two would cover half). The mean then has Student's interval,
    and the median a note. A target has one value, or as many consecutive values as `sizes` says. Values of one target
    are not independent, because one update mixes its pictures; a target is therefore drawn with all its values.

    Example:
        >>> found = summary({"psnr": torch.tensor([10.0, 20.0, 60.0])}, Generator().manual_seed(0))["psnr"]
        >>> found.mean.value, found.median.value, found.maximum
        (30.0, 20.0, 60.0)
    """
    counts = [1] * len(next(iter(values.values()))) if sizes is None else list(sizes)
    drawn = torch.randint(len(counts), (resamples, len(counts)), generator=rng)  # the same targets for every measure
    return {
        name: _summary(value.detach().cpu().double(), drawn, counts, _range(name)) for name, value in values.items()
    }


def _range(metric: str) -> tuple[float, float]:
    """Return the range of a measure; all numbers for one that is not known."""
    return next((ends for name, ends in RANGES.items() if metric.startswith(name)), (-math.inf, math.inf))


def _summary(value: Tensor, drawn: Tensor, sizes: Sequence[int], bounds: tuple[float, float]) -> Summary:
    few, note = 1 < len(sizes) < FEW, "one target: no interval" if len(sizes) == 1 else None
    if len(sizes) > 1 and max(sizes) > 1:
        note = f"interval over the {len(sizes)} targets, each with all its pictures"
    rows = pad_sequence(list(torch.split(value, list(sizes))), True, math.nan)  # (targets, pictures)
    if len(sizes) == 1:
        drawn = drawn[:1]  # all resamples of one target are alike
    resamples = rows[drawn].flatten(1)  # (resamples, targets * pictures)

    def estimate(exact: Tensor, resampled: Tensor, note: str | None = note) -> Estimate:
        # No interpolation: with an infinite PSNR it would be undefined.
        low = torch.quantile(resampled, 0.025, interpolation="lower")
        high = torch.quantile(resampled, 0.975, interpolation="higher")
        return Estimate(float(exact), float(low), float(high), note)

    mean = estimate(value.mean(), resamples.nanmean(1))
    median_note = f"{len(sizes)} targets are too few for 95 %: the median's interval is narrower" if few else note
    return Summary(
        mean=_student(value, sizes, mean, bounds) if few and bool(value.isfinite().all()) else mean,
        median=estimate(_median(value), _median(resamples), median_note),
        minimum=float(value.min()),
        maximum=float(value.max()),
        targets=len(sizes),
    )


def _student(value: Tensor, sizes: Sequence[int], mean: Estimate, bounds: tuple[float, float]) -> Estimate:
    """Return the mean with Student's interval over targets, inside the measure's range.

    The interval comes from the deviation of each target's sum from its expectation.
    """
    deviations = [float(part.sum()) - mean.value * len(part) for part in torch.split(value, list(sizes))]
    n = len(deviations)
    error = math.sqrt(n / (n - 1) * math.fsum(deviation * deviation for deviation in deviations)) / value.numel()
    radius = student_quantile(n - 1) * error
    return mean._replace(low=max(mean.value - radius, bounds[0]), high=min(mean.value + radius, bounds[1]))


def _median(x: Tensor) -> Tensor:
    """Return the median, the mean of the two middle values if the count is even.

    NaN is ignored; it pads targets with fewer pictures.
    """
    ordered, size = x.sort(-1).values, (~x.isnan()).sum(-1, keepdim=True)
    return ((ordered.gather(-1, (size - 1) // 2) + ordered.gather(-1, size // 2)) / 2)[..., 0]
