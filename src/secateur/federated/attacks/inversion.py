"""Inversion attacks inside a federation: a curious server reconstructs clients' examples from their updates.

The attacked clients of a round are one axis: one call of the attack, one target per client. On a GPU the clients of
several rounds share a call too, each with the model that was sent to that client. An attack on few images is bound by
kernel launches. So up to `at_once` clients wait for each other, at most to the next checkpoint. The start of a target
is drawn by the target's own round, so it does not depend on the other targets of the call.

An attack with `rounds`, or a schedule with a `history`, takes several rounds of one client as one target. The objective
is the sum of the matching losses of all rounds, each at the model that was sent in it. So their sent entries are
joined. The attacker assumes that the client trained on the same rows in the same order in all of these rounds. That
holds with `fixed_batches`, or where one batch is all that the client has. Rounds of other rows share no picture, so
joining them cannot help; the row's note says so. The reconstruction is compared with the last round's examples. The
column `same_rows` says if the rounds held the same examples.

An active attack (rob) sends its victims another model: see federated/attacks/observer.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import torch

from secateur import tree
from secateur.catalogue import Choice
from secateur.evaluation import gallery
from secateur.evaluation.calibration import Calibration
from secateur.evaluation.membership import flat_labels
from secateur.evaluation.reconstruction import AttackOutcome, Scoring, attack_labels, join_outcomes, judge, summary_rows
from secateur.federated.attacks.knowledge import describe_clients, describe_update, is_active
from secateur.federated.attacks.observer import NOBODY, ClientView, Observer, RoundView
from secateur.federated.attacks.schedule import AttackSchedule, Memory, Past, SentMaskMemory, count_rounds, follows
from secateur.federated.checkpoint import FederationLog
from secateur.interfaces import Batch, Knowledge, Params, Reconstruction, ServerView
from secateur.metrics.lpips import load_weights
from secateur.progress import progress
from secateur.runs.rows import Row, join_notes
from secateur.runs.unfinished import NullWatcher
from secateur.seeding import derive

AT_ONCE = 10  # clients that wait for each other on a GPU
OTHER_ROWS = "the joined rounds are of other examples, or of several steps in another order: joining them cannot help"


class PendingAttack(NamedTuple):
    """Clients of a round that wait for one attack, with the attacker's view of them and the labels of their rows."""

    attack: Choice
    round: int
    known: Knowledge  # of all of these clients
    seen: Sequence[ClientView]
    truths: Sequence[Batch]
    targets: Sequence[Sequence[ServerView]]
    labels: Sequence[dict[str, Any]]  # of the rows of each client
    pooled: dict[str, Any] | None  # of the rows of all clients together, if there are several

    @property
    def key(self) -> Hashable:
        """The key that targets of one call share.

        Knowledge of one round (an active attack, a re-applied compression) restricts the call to that round.
        """
        alone = is_active(self.attack) or self.known.compression is not None
        return str(self.attack), self.truths[0].size, id(self.known.net), self.round if alone else None


class InversionObserver(Observer):
    """An observer that attacks clients by its orders, and adds rows and figures to the log."""

    leak_name = "PSNR"

    def __init__(
        self,
        attacks: Sequence[Choice],
        known: Knowledge,
        labels: dict[str, Any],  # of the rows
        log: FederationLog,
        orders: AttackSchedule,
        kept: Mapping[int, set[int]],  # by round: the clients whose updates are remembered
        *,
        tells_labels: bool = False,
        images: bool = True,
        scoring: Scoring | None = None,
        caution: str | None = None,
        compress: Callable[[Params], Params] | None = None,
        followed: Mapping[int, set[int]] | None = None,  # by round: the clients whose sent entries are remembered
        feeds_back: bool = False,  # True: clients add what they do not send to their next gradient
        at_once: int | None = None,  # None: each round by itself on a CPU, AT_ONCE on a GPU
        calibrations: Mapping[Choice, Calibration] | None = None,  # of attacks whose weight was open
    ) -> None:
        self.attacks, self.known, self.labels, self.log = attacks, known, labels, log
        rounds = [count_rounds(attack.make(), orders) for attack in attacks]
        self.orders, self.memory = orders, Memory(max(rounds, default=1) - 1, kept)
        self.following = SentMaskMemory(followed or {}, feeds_back)
        self.tells_labels, self.images = tells_labels, images
        self.scoring = scoring or Scoring(load_weights())
        self.compress = compress  # the clients' compression, for an attack that applies it again
        self.caution = caution  # a note for readers about these attacks against this defense
        self.calibrations = calibrations or {}
        self.waiting: list[PendingAttack] = []
        self.at_once = at_once or (AT_ONCE if known.mean.device.type == "cuda" else 1)

    def looks(self, number: int) -> bool:
        """Return True at attacked rounds, and at rounds that a later attack will use."""
        return self.orders.attacks(number) or number in self.memory.kept or number in self.following.kept

    def victims(self, number: int, clients: Sequence[int]) -> Sequence[int]:
        """Return the clients that an active attack is ordered to attack; none for a passive attack."""
        active = any(is_active(attack) for attack in self.attacks)
        return self.orders.select_clients(clients) if active and self.orders.attacks(number) else ()

    def __call__(self, look: RoundView) -> None:
        """Attack a round, or let the round wait for others, and remember its updates for later attacks."""
        if self.orders.attacks(look.round):
            for attack in self.attacks:
                self._aim(attack, look)
            if sum(len(aimed.seen) for aimed in self.waiting) >= self.at_once * len(self.attacks):
                self.finish()
        self.memory.add(look, self.following.view)  # before this round's zeros replace those of the last one
        self.following.add(look)

    @property
    def waits(self) -> bool:
        """True if clients wait for others."""
        return bool(self.waiting)

    def finish(self) -> None:
        """Attack all clients that wait."""
        groups, self.waiting = group_alike(self.waiting), []
        for group in groups:
            self._attack(group)

    def state(self) -> tuple[Params, Any]:
        """Attack all clients that wait, so that none need be saved, and return the remembered rounds."""
        self.finish()
        tensors, data = self.memory.state()
        return tensors | self.following.state(), data

    def load(self, tensors: Params, data: Any) -> None:
        """Restore the result of `state`; clients that wait belong to rounds that will be repeated."""
        self.waiting = []
        self.memory.load(tensors, data)
        self.following.load(tensors)

    def _aim(self, attack: Choice, look: RoundView) -> None:
        """Record an attack's view of a round."""
        known, mounted, seen = self.known, attack.make(), self._select_updates(look)
        if is_active(attack):
            tampering = derive(self.labels["seed"], "tamper", attack.name, look.round)
            net, sent = mounted.tamper(known.net, look.sent, known, tampering)
            seen, known = look.asked(net, sent), replace(known, net=net)
        self._report_missing(attack, look, seen)
        if not seen:
            return
        compress = self.compress
        if compress is not None and getattr(mounted, "adaptive", "none") == "reapply":  # after the base pruning's mask
            known = replace(known, compression=lambda grads: compress(tree.mask_tree(grads, look.mask)))
        sizes = sorted({one.truth.size for one in seen})  # of whole epochs clients have several
        for size in sizes:
            alike = [one for one in seen if one.truth.size == size]
            self._await(attack, look.round, known, alike, pools=len(sizes) == 1 and len(seen) > 1)

    def _await(self, attack: Choice, number: int, known: Knowledge, seen: Sequence[ClientView], pools: bool) -> None:
        """Let clients with equally many examples wait for an attack."""
        truths = [self._read_truth(one, known) for one in seen]
        views = [self.following.view(one) for one in seen]
        pasts = [[past.view for past in self._history(attack, one)] for one in seen]
        targets = [[view, *past] for view, past in zip(views, pasts, strict=True)]
        knowledge, more = self._knowledge_of(known, truths), {"round": number, "attacked": 1}
        labels = [self._labels(attack, one, knowledge, more | {"client": one.client}) for one in seen]
        pooled = self._label_pooled(attack, seen, knowledge, number) if pools else None
        self.waiting.append(PendingAttack(attack, number, known, seen, truths, targets, labels, pooled))

    def _read_truth(self, seen: ClientView, known: Knowledge) -> Batch:
        """Return a client's examples; of several epochs those of the first, which has every example once."""
        truth = Batch(seen.truth.inputs.to(known.mean), seen.truth.labels)
        return truth if known.local_epochs is None else truth.take(torch.arange(truth.size // known.local_epochs))

    def _select_updates(self, look: RoundView) -> list[ClientView]:
        """Return the updates of the clients that are ordered to be attacked; a sum is always attacked."""
        clients = self.orders.select_clients([seen.client for seen in look.seen if seen.client is not None])
        return [seen for seen in look.seen if seen.client is None or seen.client in clients]

    def _report_missing(self, attack: Choice, look: RoundView, seen: Sequence[ClientView]) -> None:
        """Add a row that names the ordered clients without an update, or that says that none arrived."""
        named = self.orders.who if isinstance(self.orders.who, tuple) else ()
        missing = [f"client {client}" for client in named if client not in [one.client for one in seen]]
        if missing or not seen:
            extra = self.labels["extra"] | {"round": look.round, "client": None}
            took = f"{', '.join(missing)} took no part in the round" if missing else NOBODY
            labels = attack_labels(self.labels, extra, attack, self._weight(attack))
            self.log.rows.append(
                Row(**labels, metric="attacked_clients", value=len(seen), note=f"not attacked: {took}")
            )

    def _history(self, attack: Choice, seen: ClientView) -> list[Past]:
        """Return a client's earlier rounds, the latest first; none for an active attack."""
        rounds = count_rounds(attack.make(), self.orders)
        return [] if is_active(attack) else self.memory.recall(seen.client)[: rounds - 1]

    def _knowledge_of(self, known: Knowledge, truths: Sequence[Batch]) -> Knowledge:
        """Return the attacker's knowledge of clients that all have equally many examples."""
        labels = torch.stack([truth.labels for truth in truths]) if self.tells_labels else None
        size = truths[0].size
        batch = size // known.local_steps if known.local_epochs is None else known.local_batch
        return replace(known, labels=labels, batch_size=size, local_batch=batch)

    def _labels(self, attack: Choice, seen: ClientView, known: Knowledge, more: dict[str, Any]) -> dict[str, Any]:
        """Return the labels of the rows of one attacked update."""
        joins = count_rounds(attack.make(), self.orders) > 1
        extra = describe_update(attack, seen, self._history(attack, seen), known, joins)
        if follows(attack.make()):
            last = self.following.knows(seen)
            extra |= {
                "follows": last,
                "knows": extra["knows"] + (", which weights the client sent last" if last else ""),
            }
        if attack in self.calibrations:
            extra |= {"knows": f"{extra['knows']}, pictures of its own"}
        return attack_labels(self.labels, self.labels["extra"] | more | extra, attack, self._weight(attack))

    def _weight(self, attack: Choice) -> float | None:
        """Return the weight of total variation that the attacker chose, if it chose one."""
        return self.calibrations[attack].weight if attack in self.calibrations else None

    def _label_pooled(
        self, attack: Choice, seen: Sequence[ClientView], known: Knowledge, number: int
    ) -> dict[str, Any]:
        """Return the labels of the rows of all clients of a round together."""
        more = {"round": number, "client": None, "attacked": len(seen)}
        labels = self._labels(attack, seen[0], known, more)
        every = [self._labels(attack, one, known, more)["extra"] for one in seen]
        labels["extra"] |= {name: min(e[name] for e in every) for name in ("history", "same_rows") if name in every[0]}
        return labels

    def _attack(self, group: Sequence[PendingAttack]) -> None:
        """Attack all targets of a group in one call, and add their rows."""
        attack, first, begun = group[0].attack, group[0], time.monotonic()
        mounted = (self.calibrations[attack].attack if attack in self.calibrations else attack).make()
        truths = [truth for aimed in group for truth in aimed.truths]
        known, targets = self._knowledge_of(first.known, truths), [views for aimed in group for views in aimed.targets]
        guesses: dict[int, Reconstruction] = {}
        starts = [derive(self.labels["seed"], "reconstruct", aimed.round) for aimed in group]  # equal for all attacks
        generators = [rng for rng, aimed in zip(starts, group, strict=True) for _ in aimed.targets]
        when = f"round {first.round}" if len(group) == 1 else f"rounds {first.round} to {group[-1].round}"
        clients = [one for aimed in group for one in aimed.seen]
        title, whole = f"{attack} on {describe_clients(clients)} in {when}", getattr(mounted, "iterations", None)
        with progress(title, whole, rate=True, unit="iterations") as advance:
            guesses |= mounted.reconstruct(targets, known, generators, NullWatcher(advance))
        seconds, number = (time.monotonic() - begun) / len(targets), count()
        for aimed in group:
            outcomes = [judge([t], [guesses.get(next(number))], known, seconds, self.scoring) for t in aimed.truths]
            for one, truth, outcome, labels in zip(aimed.seen, aimed.truths, outcomes, aimed.labels, strict=True):
                self._report(attack, one, truth, outcome, known, labels)
            if aimed.pooled is not None:
                self.log.rows += self._rows(attack, aimed.pooled, join_outcomes(outcomes))

    def _report(
        self,
        attack: Choice,
        seen: ClientView,
        truth: Batch,
        outcome: AttackOutcome,
        known: Knowledge,
        labels: dict[str, Any],
    ) -> None:
        """Add the rows and figures of one client, and update the leak."""
        rows = self._rows(attack, labels, outcome)
        self.log.rows += rows
        best = [row.value for row in rows if row.metric == "psnr_max" and row.value is not None]
        self.leak = max([*best, *([] if self.leak is None else [self.leak])], default=None)
        shown, number = flat_labels(labels), self._number(seen)
        if attack == self.attacks[0]:
            pixels, names = known.pixels(truth.inputs), truth.labels.tolist()
            self.log.figures += gallery.truths(shown, number, pixels, names, self.images)
        self.log.figures += gallery.draw_figures(shown, [number], outcome, self.images)

    def _rows(self, attack: Choice, labels: dict[str, Any], outcome: AttackOutcome) -> list[Row]:
        """Return the summary rows of an outcome, with the calibration and the caution in the note of the PSNR."""
        rows = summary_rows(labels, outcome, derive(self.labels["seed"], "bootstrap"))
        chosen = self.calibrations[attack].note if attack in self.calibrations else None
        apart = OTHER_ROWS if labels["extra"].get("same_rows") is False else None
        notes = [join_notes(row.note, chosen, apart, self.caution) for row in rows]
        return [replace(r, note=n) if r.metric == "psnr" else r for r, n in zip(rows, notes, strict=True)]

    def _number(self, seen: ClientView) -> int:
        """Return a number that is unique to an update, for its figures.

        Where one client a round is attacked, this is the round's number.
        """
        if self.orders.who == 1:
            return seen.round
        return seen.round * int(self.labels["extra"]["clients"]) + (seen.client or 0)


def group_alike(waiting: Iterable[PendingAttack]) -> list[list[PendingAttack]]:
    """Group targets that one call of an attack can take together."""
    groups: dict[Hashable, list[PendingAttack]] = {}
    for aimed in waiting:
        groups.setdefault(aimed.key, []).append(aimed)
    return list(groups.values())
