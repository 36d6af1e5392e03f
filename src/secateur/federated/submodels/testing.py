"""How a sub-model does on examples, under static BatchNorm or re-estimated statistics (HeteroFL's sBN).

Under static BatchNorm a prediction depends on the batch that it is made in. So the rule is explicit: consecutive
batches of a given size in the order of the examples, and a last one of a single row joins the one before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from secateur import tree
from secateur.federated.submodels.turning import batches
from secateur.interfaces import Batch, Params
from secateur.precision import full_precision
from secateur.prediction import arranged
from secateur.pruning.operations import NORMS


def logits(net: nn.Module, params: Params, inputs: Tensor, batch_size: int = 128) -> Tensor:
    """(N, K) outputs of a network by the statistics of each batch."""
    made, own = copy.deepcopy(net).to(inputs.device).eval(), _apart(params)
    return _answers(lambda part: functional_call(made, own, (part,)), inputs, batch_size)


def losses(net: nn.Module, params: Params, batch: Batch, batch_size: int = 128) -> Tensor:
    """(N,) cross-entropy of each example, by the statistics of each batch."""
    return cross_entropy(logits(net, params, batch.inputs, batch_size), batch.labels, reduction="none")


def reestimated(net: nn.Module, params: Params, own: Tensor, inputs: Tensor, batch_size: int = 128) -> Tensor:
    """(N, K) outputs by statistics that are averaged over the batches of `own` examples (HeteroFL's sBN)."""
    made = copy.deepcopy(net).to(inputs.device).eval()
    for module in made.modules():
        if isinstance(module, NORMS):
            module.track_running_stats, module.momentum = True, None  # None: the plain average over all batches
            module.running_mean = torch.zeros(module.num_features).to(own)
            module.running_var = torch.ones(module.num_features).to(own)
            module.num_batches_tracked = torch.tensor(0, device=own.device)
            module.train()
    tensors = _apart(params) | dict(made.named_buffers())
    _answers(lambda part: functional_call(made, tensors, (part,)), own, batch_size)
    made.eval()
    return _answers(lambda part: functional_call(made, tensors, (part,)), inputs, batch_size)


def judged(found: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy and loss; a model whose numbers are not finite has no loss and is never right."""
    if not bool(found.isfinite().all()):
        return {"test_accuracy": 0.0}
    right = (found.argmax(1) == labels).double().mean()
    return {"test_loss": float(cross_entropy(found, labels)), "test_accuracy": float(right)}


def _apart(params: Params) -> Params:
    """Copies: views of a flat vector may begin where a GPU's kernels cannot read."""
    return arranged(tree.clone(params))


@torch.no_grad()
def _answers(function: Callable[[Tensor], Tensor], inputs: Tensor, batch_size: int) -> Tensor:
    rows = torch.arange(len(inputs), device=inputs.device)
    with full_precision(inputs.device):
        return torch.cat([function(arranged({"": inputs[part]})[""]) for part in batches(rows, batch_size)])
