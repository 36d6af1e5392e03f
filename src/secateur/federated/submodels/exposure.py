"""How exposed every client and the server of a federation are, by the models they sent in the end (mapp_fl 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.attacks.membership.yeom import trial
from secateur.catalogue import Choice
from secateur.chance import derive
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.federated.checkpoint import Story
from secateur.federated.submodels.attacking import TURN, Asking, Meeting, Target
from secateur.federated.submodels.federation import Seen
from secateur.interfaces import Params
from secateur.recipe import Recipe
from secateur.rows import Row

__all__ = ["Asking", "Exposer", "Target", "expose"]


def expose(
    target: Target,
    data: Dataset,
    attacks: Sequence[Choice],
    labels: dict[str, Any],
    *,
    asking: Asking | None = None,
    turn: Recipe = TURN,
    device: torch.device | str = "cpu",
) -> list[Row]:
    """The rows of a target: its accuracy, and every attack on it with intervals; one too small to attack says so."""
    asking, own = asking or Asking(), _labelled(target, labels)
    meeting = Meeting(target, data, asking, turn, torch.device(device), own)
    rows = [meeting.accuracy()]
    try:
        asked = trial(
            target.rows,
            torch.arange(data.train_size, len(data.inputs)),
            derive(own["seed"], "trial", target.client),
            printed=asking.printed,
            whole=asking.whole,
        )
    except WrongInput as error:
        return [*rows, *(meeting.left_out(attack, error.message) for attack in attacks)]
    for attack in attacks:
        rows += meeting.yeom(attack, asked) if attack.name == "yeom" else []
    others = [attack for attack in attacks if attack.name != "yeom"]
    return [*rows, *(meeting.shadowed(others, asked) if others else [])]


class Exposer:
    """An observer of a federation that attacks every client by its last updates, and in the end the server."""

    def __init__(
        self,
        attacks: Sequence[Choice],
        data: Dataset,
        labels: dict[str, Any],
        story: Story,  # where what is found goes
        rounds: int,
        *,
        asking: Asking | None = None,
        turn: Recipe = TURN,
        device: torch.device | str = "cpu",
    ) -> None:
        self.attacks, self.data, self.story, self.rounds = attacks, data, story, rounds
        self.labels = labels | {"extra": labels["extra"] | {"round": rounds}}
        self.asking, self.turn, self.device = asking or Asking(), turn, device
        self.sent: dict[int, list[Params]] = {}
        self.channels: dict[int, dict[str, Tensor]] = {}

    @property
    def every(self) -> int:
        """How many rounds lie between the updates that a stateful attacker keeps: they end with the last one."""
        most = max(1, self.rounds // self.asking.updates)
        return next(step for step in range(most, 0, -1) if self.rounds % step == 0)

    def __call__(self, seen: Seen) -> None:
        """Keep a client's update; attack it when it is the last one."""
        kept = self.sent.setdefault(seen.client, [])
        kept.append({name: value.detach().clone() for name, value in seen.sent.items()})
        del kept[: -self.asking.updates]
        if seen.round == self.rounds:
            self.channels[seen.client] = seen.channels
            self._expose(Target(seen.client, seen.net, kept, seen.rows, seen.received, seen.rate))

    def state(self) -> Params:
        """The updates that are kept, for a federation that is saved."""
        return {
            f"{client}.{place}.{name}": value
            for client, kept in self.sent.items()
            for place, params in enumerate(kept)
            for name, value in params.items()
        }

    def load(self, state: Params) -> None:
        """Go on from what `state` gave."""
        self.sent = {}
        for key, value in state.items():
            client, place, name = key.split(".", 2)
            kept = self.sent.setdefault(int(client), [])
            if int(place) == len(kept):
                kept.append({})
            kept[int(place)][name] = value.to(self.device)

    def finish(self, net: nn.Module, model: Params, shares: Sequence[Tensor]) -> None:
        """Attack the server's last model, whose members are all training data; and show who trained which cells."""
        self._expose(Target(None, net, [model], torch.cat(list(shares))))
        self.story.figures += cells(net, self.channels, self.labels)

    def _expose(self, target: Target) -> None:
        self.story.rows += expose(
            target, self.data, self.attacks, self.labels, asking=self.asking, turn=self.turn, device=self.device
        )


def cells(
    net: nn.Module, channels: Mapping[int, Mapping[str, Tensor]], labels: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Who trained which cells of a layer in the last round, for the page: outputs and inputs of every client.

    The layer is the first that is cut on both sides. Inputs are the outputs of the layer before it, which holds in a
    chain whose channels are coupled; of others nothing is shown.
    """
    layers = [(name, module) for name, module in net.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    chain = isinstance(net, nn.Sequential) and len(layers) > 2 and "independent" not in labels["extra"]["submodels"]
    if not chain or not channels:
        return []
    (before, _), (name, module) = layers[:2]
    trained = [
        {"client": client, "outputs": kept[name].tolist(), "inputs": kept[before].tolist()}
        for client, kept in sorted(channels.items())
    ]
    outputs, inputs = module.weight.shape[:2]
    own = {"kind": "cells", "layer": name, "outputs": outputs, "inputs": inputs, "trained": trained}
    flat = {key: value for key, value in labels.items() if key != "extra"} | labels["extra"]
    return [flat | own]


def _labelled(target: Target, labels: dict[str, Any]) -> dict[str, Any]:
    extra = {
        "scope": "server" if target.client is None else "client",
        "client": target.client,
        "rate": target.rate,
        "data_size": len(target.rows),
        "parameters": sum(value.numel() for value in target.net.parameters()),
    }
    return labels | {"extra": labels.get("extra", {}) | extra}
