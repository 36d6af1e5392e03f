"""An honest-but-curious server inside the run: any inversion attack on a client's update, round after round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from secateur import gallery, tree
from secateur.attacks.inversion.updates import gradient_update, weights_update
from secateur.catalogue import Choice
from secateur.chance import derive
from secateur.client import check_pictures, scale
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.exposure import attack_labels
from secateur.federated.checkpoint import Story
from secateur.federated.federation import Seen
from secateur.federated.terms import Terms
from secateur.generators import needs_generator
from secateur.interfaces import Batch, InversionAttack, Knowledge, ServerView
from secateur.judging import flat
from secateur.likeness import Scoring, judge, summary_rows
from secateur.metrics.lpips import load_weights
from secateur.progress import progress
from secateur.watching import Onlooker


class Attacker:
    """Attacks the first client that answers in a round, and adds rows and pictures to the story."""

    def __init__(
        self,
        attacks: Sequence[Choice],
        known: Knowledge,
        labels: dict[str, Any],  # of the rows
        story: Story,
        *,
        tells_labels: bool = False,
        images: bool = True,
        scoring: Scoring | None = None,
    ) -> None:
        self.attacks, self.known, self.labels, self.story = attacks, known, labels, story
        self.tells_labels, self.images = tells_labels, images
        self.scoring = scoring or Scoring(load_weights())
        self.round = 0  # the last one attacked
        self.leak: float | None = None  # the highest PSNR so far

    def __call__(self, seen: Seen) -> None:
        """Look at one client of the round."""
        if seen.round == self.round:
            return
        self.round = seen.round
        for attack in self.attacks:
            self._attack(attack, seen)

    def _attack(self, attack: Choice, seen: Seen) -> None:
        seed, begun, made = self.labels["seed"], time.monotonic(), attack.make()
        truth = Batch(seen.truth.inputs.to(self.known.mean), seen.truth.labels)
        told = truth.labels[None] if self.tells_labels else None
        known = replace(self.known, labels=told, batch_size=truth.size)
        title = f"{attack} on client {seen.client} in round {seen.round}"
        with progress(title, getattr(made, "iterations", None), rate=True) as advance:
            rng = derive(seed, "reconstruct", str(attack), seen.round, seen.client)
            found = dict(made.reconstruct([[seen.view]], known, rng, Onlooker(advance)))
        outcome = judge([truth], [found.get(0)], known, time.monotonic() - begun, self.scoring)
        labels = self._labels(attack, seen, known)
        rows = summary_rows(labels, outcome, derive(seed, "bootstrap"))
        self.story.rows += rows
        best = [row.value for row in rows if row.metric == "psnr_max" and row.value is not None]
        self.leak = max([*best, *([] if self.leak is None else [self.leak])], default=None)
        shown = flat(labels)
        first = attack == self.attacks[0]
        if first:
            pixels = known.pixels(truth.inputs)
            names = truth.labels.tolist()
            self.story.figures += gallery.truths(shown, seen.round, pixels, names, self.images)
        self.story.figures += gallery.shown(shown, [seen.round], outcome, self.images)

    def _labels(self, attack: Choice, seen: Seen, known: Knowledge) -> dict[str, Any]:
        extra = self.labels["extra"] | {"round": seen.round, "client": seen.client, "batch_size": known.batch_size}
        told = [f"{known.batch_size} examples an update", "how pixels become inputs", "the steps and learning rate"]
        extra |= {"labels": "oracle" if self.tells_labels else "inferred", "stage": f"round {seen.round}"}
        extra |= {"update": sends(known, seen), "threat": attack.method.info["threat"]}
        extra["knows"] = ", ".join([*told, *(["the labels"] if self.tells_labels else [])])
        return attack_labels(self.labels, extra, attack)


def sends(known: Knowledge, seen: Seen) -> str:
    """An update in words."""
    kind = type(seen.view.update).__name__.lower()
    return f"{kind} after {known.local_steps} local step{'s' if known.local_steps > 1 else ''}"


def knowledge_of(net: nn.Module, data: Dataset, terms: Terms, device: torch.device) -> Knowledge:
    """What the server knows of its clients' turns beside the updates."""
    check_pictures(data)
    if terms.local.steps is None:
        raise WrongInput("local_epochs", "an attacker follows local steps; give local_steps instead")
    if not terms.local.plain:
        raise WrongInput("momentum", "an attacker follows plain local steps; leave momentum and weight_decay at 0")
    mean, std = scale(data.mean, data.std, data.inputs[: data.train_size])
    normalises = any(isinstance(module, _BatchNorm) for module in net.modules())
    dtype = next(net.parameters()).dtype
    return Knowledge(
        net,
        data.input_shape,
        data.classes,
        mean.to(device, dtype),
        std.to(device, dtype),
        batch_size=terms.local.steps * terms.local.batch_size,
        loss=terms.local.loss,
        batchnorm="batch" if normalises else "eval",
        local_steps=terms.local.steps,
        learning_rate=terms.local.learning_rate,
        local_batch=terms.local.batch_size,
    )


def check_attacks(attacks: Sequence[Choice], known: Knowledge, data: Dataset, terms: Terms) -> None:
    """Refuse, before any work, an attack that cannot be mounted in this federation."""
    for attack in attacks:
        if attack.method.info.get("active"):
            raise WrongInput("attack", f"{attack.name} changes the model that is sent; choose a passive attack")
        if needs_generator(attack):
            raise WrongInput("attack", f"{attack.name} searches through a generator; use secateur invert")
        net, rows = known.net, terms.shares[0][torch.arange(known.batch_size) % len(terms.shares[0])]
        state = tree.state_of(net)
        batch = data.batch.take(rows).to(known.mean.device)
        batch = Batch(batch.inputs.to(known.mean), batch.labels)
        if terms.sends_gradients:
            view = ServerView(state, gradient_update(net, state, batch, known.batchnorm, known.loss))
        else:
            local = (known.local_steps, known.learning_rate or 0.1, known.local_batch)
            view = ServerView(state, weights_update(net, state, batch, known.batchnorm, *local, known.loss))
        made: InversionAttack = attack.make()
        made.check(known, view)
