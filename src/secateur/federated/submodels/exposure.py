"""Exposure of every client and of the server, by the last models that they sent (mapp_fl Section 3).

`ExposureObserver` observes a federation and attacks at its end. It also draws a layer's cells by client, for the page:
the picture of a channel rule (mapp_fl Figure 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secateur import tree
from secateur.catalogue import Choice
from secateur.data.dataset import Dataset
from secateur.federated.attacks.observer import Observer
from secateur.federated.checkpoint import FederationLog
from secateur.federated.spec import SubmodelSpec
from secateur.federated.submodels.federation import SubmodelFederation, SubmodelView
from secateur.federated.submodels.membership_attacks import Asking, MembershipEvaluation, ShadowModels, Target, turn_of
from secateur.federated.submodels.structure import ClientAndRound, Structure
from secateur.interfaces import Params

MOST = 2**16  # cells of a layer that is drawn: a page holds several numbers for each


class Last(NamedTuple):
    """The data of a client's last update."""

    round: int
    received: Params
    rows: Tensor
    begun: Params | None = None  # the start of its training; None: `received`


class ExposureObserver(Observer):
    """An observer that, at the end of a federation, attacks every client by its last updates, and the server."""

    def __init__(
        self,
        attacks: Sequence[Choice],
        data: Dataset,
        labels: dict[str, Any],
        log: FederationLog,  # takes the rows and the figures
        terms: SubmodelSpec,
        *,
        asking: Asking | None = None,
        device: torch.device | str = "cpu",
        loses: bool = False,  # True: any client may be lost in any round, as on real machines
    ) -> None:
        self.attacks, self.data, self.log, self.rounds = attacks, data, log, terms.rounds
        self.labels = labels | {"extra": labels["extra"] | {"round": terms.rounds}}
        self.asking, self.turn, self.device = asking or Asking(), turn_of(terms.local), device
        self.loses = loses or terms.per_round not in (None, len(terms.shares)) or terms.faults.any
        self.sent: dict[int, list[Params]] = {}
        self.last: dict[int, Last] = {}
        self.shadows: ShadowModels | None = None  # of shadow federations; None: shadow clients of one turn

    @property
    def every(self) -> int:
        """Rounds between the updates that a stateful attacker keeps; the last round is among them."""
        most = max(1, self.rounds // self.asking.updates)
        return next(step for step in range(most, 0, -1) if self.rounds % step == 0)

    def looks(self, number: int) -> bool:
        """Return True in every `every`-th round; in all rounds where a client may miss the last one."""
        return self.loses or number % self.every == 0

    def __call__(self, seen: SubmodelView) -> None:
        """Keep a client's update, in case it is the last; of earlier ones keep the latest in every `every` rounds."""
        kept, last = self.sent.setdefault(seen.client, []), self.last.get(seen.client)
        if last is not None and (last.round - 1) // self.every == (seen.round - 1) // self.every:
            kept.pop()
        kept.append(rebuild_model(seen))
        del kept[: -self.asking.updates]
        self.last[seen.client] = Last(seen.round, seen.received, seen.rows, seen.begun)

    def state(self) -> tuple[Params, Any]:
        """Return the kept updates by client, and by client their number and the round of the last one."""
        parts: dict[str, Params] = {}
        for client, last in self.last.items():
            kept = {f"{client}.{age}": params for age, params in enumerate(self.sent[client])}
            parts |= kept | {f"{client}.received": last.received, f"{client}.begun": last.begun or {}}
            parts[f"{client}.last"] = {"rows": last.rows}
        return tree.nest(parts), {str(client): [len(self.sent[client]), e.round] for client, e in self.last.items()}

    def load(self, tensors: Params, data: Any) -> None:
        """Resume from the output of `state`."""
        self.sent, self.last = {}, {}
        for client, (count, number) in data.items():
            rows = tree.part(tensors, f"{client}.last")["rows"]
            kept = tree.to(tree.part(tensors, client), self.device)
            self.sent[int(client)] = [tree.part(kept, age) for age in range(count)]
            self.last[int(client)] = Last(number, tree.part(kept, "received"), rows, tree.part(kept, "begun") or None)

    def attack_clients(self, federation: SubmodelFederation) -> None:
        """Attack every client by its last updates; a client that never answered gets rows of exclusion."""
        for client, share in enumerate(federation.terms.shares):
            number, received, rows, begun = self.last.get(client, Last(0, {}, share))
            net, rate, augment = federation.narrow(client).net, federation.rates[client], federation.terms.local.augment
            target = Target(client, net, self.sent.get(client, []), rows, received, rate, number, augment, begun)
            self._expose(federation, target, share)

    def attack(self, federation: SubmodelFederation) -> None:
        """Attack the clients, then the server's last model, whose members are all training data.

        Add the figure of the trained cells, too. Clients that train alone have no server.
        """
        self.attack_clients(federation)
        if not federation.terms.rule.alone:
            everybody = torch.cat(list(federation.terms.shares))
            self._expose(federation, Target(None, federation.net, [federation.model()], everybody), everybody)
            trained = [client for client, last in sorted(self.last.items()) if last.round == self.rounds]
            self.log.figures += picture(federation, trained, self.labels)

    def _expose(self, federation: SubmodelFederation, target: Target, share: Tensor) -> None:
        if federation.terms.batchnorm == "reestimated":
            target = replace(target, statistics=share)
        labels, device = target.labels(self.labels), torch.device(self.device)
        evaluation = MembershipEvaluation(target, self.data, self.asking, self.turn, device, labels, self.shadows)
        self.log.rows += evaluation.rows(self.attacks)


def rebuild_model(seen: SubmodelView) -> Params:
    """Return a client's model as the server knows it: sent entries, and for withheld ones the values it received.

    A withheld weight comes as zero, and an attacker knows that this is not the client's weight.
    """
    if seen.covered is None:
        return tree.clone(seen.sent)
    return {name: value.where(seen.covered[name], seen.received[name]) for name, value in seen.sent.items()}


def picture(federation: SubmodelFederation, clients: Sequence[int], labels: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a figure of the cells of one layer that these clients trained in the last round.

    The layer is the first that is cut on both sides. Without such a layer, or without clients, there is no figure.
    """
    structure, terms = federation.structure, federation.terms
    name = _explain_cut(structure)
    if name is None or not clients:
        return []
    outputs, inputs = structure.shapes[f"{name}.weight"][:2]
    trained = []
    for client in clients:
        cut = structure.cut(
            terms.rule, ClientAndRound(client, len(terms.shares), terms.rounds), federation.rates[client]
        )
        kept = {"outputs": cut.channels[name].tolist(), "inputs": cut.inputs(name, inputs).tolist()}
        trained.append({"client": client} | kept)
    cells = {"kind": "cells", "layer": name, "outputs": outputs, "inputs": inputs, "trained": trained}
    flat = {key: value for key, value in labels.items() if key != "extra"} | labels["extra"]
    return [flat | cells]


def _explain_cut(structure: Structure) -> str | None:
    always = sum(slot.size for slot in structure.slots)  # the flag of channels that every client keeps
    for name, layer in structure.layers.items():
        small = len(layer.makes) * len(layer.reads) <= MOST
        if small and bool((layer.makes < always).any() and (layer.reads < always).any()):
            return name
    return None
