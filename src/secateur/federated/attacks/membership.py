"""Membership inference inside a federation, on the updates that a server sees round after round.

Candidates are a client's rows against equally many rows of the test part, which no client trained on. The trial is that
of mapp_fl: the attacker knows 1 % of the client's rows, at least 3, and calls a candidate a member if it scores above
their mean. The attacked model is the one that a client sent. A weight that came back as 0, though the server's mask
keeps it, was withheld; it takes the value that the server sent. BatchNorm normalises by the statistics that came with
the model.

`yeom` scores by the loss under the client's last model. `lira` scores by the log odds under the client's models of
several rounds (as many as `attack_history` says), compared with the same rounds' other clients. No shadow model is
trained. The other clients of a round began at the same model and never had the candidates. So their models are the
"out" models (after Carlini et al. 2022, offline). For a candidate x

    phi_t(x)   the log odds of its label under the client's model of round t
    mu_t(x)    their mean under the models of the round's M_t others
    s(x)       the others' deviation about mu_t(x), pooled over the rounds: of x itself where it rests on 64 values or
               more, else one for all candidates
    score(x)   the mean over the rounds of -log Pr[Z > z_t(x)], z_t = (phi_t - mu_t) / (s sqrt(1 + 1 / M_t)), Z normal

The root accounts for the error of a mean of M_t values.

`rmia` compares the same models by ratios (Zarifzadeh et al. 2024, offline, with the others as "out" models):
P(x | f) / P(x), the geometric mean over the rounds. An example's score is the share of a population whose ratio is
lower. The population are rows of the attacker's half of the test part, from which no candidate is drawn. Its gamma is
1, because one turn moves ratios by much less than the factor 2 of a whole training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.special import log_ndtr

from secateur import tree
from secateur.attacks.membership.lira import MANY, NARROWEST, margin
from secateur.attacks.membership.rmia import dominance, ratio
from secateur.attacks.membership.thresholds import negative_cross_entropy
from secateur.attacks.membership.yeom import Trial, count_known, mean_advantage, trial
from secateur.data.dataset import Dataset
from secateur.errors import NotFinite, WrongInput, unknown
from secateur.federated.attacks.observer import NOBODY, ClientView, Observer, RoundView
from secateur.federated.attacks.schedule import AttackSchedule
from secateur.federated.checkpoint import FederationLog
from secateur.federated.spec import FederationSpec
from secateur.inference import logits
from secateur.interfaces import Batch, Gradient, Guesses, Params
from secateur.metrics.membership import evaluate
from secateur.runs.rows import Row
from secateur.seeding import derive

THREAT = "an honest-but-curious server that knows some of a client's examples and asks about others"
ATTACKS = ("yeom", "lira", "rmia")
FEWEST = {"lira": 3, "rmia": 2}  # clients of a round: the attacked one, and others; two for a deviation
POPULATION = 1000  # rows of RMIA, at most
GAMMA, OUT_SHARE = 1.0, 0.3  # of RMIA: gamma, and a of its offline prior


class Observed(NamedTuple):
    """The log odds of all candidates, then of RMIA's population, in one round of a client."""

    target: Tensor  # (N,) under the client's model
    others: Tensor  # (M, N) under the models of the round's other clients


class MembershipObserver(Observer):
    """An observer that attacks by its orders, and adds rows to the log."""

    leak_name = "AUC"

    def __init__(
        self,
        attacks: Sequence[str],
        net: nn.Module,
        data: Dataset,
        terms: FederationSpec,
        labels: dict[str, Any],  # of the rows
        log: FederationLog,
        orders: AttackSchedule,
        kept: Mapping[int, set[int]],  # by round: the clients whose updates are remembered
        device: torch.device,
    ) -> None:
        self.attacks, self.net, self.terms = attacks, net, terms
        self.labels, self.log, self.orders, self.kept = labels, log, orders, kept
        self.batch, self.train_size, self.device = data.batch, data.train_size, device
        self.past: dict[int, list[Observed]] = {}  # by client, the latest first

    def looks(self, number: int) -> bool:
        """Return True at attacked rounds, and at rounds that a later attack will use."""
        return self.orders.attacks(number) or (self.compares and number in self.kept)

    @property
    def compares(self) -> bool:
        """True if an attack compares a client with the others of its rounds."""
        return any(attack in FEWEST for attack in self.attacks)

    def __call__(self, look: RoundView) -> None:
        """Attack the chosen clients of a round, and remember the round's log odds for later attacks."""
        chosen = self.orders.select_clients([seen.client for seen in look.seen if seen.client is not None])
        if self.orders.attacks(look.round) and not look.seen:
            extra = self.labels["extra"] | {"round": look.round, "client": None}
            for attack in self.attacks:
                labels = self.labels | {"attack": attack, "adaptive": False, "extra": extra}
                note = f"not attacked: {NOBODY}"
                self.log.rows.append(Row(**labels, metric="attacked_clients", value=0, note=note))
        for seen in look.seen:
            asked = self.orders.attacks(look.round) and (seen.client is None or seen.client in chosen)
            if asked or seen.client in self.kept.get(look.round, ()):
                self._score(look, seen, asked)

    def state(self) -> tuple[Params, Any]:
        """Return the remembered rounds."""
        rounds = {f"{client}.{age}": o._asdict() for client, past in self.past.items() for age, o in enumerate(past)}
        return tree.nest(rounds), {str(client): len(past) for client, past in self.past.items()}

    def load(self, tensors: Params, data: Any) -> None:
        """Restore the result of `state`."""
        self.past = {
            int(client): [Observed(**tree.part(tensors, f"{client}.{age}")) for age in range(count)]
            for client, count in data.items()
        }

    def _score(self, look: RoundView, seen: ClientView, asked: bool) -> None:
        """Score the candidates of one client; if `asked`, add the rows of the attacks."""
        members = torch.cat([self.terms.shares[client] for client in seen.clients])
        outside = torch.arange(self.train_size, len(self.batch.labels))
        drawn = draw_trial(members, outside, derive(self.labels["seed"], "membership", *seen.clients))
        if isinstance(drawn, str):
            self._report_nothing(look, seen, asked, drawn)
            return
        population = drawn.outsiders[:POPULATION] if "rmia" in self.attacks else drawn.outsiders[:0]
        rows = torch.cat([drawn.known, drawn.members, drawn.nonmembers, population])
        asked_rows, batch = len(rows) - len(population), self.batch.take(rows).to(self.device)
        probabilities = self._probabilities(look, seen, batch)
        if probabilities is None:
            self._report_nothing(look, seen, asked, "the client's model answers with NaN or infinity")
            return
        if asked and "yeom" in self.attacks:
            losses = negative_cross_entropy(probabilities, batch.labels)
            self._report("yeom", look, seen, drawn, losses[:asked_rows], 1)
        if self.compares and seen.client is not None:
            others = [self._probabilities(look, other, batch) for other in look.seen if other is not seen]
            margins = [margin(other, batch.labels) for other in others if other is not None]
            now = Observed(margin(probabilities, batch.labels), _stack(margins, probabilities))
            rounds = [now, *self.past.get(seen.client, [])][: self.orders.history]
            self.past[seen.client] = rounds
            if asked and "lira" in self.attacks:
                parts = [Observed(target[:asked_rows], others[:, :asked_rows]) for target, others in rounds]
                self._report("lira", look, seen, drawn, scores(parts), len(rounds))
            if asked and "rmia" in self.attacks:
                shares = dominate_population(rounds, asked_rows)
                self._report("rmia", look, seen, drawn, shares, len(rounds), {"population": len(population)})

    def _report_nothing(self, look: RoundView, seen: ClientView, asked: bool, note: str) -> None:
        """Add a row without a value for every attack, with the reason."""
        for attack in self.attacks if asked else ():
            self.log.rows.append(Row(**self._labels(attack, look, seen, 0), metric="auc", value=None, note=note))

    def _probabilities(self, look: RoundView, seen: ClientView, batch: Batch) -> Tensor | None:
        """Return a client's (N, classes) probabilities; None if not finite, as with weights that are too large."""
        state = look.sent | rebuild_model(look, seen, self.terms.local.learning_rate) | seen.buffers
        dtype = next(iter(seen.view.update.values.values())).dtype
        try:
            return logits(self.net, state, batch.inputs.to(dtype)).softmax(1)
        except NotFinite:
            return None

    def _report(
        self,
        attack: str,
        look: RoundView,
        seen: ClientView,
        drawn: Trial,
        scored: Tensor | None,
        rounds: int,
        more: Mapping[str, int] | None = None,  # further columns
    ) -> None:
        """Add the rows of one attack on one client, and update the leak."""
        labels = self._labels(attack, look, seen, rounds) | {"adaptive": False}
        labels["extra"] = labels["extra"] | (more or {})
        if scored is None:
            note = "too few other clients answered, so nobody shows what is likely for an outsider"
            self.log.rows.append(Row(**labels, metric="auc", value=None, note=note))
            return
        sizes = [len(drawn.known), len(drawn.members), len(drawn.nonmembers)]
        known, inside, outside = scored.split_with_sizes(sizes)
        values = torch.cat([inside, outside])
        is_member = torch.arange(len(values), device=values.device) < len(inside)
        rng = derive(self.labels["seed"], "bootstrap", attack, look.round, *seen.clients)
        measured = evaluate(Guesses(values, values > known.mean()), is_member)
        measured["advantage"] = mean_advantage(known, inside, outside, rng)
        self.log.rows += [Row(**labels, metric=name, **estimate._asdict()) for name, estimate in measured.items()]
        self.leak = max(measured["auc"].value, self.leak or 0.0)

    def _labels(self, attack: str, look: RoundView, seen: ClientView, rounds: int) -> dict[str, Any]:
        """Return the labels of the rows of one attack on one client."""
        size = sum(len(self.terms.shares[client]) for client in seen.clients)
        extra = self.labels["extra"] | {"round": look.round, "client": seen.client, "threat": THREAT, "rows": size}
        extra |= {"known": count_known(size), "history": rounds, "shown": len(seen.clients)}
        return self.labels | {"attack": attack, "adaptive": False, "extra": extra}


def check_membership(attacks: Sequence[str], data: Dataset, terms: FederationSpec) -> None:
    """Refuse, before any work, attacks that this federation does not allow."""
    if wrong := [attack for attack in attacks if attack not in ATTACKS]:
        raise unknown("membership", wrong[0], ATTACKS)
    largest, outside = max(terms.shares, key=len), torch.arange(data.train_size, len(data.inputs))
    if isinstance(reason := draw_trial(largest, outside, derive(0, "check")), str):
        raise WrongInput("membership", f"no client has enough examples: {reason}")
    for attack, fewest in FEWEST.items():
        if attack in attacks and terms.view == "sum":
            raise WrongInput(
                "membership", f"{attack} compares a client with others, and view: sum shows none; use yeom"
            )
        if attack in attacks and terms.per_round < fewest:
            raise WrongInput("per_round", f"{terms.per_round} is not allowed with {attack}; must be at least {fewest}")


def draw_trial(rows: Tensor, outside: Tensor, rng: Generator) -> Trial | str:
    """Return the trial's rows, or the reason why there can be no trial."""
    try:
        return trial(rows, outside, rng)
    except WrongInput as error:
        return error.message


def rebuild_model(look: RoundView, seen: ClientView, rate: float) -> Params:
    """Return the parameters that a client ended at; a withheld weight has the value that the server sent."""
    sent, update = look.sent, seen.view.update
    if isinstance(update, Gradient):
        return {name: sent[name] - rate * value for name, value in update.values.items()}
    params = {}
    for name, value in update.values.items():
        missing = value == 0 if name not in look.mask else (value == 0) & look.mask[name]
        params[name] = torch.where(missing, sent[name], value)
    return params


def scores(rounds: Sequence[Observed]) -> Tensor | None:
    """Return (N,) scores, high = member; None if no round has two other clients, too few for a deviation."""
    known = [observed for observed in rounds if len(observed.others)]
    freedom = sum(len(observed.others) - 1 for observed in known)
    if freedom < 1:
        return None
    means = [observed.others.mean(0) for observed in known]
    squares = torch.stack([(o.others - mean).square().sum(0) for o, mean in zip(known, means, strict=True)]).sum(0)
    if freedom < MANY:
        squares = squares.mean(0, keepdim=True)
    scale = (squares / freedom).sqrt().clamp_min(NARROWEST)
    by_round = []
    for observed, mean in zip(known, means, strict=True):
        open_share = (1 + 1 / len(observed.others)) ** 0.5
        tail: Tensor = log_ndtr((mean - observed.target) / (scale * open_share))
        by_round.append(-tail)
    return torch.stack(by_round).mean(0)


def dominate_population(rounds: Sequence[Observed], asked: int) -> Tensor | None:
    """Return (asked,) RMIA's scores, the shares of the population with a lower ratio; None without other clients.

    Example:
        >>> target, others = torch.tensor([2.0, -2.0, 0.0, 0.0]), torch.tensor([[0.0, 0.0, 0.0, 1.0]])
        >>> dominate_population([Observed(target, others)], 2).tolist()
        [1.0, 0.0]
    """
    logs = []
    for target, others in (observed for observed in rounds if len(observed.others)):
        never = torch.zeros_like(others, dtype=torch.bool)
        logs.append(ratio(target.sigmoid(), others.sigmoid(), never, "offline", OUT_SHARE).log())
    if not logs:
        return None
    ratios = torch.stack(logs).mean(0)
    return dominance(ratios[:asked].exp(), ratios[asked:].exp(), GAMMA)


def _stack(values: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the values as (M, N), also where there are none."""
    return torch.stack(list(values)) if values else like.new_zeros(0, len(like), dtype=torch.float64)
