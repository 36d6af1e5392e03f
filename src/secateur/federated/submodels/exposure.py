"""How exposed every client and the server of a federation are, by the models they sent in the end (mapp_fl 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from secateur.attacks.membership.yeom import trial
from secateur.catalogue import Choice
from secateur.chance import derive
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.federated.submodels.attacking import TURN, Asking, Meeting, Target
from secateur.interfaces import Params
from secateur.recipe import Recipe
from secateur.rows import Row

if TYPE_CHECKING:
    from secateur.federated.submodels.federation import Seen

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
        rows: list[Row],  # where what is found goes
        rounds: int,
        *,
        asking: Asking | None = None,
        turn: Recipe = TURN,
        device: torch.device | str = "cpu",
    ) -> None:
        self.attacks, self.data, self.labels, self.rows, self.rounds = attacks, data, labels, rows, rounds
        self.asking, self.turn, self.device = asking or Asking(), turn, device
        self.sent: dict[int, list[Params]] = {}

    @property
    def every(self) -> int:
        """How many rounds lie between the updates that a stateful attacker keeps: they end with the last one."""
        most = self.rounds // self.asking.updates
        return next((step for step in range(most, 0, -1) if self.rounds % step == 0), 1)

    def __call__(self, seen: Seen) -> None:
        """Keep a client's update; attack it when it is the last one."""
        kept = self.sent.setdefault(seen.client, [])
        kept.append({name: value.detach().clone() for name, value in seen.sent.items()})
        del kept[: -self.asking.updates]
        if seen.round == self.rounds:
            self._expose(Target(seen.client, seen.net, kept, seen.rows, seen.received))

    def finish(self, net: nn.Module, model: Params, shares: Sequence[Tensor]) -> None:
        """Attack the server's last model; its members are all training data."""
        self._expose(Target(None, net, [model], torch.cat(list(shares))))

    def _expose(self, target: Target) -> None:
        labels = self.labels | {"extra": self.labels["extra"] | {"round": self.rounds}}
        self.rows += expose(
            target, self.data, self.attacks, labels, asking=self.asking, turn=self.turn, device=self.device
        )


def _labelled(target: Target, labels: dict[str, Any]) -> dict[str, Any]:
    extra = {
        "scope": "server" if target.client is None else "client",
        "client": target.client,
        "data_size": len(target.rows),
        "parameters": sum(value.numel() for value in target.net.parameters()),
    }
    return labels | {"extra": labels.get("extra", {}) | extra}
