"""Inversion of the updates of sub-model clients: the server knows each client's sub-model, and attacks on that network.

Clients train by Adam, and the attacker knows its settings (training/optimisers.py). `adaptive=reapply` applies the
client's defense to a trial's change too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from secateur import tree
from secateur.attacks.inversion.updates import weights_update
from secateur.catalogue import Choice
from secateur.data.dataset import Dataset
from secateur.defenses.uploads import inner_of
from secateur.errors import WrongInput
from secateur.evaluation.client import check_pictures, scale
from secateur.federated.attacks.inversion import InversionObserver
from secateur.federated.attacks.knowledge import is_active
from secateur.federated.attacks.observer import ClientView, RoundView
from secateur.federated.attacks.schedule import AttackSchedule, follows
from secateur.federated.spec import SubmodelSpec
from secateur.federated.submodels.federation import SubmodelView
from secateur.interfaces import Batch, Knowledge, Optimiser, Params, ServerView, Weights
from secateur.pruning.channels import NORMS
from secateur.seeding import derive
from secateur.training.optimisers import read_steps

MANY = 256  # examples of a turn, at most


class SubmodelInversion(InversionObserver):
    """An observer that attacks the updates of sub-model clients, each on the network of the client's width."""

    def __init__(self, terms: SubmodelSpec, attacks: Sequence[Choice], *arguments: Any, **options: Any) -> None:
        super().__init__(attacks, *arguments, compress=compression_of(terms), **options)
        self.terms, self.chosen = terms, (0, list[int]())  # a round, and its attacked clients so far

    def __call__(self, look: SubmodelView | RoundView) -> None:
        """Attack the update of one client, if it is among those to attack."""
        assert isinstance(look, SubmodelView) and look.truth is not None
        if not self.orders.attacks(look.round) or not self._choose(look):
            return
        self.known = replace(self.known, net=look.net)
        view = ServerView(look.received, Weights(look.sent))
        seen = ClientView(look.round, look.client, view, look.truth(), look.rows, {}, (look.client,))
        super().__call__(RoundView(look.round, look.received, {}, [seen], lambda *_: []))

    def finish(self) -> None:
        """Attack all clients that wait; the server observes updates under no_grad."""
        with torch.enable_grad():
            super().finish()

    def _choose(self, look: SubmodelView) -> bool:
        """Return True if a client is to be attacked; clients of a round come one by one."""
        number, clients = self.chosen if self.chosen[0] == look.round else (look.round, [])
        who = self.orders.who
        wanted = look.client in who if isinstance(who, tuple) else who == "all" or len(clients) < who
        self.chosen = number, [*clients, look.client] if wanted else clients
        return wanted

    def _knowledge_of(self, known: Knowledge, truths: Sequence[Batch]) -> Knowledge:
        """Return the attacker's knowledge of clients that all have equally many examples."""
        batch = min(self.terms.local.batch_size, truths[0].size)
        return replace(super()._knowledge_of(known, truths), local_batch=batch)

    def _labels(self, attack: Choice, seen: ClientView, known: Knowledge, more: dict[str, Any]) -> dict[str, Any]:
        """Return the labels of the rows of one attacked update, with the client's width."""
        labels = super()._labels(attack, seen, known, more)
        extra, client, size = labels["extra"], seen.clients[0], len(self.terms.shares[seen.clients[0]])
        parameters = tree.count(dict(known.net.named_parameters()))
        width = {"rate": self.terms.used_rates[client], "parameters": parameters, "data_size": size}
        labels["extra"] = extra | width | {"knows": f"{extra['knows']}, its sub-model"}
        return labels


def compression_of(terms: SubmodelSpec) -> Callable[[Params], Params]:
    """Return the way from a client's change to its upload, which is the defense's."""
    compress: Callable[[Params], Params] | None = None
    if terms.upload is not None:
        compress = getattr(inner_of(terms.upload), "compress", None)
    return compress or (lambda change: change)


def submodel_knowledge(net: nn.Module, data: Dataset, terms: SubmodelSpec, device: torch.device | str) -> Knowledge:
    """Return the server's knowledge of sub-model clients; refuse turns that no attack can take."""
    check_pictures(data)
    most = max(terms.local.count_steps(len(rows)) * min(terms.local.batch_size, len(rows)) for rows in terms.shares)
    if most > MANY:
        advice = "use local_steps, for example 1, and a smaller batch_size"
        raise WrongInput("attack", f"a turn has up to {most} examples, too many to reconstruct; {advice}")
    if terms.own_labels:
        raise WrongInput("own_labels", "hides the client's loss from an attack on updates; leave it out")
    if terms.rule.alone:
        raise WrongInput("submodels", "local sends no update to attack; use another rule")
    mean, std = scale(data.mean, data.std, data.inputs[: data.train_size])
    normalises, dtype = any(isinstance(module, NORMS) for module in net.modules()), next(net.parameters()).dtype
    return Knowledge(
        net,
        data.input_shape,
        data.classes,
        mean.to(device, dtype),
        std.to(device, dtype),
        batch_size=terms.local.batch_size * (terms.local.steps or 1),
        batchnorm="batch" if normalises else "eval",
        local_steps=terms.local.steps or 1,
        learning_rate=terms.local.learning_rate,
        local_batch=terms.local.batch_size,
        local_epochs=None if terms.local.steps else terms.local.epochs,
        optimiser=Optimiser("adam", betas=terms.local.betas, eps=terms.local.eps),
    )


def check_submodel_orders(orders: AttackSchedule, terms: SubmodelSpec) -> None:
    """Raise WrongInput for rounds and clients that do not exist."""
    if wrong := [number for number in orders.at if number > terms.rounds]:
        raise WrongInput("attack_at", f"round {wrong[0]} is not allowed; there are {terms.rounds} rounds")
    who = orders.who if isinstance(orders.who, tuple) else ()
    if wrong := [client for client in who if not 0 <= client < len(terms.shares)]:
        raise WrongInput("attack_clients", f"client {wrong[0]} is not allowed; must be in [0, {len(terms.shares) - 1}]")


def check_submodel_attacks(attacks: Sequence[Choice], known: Knowledge, narrow: Sequence[nn.Module]) -> None:
    """Refuse, before any work, an attack that cannot be mounted on the networks of all widths."""
    rng = derive(0, "check")
    inputs = torch.rand(known.batch_size, *known.input_shape, generator=rng).to(known.mean)
    batch = Batch(inputs, torch.zeros(known.batch_size, dtype=torch.int64, device=inputs.device))
    for attack in attacks:
        if is_active(attack):
            raise WrongInput("attack", f"{attack.name} sends another model, which has no sub-models; use a passive one")
        if follows(attack.make()):
            raise WrongInput("attack", f"{attack} remembers weights, and a sub-model's may change; leave follows out")
        for net in narrow:
            state = {name: value.to(known.mean) for name, value in net.named_parameters()}
            update = weights_update(net, state, batch, known.batchnorm, turn=read_steps(known))
            attack.make().check(replace(known, net=net), ServerView(tree.clone(state), update))
