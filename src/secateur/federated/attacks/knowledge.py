"""The attacker's knowledge in a federation: facts about clients' turns, refusal of attacks, labels of rows.

`knowledge_of` collects the facts that a server has beside the updates. `check_attacks` refuses attacks that cannot be
mounted. `describe_update` makes the columns of one attacked update: its form, the threat and the attacker's knowledge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from secateur import tree
from secateur.attacks.inversion import adaptive
from secateur.attacks.inversion.updates import gradient_update, read_gradient, weights_update
from secateur.catalogue import Choice
from secateur.data.dataset import Dataset
from secateur.defenses.uploads import makes_anew
from secateur.errors import WrongInput
from secateur.evaluation.client import NAIVE, check_pictures, describe_local, describe_weights, scale
from secateur.federated.attacks.observer import ClientView
from secateur.federated.attacks.schedule import Past, follows
from secateur.federated.spec import FederationSpec
from secateur.interfaces import PLAIN_SGD, Batch, InversionAttack, Knowledge, ServerView, Weights
from secateur.seeding import derive
from secateur.training.optimisers import read_steps


def is_active(attack: Choice) -> bool:
    """Return True if an attack changes the model that clients are sent."""
    return bool(attack.method.info.get("active"))


def reads_squares(attack: Choice) -> bool:
    """Return True if an attack reads the squared gradients that a base pruning makes clients send."""
    return bool(getattr(attack.make(), adaptive.MAGNITUDES, False))


def knowledge_of(net: nn.Module, data: Dataset, terms: FederationSpec, device: torch.device) -> Knowledge:
    """Return the server's knowledge of its clients' turns beside the updates."""
    check_pictures(data)
    local = terms.local
    if local.steps is None and terms.view == "sum":
        reason = "mixes trainings of several lengths in a sum, which no attack takes apart"
        raise WrongInput("local_epochs", f"{reason}; use local_steps, or view: update")
    mean, std = scale(data.mean, data.std, data.inputs[: data.train_size])
    normalises = any(isinstance(module, _BatchNorm) for module in net.modules())
    private = terms.upload is not None and makes_anew(terms.upload)  # its BatchNorm normalises by running statistics
    dtype = next(net.parameters()).dtype
    return Knowledge(
        net,
        data.input_shape,
        data.classes,
        mean.to(device, dtype),
        std.to(device, dtype),
        batch_size=len(terms.shares[0]) if local.steps is None else local.steps * local.batch_size,
        loss=local.loss,
        batchnorm="batch" if normalises and not private else "eval",
        local_steps=local.steps or 1,
        learning_rate=local.learning_rate,
        local_batch=local.batch_size,
        local_epochs=local.epochs,
        optimiser=local.optimiser,
    )


def check_attacks(attacks: Sequence[Choice], known: Knowledge, data: Dataset, terms: FederationSpec) -> None:
    """Refuse, before any work, an attack that cannot be mounted in this federation."""
    active = [attack for attack in attacks if is_active(attack)]
    if active and len(active) < len(attacks):
        reason = "changes what its victims are sent, so the others would not see their updates"
        raise WrongInput("attack", f"{active[0].name} {reason}; run active and passive attacks apart")
    if active and terms.view == "sum":
        raise WrongInput("attack", f"{active[0].name} reads one client's update; view: sum shows none")
    if terms.view == "sum":
        count = terms.per_round
        known = replace(known, batch_size=count * known.batch_size, local_batch=count * terms.local.batch_size)
        if following := [attack for attack in attacks if follows(attack.make())]:
            raise WrongInput("attack", f"{following[0]} follows one client; view: sum shows none")
        if joining := [attack for attack in attacks if getattr(attack.make(), "rounds", 1) > 1]:
            raise WrongInput("attack", f"{joining[0]} joins the rounds of one client; view: sum shows none")
    everyone = torch.cat(list(terms.shares))
    batch = data.batch.take(everyone[torch.arange(known.batch_size) % len(everyone)]).to(known.mean.device)
    batch = Batch(batch.inputs.to(known.mean), batch.labels)
    for attack in attacks:
        mounted: InversionAttack = attack.make()
        net, state = mounted.tamper(known.net, tree.state_of(known.net), known, derive(0, "check"))
        if terms.sends_gradients and terms.local.steps == 1 and terms.local.is_plain:
            view = ServerView(state, gradient_update(net, state, batch, known.batchnorm, known.loss))
        else:
            update = weights_update(net, state, batch, known.batchnorm, loss=known.loss, turn=read_steps(known))
            view = ServerView(state, update)
        tampered = replace(known, net=net)
        if terms.base.wants_squares and terms.view != "sum":
            values = read_gradient(view, tampered)
            view = replace(view, squares={name: value.square() for name, value in values.items()})
        mounted.check(tampered, view)


def describe_update(
    attack: Choice, seen: ClientView, past: Sequence[Past], known: Knowledge, remembers: bool
) -> dict[str, Any]:
    """Return the extra columns of one attacked update; if the attacker `remembers`, with the number of rounds used."""
    extra = {"batch_size": known.batch_size, "stage": f"round {seen.round}", "update": sends(known, seen)}
    extra |= {"labels": "inferred" if known.labels is None else "oracle"}
    extra |= {"threat": attack.method.info["threat"], "active": is_active(attack)}
    same = all(_have_same_rows(seen.rows, earlier.rows, known.local_steps == 1) for earlier in past)
    if remembers:
        extra |= {"history": len(past) + 1, "same_rows": same}
    naive = isinstance(seen.view.update, Weights) and not getattr(attack.make(), "unrolls", True)
    unaware = replace(known, optimiser=PLAIN_SGD, local_epochs=None) if naive else known
    phrases = _describe_known(seen, past, unaware, same, reads_squares(attack)) + ([NAIVE] if naive else [])
    return extra | {"knows": ", ".join(phrases)}


def sends(known: Knowledge, seen: ClientView) -> str:
    """Return a description of an update."""
    whole = describe_weights(known) if isinstance(seen.view.update, Weights) else "gradient"
    return whole if seen.client is not None else f"the average of {len(seen.clients)} clients' {whole}"


def _describe_known(seen: ClientView, past: Sequence[Past], known: Knowledge, same: bool, sizes: bool) -> list[str]:
    """Return the attacker's knowledge as phrases."""
    size = known.batch_size
    phrases = ["one example an update" if size == 1 else f"{size} examples an update", "how pixels become inputs"]
    phrases += ["the steps and learning rate", *describe_local(known)]
    phrases += ["the labels"] if known.labels is not None else []
    phrases += ["a generator of such pictures"] if known.generator is not None else []
    phrases += ["the sizes of its gradients by their squares"] if sizes else []
    phrases += ["the client's compression"] if known.compression is not None else []
    belief = f"that a client's last {len(past) + 1} rounds are of the same rows"
    phrases += [belief if same else f"{belief} (wrongly)"] if past else []
    return phrases + ([f"that it is the sum of {len(seen.clients)} clients"] if seen.client is None else [])


def _have_same_rows(rows: Tensor, others: Tensor, one_step: bool) -> bool:
    """Return True if two rounds held the same examples: after one step in any order, else in the same order."""
    if one_step:
        rows, others = rows.sort().values, others.sort().values
    return rows.shape == others.shape and bool((rows == others).all())


def describe_clients(seen: Sequence[ClientView]) -> str:
    """Return a description of the clients of one call of an attack."""
    if seen[0].client is None:
        return f"the sum of {len(seen[0].clients)} clients"
    return f"client {seen[0].client}" if len(seen) == 1 else f"{len(seen)} clients"
