"""Rob: a server that changes the model so that its gradient holds the pictures themselves."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from secateur.attacks.inversion.adaptive import Adaptive, mask_again
from secateur.attacks.inversion.imprint import (
    Imprinted,
    expected_isolated,
    measure,
    read_out,
    read_surviving,
    thresholds,
)
from secateur.attacks.inversion.problem import structure
from secateur.attacks.inversion.updates import observed_gradient
from secateur.catalogue import method
from secateur.errors import WrongInput, unknown
from secateur.interfaces import Batch, Knowledge, Params, Reconstruction, ServerView, Watch
from secateur.tree import masked

DEVIATIONS = {"randn": 1.0, "dct": 0.18}  # of a measurement whose row has norm D^-.5 (dct) or 1 (randn)
SENSELESS: dict[Adaptive, str] = {
    "layer": "reads the gradient of its own imprint block alone, so no other layer's is there to be left out",
    "reapply": "reads the pictures off the gradient and tries none, so there is no trial to compress again",
}


@method(
    "inversion",
    "rob",
    "dgp",
    threat="an active server that puts an imprint block before the first layer; it knows the normalisation, so that a"
    " random measurement of a picture has about mean 0 and deviation 1 (or estimates both from public pictures)",
    active=True,
    adapts=("support", "mask"),
)
@dataclass(frozen=True)
class Rob:
    """Read the pictures off the gradient of an imprint block put in by the server (Robbing the Fed, Fowl et al. 2021).

    All rows of the block are one measurement of the picture and row i is active above the i-th quantile of that
    measurement, so the difference of two neighbouring rows' gradients holds only the pictures between two quantiles: a
    picture that is alone there is exact, those that share a bin are averaged. `measurement` is randn (quantiles of a
    Gaussian) or dct (the first horizontal frequency, quantiles of a Laplace); `centre` and `deviation` are what the
    attacker believes of it. Differences of the bias gradient below `threshold` of the largest count as empty; of the
    others the batch size's many with the largest are kept, since more bins than pictures cannot be full. A picture's
    label is the one that explains its bias gradient best; the loss is how far that leaves it open.

    An attacker who knows that entries were dropped reads the jumps between rows of weights, which outlive their biases
    (`adaptive`: support, where a zero was dropped; mask, where noise filled the holes).
    """

    bins: int = 128
    measurement: str = "randn"
    centre: float = 0.0
    deviation: float | None = None
    threshold: float = 1e-5
    adaptive: Adaptive = "none"

    def __post_init__(self) -> None:
        if self.measurement not in DEVIATIONS:
            raise unknown("attack rob measurement", self.measurement, DEVIATIONS)
        if self.adaptive in SENSELESS:
            reason = f"{self.adaptive} means nothing here: rob {SENSELESS[self.adaptive]}"
            raise WrongInput("attack rob adaptive", f"{reason}; allowed: none, support, mask")
        if self.bins < 2:
            raise WrongInput("attack rob bins", f"{self.bins} is not allowed; give 2 or more")
        if self.deviation is not None and not self.deviation > 0:
            raise WrongInput("attack rob deviation", f"{self.deviation} is not allowed; give a number above 0")
        if not 0 <= self.threshold < 1:
            raise WrongInput("attack rob threshold", f"{self.threshold} is not allowed; give a number from 0 up to 1")

    def check(self, knowledge: Knowledge, view: ServerView) -> None:
        """Refuse an update that was not made with the model of `tamper`."""
        if "imprint.weight" not in view.sent or "imprint.weight" not in view.update.values:
            raise WrongInput(
                "attack rob", "needs an update of the model that it tampered with; this one has no imprint"
            )

    def tamper(self, net: nn.Module, state: Params, knowledge: Knowledge, rng: Generator) -> tuple[nn.Module, Params]:
        """The network behind an imprint block, its own tensors under `net.`; the row is drawn from `rng`."""
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
        """Every target's pictures: of several rounds those of the one that shows most, then of the least loss."""
        classes = range(knowledge.classes)
        for index, views in enumerate(targets):
            told = classes if knowledge.labels is None else sorted(set(knowledge.labels[index].tolist()))
            rounds = [self._round(view, knowledge, told) for view in views]
            watch.advance(1)
            best = max(range(len(rounds)), key=lambda i: (rounds[i].batch.size, -rounds[i].loss))
            yield index, replace(rounds[best], trial=best)

    def _round(self, view: ServerView, knowledge: Knowledge, labels: Sequence[int]) -> Reconstruction:
        inputs, slopes, sizes = self._read(view, knowledge)
        full = len(slopes)
        kept = sizes.argsort(descending=True, stable=True)[: knowledge.batch_size].sort().values
        pictures, slopes = inputs[kept].view(-1, *knowledge.input_shape), slopes[kept]
        believed, open_share = explain(view, knowledge, pictures, slopes, labels)
        alone = expected_isolated(torch.full((self.bins,), 1 / self.bins), knowledge.batch_size)
        by = "bias gradient" if self.adaptive == "none" else "jump of the weights' gradient"
        note = f"{full} of {self.bins} bins hold pictures; the {len(kept)} of the largest {by} are kept; "
        note += f"if bins are equally likely {alone:.1%} of the pictures are alone in theirs"
        if knowledge.batchnorm == "batch":
            note += "; the labels are a guess, since batch statistics mix the gradients of the pictures"
        return Reconstruction(Batch(pictures, believed), open_share, note=note)

    def _read(self, view: ServerView, knowledge: Knowledge) -> tuple[Tensor, Tensor, Tensor]:
        """Pictures (P, D), their slopes and by which they are ranked (P,), of all entries or of those that survived."""
        observed = observed_gradient(view, knowledge)
        if self.adaptive == "mask":
            observed = masked(observed, mask_again(view, observed))
        weight, bias = observed["imprint.weight"], observed["imprint.bias"]
        if self.adaptive == "none":
            inputs, slopes = read_out(weight, bias, self.threshold)
            return inputs, slopes, slopes.abs()
        low, high = knowledge.box
        reach = torch.maximum(low.abs(), high.abs()).expand(knowledge.input_shape).flatten().to(weight)
        return read_surviving(weight, bias, view.sent, reach, self.threshold)


def explain(
    view: ServerView, knowledge: Knowledge, pictures: Tensor, slopes: Tensor, labels: Sequence[int]
) -> tuple[Tensor, float]:
    """Of each picture the label whose loss would have caused its bias gradient, and the mean gap that this leaves."""
    choices = torch.tensor(labels, device=slopes.device)
    if not len(pictures):
        return choices[:0], 1.0
    tampered = structure(knowledge.net, knowledge.batchnorm)
    sent = {name: value.detach() for name, value in view.sent.items()}
    active = torch.relu(pictures.flatten(1) @ sent["imprint.weight"].T + sent["imprint.bias"]).mean(1)
    leaf = active.requires_grad_()
    inner = {name.removeprefix("net."): value for name, value in sent.items() if name.startswith("net.")}
    shown = pictures + leaf.view(-1, *[1] * (pictures.ndim - 1))
    outputs = functional_call(tampered.get_submodule("net"), inner, (shown,))
    share = len(pictures) / knowledge.batch_size / len(sent["imprint.bias"])
    gaps = []
    for label in choices:
        loss = knowledge.loss(outputs, label.expand(len(pictures)))
        caused = share * torch.autograd.grad(loss, leaf, retain_graph=True)[0]
        gaps.append(((caused - slopes) / slopes).abs())
    left, best = torch.stack(gaps).nan_to_num(math.inf).min(0)
    return choices[best], float(left.mean())
