"""The schedule of an attacker inside a federation, and its memory of clients' earlier rounds, saved with the run.

`Memory` keeps a client's last rounds whole, for attacks that join them. `SentMaskMemory` keeps the entries that a
client did not send last, for attacks that follow a client.

A client that withholds a weight and keeps it (pseudo-, priprune) begins its next turn at its own value, not at the
server's. When the client sends the weight again, the difference from the broadcast holds all earlier changes. The
difference is no gradient of this round and, divided by the learning rate, is larger than everything else. An attacker
that saw the client's last update knows these weights: their values were 0 then. Error feedback has the same effect: an
entry of the gradient that was 0 holds the gradients of earlier rounds when it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from secateur import tree
from secateur.errors import WrongInput
from secateur.federated.attacks.observer import ClientView, RoundView
from secateur.federated.sampling import sampler_of
from secateur.federated.spec import FederationSpec
from secateur.interfaces import Gradient, Mask, Params, ServerView, Weights

Who = int | Literal["all"] | tuple[int, ...]  # a number of a round's clients, all of them, or these clients


@dataclass(frozen=True)
class AttackSchedule:
    """The attacked rounds and clients; an attack combines the last `history` rounds of a client."""

    every: int = 1  # rounds
    at: tuple[int, ...] = ()  # these rounds instead
    who: Who = 1
    history: int = 1

    def attacks(self, number: int) -> bool:
        """Return True if the round is attacked."""
        return number in self.at if self.at else number % self.every == 0

    def rounds(self, last: int) -> list[int]:
        """Return the attacked rounds among 1..`last`."""
        return [number for number in range(1, last + 1) if self.attacks(number)]

    def select_clients(self, clients: Sequence[int]) -> list[int]:
        """Return the attacked clients among these, in their order.

        Example:
            >>> [AttackSchedule(who=who).select_clients([7, 3, 5]) for who in (2, (5, 7), "all")]
            [[7, 3], [7, 5], [7, 3, 5]]
        """
        if isinstance(self.who, tuple):
            return [client for client in clients if client in self.who]
        return list(clients) if self.who == "all" else list(clients)[: self.who]

    def plan_memory(
        self, last: int, drawn: Callable[[int], Sequence[int]], back: int | None = None
    ) -> dict[int, set[int]]:
        """Return, by round, the clients whose updates a later attack will use.

        A real attacker would keep every update. Keeping only the updates that are used saves memory and changes no
        result.

        Args:
            last: the last round of the federation.
            drawn: returns the clients that take part in a round.
            back: earlier rounds of a client that an attack uses; None: `history - 1`.
        """
        kept: dict[int, set[int]] = {}
        back = self.history - 1 if back is None else back
        for number in self.rounds(last) if back else ():
            clients = drawn(number)  # all sampled clients: the first may not answer
            missing_rounds = dict.fromkeys(
                self.select_clients(clients) if isinstance(self.who, tuple) else clients, back
            )
            for earlier in range(number - 1, 0, -1):
                if not missing_rounds:
                    break
                for client in set(drawn(earlier)) & missing_rounds.keys():
                    kept.setdefault(earlier, set()).add(client)
                    missing_rounds[client] -= 1
                missing_rounds = {client: rounds for client, rounds in missing_rounds.items() if rounds}
        return kept


def check_orders(orders: AttackSchedule, terms: FederationSpec, seed: int) -> None:
    """Raise WrongInput, before any work, for clients and rounds that do not exist."""
    if wrong := [number for number in orders.at if not 1 <= number <= terms.rounds]:
        raise WrongInput("attack_at", f"round {wrong[0]} is not allowed; there are {terms.rounds} rounds")
    if orders.history > terms.rounds:
        raise WrongInput("attack_history", f"{orders.history} is not allowed; there are {terms.rounds} rounds")
    if terms.view == "sum" and orders.who != 1:
        raise WrongInput("attack_clients", "view: sum shows no single client, only the sum of a round; leave it out")
    if terms.view == "sum" and orders.history > 1:
        raise WrongInput("attack_history", "is of one client, and view: sum shows none; leave it at 1")
    if isinstance(orders.who, int) and orders.who > terms.per_round:
        raise WrongInput("attack_clients", f"{orders.who} is not allowed; {terms.per_round} take part in a round")
    if not isinstance(orders.who, tuple):
        return
    if wrong := [client for client in orders.who if not 0 <= client < len(terms.shares)]:
        raise WrongInput("attack_clients", f"client {wrong[0]} is not allowed; must be in [0, {len(terms.shares) - 1}]")
    sampler = sampler_of(terms, seed)
    if not any(orders.select_clients(sampler.clients(number)) for number in orders.rounds(terms.rounds)):
        present = [n for n in range(1, min(terms.rounds, 1000) + 1) if orders.select_clients(sampler.clients(n))][:5]
        advice = f"they do in {', '.join(map(str, present))}" if present else "raise per_round or rounds"
        raise WrongInput("attack_clients", f"none of them takes part in an attacked round of seed {seed}; {advice}")


class Past(NamedTuple):
    """One earlier round of a client."""

    round: int
    view: ServerView
    rows: Tensor  # evaluator only


class Memory:
    """The last rounds of each client before the attacked round."""

    def __init__(self, depth: int, kept: Mapping[int, set[int]]) -> None:
        self.depth = depth  # rounds of each client
        self.kept = kept  # by round: the clients that are remembered
        self.past: dict[int, list[Past]] = {}  # by client, the latest first

    def recall(self, client: int | None) -> list[Past]:
        """Return a client's remembered rounds, the latest first."""
        return [] if client is None else self.past.get(client, [])

    def add(self, look: RoundView, view: Callable[[ClientView], ServerView] = lambda seen: seen.view) -> None:
        """Remember the updates that a later attack will use, as `view` shows them."""
        for seen in look.seen:
            if seen.client is not None and seen.client in self.kept.get(look.round, ()):
                past = [Past(look.round, view(seen), seen.rows), *self.recall(seen.client)]
                self.past[seen.client] = past[: self.depth]

    def state(self) -> tuple[Params, Any]:
        """Return tensors by client, age, part and name, and by client [round, is a gradient] of each round."""
        parts: dict[str, Params] = {}
        for client, past in self.past.items():
            for age, one in enumerate(past):
                view = {"sent": one.view.sent, "update": one.view.update.values, "rows": {"": one.rows}}
                view |= {"squares": one.view.squares or {}, "last": one.view.last or {}}
                parts[f"{client}.{age}"] = tree.nest(view)
        kinds = {
            str(client): [[one.round, isinstance(one.view.update, Gradient)] for one in past]
            for client, past in self.past.items()
        }
        return tree.nest(parts), kinds

    def load(self, tensors: Params, data: Any) -> None:
        """Restore the result of `state`."""
        self.past = {}
        for client, rounds in data.items():
            for age, (number, gradient) in enumerate(rounds):
                parts = tree.part(tensors, f"{client}.{age}")
                update = (Gradient if gradient else Weights)(tree.part(parts, "update"))
                last, squares = (tree.part(parts, name) or None for name in ("last", "squares"))
                view = ServerView(tree.part(parts, "sent"), update, last, squares)
                past = Past(number, view, tree.part(parts, "rows")[""])
                self.past.setdefault(int(client), []).append(past)


class SentMaskMemory:
    """The entries of each client that it did not send in its last update."""

    def __init__(self, kept: Mapping[int, set[int]], feeds_back: bool = False) -> None:
        self.kept = kept  # by round: the clients that a later attack follows
        self.feeds_back = feeds_back  # True: clients send gradients, and add what they do not send to later ones
        self.lacking: dict[int, Mask] = {}  # by client: True where the last update was 0

    def add(self, look: RoundView) -> None:
        """Remember the zeros that a later attack will use."""
        for seen in look.seen:
            if seen.client is not None and seen.client in self.kept.get(look.round, ()):
                self.lacking[seen.client] = self._list_unsent(seen.view)

    def _list_unsent(self, view: ServerView) -> Mask:
        """Return True where an update is 0; gradients of several steps became weights, which then stay as sent."""
        unmoved = self.feeds_back and isinstance(view.update, Weights)
        return {name: value == (view.sent[name] if unmoved else 0) for name, value in view.update.values.items()}

    def knows(self, seen: ClientView) -> bool:
        """Return True if the client's last update was seen."""
        return seen.client in self.lacking

    def view(self, seen: ClientView) -> ServerView:
        """Return the update with the entries that were not 0 the last time."""
        late = {} if seen.client is None else self.lacking.get(seen.client, {})
        if not late or not (self.feeds_back or isinstance(seen.view.update, Weights)):
            return seen.view
        return replace(seen.view, last={name: ~zeros for name, zeros in late.items()})

    def state(self) -> Params:
        """Return masks by client and name."""
        return tree.nest({"lacking": tree.nest(self.lacking)})

    def load(self, tensors: Params) -> None:
        """Restore the result of `state`; ignore other tensors."""
        self.lacking = {int(client): mask for client, mask in tree.parts(tree.part(tensors, "lacking")).items()}


def follows(attack: Any) -> bool:
    """Return True if an attack takes only the weights that a client sent in its last turn too."""
    return bool(getattr(attack, "follows", False))


def count_rounds(attack: Any, orders: AttackSchedule) -> int:
    """Return the number of a client's rounds that an attack joins: its own setting, or that of all attacks."""
    rounds: int = getattr(attack, "rounds", 1)
    return rounds if rounds > 1 else orders.history


def turns_back(terms: FederationSpec) -> int:
    """Return the number of a client's earlier turns to watch: one, or all if the last may not have arrived."""
    return terms.rounds if terms.faults.any else 1
