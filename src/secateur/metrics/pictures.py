"""Pairs of picture stacks: their check, their matching, the mutual information and the wavelet similarity.

A stack is (N, C, H, W) with values in [0, 1]. A reconstructed batch has no order, so it is matched before it is scored.

CW-SSIM is robust to small shifts and changes of brightness. Its wavelets are Kingsbury's dual-tree complex wavelets:
six orientations a scale, symmetric extension at the borders. N. Kingsbury, "Complex wavelets for shift invariant
analysis and filtering of signals", 2001 (13,19-tap near-symmetric filters first, then the 14-tap quarter-shift ones);
I. Selesnick, R. Baraniuk, N. Kingsbury, "The dual-tree complex wavelet transform", 2005.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from secateur.errors import WrongInput, check_whole


def to_float64(truth: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    """Return both stacks in float64, in which no device rounds products.

    Stacks are refused unless they have the same shape and are grey or colour.
    """
    if truth.shape != guess.shape:
        raise WrongInput("pictures", f"{tuple(truth.shape)} and {tuple(guess.shape)} differ; must be equal")
    if truth.ndim != 4 or truth.shape[1] not in (1, 3) or not truth.numel():
        raise WrongInput("pictures", f"{tuple(truth.shape)} is not allowed; must be (N, 1 or 3, H, W) with N > 0")
    if not (truth.is_floating_point() and guess.is_floating_point()):
        raise WrongInput("pictures", f"{truth.dtype} and {guess.dtype} are not allowed; must be floating-point")
    return truth.double(), guess.double()


def match(truth: Tensor, guess: Tensor) -> Tensor:
    """Return (N,) the row of `guess` for each row of `truth`: the assignment with the least total MSE (Hungarian).

    Only the evaluator may call this function: it looks at the truth. Every guess is used at most once, so an attack
    that returns one picture many times gains nothing. Of more guesses than truths some are left over.

    Example:
        >>> truth = torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1, 1)
        >>> guess = torch.tensor([0.9, 0.1, 0.4]).view(3, 1, 1, 1)
        >>> match(truth, guess).tolist()
        [1, 2, 0]
    """
    from scipy.optimize import linear_sum_assignment

    first, _ = to_float64(truth, guess[: len(truth)])
    a, b = first.flatten(1), guess.double().flatten(1)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise WrongInput("pictures", "NaN or infinite values cannot be matched; leave the diverged trials out")
    # by differences: the expanded square would lose the small differences of nearly equal pictures
    distance = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
    _, columns = linear_sum_assignment((distance**2).cpu().numpy())
    return torch.as_tensor(columns, device=truth.device)


PAIRS = 1024  # pairs of counts per block; bounds the memory


class MutualInformation(NamedTuple):
    """Normalised mutual information of each pair, its chance level, and the adjusted one: 0 by chance, 1 when equal."""

    nmi: Tensor  # (N,)
    chance: Tensor  # (N,) the expected NMI when the pixels of one picture are permuted
    ami: Tensor  # (N,)


def nmi(truth: Tensor, guess: Tensor, levels: int = 256) -> MutualInformation:
    """Return the normalised mutual information of quantised pixels (PriPrune, Section 4.2.1), its chance level and AMI.

    The cluster of a pixel is its level floor(levels * value); colours are separate pixels.
    NMI = I(U; V) / ((H(U) + H(V)) / 2); chance = E[I] / ((H(U) + H(V)) / 2);
    AMI = (I - E[I]) / ((H(U) + H(V)) / 2 - E[I]).
    E[I] is exact over all permutations of the pixels (Vinh, Epps and Bailey 2010, Eq. 24a).

    Many levels and few pixels raise the chance level: noise on a natural 32x32 picture scores 0.4 to 0.5 at 256 levels.
    NMI is therefore meaningless without its chance level. Two constant pictures score 1, as in scikit-learn. The
    negative of a picture scores like the picture.

    Example:
        >>> truth = torch.tensor([0.0, 0.0, 1.0, 1.0]).view(1, 1, 2, 2)
        >>> found = nmi(truth, 1 - truth, levels=2)
        >>> [round(float(value), 4) for value in found]
        [1.0, 0.3333, 1.0]
    """
    check_whole("levels", levels, 2)
    u, v = (_quantise(stack, levels) for stack in to_float64(truth, guess))  # (N, P)
    size = u.shape[1]
    of_u, of_v = _histogram(u, levels), _histogram(v, levels)
    h_u, h_v = _entropy(of_u, size), _entropy(of_v, size)
    information = (h_u + h_v - _joint_entropy(u, v, levels)).clamp_min(0)
    expected = _expected_information(of_u, of_v, size)
    mean = (h_u + h_v) / 2

    constant = [(counts > 0).sum(1) == 1 for counts in (of_u, of_v)]
    none, both = constant[0] | constant[1], constant[0] & constant[1]
    convention = both.double()
    return MutualInformation(
        *(
            torch.where(none, convention, value)
            for value in (
                information / mean,
                expected / mean,
                _avoid_zero(information - expected) / _avoid_zero(mean - expected),
            )
        )
    )


def _quantise(pictures: Tensor, levels: int) -> Tensor:
    return (pictures.flatten(1) * levels).floor().clamp(0, levels - 1).long()


def _histogram(quantised: Tensor, levels: int) -> Tensor:
    """Return the number of pixels at each level, (N, L)."""
    counts = torch.zeros(len(quantised), levels, dtype=torch.long, device=quantised.device)
    return counts.scatter_add_(1, quantised, torch.ones_like(quantised))


def _entropy(counts: Tensor, size: int) -> Tensor:
    total: Tensor = torch.special.xlogy(counts, counts.double()).sum(1)
    return math.log(size) - total / size


def _joint_entropy(u: Tensor, v: Tensor, levels: int) -> Tensor:
    """Return H(U, V), (N,), from the pairs of levels that occur: a table of all pairs would be mostly zeros."""
    number, size = u.shape
    picture = torch.arange(number, device=u.device)[:, None]
    cells, counts = torch.unique((picture * levels + u) * levels + v, return_counts=True)
    total = torch.zeros(number, dtype=torch.float64, device=u.device)
    total.index_add_(0, cells // levels**2, torch.special.xlogy(counts, counts.double()))
    return math.log(size) - total / size


def _avoid_zero(value: Tensor) -> Tensor:
    """Return the value at least eps away from 0, as in scikit-learn: 0 / 0 is a perfect match."""
    least = torch.finfo(torch.float64).eps
    return torch.where(value < 0, value.clamp_max(-least), value.clamp_min(least))


def _expected_information(of_u: Tensor, of_v: Tensor, size: int) -> Tensor:
    """Return E[I], (N,), for fixed histograms and a random pairing of the pixels.

    A cell of the table is hypergeometric, so its expectation depends only on its two counts. Counts repeat within and
    between pictures, so each pair of distinct counts is evaluated once.
    """
    (a, many_a), (b, many_b) = _count_distinct(of_u), _count_distinct(of_v)
    pairs = torch.cartesian_prod(a, b)
    table = _expected_x_log_x(pairs[:, 0], pairs[:, 1], size).view(len(a), len(b))
    cells = torch.einsum("na,ab,nb->n", many_a, table, many_b) / size
    return cells - math.log(size) + _entropy(of_u, size) + _entropy(of_v, size)


def _count_distinct(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct counts above zero, (K,), and their frequency in each picture, (N, K)."""
    kinds = torch.unique(torch.cat([counts.new_zeros(1), counts.flatten()]))
    return kinds[1:], _histogram(torch.searchsorted(kinds, counts), len(kinds))[:, 1:].double()


def _expected_x_log_x(a: Tensor, b: Tensor, size: int) -> Tensor:
    """Return E[X log X], (P,), for X the number of b pixels, drawn out of `size`, that are among a fixed pixels."""
    mean = a * b / size
    reach = 12 * mean.sqrt() + 40  # the tails beyond have probability below e^-70 (Bernstein)
    start = torch.maximum((mean - reach).floor().long(), a + b - size).clamp_min(1)
    stop = torch.minimum((mean + reach).ceil().long(), torch.minimum(a, b))
    log_factorial = torch.arange(size + 1, dtype=torch.float64, device=a.device).add(1).lgamma()
    fixed = log_factorial[a] + log_factorial[b] + log_factorial[size - a] + log_factorial[size - b]
    fixed = fixed - log_factorial[size]

    expectation = torch.zeros_like(fixed)
    for block in torch.split((stop - start).argsort(), PAIRS):  # sorted by length, so that a block has little padding
        low, high = start[block, None], stop[block, None]
        x = low + torch.arange(int((high - low).max()) + 1, device=a.device)
        inside, x = x <= high, torch.minimum(x, high)
        rest = (x, a[block, None] - x, b[block, None] - x, size - a[block, None] - b[block, None] + x)
        probability = (fixed[block, None] - sum(log_factorial[count] for count in rest)).exp()
        expectation[block] = torch.where(inside, probability * torch.special.xlogy(x, x.double()), 0.0).sum(1)
    return expectation


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
