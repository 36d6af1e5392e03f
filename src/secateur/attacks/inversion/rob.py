"""Rob: a server that changes the model so that its gradient holds the pictures themselves.

The server puts an imprint block before the network (`Imprinted`). `read_out` and `read_surviving` read the pictures
from the block's gradient.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn
from torch.distributions import Laplace, Normal
from torch.func import functional_call

from secateur.attacks.inversion.adaptive import FILL, Adaptive, AdaptiveServer, mask_again
from secateur.attacks.inversion.problem import expand_as, structure
from secateur.attacks.inversion.updates import read_gradient
from secateur.catalogue import method
from secateur.errors import WrongInput, check_number, check_whole, unknown
from secateur.interfaces import Batch, Knowledge, Params, Reconstruction, ServerView, Watch, Weights
from secateur.tree import mask_tree

DEVIATIONS = {"randn": 1.0, "dct": 0.18}  # of a measurement whose row has norm D^-.5 (dct) or 1 (randn)
SENSELESS: dict[Adaptive, str] = {
    "layer": "reads the gradient of its own imprint block alone, so no other layer's is there to be left out",
    "reapply": "reads the pictures off the gradient and tries none, so there is no trial to compress again",
    "loss": "reads the pictures off ratios of gradients, which are the same under every loss",
}
LOWEST = -10.0  # deviations: all pictures lie above the first threshold
FEW = 0.01  # of a row's entries: where fewer change, equal entries at a pruning's threshold were parted
STRETCHED = 0.9  # of a picture's entries lie inside the box when its slope is not known


@method(
    "inversion",
    "rob",
    "dgp",
    threat="an active server that puts an imprint block before the first layer; it knows the normalisation, so that a"
    " random measurement of a picture has about mean 0 and deviation 1 (or estimates both from public pictures)",
    active=True,
    adapts=("support", "mask", FILL),
)
@dataclass(frozen=True)
class Rob:
    """Read the pictures off the gradient of an imprint block put in by the server (Robbing the Fed, Fowl et al. 2021).

    All rows of the block are one measurement of the picture, and row i is active above the i-th quantile of that
    measurement. So the difference of two neighbouring rows' gradients holds only the pictures between two quantiles. A
    picture that is alone there is exact; pictures that share a bin are averaged.

    `measurement` is randn (quantiles of a Gaussian) or dct (the first horizontal frequency, quantiles of a Laplace).
    `centre` and `deviation` are the attacker's estimate of the measurement. Differences of the bias gradient below
    `threshold` of the largest count as empty. Of the others the largest are kept, as many as the batch has pictures:
    more bins than pictures cannot be full.

    A picture's label is the one that explains its bias gradient best; the loss is the share that remains unexplained.

    An attacker who knows that entries were dropped reads the jumps between rows of weights, which outlive their biases.
    `adaptive` is then support, where a zero was dropped, or mask, where noise filled the holes. One who knows that
    entries were withheld takes them from the nearest rows where they were sent: fill. Rows without a picture between
    them are equal, so this is exact unless an entry is missing in all rows between two pictures.

    Equation: `picture of bin i = (dL/dW_i - dL/dW_(i+1)) / (dL/db_i - dL/db_(i+1))`.
    """

    bins: int = 128
    measurement: str = "randn"
    centre: float = 0.0
    deviation: float | None = None
    threshold: float = 1e-5
    adaptive: AdaptiveServer = "none"

    def __post_init__(self) -> None:
        if self.measurement not in DEVIATIONS:
            raise unknown("attack rob measurement", self.measurement, DEVIATIONS)
        if self.adaptive in SENSELESS:
            reason = f"{self.adaptive} means nothing here: rob {SENSELESS[self.adaptive]}"
            raise WrongInput("attack rob adaptive", f"{reason}; allowed: none, support, mask, fill")
        check_whole("attack rob bins", self.bins, 2)
        if self.deviation is not None:
            check_number("attack rob deviation", self.deviation, "(0, inf)")
        check_number("attack rob threshold", self.threshold, "[0, 1)")

    def check(self, knowledge: Knowledge, view: ServerView) -> None:
        """Refuse an update that was not made with the model of `tamper`."""
        if "imprint.weight" not in view.sent or "imprint.weight" not in view.update.values:
            raise WrongInput("attack rob", "needs an update of its tampered model; this one has no imprint")

    def tamper(self, net: nn.Module, state: Params, knowledge: Knowledge, rng: Generator) -> tuple[nn.Module, Params]:
        """Return the network behind an imprint block, its tensors under `net.`; draw the row from `rng`."""
        like = next(value for value in state.values() if value.is_floating_point())
        deviation = self.deviation or DEVIATIONS[self.measurement]
        row = measure(self.measurement, knowledge.input_shape, rng) / deviation
        bias = -thresholds(self.measurement, self.bins) - self.centre / deviation
        imprint = {"imprint.weight": row.expand(self.bins, -1), "imprint.bias": bias}
        imprint = {name: value.to(like.device, like.dtype).clone() for name, value in imprint.items()}
        tampered = Imprinted(copy.deepcopy(net), len(row), self.bins).to(like.device)
        tampered.imprint.to(like.dtype)
        with torch.no_grad():
            tampered.imprint.weight.copy_(imprint["imprint.weight"])
            tampered.imprint.bias.copy_(imprint["imprint.bias"])
        return tampered, imprint | {f"net.{name}": value for name, value in state.items()}

    def reconstruct(
        self, targets: Sequence[Sequence[ServerView]], knowledge: Knowledge, chance: Sequence[Generator], watch: Watch
    ) -> Iterator[tuple[int, Reconstruction]]:
        """Return every target's pictures: those of the round that shows most, and then has the least loss."""
        classes = range(knowledge.classes)
        for index, views in enumerate(targets):
            labels = classes if knowledge.labels is None else sorted(set(knowledge.labels[index].tolist()))
            rounds = [self._round(view, knowledge, labels) for view in views]
            watch.advance(1)
            best = max(range(len(rounds)), key=lambda i: (rounds[i].batch.size, -rounds[i].loss))
            yield index, replace(rounds[best], trial=best)

    def _round(self, view: ServerView, knowledge: Knowledge, labels: Sequence[int]) -> Reconstruction:
        """Return the pictures, labels and loss of one update."""
        inputs, slopes, sizes = self._read(view, knowledge)
        full = len(slopes)
        kept = sizes.argsort(descending=True, stable=True)[: knowledge.batch_size].sort().values
        pictures, slopes = inputs[kept].view(-1, *knowledge.input_shape), slopes[kept]
        inferred, open_share = explain(view, knowledge, pictures, slopes, labels)
        alone = expected_isolated(torch.full((self.bins,), 1 / self.bins), knowledge.batch_size)
        by = "bias gradient" if self.adaptive in ("none", FILL) else "jump of the weights' gradient"
        note = f"{full} of {self.bins} bins hold pictures; the {len(kept)} of the largest {by} are kept; "
        note += f"if bins are equally likely {alone:.1%} of the pictures are alone in theirs"
        if knowledge.batchnorm == "batch":
            note += "; the labels are a guess, since batch statistics mix the gradients of the pictures"
        return Reconstruction(Batch(pictures, inferred), open_share, note=note)

    def _read(self, view: ServerView, knowledge: Knowledge) -> tuple[Tensor, Tensor, Tensor]:
        """Return pictures (P, D), their slopes (P,) and sizes for ranking (P,), by all or the surviving entries."""
        observed = read_gradient(view, knowledge, "rob")
        if self.adaptive == "mask":
            observed = mask_tree(observed, mask_again(view, observed))
        weight, bias = observed["imprint.weight"], observed["imprint.bias"]
        if self.adaptive == FILL:
            weight, bias = fill_rows(
                weight, bias, *(find_sent(view, f"imprint.{x}", observed) for x in ("weight", "bias"))
            )
        if self.adaptive in ("none", FILL):
            inputs, slopes = read_out(weight, bias, self.threshold)
            return inputs, slopes, slopes.abs()
        low, high = knowledge.box
        reach = torch.maximum(low.abs(), high.abs()).expand(knowledge.input_shape).flatten().to(weight)
        return read_surviving(weight, bias, view.sent, reach, self.threshold)


class Imprinted(nn.Module):
    """A network behind an imprint block: its input is x + mean_i relu(w_i x + b_i) instead of x."""

    def __init__(self, net: nn.Module, pixels: int, bins: int) -> None:
        super().__init__()
        self.imprint = nn.Linear(pixels, bins)
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        """Add the mean activation to every pixel, so that all rows get the same gradient."""
        active = torch.relu(self.imprint(inputs.flatten(1))).mean(1)
        output: Tensor = self.net(inputs + expand_as(active, inputs))
        return output


def measure(measurement: str, shape: tuple[int, ...], rng: Generator) -> Tensor:
    """Return the row (D,) that a picture is multiplied with, float64.

    randn: the row's mean is taken out. Pictures differ most in brightness, which one draw would weigh ten times as much
    as another.

    dct: the mean over pixels of sqrt(2) cos(pi (column + 1/2) / width).
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
    """Return (bins,) ascending, the lower ends of bins of equal mass under the unit Gaussian (dct: Laplace)."""
    law = Laplace(0.0, math.sqrt(0.5)) if measurement == "dct" else Normal(0.0, 1.0)
    ends = law.icdf(torch.arange(1, bins, dtype=torch.double) / bins)  # type: ignore[no-untyped-call]
    return torch.cat([torch.tensor([LOWEST], dtype=torch.double), ends])


def read_out(weight: Tensor, bias: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the (P, D) pictures dgW / dgb of the full bins, and their (P,) dgb.

    dg is row i of the gradient less row i + 1; the last row is taken as it is.
    """
    below = torch.zeros_like(weight[:1])
    rows = weight - torch.cat([weight[1:], below])
    slopes = bias - torch.cat([bias[1:], below[0, :1]])
    full = slopes.abs() > threshold * slopes.abs().max()
    return rows[full] / slopes[full, None], slopes[full]


def read_surviving(
    weight: Tensor, bias: Tensor, sent: Params, reach: Tensor, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pictures and slopes as `read_out`, of a gradient with dropped entries (0 here), and (P,) the jumps' sizes.

    Rows without a picture between them are equal. So a picture still shows as a jump from one row of weights to the
    next, on the entries that survived in either row. Entries that survived in neither are 0. Where the bias gradient of
    both rows survived, it gives the slope; where both survived and are equal, there is no picture.

    Elsewhere the slope's sign is that of the surviving bias entry. Without one, the sign is such that the picture's
    measurement has the sign of its bin. The slope's size is such that the picture fills the box, `reach` (D,) to both
    sides of 0.
    """
    nothing = torch.zeros_like(weight[:1])
    jumps = weight - torch.cat([weight[1:], nothing])
    slopes = bias - torch.cat([bias[1:], nothing[0, :1]])
    survived = bias != 0
    if torch.equal(survived, (weight != 0).any(1)):  # rows above all pictures are empty without pruning
        survived = torch.ones_like(survived)
    known = survived & torch.cat([survived[1:], survived.new_ones(1)])
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


def find_sent(view: ServerView, name: str, observed: Params) -> Tensor:
    """Return the mask of a tensor's entries that the client sent: no zeros, and none that its gradient shows as 0."""
    received = view.update.values[name] if isinstance(view.update, Weights) else observed[name]
    return (received != 0) & (observed[name] != 0)


def fill_rows(weight: Tensor, bias: Tensor, sent: Tensor, bias_sent: Tensor) -> tuple[Tensor, Tensor]:
    """Return the imprint's gradient (bins, D) and (bins,) with entries that were not sent taken from the nearest rows.

    Two rows differ by slope times picture of each picture between them. So rows without a picture between them are
    equal. If an entry was sent in two rows, but in none between them, the pictures between them share the difference
    by their squared slopes. These are the smallest pictures that explain it. The row after the last is 0. An entry that
    no row above shows is equal to that of the next row: its picture is 0 there.

    Slopes are differences of the bias gradient. Where it was not sent, the mean squared jump of the weights' gradient
    over entries sent in both rows stands for the squared slope.
    """
    after = (
        torch.cat([sent[1:], torch.ones_like(sent[:1])]),
        torch.cat([bias_sent[1:], torch.ones_like(bias_sent[:1])]),
    )
    jumps, slopes = (value - torch.cat([value[1:], torch.zeros_like(value[:1])]) for value in (weight, bias))
    shared, known = sent & after[0], bias_sent & after[1]
    mean = torch.where(shared, jumps.double().square(), 0).sum(1) / shared.sum(1).clamp_min(1)
    squares = torch.where(known, slopes.double().square(), mean)
    return interpolate(weight, sent, squares), interpolate(bias[:, None], bias_sent[:, None], squares)[:, 0]


def interpolate(values: Tensor, known: Tensor, steps: Tensor) -> Tensor:
    """Return rows (R, E) whose unknown entries lie between the nearest known ones, `steps` (R,) from row to row.

    The row after the last is known to be 0. Unknown entries above all known ones are equal to the first known one.

    Example:
        >>> rows, known = torch.tensor([[6.0], [0.0], [0.0]]), torch.tensor([[True], [False], [False]])
        >>> interpolate(rows, known, torch.tensor([0.0, 1.0, 2.0])).flatten()
        tensor([6., 6., 4.])
    """
    count = len(values)
    ends, known = torch.cat([values, torch.zeros_like(values[:1])]), torch.cat([known, torch.ones_like(known[:1])])
    rows = torch.arange(count + 1, device=values.device)[:, None]
    above = torch.where(known, rows, -1).cummax(0).values
    below = torch.where(known, rows, count).flip(0).cummin(0).values.flip(0)
    place = torch.cat([torch.zeros_like(steps[:1]), steps.cumsum(0)])
    start = place[above.clamp_min(0)]
    share = ((place[:, None] - start) / (place[below] - start)).nan_to_num(0.0).to(values)  # 0 / 0: all are equal
    first, last = ends.gather(0, above.clamp_min(0)), ends.gather(0, below)
    filled = torch.where(above < 0, last, torch.lerp(first, last, share))
    return torch.where(known, ends, filled)[:-1]


def explain(
    view: ServerView, knowledge: Knowledge, pictures: Tensor, slopes: Tensor, labels: Sequence[int]
) -> tuple[Tensor, float]:
    """Return each picture's label whose loss explains its bias gradient best, and the mean remaining gap."""
    choices = torch.tensor(labels, device=slopes.device)
    if not len(pictures):
        return choices[:0], 1.0
    tampered = structure(knowledge.net, knowledge.batchnorm)
    sent = {name: value.detach() for name, value in view.sent.items()}
    active = torch.relu(pictures.flatten(1) @ sent["imprint.weight"].T + sent["imprint.bias"]).mean(1)
    leaf = active.requires_grad_()
    inner = {name.removeprefix("net."): value for name, value in sent.items() if name.startswith("net.")}
    shown = pictures + expand_as(leaf, pictures)
    outputs = functional_call(tampered.get_submodule("net"), inner, (shown,))
    share = len(pictures) / knowledge.batch_size / len(sent["imprint.bias"])
    gaps = []
    for label in choices:
        loss = knowledge.loss(outputs, label.expand(len(pictures)))
        caused = share * torch.autograd.grad(loss, leaf, retain_graph=True)[0]
        gaps.append(((caused - slopes) / slopes).abs())
    left, best = torch.stack(gaps).nan_to_num(math.inf).min(0)
    return choices[best], float(left.mean())


def expected_isolated(masses: Tensor, batch: int) -> float:
    """Return the share of a batch's pictures that are alone in their bin: sum_b p_b (1 - p_b)^(batch - 1).

    Example:
        >>> round(expected_isolated(torch.full((128,), 1 / 128), 9), 3)
        0.939
    """
    return float((masses * (1 - masses) ** (batch - 1)).sum())
