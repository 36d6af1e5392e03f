"""Who is in a client's data? Membership inference on the updates that a server sees, round after round.

Asked are the client's own rows against as many of the test part, which nobody trained on, by the trial of mapp_fl: the
attacker knows 1 % of the client's rows, at least 3, and calls a member whoever scores above their mean. It looks at the
model that a client sent; a weight that came back as 0 though the server's mask keeps it was withheld, and counts as the
server sent it. BatchNorm normalises by the statistics that came with the model.

`yeom` scores by the loss under the client's last model, `lira` by its log odds over the rounds that the client took
part in (as many as `attack_history` says) against the same rounds' other clients: how unlikely are its models' answers,
if the others' are what is likely? No shadow model is trained for that: the other clients of a round began at the same
model as the client that is asked about, and never had the candidates, so theirs are the "out" models (after Carlini et
al. 2022, offline). Of a candidate x

    phi_t(x)   the log odds of its label under the client's model of round t
    mu_t(x)    their mean under the models of the round's M_t others
    s(x)       the others' deviation about mu_t(x), pooled over the rounds: of x itself where it rests on 64 values or
               more, else one for all candidates
    score(x)   the mean over the rounds of -log Pr[Z > z_t(x)], z_t = (phi_t - mu_t) / (s sqrt(1 + 1 / M_t)), Z normal

The root stands for what M_t values leave open of the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.special import log_ndtr

from secateur.attacks.membership.lira import MANY, NARROWEST, margin
from secateur.attacks.membership.thresholds import negative_cross_entropy
from secateur.attacks.membership.yeom import Trial, known_count, mean_advantage, trial
from secateur.data.dataset import Dataset
from secateur.errors import NotFinite, WrongInput, unknown
from secateur.federated.attacks.observer import NOBODY, Look, Seen
from secateur.federated.attacks.schedule import Orders
from secateur.federated.checkpoint import Story
from secateur.federated.spec import Terms
from secateur.inference import logits
from secateur.interfaces import Batch, Gradient, Guesses, Params
from secateur.metrics.membership import evaluate
from secateur.runs.rows import Row
from secateur.seeding import derive

THREAT = "an honest-but-curious server that knows some of a client's examples and asks about others"
ATTACKS = ("yeom", "lira")
FEWEST = 3  # clients of a round, for two whose models show what is likely


class Observed(NamedTuple):
    """One round of a client: the log odds of all candidates."""

    own: Tensor  # (N,) under the client's model
    others: Tensor  # (M, N) under those of the round's other clients


def scores(rounds: Sequence[Observed]) -> Tensor | None:
    """(N,) high = member; None where the others are too few for a deviation: no round has two of them."""
    freedom = sum(len(each.others) - 1 for each in rounds if len(each.others))
    if freedom < 1:
        return None
    known = [each for each in rounds if len(each.others)]
    means = [each.others.mean(0) for each in known]
    squares = torch.stack([(o.others - mean).square().sum(0) for o, mean in zip(known, means, strict=True)]).sum(0)
    if freedom < MANY:
        squares = squares.mean(0, keepdim=True)
    scale = (squares / freedom).sqrt().clamp_min(NARROWEST)
    found = []
    for each, mean in zip(known, means, strict=True):
        open_share = (1 + 1 / len(each.others)) ** 0.5
        tail: Tensor = log_ndtr((mean - each.own) / (scale * open_share))
        found.append(-tail)
    return torch.stack(found).mean(0)


class Asker:
    """Asks about members by its orders, and adds rows to the story."""

    def __init__(
        self,
        attacks: Sequence[str],
        net: nn.Module,
        data: Dataset,
        terms: Terms,
        labels: dict[str, Any],  # of the rows
        story: Story,
        orders: Orders,
        kept: Mapping[int, set[int]],  # by round whose updates are to be remembered
        device: torch.device,
    ) -> None:
        self.attacks, self.net, self.terms = attacks, net, terms
        self.labels, self.story, self.orders, self.kept = labels, story, orders, kept
        self.batch, self.train_size, self.device = data.batch, data.train_size, device
        self.past: dict[int, list[Observed]] = {}  # by client, the latest first
        self.leak: float | None = None  # the highest AUC so far

    def looks(self, number: int) -> bool:
        """At attacked rounds, and at those that a later attack will use."""
        return self.orders.attacks(number) or ("lira" in self.attacks and number in self.kept)

    def victims(self, number: int, clients: Sequence[int]) -> Sequence[int]:
        """It only looks."""
        return ()

    def __call__(self, look: Look) -> None:
        """Ask about the chosen clients of a round, and remember what is for later."""
        chosen = self.orders.chosen([seen.client for seen in look.seen if seen.client is not None])
        if self.orders.attacks(look.round) and not look.seen:
            extra = self.labels["extra"] | {"round": look.round, "client": None}
            for attack in self.attacks:
                own = self.labels | {"attack": attack, "adaptive": False, "extra": extra}
                note = f"not attacked: {NOBODY}"
                self.story.rows.append(Row(**own, metric="attacked_clients", value=0, note=note))
        for seen in look.seen:
            asked = self.orders.attacks(look.round) and (seen.client is None or seen.client in chosen)
            if asked or seen.client in self.kept.get(look.round, ()):
                self._look(look, seen, asked)

    def _look(self, look: Look, seen: Seen, asked: bool) -> None:
        members = torch.cat([self.terms.shares[client] for client in seen.clients])
        outside = torch.arange(self.train_size, len(self.batch.labels))
        made = asked_about(members, outside, derive(self.labels["seed"], "membership", *seen.clients))
        if isinstance(made, str):
            self._tell_nothing(look, seen, asked, made)
            return
        batch = self.batch.take(torch.cat([made.known, made.members, made.nonmembers])).to(self.device)
        own = self._probabilities(look, seen, batch)
        if own is None:
            self._tell_nothing(look, seen, asked, "the client's model answers with NaN or infinity")
            return
        if asked and "yeom" in self.attacks:
            self._tell("yeom", look, seen, made, negative_cross_entropy(own, batch.labels), 1)
        if "lira" in self.attacks and seen.client is not None:
            others = [self._probabilities(look, other, batch) for other in look.seen if other is not seen]
            margins = [margin(each, batch.labels) for each in others if each is not None]
            now = Observed(margin(own, batch.labels), _stacked(margins, own))
            rounds = [now, *self.past.get(seen.client, [])][: self.orders.history]
            self.past[seen.client] = rounds
            if asked:
                self._tell("lira", look, seen, made, scores(rounds), len(rounds))

    def _tell_nothing(self, look: Look, seen: Seen, asked: bool, note: str) -> None:
        for attack in self.attacks if asked else ():
            self.story.rows.append(Row(**self._labels(attack, look, seen, 0), metric="auc", value=None, note=note))

    def _probabilities(self, look: Look, seen: Seen, batch: Batch) -> Tensor | None:
        """What a client's model answers; None where that is not finite, as of finite weights that are too large."""
        state = look.sent | sent_model(look, seen, self.terms.local.learning_rate) | seen.buffers
        dtype = next(iter(seen.view.update.values.values())).dtype
        try:
            return logits(self.net, state, batch.inputs.to(dtype)).softmax(1)
        except NotFinite:
            return None

    def _tell(self, attack: str, look: Look, seen: Seen, made: Trial, found: Tensor | None, rounds: int) -> None:
        labels = self._labels(attack, look, seen, rounds) | {"adaptive": False}
        if found is None:
            note = "fewer than two other clients answered, so nobody shows what is likely for an outsider"
            self.story.rows.append(Row(**labels, metric="auc", value=None, note=note))
            return
        sizes = [len(made.known), len(made.members), len(made.nonmembers)]
        known, inside, outside = found.split_with_sizes(sizes)
        values = torch.cat([inside, outside])
        is_member = torch.arange(len(values), device=values.device) < len(inside)
        rng = derive(self.labels["seed"], "bootstrap", attack, look.round, *seen.clients)
        measured = evaluate(Guesses(values, values > known.mean()), is_member, rng)
        measured["advantage"] = mean_advantage(known, inside, outside, rng)
        self.story.rows += [Row(**labels, metric=name, **each._asdict()) for name, each in measured.items()]
        self.leak = max(measured["auc"].value, self.leak or 0.0)

    def _labels(self, attack: str, look: Look, seen: Seen, rounds: int) -> dict[str, Any]:
        size = sum(len(self.terms.shares[client]) for client in seen.clients)
        extra = self.labels["extra"] | {"round": look.round, "client": seen.client, "threat": THREAT, "rows": size}
        extra |= {"known": known_count(size), "history": rounds, "shown": len(seen.clients)}
        return self.labels | {"attack": attack, "adaptive": False, "extra": extra}

    waits = False

    def finish(self) -> None:
        """Nothing was put off."""

    def state(self) -> tuple[Params, Any]:
        """What was remembered."""
        tensors: Params = {}
        for client, past in self.past.items():
            for place, one in enumerate(past):
                tensors |= {f"{client}/{place}/{part}": value for part, value in one._asdict().items()}
        return tensors, {str(client): len(past) for client, past in self.past.items()}

    def load(self, tensors: Params, data: Any) -> None:
        """Go on from what `state` gave."""
        self.past = {
            int(client): [
                Observed(*(tensors[f"{client}/{place}/{part}"] for part in Observed._fields)) for place in range(count)
            ]
            for client, count in data.items()
        }


def sent_model(look: Look, seen: Seen, rate: float) -> Params:
    """The parameters that a client ended at, as the server can know them: what was withheld is as it was sent."""
    sent, update = look.sent, seen.view.update
    if isinstance(update, Gradient):
        return {name: sent[name] - rate * value for name, value in update.values.items()}
    found = {}
    for name, value in update.values.items():
        missing = value == 0 if name not in look.mask else (value == 0) & look.mask[name]
        found[name] = torch.where(missing, sent[name], value)
    return found


def asked_about(rows: Tensor, outside: Tensor, rng: Generator) -> Trial | str:
    """Who is asked about, or why nobody can be."""
    try:
        return trial(rows, outside, rng)
    except WrongInput as error:
        return error.message


def check_membership(attacks: Sequence[str], data: Dataset, terms: Terms) -> None:
    """Refuse, before any work, what cannot be asked."""
    if wrong := [attack for attack in attacks if attack not in ATTACKS]:
        raise unknown("membership", wrong[0], ATTACKS)
    largest, outside = max(terms.shares, key=len), torch.arange(data.train_size, len(data.inputs))
    if isinstance(reason := asked_about(largest, outside, derive(0, "check")), str):
        raise WrongInput("membership", f"no client can be asked about: {reason}")
    if "lira" in attacks and terms.view == "sum":
        raise WrongInput("membership", "lira compares a client with others, and view: sum shows none; take yeom")
    if "lira" in attacks and terms.per_round < FEWEST:
        raise WrongInput("per_round", f"{terms.per_round} is not allowed with lira; give at least {FEWEST}")


def _stacked(values: Sequence[Tensor], like: Tensor) -> Tensor:
    """(M, N), also of none."""
    return torch.stack(list(values)) if values else like.new_zeros(0, len(like), dtype=torch.float64)
