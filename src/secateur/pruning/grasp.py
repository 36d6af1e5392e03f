"""GraSP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, nn

from secateur.catalogue import method
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.gradients import batch_loss
from secateur.pruning.masks import Scope, prune_lowest


@method("pruner", "grasp", "priprune")
@dataclass(frozen=True)
class Grasp:
    """Drops the weights whose removal harms the gradient flow least: the largest -w * Hg (GraSP; Wang et al. 2020).

    g and H are the gradient and the Hessian, by the prunable weights, of the loss of logits / `temperature` on the
    first `samples_per_class` examples of each class in the batch (fewer where it has fewer).
    """

    temperature: float = 200.0
    samples_per_class: int = 10
    scope: Scope = "global"

    def scores(self, net: nn.Module, batch: Batch, rng: Generator) -> Params:
        """The paper's score with its sign turned, w * Hg, so that the lowest are pruned."""
        loss, weights = batch_loss(net, balanced(batch, self.samples_per_class), self.temperature)
        values = list(weights.values())
        grads = torch.autograd.grad(loss, values, create_graph=True, materialize_grads=True)
        flow = torch.stack([(g * g.detach()).sum() for g in grads]).sum()
        products = torch.autograd.grad(flow, values, materialize_grads=True)  # Hg
        return {name: w.detach() * h for (name, w), h in zip(weights.items(), products, strict=True)}

    def __call__(self, net: nn.Module, batch: Batch, sparsity: float, rng: Generator) -> Mask:
        """The mask."""
        return prune_lowest(self.scores(net, batch, rng), sparsity, self.scope)


def balanced(batch: Batch, per_class: int) -> Batch:
    """The first `per_class` examples of each class, in the batch's order."""
    classes = sorted(set(batch.labels.tolist()))
    rows = torch.cat([(batch.labels == label).nonzero().flatten()[:per_class] for label in classes]).sort().values
    return Batch(batch.inputs[rows], batch.labels[rows])
