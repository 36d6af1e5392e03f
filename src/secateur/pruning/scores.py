"""Unstructured pruning by a score of every weight: L1, random, SynFlow, SNIP and GraSP.

SNIP and GraSP score by gradients of one batch's loss on a copy of the network; SynFlow needs no data.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from secateur.catalogue import method
from secateur.errors import check_number
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.channels import NORMS
from secateur.pruning.masks import Scope, prune_lowest, select, warn_of_floor, weights_of


class ScorePruner(ABC):
    """A pruner that drops the weights of lowest score."""

    scope: Scope

    @abstractmethod
    def scores(self, net: nn.Module, batch: Batch, rng: Generator) -> Params:
        """Return the score of every weight."""

    def __call__(self, net: nn.Module, batch: Batch, sparsity: float, rng: Generator) -> Mask:
        """Return the mask."""
        return prune_lowest(self.scores(net, batch, rng), sparsity, self.scope)


@method("pruner", "l1-unstructured", "samia_ppb")
@dataclass(frozen=True)
class L1Unstructured(ScorePruner):
    """Drops the weights of least magnitude, layer by layer (L1 unstructured; Han et al. 2015, in samia_ppb).

    Equation: `score(w) = |w|; the lowest go`.

    Every Conv and Linear weight takes part, first and last included; biases and BatchNorm are left alone.
    """

    scope: Scope = "layer"

    def scores(self, net: nn.Module, batch: Batch, rng: Generator) -> Params:
        """Return |w|."""
        return {name: weight.detach().abs() for name, weight in weights_of(net).items()}


@method("pruner", "random", "priprune")
@dataclass(frozen=True)
class Random(ScorePruner):
    """Drops weights at random, drawn over the whole network (the Random base pruning of priprune).

    Equation: `score(w) ~ U[0, 1); the lowest go`.
    """

    scope: Scope = "global"

    def scores(self, net: nn.Module, batch: Batch, rng: Generator) -> Params:
        """Return uniform draws, in float64 so that no two are equal."""
        return {
            name: torch.rand(weight.shape, generator=rng, device=rng.device, dtype=torch.float64).to(weight.device)
            for name, weight in weights_of(net).items()
        }


@method("pruner", "synflow", "priprune")
@dataclass(frozen=True)
class SynFlow:
    """Drops the weights of least synaptic flow, without data, in many rounds (SynFlow; Tanaka et al. 2020, Alg. 1).

    R is the sum of the outputs for an input of ones, with every parameter replaced by its magnitude, in eval mode and
    float64. The score is |w * dR/dw|, and after round k a share density^(k / rounds) is left. Of the batch only the
    shape of its inputs is used.

    Equation: `score(w) = |w * dR/dw|; R = sum of f(ones; |w|); after round k a share density^(k / rounds) is left`.
    """

    rounds: int = 100
    scope: Scope = "global"

    def __call__(self, net: nn.Module, batch: Batch, sparsity: float, rng: Generator) -> Mask:
        """Return the mask."""
        check_number("sparsity", sparsity, "[0, 1)")
        twin, weights = linearise(net)
        ones = torch.ones_like(batch.inputs[:1], dtype=torch.float64, device=next(iter(weights.values())).device)
        mask: Mask = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in weights.items()}
        floored: list[str] = []
        for k in range(1, self.rounds + 1):
            scores = flow(twin, weights, ones)
            scores = {name: score.where(mask[name], -1) for name, score in scores.items()}  # no weight returns
            target = sparsity if k == self.rounds else 1 - (1 - sparsity) ** (k / self.rounds)
            mask, met = select(scores, target, self.scope)
            floored += met
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.mul_(mask[name])
        warn_of_floor(floored)
        return mask


@method("pruner", "snip", "priprune")
@dataclass(frozen=True)
class Snip(ScorePruner):
    """Drops the weights whose removal changes one batch's loss least, |w * dL/dw| (SNIP; Lee et al. 2019, Eq. 5).

    Equation: `score(w) = |w * dL/dw|; the lowest go`.
    """

    scope: Scope = "global"

    def scores(self, net: nn.Module, batch: Batch, rng: Generator) -> Params:
        """Return |w * g|; the paper divides by the sum, which does not change the order."""
        return _saliency(*batch_loss(net, batch))


@method("pruner", "grasp", "priprune")
@dataclass(frozen=True)
class Grasp(ScorePruner):
    """Drops the weights whose removal harms the gradient flow least: the largest -w * Hg (GraSP; Wang et al. 2020).

    g and H are the gradient and the Hessian, by the prunable weights, of the loss of logits / `temperature`. The loss
    is taken on the first `samples_per_class` examples of each class in the batch (fewer if the batch has fewer).

    Equation: `score(w) = -w * (H g); the largest go`.
    """

    temperature: float = 200.0
    samples_per_class: int = 10
    scope: Scope = "global"

    def scores(self, net: nn.Module, batch: Batch, rng: Generator) -> Params:
        """Return w * Hg, the paper's score with the opposite sign, so that the lowest are pruned."""
        loss, weights = batch_loss(net, balance(batch, self.samples_per_class), self.temperature)
        values = list(weights.values())
        grads = torch.autograd.grad(loss, values, create_graph=True, materialize_grads=True)
        product = torch.stack([(g * g.detach()).sum() for g in grads]).sum()
        products = torch.autograd.grad(product, values, materialize_grads=True)  # Hg
        return {name: w.detach() * h for (name, w), h in zip(weights.items(), products, strict=True)}


def linearise(net: nn.Module) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """Return a copy of the net in float64 and eval mode with |parameters|, and its prunable weights."""
    twin = copy.deepcopy(net).double().eval().requires_grad_(False)
    for parameter in twin.parameters():
        parameter.abs_()
    return twin, _require_gradients(twin)


def flow(twin: nn.Module, weights: dict[str, nn.Parameter], ones: Tensor) -> Params:
    """Return |w * dR/dw| of a linearised net."""
    return _saliency(twin(ones).sum(), weights)


def batch_loss(net: nn.Module, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, dict[str, nn.Parameter]]:
    """Return the mean cross-entropy of logits / temperature of a copy of the net, and the copy's prunable weights.

    BatchNorm uses the batch's statistics, because the running ones mean nothing at initialisation, where SNIP and GraSP
    score. Dropout is off, so that a score has no random part.
    """
    twin = copy.deepcopy(net).eval().requires_grad_(False)
    for module in twin.modules():
        if isinstance(module, NORMS):
            module.train()
    weights = _require_gradients(twin)
    batch = batch.to(next(iter(weights.values())).device)
    return F.cross_entropy(twin(batch.inputs) / temperature, batch.labels), weights


def _saliency(output: Tensor, weights: dict[str, nn.Parameter]) -> Params:
    """Return |w * dy/dw| of an output y, ()."""
    grads = torch.autograd.grad(output, list(weights.values()), materialize_grads=True)
    return {name: (w.detach() * g).abs() for (name, w), g in zip(weights.items(), grads, strict=True)}


def _require_gradients(twin: nn.Module) -> dict[str, nn.Parameter]:
    """Return the prunable weights of a copy, with gradients turned on."""
    weights = weights_of(twin)
    for weight in weights.values():
        weight.requires_grad_(True)
    return weights


def balance(batch: Batch, per_class: int) -> Batch:
    """Return the first `per_class` examples of each class, in the batch's order."""
    classes = sorted(set(batch.labels.tolist()))
    rows = torch.cat([(batch.labels == label).nonzero().flatten()[:per_class] for label in classes]).sort().values
    return batch.take(rows)
