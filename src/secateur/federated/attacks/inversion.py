"""A curious server inside the run: any inversion attack on clients' updates, round after round.

The chosen clients of a round are one axis: one call of the attack, a target each, whose start is drawn in their order.
On a GPU the clients of several rounds are too, each with the model that it was sent: an attack on few pictures is
bound by the launching of kernels. So they wait for each other, `at_once` of them, to the end or the next checkpoint.
Where a target begins is drawn by its own round, whoever else is in the call.

With a `history` a target is several rounds of one client. This attacker takes it that the client trained on the same
rows in the same order in all of them, as it does with `fixed_batches`, or where its one batch is all it has; what is
found is compared with the last round's examples, and rows say by `same_rows` whether the rounds held the same.

An active attack (rob) sends its victims another model; federated/attacks/observer.py says what then happens to them.

`Aimed` are targets that wait: what the attack sees of some clients of a round, taken down when it saw them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from secateur import tree
from secateur.catalogue import Choice
from secateur.evaluation import gallery
from secateur.evaluation.membership import flat
from secateur.evaluation.reconstruction import Outcome, Scoring, attack_labels, joined, judge, summary_rows
from secateur.federated.attacks.knowledge import is_active, told_of, who
from secateur.federated.attacks.memory import Following, Memory, Past, follows
from secateur.federated.attacks.observer import NOBODY, Look, Seen
from secateur.federated.attacks.schedule import Orders
from secateur.federated.checkpoint import Story
from secateur.interfaces import Batch, Knowledge, Params, Reconstruction, ServerView
from secateur.metrics.lpips import load_weights
from secateur.progress import progress
from secateur.runs.rows import Row
from secateur.runs.unfinished import Onlooker
from secateur.seeding import derive

AT_ONCE = 10  # clients that wait for each other on a GPU


class Aimed(NamedTuple):
    """Clients of a round that one attack is to be mounted on, and what is said of them."""

    attack: Choice
    round: int
    known: Knowledge  # what holds for all of them
    seen: Sequence[Seen]
    truths: Sequence[Batch]
    targets: Sequence[Sequence[ServerView]]
    labels: Sequence[dict[str, Any]]  # of each one's rows
    pooled: dict[str, Any] | None  # of the rows of all together, if they are several

    @property
    def alike(self) -> Hashable:
        """What targets of one call have in common; what knows something of its round alone stays alone."""
        alone = is_active(self.attack) or self.known.compression is not None
        return str(self.attack), self.truths[0].size, self.round if alone else None


def alike(waiting: Iterable[Aimed]) -> list[list[Aimed]]:
    """Those that one call of an attack can be mounted on, side by side."""
    groups: dict[Hashable, list[Aimed]] = {}
    for aimed in waiting:
        groups.setdefault(aimed.alike, []).append(aimed)
    return list(groups.values())


class Attacker:
    """Attacks clients by its orders, and adds rows and pictures to the story."""

    def __init__(
        self,
        attacks: Sequence[Choice],
        known: Knowledge,
        labels: dict[str, Any],  # of the rows
        story: Story,
        orders: Orders,
        kept: Mapping[int, set[int]],  # by round whose updates are to be remembered
        *,
        tells_labels: bool = False,
        images: bool = True,
        scoring: Scoring | None = None,
        caution: str | None = None,
        compress: Callable[[Params], Params] | None = None,
        followed: Mapping[int, set[int]] | None = None,  # by round whose sent weights are to be remembered
        at_once: int | None = None,  # None: each round by itself on a CPU, AT_ONCE on a GPU
    ) -> None:
        self.attacks, self.known, self.labels, self.story = attacks, known, labels, story
        self.orders, self.memory = orders, Memory(orders.history - 1, kept)
        self.following = Following(followed or {})
        self.tells_labels, self.images = tells_labels, images
        self.scoring = scoring or Scoring(load_weights())
        self.compress = compress  # the clients' own, for an attacker who applies it again
        self.caution = caution  # what a reader must know of these attacks against this defense
        self.leak: float | None = None  # the highest PSNR so far
        self.waiting: list[Aimed] = []
        self.at_once = at_once or (AT_ONCE if known.mean.device.type == "cuda" else 1)

    def looks(self, number: int) -> bool:
        """At attacked rounds, and at those that a later attack will use."""
        return self.orders.attacks(number) or number in self.memory.kept or number in self.following.kept

    def victims(self, number: int, clients: Sequence[int]) -> Sequence[int]:
        """Of an active attack: those it is ordered to attack."""
        active = any(is_active(attack) for attack in self.attacks)
        return self.orders.chosen(clients) if active and self.orders.attacks(number) else ()

    def __call__(self, look: Look) -> None:
        """Attack a round, or let it wait for others, and remember what is for later."""
        if self.orders.attacks(look.round):
            for attack in self.attacks:
                self._aim(attack, look)
            if sum(len(aimed.seen) for aimed in self.waiting) >= self.at_once * len(self.attacks):
                self.finish()
        self.memory.add(look)
        self.following.add(look)

    @property
    def waits(self) -> bool:
        """Whether clients wait for others."""
        return bool(self.waiting)

    def finish(self) -> None:
        """Attack all that wait."""
        groups, self.waiting = alike(self.waiting), []
        for group in groups:
            self._attack(group)

    def _aim(self, attack: Choice, look: Look) -> None:
        """Take down what an attack sees of a round."""
        known, made, seen = self.known, attack.make(), self._chosen(look)
        if is_active(attack):
            tampering = derive(self.labels["seed"], "tamper", attack.name, look.round)
            net, sent = made.tamper(known.net, look.sent, known, tampering)
            seen, known = look.asked(net, sent), replace(known, net=net)
        self._tell_missing(attack, look, seen)
        if not seen:
            return
        compress = self.compress
        if compress is not None and getattr(made, "adaptive", "none") == "reapply":  # after the base pruning's mask
            known = replace(known, compression=lambda grads: compress(tree.masked(grads, look.mask)))
        truths = [Batch(one.truth.inputs.to(known.mean), one.truth.labels) for one in seen]
        views = [self.following.view(one) if follows(made) else one.view for one in seen]
        pasts = [[past.view for past in self._history(attack, one)] for one in seen]
        targets = [[view, *past] for view, past in zip(views, pasts, strict=True)]
        told, more = self._told(known, truths), {"round": look.round, "attacked": 1}
        labels = [self._labels(attack, one, told, more | {"client": one.client}) for one in seen]
        pooled = self._pooled(attack, seen, told, look.round) if len(seen) > 1 else None
        self.waiting.append(Aimed(attack, look.round, known, seen, truths, targets, labels, pooled))

    def _attack(self, group: Sequence[Aimed]) -> None:
        """One call on all targets of a group."""
        attack, first, begun = group[0].attack, group[0], time.monotonic()
        made, truths = attack.make(), [truth for aimed in group for truth in aimed.truths]
        known, targets = self._told(first.known, truths), [views for aimed in group for views in aimed.targets]
        found: dict[int, Reconstruction] = {}
        begins = [derive(self.labels["seed"], "reconstruct", aimed.round) for aimed in group]  # alike for all attacks
        chance = [rng for rng, aimed in zip(begins, group, strict=True) for _ in aimed.targets]
        when = f"round {first.round}" if len(group) == 1 else f"rounds {first.round} to {group[-1].round}"
        everybody = [one for aimed in group for one in aimed.seen]
        with progress(f"{attack} on {who(everybody)} in {when}", _length(made), rate=True) as advance:
            found |= made.reconstruct(targets, known, chance, Onlooker(advance))
        seconds, number = (time.monotonic() - begun) / len(targets), iter(range(len(targets)))
        for aimed in group:
            outcomes = [judge([t], [found.get(next(number))], known, seconds, self.scoring) for t in aimed.truths]
            for one, truth, outcome, labels in zip(aimed.seen, aimed.truths, outcomes, aimed.labels, strict=True):
                self._tell(attack, one, truth, outcome, known, labels)
            if aimed.pooled is not None:
                self.story.rows += self._rows(aimed.pooled, joined(outcomes))

    def _pooled(self, attack: Choice, seen: Sequence[Seen], known: Knowledge, number: int) -> dict[str, Any]:
        """The labels of all clients of a round together: what they have in common."""
        more = {"round": number, "client": None, "attacked": len(seen)}
        labels = self._labels(attack, seen[0], known, more)
        every = [self._labels(attack, one, known, more)["extra"] for one in seen]
        labels["extra"] |= {name: min(e[name] for e in every) for name in ("history", "same_rows") if name in every[0]}
        return labels

    def _rows(self, labels: dict[str, Any], outcome: Outcome) -> list[Row]:
        rows = summary_rows(labels, outcome, derive(self.labels["seed"], "bootstrap"))
        notes = ["; ".join(filter(None, (row.note, self.caution))) or None for row in rows]
        return [replace(r, note=n) if r.metric == "psnr" else r for r, n in zip(rows, notes, strict=True)]

    def _chosen(self, look: Look) -> list[Seen]:
        clients = self.orders.chosen([seen.client for seen in look.seen if seen.client is not None])
        return [seen for seen in look.seen if seen.client is None or seen.client in clients]

    def _told(self, known: Knowledge, truths: Sequence[Batch]) -> Knowledge:
        """What the attacker is told of clients who all have as many examples."""
        labels = torch.stack([truth.labels for truth in truths]) if self.tells_labels else None
        size = truths[0].size
        return replace(known, labels=labels, batch_size=size, local_batch=size // known.local_steps)

    def _history(self, attack: Choice, seen: Seen) -> list[Past]:
        return [] if is_active(attack) else self.memory.of(seen.client)

    def _tell(
        self, attack: Choice, seen: Seen, truth: Batch, outcome: Outcome, known: Knowledge, labels: dict[str, Any]
    ) -> None:
        rows = self._rows(labels, outcome)
        self.story.rows += rows
        best = [row.value for row in rows if row.metric == "psnr_max" and row.value is not None]
        self.leak = max([*best, *([] if self.leak is None else [self.leak])], default=None)
        shown, number = flat(labels), self._number(seen)
        if attack == self.attacks[0]:
            pixels, names = known.pixels(truth.inputs), truth.labels.tolist()
            self.story.figures += gallery.truths(shown, number, pixels, names, self.images)
        self.story.figures += gallery.shown(shown, [number], outcome, self.images)

    def _number(self, seen: Seen) -> int:
        """One for every update that can be attacked; of a federation attacked at one client a round the round's."""
        if self.orders.who == 1:
            return seen.round
        return seen.round * int(self.labels["extra"]["clients"]) + (seen.client or 0)

    def _tell_missing(self, attack: Choice, look: Look, seen: Sequence[Seen]) -> None:
        """Say which of the clients that were named could not be attacked, or that nobody could."""
        named = self.orders.who if isinstance(self.orders.who, tuple) else ()
        missing = [f"client {client}" for client in named if client not in [one.client for one in seen]]
        if missing or not seen:
            extra = self.labels["extra"] | {"round": look.round, "client": None}
            took = f"{', '.join(missing)} took no part in the round" if missing else NOBODY
            labels = attack_labels(self.labels, extra, attack)
            self.story.rows.append(
                Row(**labels, metric="attacked_clients", value=len(seen), note=f"not attacked: {took}")
            )

    def _labels(self, attack: Choice, seen: Seen, known: Knowledge, more: dict[str, Any]) -> dict[str, Any]:
        told = told_of(attack, seen, self._history(attack, seen), known, self.orders.history > 1)
        if follows(attack.make()):
            last = self.following.knows(seen)
            told |= {"follows": last, "knows": told["knows"] + (", which weights the client sent last" if last else "")}
        return attack_labels(self.labels, self.labels["extra"] | more | told, attack)

    def state(self) -> tuple[Params, Any]:
        """What was remembered; nobody waits any longer, so that nothing of it need be kept."""
        self.finish()
        tensors, data = self.memory.state()
        return tensors | self.following.state(), data

    def load(self, tensors: Params, data: Any) -> None:
        """Go on from what `state` gave; who waits is of rounds that are yet to come."""
        self.waiting = []
        self.memory.load(tensors, data)
        self.following.load(tensors)


def _length(made: Any) -> int | None:
    found: int | None = getattr(made, "iterations", None)
    return found
