"""How exposed every client and the server of a federation are: membership attacks on the models they sent.

Yeom's attack is mapp_fl's (Section 3): on a client's last update, on its last k updates (the stateful attacker, by the
mean of an example's losses), and on the server's last model, whose members are all training data.

LiRA and RMIA are a stronger attacker: the server itself, with shadow clients of its own (shadow_clients.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.attacks.membership.batching import RULES, SIZE, is_static, scorer, settled, together
from secateur.attacks.membership.xent import negative_cross_entropy
from secateur.attacks.membership.yeom import Trial, trial
from secateur.catalogue import Choice
from secateur.chance import derive
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.federated.submodels.shadow_clients import shadow_clients
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, InOut, Params
from secateur.metrics.membership import evaluate, share
from secateur.recipe import Recipe
from secateur.rows import Row

REFERENCE = 1024  # examples that fixed statistics are estimated on
TURN = Recipe(epochs=1, weight_decay=0.0, patience=None)  # of a client of mapp_fl: Adam, .001, one epoch of 128


@dataclass(frozen=True, eq=False)
class Target:
    """A client of a finished federation as an attacker finds it, or the server."""

    client: int | None  # None: the server
    net: nn.Module  # the structure, of its own width
    sent: Sequence[Params]  # its updates, the last one last; of the server its last model alone
    rows: Tensor  # that it was trained on
    received: Params | None = None  # what a client was sent in the last round


@dataclass(frozen=True)
class Asking:
    """How an attacker asks."""

    printed: bool = False  # knows min(3, 1 %), as the paper prints it, and not max
    whole: bool = False  # is asked about known members too, as the paper is
    batches: str = "mixed"  # of attacks/membership/batching.py
    size: int = SIZE  # of those batches
    updates: int = 1  # k of the stateful attacker
    shadows: int = 8  # shadow clients of LiRA and RMIA
    compare: bool = True  # Yeom under the other batch rules too


class View(NamedTuple):
    """One way in which Yeom's attack looks at a target."""

    batches: str
    updates: int


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
    meeting = _Meeting(target, data, asking, turn, torch.device(device), own)
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
        rows += meeting.yeom(attack, asked) if attack.name == "yeom" else meeting.shadowed(attack, asked)
    return rows


@dataclass(frozen=True, eq=False)
class _Meeting:
    """A target and its attacker."""

    target: Target
    data: Dataset
    asking: Asking
    turn: Recipe
    device: torch.device
    labels: dict[str, Any]

    def accuracy(self) -> Row:
        """On the test part: of the model that a client was sent in the last round, or the server's last."""
        state = self.target.sent[-1] if self.target.received is None else self.target.received
        test = self._batch(torch.arange(self.data.train_size, len(self.data.inputs)))
        answer = scorer(self.target.net, state, self.device, self.asking.size)
        right = share(answer(test.inputs).argmax(1) == test.labels)
        return Row(**self.labels, metric="test_accuracy", **right._asdict())

    def left_out(self, attack: Choice, reason: str) -> Row:
        """Says that a target was not attacked, and why."""
        return Row(**self.labels | {"attack": str(attack)}, metric="advantage", value=None, note=f"excluded: {reason}")

    def yeom(self, attack: Choice, asked: Trial) -> Iterator[Row]:
        """Yeom's attack as it is asked for, by k updates, and by the other batch rules to show what they do."""
        views = [View(self.asking.batches, 1)]
        views += [View(self.asking.batches, self.asking.updates)] if self.asking.updates > 1 else []
        if self.asking.compare and is_static(self.target.net):
            views += [View(rule, 1) for rule in RULES if rule != self.asking.batches]
        for view in views:
            guesses = self._guess(attack, asked, view)
            truth = torch.arange(2 * len(asked.members)) < len(asked.members)
            yield from self._rows(attack, guesses, truth, view, len(asked.known), main=view == views[0])

    def _guess(self, attack: Choice, asked: Trial, view: View) -> Guesses:
        """Yeom's guesses: members first, then as many others."""
        parts = [self._batch(rows) for rows in (asked.known, asked.known_outside, asked.members, asked.nonmembers)]
        values = [torch.zeros(part.size, dtype=torch.float64, device=self.device) for part in parts]
        used = self.target.sent[-view.updates :]
        for number, state in enumerate(used):
            rng = derive(self.labels["seed"], "batches", self.target.client, view.batches, number)
            for value, part, found in zip(values, parts, self._answers(state, parts, asked, view, rng), strict=True):
                value += negative_cross_entropy(found, part.labels) / len(used)
        known = torch.cat(values[:2])
        labels = torch.cat([part.labels for part in parts[:2]])
        inside = torch.arange(len(known), device=self.device) < len(asked.known)
        fitted = attack.make().learn(known, labels, inside, self.data.classes)
        decided: Guesses = fitted.decide(torch.cat(values[2:]), torch.cat([part.labels for part in parts[2:]]))
        return decided

    def _answers(
        self, state: Params, parts: Sequence[Batch], asked: Trial, view: View, rng: Generator
    ) -> Sequence[Tensor]:
        net, size = self.target.net, self.asking.size
        if view.batches == "fixed" and is_static(net):
            net, state = settled(net, tree.to(state, self.device), self._batch(asked.own[:REFERENCE]).inputs, size)
        answer, inputs = scorer(net, state, self.device, size), [part.inputs for part in parts]
        if view.batches != "apart":
            return together(answer, inputs, view.batches, rng)
        (known, members), (outside, others) = (
            answer(torch.cat(side)).split_with_sizes([len(part) for part in side])
            for side in ((inputs[0], inputs[2]), (inputs[1], inputs[3]))
        )
        return [known, outside, members, others]

    def shadowed(self, attack: Choice, asked: Trial) -> Iterator[Row]:
        """LiRA, RMIA, or another attack that learns from models: here from shadow clients."""
        if self.target.received is None:
            yield self.left_out(attack, "shadow clients stand for clients; the server's model has none")
            return
        seed, client = self.labels["seed"], self.target.client
        order = torch.randperm(2 * len(asked.members), generator=derive(seed, "mixed", client))
        pool = self._batch(torch.cat([asked.members, asked.nonmembers])[order])
        rng = derive(seed, "shadow clients", client)
        states, design = shadow_clients(
            self.target.net, self.target.received, pool, self.asking.shadows, self.turn, rng
        )
        boxes = [
            BlackBox(scorer(self.target.net, state, self.device, self.asking.size))
            for state in (*states, self.target.sent[-1])
        ]
        fitted = attack.make().fit(InOut(boxes[:-1], pool, design), derive(seed, str(attack)))
        guesses = fitted.score(boxes[-1], Candidates(pool, torch.arange(pool.size), self._batch(asked.own)))
        yield from self._rows(attack, guesses, order < len(asked.members), View(self.asking.batches, 1), 0, main=True)

    def _rows(
        self, attack: Choice, guesses: Guesses, truth: Tensor, view: View, known: int, *, main: bool
    ) -> Iterator[Row]:
        found = evaluate(guesses, truth, derive(self.labels["seed"], "bootstrap"), 1000 if main else 200)
        extra = self.labels["extra"] | {"batches": view.batches, "updates": view.updates, "known": known}
        labels = self.labels | {"attack": str(attack), "extra": extra}
        for name in found if main else ("advantage", "auc"):
            notes = [note for note in (found[name].note, guesses.note) if note]
            yield Row(**labels, metric=name, **found[name]._asdict() | {"note": "; ".join(notes) or None})

    def _batch(self, rows: Tensor) -> Batch:
        return self.data.batch.take(rows).to(self.device)


def _labelled(target: Target, labels: dict[str, Any]) -> dict[str, Any]:
    extra = {
        "scope": "server" if target.client is None else "client",
        "client": target.client,
        "data_size": len(target.rows),
        "parameters": sum(value.numel() for value in target.net.parameters()),
    }
    return labels | {"extra": labels.get("extra", {}) | extra}
