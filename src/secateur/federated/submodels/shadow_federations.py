"""Shadow federations: an attacker at the server runs the federation again, with random halves of its candidates.

Shadow clients of one turn (membership_attacks.py) start from the model that a client got, in which leaks of earlier
rounds are the same for all. A shadow federation begins at the first model and has the rounds, rules and defenses of the
attacked one. In it every client has its known members and a random half of its candidates and its population. So the
updates and the server's models of the last round differ by all rounds. The price is as many federations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secateur import tree
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.federated.attacks.observer import Observer
from secateur.federated.checkpoint import FederationLog, depends_of, run_or_resume
from secateur.federated.spec import SubmodelSpec
from secateur.federated.submodels.exposure import rebuild_model
from secateur.federated.submodels.federation import StackedFederations, SubmodelFederation, SubmodelView
from secateur.federated.submodels.membership_attacks import (
    Asking,
    ShadowModels,
    ShadowPool,
    draw_client_trial,
    halves,
    pool_of,
)
from secateur.interfaces import Params
from secateur.progress import Advance, progress
from secateur.runs.folder import Run
from secateur.seeding import derive, draw_seed


class ShadowDesign(NamedTuple):
    """The rows of all shadow federations."""

    pools: dict[int, ShadowPool]  # by client; none for clients that are too small to be attacked
    inside: dict[int, Tensor]  # by client: (models, pool) True for the rows of each model
    shares: list[list[Tensor]]  # by model: the rows of each client


def design_shadows(terms: SubmodelSpec, data: Dataset, asking: Asking, seed: int) -> ShadowDesign:
    """Draw the rows of `asking.federations` shadow federations; each pool's row is in exactly half of them.

    A client that is too small to be attacked is unknown to the attacker, and gets as many rows that nobody has.
    """
    pools, inside, known = {}, {}, {}
    shares: list[list[Tensor]] = [[] for _ in range(asking.federations)]
    outside = torch.arange(data.train_size, len(data.inputs))
    for client, rows in enumerate(terms.shares):
        rng = derive(seed, "shadow federations", client)
        try:
            asked = draw_client_trial(client, rows, data, asking, seed)
        except WrongInput:
            drawn = outside[torch.randint(len(outside), (len(rows),), generator=rng)]
            for share in shares:
                share.append(drawn)
            continue
        pools[client], known[client] = pool_of(asked, derive(seed, "mixed", client)), asked.known
        inside[client] = halves(len(pools[client].rows), asking.federations, rng)
        for share, chosen in zip(shares, inside[client], strict=True):
            share.append(torch.cat([known[client], pools[client].rows[chosen]]))
    return ShadowDesign(pools, inside, shares)


class LastUpdates(Observer):
    """An observer that keeps every client's last update."""

    def __init__(self) -> None:
        self.sent: dict[int, Params] = {}

    def looks(self, number: int) -> bool:
        """Return True: any round may be a client's last."""
        return True

    def __call__(self, seen: SubmodelView) -> None:
        """Keep a client's update."""
        self.sent[seen.client] = rebuild_model(seen)

    def state(self) -> tuple[Params, Any]:
        """Return the updates by client."""
        return tree.nest(self.sent), None

    def load(self, tensors: Params, data: Any) -> None:
        """Restore the result of `state`."""
        self.sent = {int(client): params for client, params in tree.parts(tensors).items()}


class ShadowFederation(SubmodelFederation):
    """A federation of the attacker, on any rows of the data."""

    def __init__(self, net: nn.Module, data: Dataset, terms: SubmodelSpec, seed: int, *where: Any, **how: Any) -> None:
        self.last = LastUpdates()
        super().__init__(net, data, terms, seed, *where, observers=[self.last], **how)

    def model(self) -> Params:
        """Return the server's model and, by client, the last updates."""
        return tree.nest({"server": super().model()} | {f"client{c}": sent for c, sent in self.last.sent.items()})


@dataclass(frozen=True, eq=False)
class ShadowRun:
    """The shadow federations of one federation, as stages of its run."""

    run: Run
    net: Callable[[], nn.Module]  # returns the first model, which the server made
    data: Dataset
    terms: SubmodelSpec
    asking: Asking
    seed: int
    device: torch.device
    execution: str
    threads: int

    @property
    def stacks(self) -> bool:
        """True if all shadow federations run as one stack."""
        return self.device.type == "cuda" and self.execution != "sequential"

    def run_all(self, rule: str) -> tuple[ShadowModels, float]:
        """Return what `models` does, with a progress bar that names the rule of channels."""
        number, rounds = self.asking.federations, self.terms.rounds
        title = f"{number} shadow federations of {rule}, seed {self.seed}"
        with progress(title, rounds * (1 if self.stacks else number), rate=True, unit="rounds") as advance:
            return self.models(advance)

    def models(self, advance: Advance = lambda *_: None) -> tuple[ShadowModels, float]:
        """Return the models of all shadow federations, and their seconds; on a GPU they run as one stack."""
        design = design_shadows(self.terms, self.data, self.asking, self.seed)
        whole = replace(self.data, train_size=len(self.data.inputs))
        groups = [[number] for number in range(self.asking.federations)]
        if self.stacks:
            groups = [[number for (number,) in groups]]
        models: list[Params] = []
        seconds = 0.0
        for group in groups:
            log = FederationLog()
            federations = self._build(group, whole, design.shares)
            depends = [depends_of(fed.terms, fed.net, whole, fed.seed, self.device) for fed in federations]
            key = {"federations": depends, "shadow": True, "threads": self.threads, "execution": self.execution}
            joined = StackedFederations(federations) if len(federations) > 1 else federations[0]
            tensors, log = run_or_resume(self.run, joined, log, lambda done: advance(1), key)
            parts = [tree.part(tensors, i) for i in range(len(group))] if len(group) > 1 else [tensors]
            models += [tree.to(part, self.device) for part in parts]
            seconds += log.seconds
        return ShadowModels(design.pools, design.inside, design.shares, models), seconds

    def _build(self, group: Sequence[int], data: Dataset, shares: Sequence[Sequence[Tensor]]) -> list[ShadowFederation]:
        federations: list[ShadowFederation] = []
        for number in group:
            terms = replace(self.terms, shares=shares[number], evaluate_every=self.terms.rounds)
            seed = draw_seed(derive(self.seed, "shadow federation", number))
            how = {"execution": self.execution, "beside": federations[0] if federations else None}
            federations.append(ShadowFederation(self.net(), data, terms, seed, self.device, **how))
        return federations
