"""What an attacker at the server knows of its clients' turns, and what it cannot be asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from secateur import tree
from secateur.attacks.inversion.updates import gradient_update, weights_update
from secateur.catalogue import Choice
from secateur.chance import derive
from secateur.client import check_pictures, scale
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.federated.captions import is_active
from secateur.federated.following import follows
from secateur.federated.sending import makes_anew
from secateur.federated.terms import Terms
from secateur.interfaces import Batch, InversionAttack, Knowledge, ServerView


def knowledge_of(net: nn.Module, data: Dataset, terms: Terms, device: torch.device) -> Knowledge:
    """What the server knows of its clients' turns beside the updates."""
    check_pictures(data)
    if terms.local.steps is None:
        raise WrongInput("local_epochs", "an attacker follows local steps; give local_steps instead")
    if not terms.local.plain:
        raise WrongInput("momentum", "an attacker follows plain local steps; leave momentum and weight_decay at 0")
    mean, std = scale(data.mean, data.std, data.inputs[: data.train_size])
    normalises = any(isinstance(module, _BatchNorm) for module in net.modules())
    private = terms.upload is not None and makes_anew(terms.upload)  # by running statistics
    dtype = next(net.parameters()).dtype
    return Knowledge(
        net,
        data.input_shape,
        data.classes,
        mean.to(device, dtype),
        std.to(device, dtype),
        batch_size=terms.local.steps * terms.local.batch_size,
        loss=terms.local.loss,
        batchnorm="batch" if normalises and not private else "eval",
        local_steps=terms.local.steps,
        learning_rate=terms.local.learning_rate,
        local_batch=terms.local.batch_size,
    )


def check_attacks(attacks: Sequence[Choice], known: Knowledge, data: Dataset, terms: Terms) -> None:
    """Refuse, before any work, an attack that cannot be mounted in this federation."""
    active = [attack for attack in attacks if is_active(attack)]
    if active and len(active) < len(attacks):
        alone = "changes what its victims are sent, so the others would not see their updates"
        raise WrongInput("attack", f"{active[0].name} {alone}; run active and passive attacks apart")
    if active and terms.view == "sum":
        raise WrongInput("attack", f"{active[0].name} reads one client's update; view: sum shows none")
    if terms.view == "sum":
        count = terms.per_round
        known = replace(known, batch_size=count * known.batch_size, local_batch=count * terms.local.batch_size)
        if following := [attack for attack in attacks if follows(attack.make())]:
            raise WrongInput("attack", f"{following[0]} follows one client; view: sum shows none")
    everyone = torch.cat(list(terms.shares))
    batch = data.batch.take(everyone[torch.arange(known.batch_size) % len(everyone)]).to(known.mean.device)
    batch = Batch(batch.inputs.to(known.mean), batch.labels)
    for attack in attacks:
        made: InversionAttack = attack.make()
        net, state = made.tamper(known.net, tree.state_of(known.net), known, derive(0, "check"))
        if terms.sends_gradients and terms.local.steps == 1:
            view = ServerView(state, gradient_update(net, state, batch, known.batchnorm, known.loss))
        else:
            local = (known.local_steps, known.learning_rate or 0.1, known.local_batch)
            view = ServerView(state, weights_update(net, state, batch, known.batchnorm, *local, known.loss))
        made.check(replace(known, net=net), view)
