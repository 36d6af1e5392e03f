"""Membership attacks on the models that clients and the server of a federation sent.

Yeom's attack is mapp_fl's (Section 3): on a client's last update, on its last k updates (the stateful attacker, by the
mean of an example's losses), and on the server's last model, whose members are all training data.

LiRA and RMIA are a stronger attacker: the server itself, with shadow clients of its own. It knows the sub-model that it
sent a client in the last round. Shadow clients of the same width start from that very model and train as the client
does, for one turn, each on half of the examples asked about. So every example has models that trained on it and models
that did not. What these differ by is what that turn alone gave away; what earlier rounds left is in the model that was
sent, and so in all of them. A client with more examples than are asked about takes more steps in its turn than its
shadows do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.attacks.membership.scoring_batches import RULES, SIZE, is_static, scorer, settled, together
from secateur.attacks.membership.thresholds import negative_cross_entropy
from secateur.attacks.membership.yeom import Trial, mean_advantage, over_knowledge
from secateur.catalogue import Choice
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.federated.submodels import evaluation
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, InOut, Params, Transform
from secateur.metrics.membership import Estimate, evaluate, share
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.training.recipe import Recipe, Task
from secateur.training.trainer import fit_many

REFERENCE = 1024  # examples that fixed statistics are estimated on
TURN = Recipe(epochs=1, weight_decay=0.0, patience=None)  # of a client of mapp_fl: Adam, .001, one epoch of 128


def shadow_clients(
    net: nn.Module,
    received: Params,
    pool: Batch,
    models: int,
    turn: Recipe,
    rng: Generator,
    augment: Transform | None = None,  # of every step's inputs, as the client does
) -> tuple[list[Params], Tensor]:
    """What the shadow clients would send, and (models, pool) which rows each trained on."""
    design = halves(pool.size, models, rng)
    device, nobody = pool.inputs.device, pool.take(torch.arange(0))
    start = tree.to(received, device)
    seeds = torch.randint(2**62, (models,), generator=rng).tolist()
    tasks = [
        Task(start, pool.take(rows.to(device)), nobody, torch.Generator().manual_seed(seed))
        for rows, seed in zip(design, seeds, strict=True)
    ]
    way = "stacked" if device.type == "cuda" else "auto"  # narrow, equal and brief: timing the ways takes longer
    with torch.enable_grad():  # a server that looks at updates takes no gradients
        fitted = dict(fit_many(net, tasks, turn, transform=augment, way=way))
    return [fitted[number].state for number in range(models)], design


def halves(rows: int, models: int, rng: Generator) -> Tensor:
    """(models, rows) bool: pairs of models share the rows out evenly, so that every row is in exactly half of them."""
    if models < 2 or models % 2:
        raise WrongInput("shadows", f"{models} is not allowed; give an even number: each row is in half of them")
    first = torch.stack([torch.randperm(rows, generator=rng) < rows // 2 for _ in range(models // 2)])
    return torch.stack([first, ~first], 1).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class Target:
    """A client of a finished federation as an attacker finds it, or the server."""

    client: int | None  # None: the server
    net: nn.Module  # the structure, of its own width
    sent: Sequence[Params]  # its updates, the last one last; of the server its last model alone
    rows: Tensor  # that it was trained on
    received: Params | None = None  # what a client was sent in the round of its last update
    rate: float = 1.0  # the share of the server's channels
    round: int | None = None  # in which a client sent its last update
    augment: Transform | None = None  # of its training's inputs, which its shadows do too; what is asked stays as it is
    begun: Params | None = None  # what it trained from, where that is not what it was sent
    statistics: Tensor | None = None  # rows that BatchNorm's are re-estimated by to test it; None: each batch's own


@dataclass(frozen=True)
class Asking:
    """How an attacker asks."""

    printed: bool = False  # knows min(3, 1 %) of a client, as the paper prints it, and not max; of the server's 1 %
    whole: bool = False  # is asked about known members too, as the paper is
    batches: str = "mixed"  # of attacks/membership/scoring_batches.py
    size: int = SIZE  # of those batches
    updates: int = 1  # k of the stateful attacker: so many are kept
    shadows: int = 8  # shadow clients of LiRA and RMIA
    compare: bool = True  # Yeom under the other batch rules too
    shuffles: int = 4  # of the mixed batches: an example's loss is the mean over its batch mates of each
    mates: int = 0  # where the shuffling begins


class View(NamedTuple):
    """One way in which Yeom's attack looks at a target."""

    batches: str
    updates: int


@dataclass(frozen=True, eq=False)
class Meeting:
    """A target and its attacker."""

    target: Target
    data: Dataset
    asking: Asking
    turn: Recipe
    device: torch.device
    labels: dict[str, Any]

    def accuracy(self) -> Row:
        """On the test part: of the model that a client began its last turn with, or the server's last."""
        target, size = self.target, self.asking.size
        state = tree.to(target.begun or target.received or target.sent[-1], self.device)
        test = self._batch(torch.arange(self.data.train_size, len(self.data.inputs)))
        if target.statistics is None:
            found = evaluation.logits(target.net, state, test.inputs, size)
        else:
            own = self._batch(target.statistics).inputs
            found = evaluation.reestimated(target.net, state, own, test.inputs, size)
        right = share((found.argmax(1) == test.labels) & found.isfinite().all())  # as evaluation.judged does
        return Row(**self.labels, metric="test_accuracy", **right._asdict())

    def left_out(self, attack: Choice, reason: str) -> Row:
        """Says that a target was not attacked, and why."""
        return Row(**self.labels | {"attack": str(attack)}, metric="advantage", value=None, note=f"excluded: {reason}")

    def yeom(self, attack: Choice, asked: Trial) -> Iterator[Row]:
        """Yeom's attack as it is asked for, by k updates, and by the other batch rules to show what they do."""
        views = [View(self.asking.batches, 1)]
        views += [View(self.asking.batches, len(self.target.sent))] if len(self.target.sent) > 1 else []
        if self.asking.compare and is_static(self.target.net):
            views += [View(rule, 1) for rule in RULES if rule != self.asking.batches]
        parts = [self._batch(rows) for rows in (asked.known, asked.known_outside, asked.members, asked.nonmembers)]
        for view in views:
            values, labels = self._values(parts, asked, view)
            yield from self._yeom(attack, values, labels, view, main=view == views[0])

    def _yeom(
        self, attack: Choice, values: list[Tensor], labels: list[Tensor], view: View, *, main: bool
    ) -> Iterator[Row]:
        """Fit on what is known, decide on what is asked, and show how much hangs on who is known."""
        known, outside, members, others = values
        inside = torch.arange(len(known) + len(outside), device=self.device) < len(known)
        fitted = attack.make().learn(torch.cat([known, outside]), torch.cat(labels[:2]), inside, self.data.classes)
        guesses = fitted.decide(torch.cat([members, others]), torch.cat(labels[2:]))
        truth = torch.arange(len(members) + len(others)) < len(members)
        rng = derive(self.labels["seed"], "knowledge", self.target.client)
        better = {"advantage": mean_advantage(known, members, others, rng)} if fitted.way == "mean" else {}
        yield from self._rows(attack, guesses, truth, view, len(known), main=main, better=better)
        if main and fitted.way == "mean":
            spread = over_knowledge(torch.cat([known, members]), others, len(known), rng)
            own = self._labels(attack, view, len(known))
            yield Row(**own, metric="advantage_over_knowledge", **spread._asdict())

    def _values(self, parts: Sequence[Batch], asked: Trial, view: View) -> tuple[list[Tensor], list[Tensor]]:
        """Log p_y, by the mean over the updates, and labels: of known members and others, then of those asked about."""
        values = [torch.zeros(part.size, dtype=torch.float64, device=self.device) for part in parts]
        used = self.target.sent[-view.updates :]
        rng = derive(self.labels["seed"], "batches", self.target.client, self.asking.mates)
        mixed = view == View("mixed", 1) and is_static(self.target.net)  # several updates have mates of their own each
        shuffles = self.asking.shuffles if mixed else 1
        for state in (state for state in used for _ in range(shuffles)):
            for value, part, found in zip(values, parts, self._answers(state, parts, asked, view, rng), strict=True):
                value += negative_cross_entropy(found, part.labels) / (len(used) * shuffles)
        return values, [part.labels for part in parts]

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

    def shadowed(self, attacks: Sequence[Choice], asked: Trial) -> Iterator[Row]:
        """LiRA, RMIA and others that learn from models: here from shadow clients, the same for all of them."""
        net, received, size = self.target.net, self.target.received, self.asking.size
        if received is None:
            reason = "shadow clients stand for clients; the server's model has none"
            yield from (self.left_out(attack, reason) for attack in attacks)
            return
        seed, client = self.labels["seed"], self.target.client
        order = torch.randperm(2 * len(asked.members), generator=derive(seed, "mixed", client))
        pool = self._batch(torch.cat([asked.members, asked.nonmembers])[order])
        rng = derive(seed, "shadow clients", client)
        states, design = shadow_clients(net, received, pool, self.asking.shadows, self.turn, rng, self.target.augment)
        *boxes, own = (BlackBox(scorer(net, state, self.device, size)) for state in (*states, self.target.sent[-1]))
        # RMIA's population is the pool too: of others its models could only tell P(z) offline, on another scale.
        candidates = Candidates(pool, torch.arange(pool.size))
        for attack in attacks:
            fitted = attack.make().fit(InOut(boxes, pool, design), derive(seed, str(attack)))
            guesses, view = fitted.score(own, candidates), View(self.asking.batches, 1)
            yield from self._rows(attack, guesses, order < len(asked.members), view, 0, main=True)

    def _rows(
        self,
        attack: Choice,
        guesses: Guesses,
        truth: Tensor,
        view: View,
        known: int,
        *,
        main: bool,
        better: Mapping[str, Estimate] | None = None,  # estimates to take instead
    ) -> Iterator[Row]:
        found = evaluate(guesses, truth, derive(self.labels["seed"], "bootstrap"), 1000 if main else 200)
        found |= better or {}
        labels = self._labels(attack, view, known)
        for name in found if main else ("advantage", "auc"):
            notes = [note for note in (found[name].note, guesses.note) if note]
            yield Row(**labels, metric=name, **found[name]._asdict() | {"note": "; ".join(notes) or None})

    def _labels(self, attack: Choice, view: View, known: int) -> dict[str, Any]:
        extra = self.labels["extra"] | {"batches": view.batches, "updates": view.updates, "known": known}
        return self.labels | {"attack": str(attack), "extra": extra}

    def _batch(self, rows: Tensor) -> Batch:
        return self.data.batch.take(rows).to(self.device)
