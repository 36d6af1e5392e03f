"""ATS: the client transforms its pictures, so that a reconstruction differs from the raw pictures.

The 50 fixed operations are AutoAugment's (Cubuk et al. 2019) with the magnitudes of ATS's authors. An operation takes
integer levels 0 to 255, (N, C, H, W) int64 in grey or RGB, and a sign (N,) of 1 or -1 per picture. Some operations
ignore the sign. The results equal those of Pillow's ImageOps, ImageEnhance and Image.transform, level by level.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from secateur.catalogue import method
from secateur.errors import WrongInput, check_whole
from secateur.functional import Functional, split
from secateur.inference import per_example_gradients
from secateur.interfaces import Batch, Loss, Params, Transform
from secateur.progress import progress
from secateur.seeding import draw_seed

Operate = Callable[[Tensor, Tensor, float], Tensor]  # (levels, sign, magnitude) -> levels
GREY = (19595, 38470, 7471)  # weights of red, green and blue in a grey level, sum 65536 (ITU-R 601-2)


def invert(levels: Tensor, sign: Tensor, magnitude: float) -> Tensor:
    """Return 255 - v."""
    return 255 - levels


def solarize(levels: Tensor, sign: Tensor, magnitude: float) -> Tensor:
    """Replace levels v of at least the magnitude by 255 - v."""
    return torch.where(levels < magnitude, levels, 255 - levels)


def posterize(levels: Tensor, sign: Tensor, magnitude: float) -> Tensor:
    """Keep only the highest `magnitude` bits."""
    return levels & -(1 << (8 - int(magnitude)))


def autocontrast(levels: Tensor, sign: Tensor, magnitude: float) -> Tensor:
    """Stretch every channel so that its lowest level becomes 0 and its highest 255; a flat channel is unchanged."""
    low, high = levels.amin((2, 3), True), levels.amax((2, 3), True)
    stretch = torch.full_like(low, 255, dtype=torch.float64) / (high - low).clamp_min(1)  # 255 / x would round twice
    stretched = (levels * stretch + -low * stretch).trunc().clamp(0, 255).long()
    return torch.where(high > low, stretched, levels)


def equalize(levels: Tensor, sign: Tensor, magnitude: float) -> Tensor:
    """Flatten the histogram of every channel: v becomes (step // 2 + pixels below v) // step."""
    flat = levels.flatten(2)  # (N, C, P)
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=levels.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, True))
    step = (flat.shape[2] - last) // 255
    divisor = step.clamp_min(1)
    table = ((step // 2 + counts.cumsum(2) - counts) // divisor).clamp(0, 255)
    return torch.where(step > 0, table.gather(2, flat), flat).view_as(levels)


def brightness(levels: Tensor, sign: Tensor, magnitude: float) -> Tensor:
    """Blend away from black (sign 1) or towards black (sign -1)."""
    return _blend(torch.zeros_like(levels), levels, sign, magnitude)


def colour(levels: Tensor, sign: Tensor, magnitude: float) -> Tensor:
    """Blend away from grey (sign 1) or towards grey (sign -1)."""
    return _blend(_to_grey(levels).expand_as(levels), levels, sign, magnitude)


def contrast(levels: Tensor, sign: Tensor, magnitude: float) -> Tensor:
    """Blend away from the picture's mean grey (sign 1) or towards it (sign -1)."""
    mean = (_to_grey(levels).double().mean((1, 2, 3), True) + 0.5).long()
    return _blend(mean.expand_as(levels), levels, sign, magnitude)


def sharpness(levels: Tensor, sign: Tensor, magnitude: float) -> Tensor:
    """Blend away from the smoothed picture (sign 1) or towards it (sign -1).

    In the smoothing a pixel weighs 5 and its eight neighbours 1; the border is not smoothed.
    """
    height, width = levels.shape[2:]
    smooth = levels.clone()
    if height > 2 and width > 2:
        shifts = [(i, j) for i in range(3) for j in range(3)]
        around = torch.stack([levels[..., i : height - 2 + i, j : width - 2 + j] for i, j in shifts]).sum(0)
        smooth[..., 1:-1, 1:-1] = (2 * (around + 4 * levels[..., 1:-1, 1:-1]) + 13) // 26
    return _blend(smooth, levels, sign, magnitude)


def translate(levels: Tensor, sign: Tensor, magnitude: float, axis: int) -> Tensor:
    """Shift by a share of the width (axis 3) or height (axis 2): nearest pixels, black outside the picture."""
    size = levels.shape[axis]
    zeros = sign.new_zeros(len(sign), 1, 1)
    x, y = (_centres(levels, along) + zeros for along in (3, 2))
    shift = (magnitude * size * sign.double())[:, None, None]
    return _sample_nearest(levels, *((x + shift, y) if axis == 3 else (x, y + shift)), outside=0)


def rotate(levels: Tensor, sign: Tensor, magnitude: float) -> Tensor:
    """Rotate by `magnitude` degrees counter-clockwise about the centre: nearest pixels, mid-grey outside."""
    angle = -math.radians(magnitude)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    height, width = levels.shape[2:]
    x, y = _centres(levels, 3) - width / 2, _centres(levels, 2) - height / 2
    zeros = sign.new_zeros(len(sign), 1, 1)
    turned_x, turned_y = cos * x + sin * y + width / 2, -sin * x + cos * y + height / 2
    return _sample_nearest(levels, turned_x + zeros, turned_y + zeros, outside=128)


def shear_y(levels: Tensor, sign: Tensor, magnitude: float) -> Tensor:
    """Shift every column by a share of its x coordinate: cubic interpolation, black outside the picture."""
    height = levels.shape[2]
    y = _centres(levels, 2) + (magnitude * sign.double())[:, None, None] * _centres(levels, 3)  # (N, H, W)
    inside = (y >= 0) & (y < height)
    below = (y - 0.5).floor()
    d = (y - 0.5 - below)[:, None]
    rows = [(below.long() + i).clamp(0, height - 1)[:, None].expand_as(levels) for i in (-1, 0, 1, 2)]
    a, b, c, e = (levels.gather(2, row).double() for row in rows)
    cubic = b + d * (c - a + d * (2 * (a - b) + c - e + d * (b - a - c + e)))
    return torch.where(inside[:, None], cubic.clamp(0, 255).long(), 0)


def _blend(away: Tensor, levels: Tensor, sign: Tensor, magnitude: float) -> Tensor:
    """Return away + (1 + sign magnitude) (levels - away), clamped to [0, 255], in float32 as Pillow does."""
    factor = (1 + magnitude * sign.double()).float()[:, None, None, None]
    return (away.float() + factor * (levels - away).float()).clamp(0, 255).long()


def _to_grey(levels: Tensor) -> Tensor:
    """Return the grey levels, (N, 1, H, W)."""
    if levels.shape[1] == 1:
        return levels
    return sum((weight * levels[:, i : i + 1] for i, weight in enumerate(GREY)), torch.tensor(0x8000)) >> 16


def _centres(levels: Tensor, axis: int) -> Tensor:
    """Return the coordinates of the pixel centres along an axis: (1, W) or (H, 1)."""
    centres = torch.arange(levels.shape[axis], dtype=torch.float64, device=levels.device) + 0.5
    return centres[None, :] if axis == 3 else centres[:, None]


def _sample_nearest(levels: Tensor, x: Tensor, y: Tensor, outside: int) -> Tensor:
    """Return the levels at (N, H, W) coordinates, and `outside` beyond the picture."""
    height, width = levels.shape[2:]
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    index = y.floor().clamp(0, height - 1).long() * width + x.floor().clamp(0, width - 1).long()
    gathered = levels.flatten(2).gather(2, index.flatten(1)[:, None].expand(-1, levels.shape[1], -1))
    return torch.where(inside[:, None], gathered.view_as(levels), outside)


class Operation(NamedTuple):
    """One of the 50 operations."""

    name: str
    step: int  # 0 to 9, from the weakest magnitude to the strongest

    @property
    def magnitude(self) -> float:
        """The magnitude of the step."""
        _, first, last = KINDS[self.name]
        value = first + (last - first) * self.step / 9
        return round(value) if self.name == "posterize" else value

    def __call__(self, levels: Tensor, sign: Tensor) -> Tensor:
        """Return the levels after the operation; `sign` (N,) is its direction."""
        return KINDS[self.name][0](levels, sign, self.magnitude)


KINDS: dict[str, tuple[Operate, float, float]] = {  # function, magnitude of the first step, magnitude of the tenth
    "invert": (invert, 0, 0),
    "contrast": (contrast, 0, 0.5),
    "rotate": (rotate, 0, 30),
    "translate-x": (partial(translate, axis=3), 0, 150 / 331),
    "translate-y": (partial(translate, axis=2), 0, 150 / 331),
    "sharpness": (sharpness, 0, 0.5),
    "shear-y": (shear_y, 0, 0.3),
    "autocontrast": (autocontrast, 0, 0),
    "equalize": (equalize, 0, 0),
    "posterize": (posterize, 8, 4),
    "colour": (colour, 0, 0.5),
    "brightness": (brightness, 0, 0.5),
    "solarize": (solarize, 256, 0),
}
LISTED = (
    "invert 7, contrast 6, rotate 2, translate-x 9, sharpness 1, sharpness 3, shear-y 2, translate-y 2, "
    "autocontrast 5, equalize 2, shear-y 5, posterize 5, colour 3, brightness 5, sharpness 9, brightness 9, "
    "equalize 5, equalize 1, contrast 7, sharpness 5, colour 5, translate-x 5, equalize 7, autocontrast 8, "
    "translate-y 3, sharpness 6, brightness 6, colour 8, solarize 0, invert 0, equalize 0, autocontrast 0, "
    "equalize 8, equalize 4, colour 5, equalize 5, autocontrast 4, solarize 4, brightness 3, colour 0, "
    "solarize 1, autocontrast 0, translate-y 3, translate-y 3, autocontrast 1, solarize 1, equalize 5, "
    "invert 0, translate-y 3, autocontrast 1"
)
OPERATIONS = tuple(Operation(name, int(step)) for name, step in map(str.split, LISTED.split(", ")))


Policy = tuple[int, ...]  # indices into OPERATIONS, applied in this order
CHOSEN = "3-1-7/43-18-18"  # result of the authors' search for ResNet20 on CIFAR-100
SEARCH = "search"
CONVNET = "21-13-3/7-4-15"  # the same for their ConvNet on CIFAR-100
OPERATIONS_PER_POLICY = 3  # operations per policy
STEPS = 20  # from noise to the picture, so 21 blends
LEAST = 1e-5  # k, added to the eigenvalues


@method(
    "defense",
    "ats",
    "dgp",
    acts_on="inputs",
    adaptive=(),
    strongest="the plain attack: it finds the transformed picture, and no mode undoes a transform that is drawn anew",
)
@dataclass(frozen=True)
class AutomaticTransformationSearch:
    """Trains on transformed pictures, by a policy drawn anew for each of them (ATS, Gao et al. 2021).

    Acts on: the inputs. A policy is up to three of the 50 fixed operations, written `3-1-7`.
    Several policies are separated by `/`, and each picture gets one of them with equal probability. The direction of an
    operation such as a shift is random too. The default is the result of the authors' search for ResNet20 on CIFAR-100.

    With `ats:policies=search`, secateur invert first searches policies for its own network. It draws `candidates`
    random policies and keeps those with an accuracy score of at least `threshold`. The two most private of these are
    used. A reconstruction is compared with the transformed picture (ATS-R) and with the raw one (ATS-T).

    Equation: `sent = dL(f(T(x)), y)/dw; T drawn anew from the policies for each picture`.
    """

    policies: str | int = CHOSEN  # a single number is a policy of one operation; search: determined before the run
    candidates: int = 1600  # random policies that the search draws
    threshold: float | None = None  # of the search, the authors' is -85; None: the median of the candidates

    def __post_init__(self) -> None:
        check_whole("candidates", self.candidates)
        if self.policies != SEARCH:
            read_policies(str(self.policies))

    def transform(self, mean: Tensor, std: Tensor) -> Transform:
        """Return the transform of inputs (pixels - mean) / std; mean and std are (C, 1, 1)."""
        if self.policies == SEARCH:
            how = "use secateur invert, which searches before it attacks, or set the policies that it reports"
            raise WrongInput("defense ats", f"policies=search is not possible here; {how}")
        return Transformation(read_policies(str(self.policies)), mean, std)


@dataclass(frozen=True, eq=False)
class Transformation:
    """Transform that applies one of several policies to every picture of a batch."""

    policies: tuple[Policy, ...]
    mean: Tensor
    std: Tensor

    def __call__(self, inputs: Tensor, rng: Generator) -> Tensor:
        """Return the transformed pictures; no value is read back from the device."""
        mean, std, count = self.mean.to(inputs), self.std.to(inputs), len(inputs)
        levels = ((inputs * std + mean) * 255).round().clamp(0, 255).long()
        longest = max(map(len, self.policies))
        signs = torch.randint(2, (max(longest, 1), count), generator=rng, device=rng.device).to(inputs.device) * 2 - 1
        choices = torch.randint(len(self.policies), (count,), generator=rng, device=rng.device).to(inputs.device)
        transformed = levels
        for number, policy in enumerate(self.policies):
            chosen = (choices == number)[:, None, None, None]
            transformed = torch.where(chosen, apply_policy(policy, levels, signs), transformed)
        return (transformed.to(inputs) / 255 - mean) / std


def apply_policy(policy: Policy, levels: Tensor, signs: Tensor) -> Tensor:
    """Return the levels (N, C, H, W) after a policy's operations; `signs` (operations, N) are their directions."""
    for number, sign in zip(policy, signs, strict=False):
        levels = OPERATIONS[number](levels, sign)
    return levels


def read_policies(text: str) -> tuple[Policy, ...]:
    """Parse policies from text.

    Example:
        >>> read_policies("3-1-7/43-18-18")
        ((3, 1, 7), (43, 18, 18))
    """
    try:
        policies = tuple(tuple(int(number) for number in policy.split("-")) for policy in text.split("/"))
    except ValueError:
        raise WrongInput("policies", f"{text!r} is not readable; use for example {CHOSEN}") from None
    highest = len(OPERATIONS) - 1
    if wrong := [number for policy in policies for number in policy if number > highest]:
        raise WrongInput("policies", f"operation {wrong[0]} is not allowed; must be in [0, {highest}]")
    return policies


def write_policies(policies: tuple[Policy, ...]) -> str:
    """Return the text that `read_policies` parses."""
    return "/".join("-".join(map(str, policy)) for policy in policies)


# The search: random triples of operations, scored without a training or an attack ---------------------------------
class ScoredPolicy(NamedTuple):
    """A policy and its scores."""

    policy: Policy
    privacy: float  # lower reveals less
    accuracy: float  # higher learns better; at most minus the number of examples


def search(
    net: nn.Module,
    trained: Params,
    untrained: Params,
    batch: Batch,
    mean: Tensor,
    std: Tensor,
    rng: Generator,
    candidates: int = 1600,
    threshold: float | None = -85.0,
) -> list[ScoredPolicy]:
    """Return the policies of three operations with an accuracy score of at least `threshold`, most private first.

    A threshold of None is the median of the candidates, because the scale of the score depends on the network and the
    data.

    The privacy score is of a partly trained model, the accuracy score of an untrained one. Both use one batch of inputs
    (pixels - mean) / std, which every policy transforms with the same draws. No accuracy score is above minus the
    number of examples. The authors' threshold is for about 63 examples, one of each class that occurs among 100. Pass
    the result to the defense as `AutomaticTransformationSearch(write_policies(...))`.
    """
    if threshold is not None and threshold > -batch.size:
        reach = f"{threshold} cannot be reached with {batch.size} examples"
        raise WrongInput("threshold", f"{reach}; must be at most {-batch.size}")
    chosen = torch.randint(len(OPERATIONS), (candidates, OPERATIONS_PER_POLICY), generator=rng)
    noise = torch.rand(batch.inputs.shape, generator=rng, dtype=batch.inputs.dtype).to(batch.inputs.device)
    noise = (noise - mean.to(noise)) / std.to(noise)
    seed = draw_seed(rng)

    def transform_batch(policy: Policy) -> Tensor:
        return Transformation((policy,), mean, std)(batch.inputs, Generator().manual_seed(seed))

    policies: list[Policy] = [tuple(operations) for operations in chosen.tolist()]
    accuracies = [accuracy_score(net, untrained, transform_batch(policy)) for policy in policies]
    least = median(accuracies) if threshold is None else threshold
    selected = []
    with progress("policies judged", candidates) as advance:
        for policy, accuracy in zip(policies, accuracies, strict=True):
            if accuracy >= least:
                privacy = privacy_scores(net, trained, Batch(transform_batch(policy), batch.labels), noise)
                selected.append(ScoredPolicy(policy, float(privacy.mean()), accuracy))
            advance(1)
    return sorted(selected, key=lambda scored: (scored.privacy, scored.policy))


def privacy_scores(net: nn.Module, state: Params, batch: Batch, noise: Tensor, loss: Loss = cross_entropy) -> Tensor:
    """Return (N,) scores of how early a blend of noise and picture has the picture's gradient; low is private.

    Blend i of 0 to 20 is (1 - i/20) noise + i/20 picture. s_i is the cosine of its gradient and the picture's, averaged
    over the parameter tensors. The score is the area under s over i/20, by the trapezoid rule.
    """
    scores = []
    share = torch.linspace(0, 1, STEPS + 1, dtype=noise.dtype, device=noise.device).view(-1, *[1] * (noise.ndim - 1))
    for picture, label, start in zip(batch.inputs, batch.labels, noise, strict=True):
        blends = Batch(start + share * (picture - start), label.expand(STEPS + 1))
        grads = per_example_gradients(net, state, blends, loss)
        cosines = [cosine_similarity(value.flatten(1), value[-1:].flatten(1)) for value in grads.values()]
        scores.append(torch.trapezoid(torch.stack(cosines).mean(0), dx=1 / STEPS))
    return torch.stack(scores)


def accuracy_score(net: nn.Module, state: Params, inputs: Tensor) -> float:
    """Return an estimate of how well a network will learn from the examples, without training (Mellor et al. 2020).

    The score is high if the network treats different examples differently. J has one row per example: the gradient of
    the sum of its logits with respect to its pixels. v are the eigenvalues of the correlation matrix of the rows. The
    score is - sum ln(v + k) + 1 / (v + k), k = 1e-5.
    """
    function = Functional(net, training=False, device=inputs.device)
    params, others = split(net, {name: value.to(inputs.device) for name, value in state.items()})
    leaf = inputs.detach().clone().requires_grad_()
    (slopes,) = torch.autograd.grad(function(params | others, leaf).sum(), leaf)
    return eigenvalue_score(torch.corrcoef(slopes.flatten(1).double()))


def eigenvalue_score(correlations: Tensor) -> float:
    """Return the score of a correlation matrix; a correlation with an example of zero gradient counts as 0."""
    values = torch.linalg.eigvalsh(correlations.nan_to_num(0, 0, 0)).clamp_min(0) + LEAST
    return -float((values.log() + 1 / values).sum())
