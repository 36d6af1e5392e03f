"""Membership attacks on the models that the clients and the server of a federation sent.

Yeom's attack is mapp_fl's (Section 3). Its targets are a client's last update, a client's last k updates, and the
server's last model. The attacker with k updates is called stateful, and takes the mean of an example's losses. The
members of the server's model are all training data.

LiRA and RMIA are a stronger attacker: the server itself, with shadow clients. The server knows the sub-model that it
sent a client in the last round. Shadow clients of the same width start from that model and train as the client does,
for one turn, each on half of the candidates. So every example has models that trained on it and models that did not.
Their difference is the leak of that turn alone: leaks of earlier rounds are in the sent model, and so in all of them.
A client with more examples than candidates takes more steps in its turn than its shadows do. Shadow federations
(shadow_federations.py) have all rounds, and models of the server too.

RMIA's population are further rows of the attacker. They are dealt to the shadows like the candidates, because P(z) of
rows that no shadow trained on would be on another scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.attacks.membership.scoring_batches import RULES, SIZE, answer_parts, fix_statistics, is_static, scorer
from secateur.attacks.membership.thresholds import negative_cross_entropy
from secateur.attacks.membership.yeom import MOST, Trial, average_over_knowledge, mean_advantage, trial
from secateur.catalogue import Choice
from secateur.data.dataset import Dataset
from secateur.errors import NotFinite, WrongInput, check_whole
from secateur.evaluation.attack_strength import name_missing_clients
from secateur.federated.spec import Adam
from secateur.federated.submodels import networks
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, InOut, Params, Transform
from secateur.metrics.membership import Estimate, evaluate, share
from secateur.runs.rows import Row, join_notes
from secateur.seeding import derive
from secateur.training.recipe import Recipe, Task
from secateur.training.trainer import fit_many

REFERENCE = 1024  # examples for the estimate of fixed statistics


@dataclass(frozen=True, eq=False)
class Target:
    """A client of a finished federation as an attacker sees it, or the server."""

    client: int | None  # None: the server
    net: nn.Module  # the structure, of the target's width
    sent: Sequence[Params]  # a client's updates, oldest first; the server's last model alone
    rows: Tensor  # its training examples
    received: Params | None = None  # the model that a client was sent in the round of its last update
    rate: float = 1.0  # the share of the server's channels
    round: int | None = None  # of a client's last update
    augment: Transform | None = None  # of training inputs, also of its shadows; candidates are not augmented
    begun: Params | None = None  # the start of its training; None: `received`
    statistics: Tensor | None = None  # rows to re-estimate BatchNorm on, for the accuracy; None: by batch

    def labels(self, labels: dict[str, Any]) -> dict[str, Any]:
        """Return the labels of the target's rows, from those of its federation."""
        extra = {"scope": "server" if self.client is None else "client", "client": self.client, "rate": self.rate}
        extra |= {"data_size": len(self.rows), "parameters": tree.count(dict(self.net.named_parameters()))}
        extra |= {} if self.round is None else {"answered": self.round}
        return labels | {"extra": labels.get("extra", {}) | extra}


@dataclass(frozen=True)
class Asking:
    """The settings of an attacker."""

    printed: bool = False  # knows min(3, 1 %) of a client, as printed in the paper, not max; of the server 1 %
    whole: bool = False  # candidates include the known members, as in the paper
    batches: str = "mixed"  # a rule of attacks/membership/scoring_batches.py
    size: int = SIZE  # of the scoring batches
    updates: int = 1  # k of the stateful attacker
    shadows: int = 8  # shadow clients of LiRA and RMIA
    federations: int = 0  # shadow federations, instead of shadow clients
    compare: bool = True  # True: Yeom under the other batch rules too
    shuffles: int = 4  # of the mixed batches: an example's loss is the mean over these
    mates: int = 0  # seed of the shuffles


class ShadowPool(NamedTuple):
    """The rows that are dealt to shadows: the candidates of one target in random order, then RMIA's population."""

    rows: Tensor
    is_member: Tensor  # (candidates,) bool

    @property
    def population(self) -> Tensor:
        """The places of the population in `rows`."""
        return torch.arange(len(self.is_member), len(self.rows))


class ShadowModels(NamedTuple):
    """Shadow federations: their rows, and the models of their last round."""

    pools: dict[int, ShadowPool]  # by client
    inside: dict[int, Tensor]  # by client: (models, pool) True for the rows of each model
    shares: Sequence[Sequence[Tensor]]  # by model: the rows of each client
    models: Sequence[Params]  # "server." and "clientN." with the names of parameters

    def find(self, client: int | None, rng: Generator) -> tuple[ShadowPool, Tensor, list[Params]] | None:
        """Return a target's pool, the rows of each model, and the models; None if not all of them answered."""
        part = "server" if client is None else f"client{client}"
        models = [tree.part(model, part) for model in self.models]
        if not self.pools or (client is not None and client not in self.pools) or not all(models):
            return None
        if client is not None:
            return self.pools[client], self.inside[client], models
        pool = join_pools(list(self.pools.values()), rng)
        return pool, torch.stack([torch.isin(pool.rows, torch.cat([*share])) for share in self.shares]), models


def join_pools(pools: Sequence[ShadowPool], rng: Generator) -> ShadowPool:
    """Return the pool of the server: as many members as non-members of its clients' pools, and their population.

    Rows that are candidates of one client and population of another are candidates.
    """
    asked_rows = [(pool.rows[: len(pool.is_member)], pool.is_member) for pool in pools]
    sides = [_list_distinct([rows[inside == side] for rows, inside in asked_rows]) for side in (True, False)]
    others = _list_distinct([pool.rows[pool.population] for pool in pools])
    asked = min(MOST, *map(len, sides))
    members, nonmembers = (side[torch.randperm(len(side), generator=rng)[:asked]] for side in sides)
    order = torch.randperm(2 * asked, generator=rng)
    population = others[~torch.isin(others, sides[1])]
    return ShadowPool(torch.cat([torch.cat([members, nonmembers])[order], population]), order < asked)


def _list_distinct(parts: Sequence[Tensor]) -> Tensor:
    return torch.tensor(sorted({int(row) for part in parts for row in part}), dtype=torch.int64)


def pool_of(asked: Trial, rng: Generator) -> ShadowPool:
    """Return the pool of one target; the population are as many rows of the attacker as there are members, or fewer."""
    order = torch.randperm(2 * len(asked.members), generator=rng)
    candidates = torch.cat([asked.members, asked.nonmembers])[order]
    population = asked.outsiders[: len(asked.members)]
    return ShadowPool(torch.cat([candidates, population]), order < len(asked.members))


def draw_client_trial(client: int | None, rows: Tensor, data: Dataset, asking: Asking, seed: int) -> Trial:
    """Draw the known rows and the candidates of a client, or of the server; refuse sets that are too small."""
    outside, printed = torch.arange(data.train_size, len(data.inputs)), asking.printed and client is not None
    return trial(rows, outside, derive(seed, "trial", client), printed=printed, whole=asking.whole)


class YeomView(NamedTuple):
    """One view of Yeom's attack on a target: its batch rule, and its number of updates."""

    batches: str
    updates: int


@dataclass(frozen=True, eq=False)
class MembershipEvaluation:
    """A target and its attacker."""

    target: Target
    data: Dataset
    asking: Asking
    turn: Recipe
    device: torch.device
    labels: dict[str, Any]
    shadows: ShadowModels | None = None

    def rows(self, attacks: Sequence[Choice]) -> list[Row]:
        """Return the target's accuracy, and every attack with intervals, or the reason of its exclusion."""
        target, asking = self.target, self.asking
        if not target.sent:
            return [self.exclude(attack, "none of its updates was seen") for attack in attacks]
        try:
            asked = draw_client_trial(target.client, target.rows, self.data, asking, self.labels["seed"])
        except WrongInput as error:
            return [self.accuracy(), *(self.exclude(attack, error.message) for attack in attacks)]
        by_loss, by_shadows = ([a for a in attacks if (a.name == "yeom") == yeom] for yeom in (True, False))
        groups = [([attack], self.yeom(attack, asked)) for attack in by_loss]
        groups += [(by_shadows, self.run_shadow_attacks(by_shadows, asked))] if by_shadows else []
        rows = [self.accuracy()]
        for group, attacked in groups:
            try:
                rows += list(attacked)
            except NotFinite as error:
                rows += [self.exclude(attack, error.message) for attack in group]
        met = {str(row.attack) for row in rows if row.metric == "auc"}  # an excluded attack was not met
        unmet = name_missing_clients(met, federations=asking.federations)
        return [replace(row, note=join_notes(row.note, unmet)) if row.metric == "auc" else row for row in rows]

    def accuracy(self) -> Row:
        """Return the test accuracy of the model that a client began its last turn with, or of the server's last."""
        target, size = self.target, self.asking.size
        state = tree.to(target.begun or target.received or target.sent[-1], self.device)
        test = self._batch(torch.arange(self.data.train_size, len(self.data.inputs)))
        if target.statistics is None:
            outputs = networks.logits(target.net, state, test.inputs, size)
        else:
            examples = self._batch(target.statistics).inputs
            outputs = networks.predict_reestimated(target.net, state, examples, test.inputs, size)
        right = share((outputs.argmax(1) == test.labels) & outputs.isfinite().all())  # as in networks.judged
        return Row(**self.labels, metric="test_accuracy", **right._asdict())

    def exclude(self, attack: Choice, reason: str) -> Row:
        """Return a row that excludes the target from an attack, with the reason."""
        return Row(**self.labels | {"attack": str(attack)}, metric="advantage", value=None, note=f"excluded: {reason}")

    def yeom(self, attack: Choice, asked: Trial) -> Iterator[Row]:
        """Yield the rows of Yeom's attack as configured, then by k updates, and by the other batch rules to compare."""
        views = [YeomView(self.asking.batches, 1)]
        views += [YeomView(self.asking.batches, len(self.target.sent))] if len(self.target.sent) > 1 else []
        if self.asking.compare and is_static(self.target.net):
            views += [YeomView(rule, 1) for rule in RULES if rule != self.asking.batches]
        parts = [self._batch(rows) for rows in (asked.known, asked.known_outside, asked.members, asked.nonmembers)]
        for view in views:
            values, labels = self._values(parts, asked, view)
            yield from self._yeom_rows(attack, values, labels, view, main=view == views[0])

    def run_shadow_attacks(self, attacks: Sequence[Choice], asked: Trial) -> Iterator[Row]:
        """Yield the rows of attacks that learn from models (LiRA, RMIA), here from the same shadows for all."""
        net, seed = self.target.net, self.labels["seed"]
        shadows = self._shadows(asked)
        if isinstance(shadows, str):
            yield from (self.exclude(attack, shadows) for attack in attacks)
            return
        dealt, design, states = shadows
        pool, population, is_member = self._batch(dealt.rows), dealt.population, dealt.is_member
        *boxes, target_box = (
            BlackBox(scorer(net, state, self.device, self.asking.size)) for state in (*states, self.target.sent[-1])
        )
        places = torch.arange(len(is_member))
        candidates = Candidates(pool.take(places.to(self.device)), places)
        for attack in attacks:
            if "population" in attack.method.defaults and len(population) < 2:
                yield self.exclude(attack, f"its population has {len(population)} of at least 2 rows; use more data")
                continue
            fitted = attack.make().fit(InOut(boxes, pool, design, population), derive(seed, str(attack)))
            guesses, view = fitted.score(target_box, candidates), YeomView(self.asking.batches, 1)
            for row in self._rows(attack, guesses, is_member, view, 0, main=True):
                extra = {"shadows": self._describe_shadows(), "shadow_rows": int(design[0].sum())}
                yield replace(row, extra=row.extra | extra | {"population": len(population)})

    def _shadows(self, asked: Trial) -> tuple[ShadowPool, Tensor, Sequence[Params]] | str:
        """Return the pool, the rows of each shadow, and the shadows' models; or the reason why there are none."""
        target, seed, client = self.target, self.labels["seed"], self.target.client
        if self.shadows is not None:
            missing = "a shadow federation has no update of it"
            return self.shadows.find(client, derive(seed, "server pool")) or missing
        if target.received is None:
            return "shadow clients stand for clients; the server's model has none; use shadow_federations"
        pool, rng = pool_of(asked, derive(seed, "mixed", client)), derive(seed, "shadow clients", client)
        batch, shadows = self._batch(pool.rows), self.asking.shadows
        states, design = shadow_clients(target.net, target.received, batch, shadows, self.turn, rng, target.augment)
        return pool, design, states

    def _describe_shadows(self) -> str:
        """Return the kind and number of the shadows."""
        one_turn = f"{self.asking.shadows} clients, one turn"
        return one_turn if self.shadows is None else f"{self.asking.federations} federations, all rounds"

    def _values(self, parts: Sequence[Batch], asked: Trial, view: YeomView) -> tuple[list[Tensor], list[Tensor]]:
        """Return log p_y, the mean over updates and shuffles, and the labels, of each part."""
        values = [torch.zeros(part.size, dtype=torch.float64, device=self.device) for part in parts]
        used = self.target.sent[-view.updates :]
        rng = derive(self.labels["seed"], "batches", self.target.client, self.asking.mates)
        mixed = view == YeomView("mixed", 1) and is_static(self.target.net)  # several updates shuffle apart
        shuffles = self.asking.shuffles if mixed else 1
        for state in (state for state in used for _ in range(shuffles)):
            for value, part, outputs in zip(values, parts, self._answers(state, parts, asked, view, rng), strict=True):
                value += negative_cross_entropy(outputs, part.labels) / (len(used) * shuffles)
        return values, [part.labels for part in parts]

    def _answers(
        self, state: Params, parts: Sequence[Batch], asked: Trial, view: YeomView, rng: Generator
    ) -> Sequence[Tensor]:
        net, size = self.target.net, self.asking.size
        if view.batches == "fixed" and is_static(net):
            reference = self._batch(asked.outsiders[:REFERENCE]).inputs
            net, state = fix_statistics(net, tree.to(state, self.device), reference, size)
        answer, inputs = scorer(net, state, self.device, size), [part.inputs for part in parts]
        if view.batches != "apart":
            return answer_parts(answer, inputs, view.batches, rng)
        (known, members), (outside, others) = (
            answer(torch.cat(side)).split_with_sizes([len(part) for part in side])
            for side in ((inputs[0], inputs[2]), (inputs[1], inputs[3]))
        )
        return [known, outside, members, others]

    def _yeom_rows(
        self, attack: Choice, values: list[Tensor], labels: list[Tensor], view: YeomView, *, main: bool
    ) -> Iterator[Row]:
        """Fit on the known examples, decide on the candidates, and show the spread over the choice of known members."""
        known, outside, members, others = values
        inside = torch.arange(len(known) + len(outside), device=self.device) < len(known)
        fitted = attack.make().learn(torch.cat([known, outside]), torch.cat(labels[:2]), inside, self.data.classes)
        guesses = fitted.decide(torch.cat([members, others]), torch.cat(labels[2:]))
        truth = torch.arange(len(members) + len(others)) < len(members)
        rng = derive(self.labels["seed"], "knowledge", self.target.client)
        better = {"advantage": mean_advantage(known, members, others, rng)} if fitted.rule == "mean" else {}
        yield from self._rows(attack, guesses, truth, view, len(known), main=main, better=better)
        if main and fitted.rule == "mean":
            spread = average_over_knowledge(torch.cat([known, members]), others, len(known), rng)
            row_labels = self._labels(attack, view, len(known))
            yield Row(**row_labels, metric="advantage_over_knowledge", **spread._asdict())

    def _rows(
        self,
        attack: Choice,
        guesses: Guesses,
        truth: Tensor,
        view: YeomView,
        known: int,
        *,
        main: bool,
        better: Mapping[str, Estimate] | None = None,  # estimates that replace those of `evaluate`
    ) -> Iterator[Row]:
        estimates = evaluate(guesses, truth)
        estimates |= better or {}
        labels = self._labels(attack, view, known)
        for name in estimates if main else ("advantage", "auc"):
            notes = [note for note in (estimates[name].note, guesses.note) if note]
            yield Row(**labels, metric=name, **estimates[name]._asdict() | {"note": "; ".join(notes) or None})

    def _labels(self, attack: Choice, view: YeomView, known: int) -> dict[str, Any]:
        extra = self.labels["extra"] | {"batches": view.batches, "updates": view.updates, "known": known}
        return self.labels | {"attack": str(attack), "extra": extra}

    def _batch(self, rows: Tensor) -> Batch:
        return self.data.batch.take(rows).to(self.device)


def turn_of(local: Adam) -> Recipe:
    """Return the training of a client's turn, for its shadow clients."""
    return Recipe(local.epochs, local.batch_size, learning_rate=local.learning_rate, weight_decay=0.0, patience=None)


def shadow_clients(
    net: nn.Module,
    received: Params,
    pool: Batch,
    models: int,
    turn: Recipe,
    rng: Generator,
    augment: Transform | None = None,  # of every step's inputs, as in the client's training
) -> tuple[list[Params], Tensor]:
    """Return the states that shadow clients would send, and (models, pool) True for the rows of each."""
    design = halves(pool.size, models, rng)
    device, nobody = pool.inputs.device, pool.take(torch.arange(0))
    start = tree.to(received, device)
    seeds = torch.randint(2**62, (models,), generator=rng).tolist()
    tasks = [
        Task(start, pool.take(rows.to(device)), nobody, torch.Generator().manual_seed(seed))
        for rows, seed in zip(design, seeds, strict=True)
    ]
    execution = "stacked" if device.type == "cuda" else "auto"  # short runs of small nets: timing the ways takes longer
    with torch.enable_grad():  # the server observes updates under no_grad
        fitted = dict(fit_many(net, tasks, turn, transform=augment, execution=execution))
    return [fitted[number].state for number in range(models)], design


def halves(rows: int, models: int, rng: Generator) -> Tensor:
    """Return (models, rows) bool: pairs of models share the rows out evenly.

    So every row is in exactly half of the models.
    """
    check_whole("shadows", models, 2, even=True)  # each row is in half of them
    first = torch.stack([torch.randperm(rows, generator=rng) < rows // 2 for _ in range(models // 2)])
    return torch.stack([first, ~first], 1).flatten(0, 1)
