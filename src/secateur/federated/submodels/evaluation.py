"""Evaluation of the models of a sub-model federation on examples that no client has.

BatchNorm is static, or its statistics are re-estimated (HeteroFL's sBN). Under static BatchNorm a prediction depends on
its batch, so the rule is explicit. Batches are consecutive, of a given size, in the order of the examples. A last batch
of a single row joins the one before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from secateur import tree
from secateur.federated.spec import SubmodelSpec
from secateur.federated.submodels.clients import Narrow, batches
from secateur.federated.submodels.structure import SubmodelIndex, params_of
from secateur.federated.traffic import Measure
from secateur.gpu.precision import full_precision
from secateur.inference import arranged
from secateur.interfaces import Batch, Params
from secateur.pruning.channels import NORMS

Received = Callable[
    [int], tuple[Narrow, SubmodelIndex, Tensor]
]  # client -> its width, its channels, the model at its start


class SubmodelEvaluation:
    """Accuracy and loss of the server's model and of every client's."""

    def __init__(self, train: Batch, test: Batch, terms: SubmodelSpec) -> None:
        self.train, self.test, self.terms = train, test, terms

    def __call__(self, narrow: Narrow, flat: Tensor, shares: Sequence[Tensor]) -> dict[str, float]:
        """Return the scores of one model; BatchNorm's statistics are re-estimated on the rows `shares`."""
        if not self.test.size:
            return {}
        terms, params = self.terms, params_of(flat, narrow.shapes) | narrow.others
        if terms.batchnorm == "static":
            outputs = logits(narrow.net, params, self.test.inputs, terms.test_batch)
        else:
            examples = self.train.inputs[torch.cat([*shares]).to(self.train.inputs.device)]
            outputs = reestimated(narrow.net, params, examples, self.test.inputs, terms.test_batch)
        return judged(outputs, self.test.labels)

    def clients(self, number: int, received: Received) -> list[Measure]:
        """Return the measures of the models that clients begin the round with; equal models are tested once."""
        measures: list[Measure] = []
        tested: dict[int, tuple[SubmodelIndex, dict[str, float]]] = {}
        shared = self.terms.batchnorm == "static" and self.terms.withholding is None
        for client, rows in enumerate(self.terms.shares):
            narrow, cut, flat = received(client)
            form = id(cut) if shared else client
            if form not in tested:
                tested[form] = cut, self(narrow, flat, [rows])
            sized = {"parameters": float(len(flat)), "client_rows": float(len(rows))}
            measures += [Measure(name, value, number, client) for name, value in (tested[form][1] | sized).items()]
        return measures + mean_of(measures, number)


def mean_of(measures: Sequence[Measure], number: int) -> list[Measure]:
    """Return the clients' mean accuracy."""
    values = [measure.value for measure in measures if measure.metric == "test_accuracy" and measure.client is not None]
    note = "the mean over all clients of the model that they began the round with"
    return [Measure("client_accuracy", sum(values) / len(values), number, note=note)] if values else []


def judged(outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy and loss; outputs that are not finite have accuracy 0 and no loss."""
    if not bool(outputs.isfinite().all()):
        return {"test_accuracy": 0.0}
    right = (outputs.argmax(1) == labels).double().mean()
    return {"test_loss": float(cross_entropy(outputs, labels)), "test_accuracy": float(right)}


def logits(net: nn.Module, params: Params, inputs: Tensor, batch_size: int = 128) -> Tensor:
    """Return (N, K) outputs of a network by the statistics of each batch."""
    model, tensors = copy.deepcopy(net).to(inputs.device).eval(), _copies(params)
    return _outputs(lambda part: functional_call(model, tensors, (part,)), inputs, batch_size)


def losses(net: nn.Module, params: Params, batch: Batch, batch_size: int = 128) -> Tensor:
    """Return (N,) cross-entropy of each example, by the statistics of each batch."""
    return cross_entropy(logits(net, params, batch.inputs, batch_size), batch.labels, reduction="none")


def reestimated(net: nn.Module, params: Params, examples: Tensor, inputs: Tensor, batch_size: int = 128) -> Tensor:
    """Return (N, K) outputs by statistics averaged over the batches of `examples` (HeteroFL's sBN)."""
    model = copy.deepcopy(net).to(inputs.device).eval()
    for module in model.modules():
        if isinstance(module, NORMS):
            module.track_running_stats, module.momentum = True, None  # None: the plain average over all batches
            module.running_mean = torch.zeros(module.num_features).to(examples)
            module.running_var = torch.ones(module.num_features).to(examples)
            module.num_batches_tracked = torch.tensor(0, device=examples.device)
            module.train()
    tensors = _copies(params) | dict(model.named_buffers())
    _outputs(lambda part: functional_call(model, tensors, (part,)), examples, batch_size)
    model.eval()
    return _outputs(lambda part: functional_call(model, tensors, (part,)), inputs, batch_size)


@torch.no_grad()
def _outputs(function: Callable[[Tensor], Tensor], inputs: Tensor, batch_size: int) -> Tensor:
    rows = torch.arange(len(inputs), device=inputs.device)
    with full_precision(inputs.device):
        return torch.cat([function(arranged({"": inputs[part]})[""]) for part in batches(rows, batch_size)])


def _copies(params: Params) -> Params:
    """Return copies, as views of a flat vector may begin at addresses that GPU kernels cannot read."""
    return arranged(tree.clone(params))
