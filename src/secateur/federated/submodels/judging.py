"""How the models of a sub-model federation do on examples that no client has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from secateur.federated.ledger import Measure
from secateur.federated.submodels import testing
from secateur.federated.submodels.cutting import Cut, params_of
from secateur.federated.submodels.terms import Terms
from secateur.federated.submodels.turning import Narrow
from secateur.interfaces import Batch

Received = Callable[[int], tuple[Narrow, Cut, Tensor]]  # a client -> its width, its channels, the model it begins with


class Judge:
    """Accuracy and loss, of the server and of every client."""

    def __init__(self, train: Batch, test: Batch, terms: Terms) -> None:
        self.train, self.test, self.terms = train, test, terms

    def __call__(self, narrow: Narrow, flat: Tensor, shares: Sequence[Tensor]) -> dict[str, float]:
        """Of one model; `shares` are the rows that BatchNorm's statistics are re-estimated by."""
        if not self.test.size:
            return {}
        terms, params = self.terms, params_of(flat, narrow.shapes) | narrow.others
        if terms.batchnorm == "static":
            found = testing.logits(narrow.net, params, self.test.inputs, terms.test_batch)
        else:
            own = self.train.inputs[torch.cat([*shares]).to(self.train.inputs.device)]
            found = testing.reestimated(narrow.net, params, own, self.test.inputs, terms.test_batch)
        return testing.judged(found, self.test.labels)

    def clients(self, number: int, received: Received) -> list[Measure]:
        """Of every client's model in a round, as it begins with it; equal models are tested once."""
        found: list[Measure] = []
        tested: dict[int, tuple[Cut, dict[str, float]]] = {}
        shared = self.terms.batchnorm == "static" and self.terms.withholding is None
        for client, rows in enumerate(self.terms.shares):
            narrow, cut, flat = received(client)
            form = id(cut) if shared else client
            if form not in tested:
                tested[form] = cut, self(narrow, flat, [rows])
            sized = {"parameters": float(len(flat)), "client_rows": float(len(rows))}
            found += [Measure(name, value, number, client) for name, value in (tested[form][1] | sized).items()]
        return found + mean_of(found, number)


def mean_of(found: Sequence[Measure], number: int) -> list[Measure]:
    """The clients' mean accuracy."""
    values = [each.value for each in found if each.metric == "test_accuracy" and each.client is not None]
    note = "the mean over all clients of the model that they began the round with"
    return [Measure("client_accuracy", sum(values) / len(values), number, note=note)] if values else []
