"""SynFlow."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from secateur.catalogue import method
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.masks import Scope, check_sparsity, select, warn_of_floor, weights_of


@method("pruner", "synflow", "priprune")
@dataclass(frozen=True)
class SynFlow:
    """Drops the weights of least synaptic flow, without data, in many rounds (SynFlow; Tanaka et al. 2020, Alg. 1).

    R is the sum of the outputs for an input of ones, with every parameter replaced by its magnitude, in eval mode and
    float64; the score is |w * dR/dw|, and after round k a share density^(k / rounds) is left. Of the batch only the
    shape of its inputs is used.
    """

    rounds: int = 100
    scope: Scope = "global"

    def __call__(self, net: nn.Module, batch: Batch, sparsity: float, rng: Generator) -> Mask:
        """The mask."""
        check_sparsity(sparsity)
        twin, weights = linearised(net)
        ones = torch.ones_like(batch.inputs[:1], dtype=torch.float64, device=next(iter(weights.values())).device)
        mask: Mask = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in weights.items()}
        floored: list[str] = []
        for k in range(1, self.rounds + 1):
            scores = flow(twin, weights, ones)
            scores = {name: score.where(mask[name], -1) for name, score in scores.items()}  # what is gone stays gone
            target = sparsity if k == self.rounds else 1 - (1 - sparsity) ** (k / self.rounds)
            mask, met = select(scores, target, self.scope)
            floored += met
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.mul_(mask[name])
        warn_of_floor(floored)
        return mask


def linearised(net: nn.Module) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """A copy of the net in float64 and eval mode with |parameters|, and its prunable weights."""
    twin = copy.deepcopy(net).double().eval().requires_grad_(False)
    for parameter in twin.parameters():
        parameter.abs_()
    weights = weights_of(twin)
    for weight in weights.values():
        weight.requires_grad_(True)
    return twin, weights


def flow(twin: nn.Module, weights: dict[str, nn.Parameter], ones: Tensor) -> Params:
    """|w * dR/dw| of a linearised net."""
    grads = torch.autograd.grad(twin(ones).sum(), list(weights.values()), materialize_grads=True)
    return {name: (w.detach() * g).abs() for (name, w), g in zip(weights.items(), grads, strict=True)}
