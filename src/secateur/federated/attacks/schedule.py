"""The schedule of an attacker inside a federation: attacked rounds, attacked clients, and remembered updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from secateur.errors import WrongInput
from secateur.federated.sampling import sampler_of
from secateur.federated.spec import FederationSpec

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

    def chosen(self, clients: Sequence[int]) -> list[int]:
        """Return the attacked clients among these, in their order.

        Example:
            >>> Orders(who=2).chosen([7, 3, 5]), Orders(who=(5, 7)).chosen([7, 3, 5]), Orders(who="all").chosen([7, 3])
            ([7, 3], [7, 5], [7, 3])
        """
        if isinstance(self.who, tuple):
            return [client for client in clients if client in self.who]
        return list(clients) if self.who == "all" else list(clients)[: self.who]

    def remembered(
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
            missing_rounds = dict.fromkeys(self.chosen(clients) if isinstance(self.who, tuple) else clients, back)
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
        raise WrongInput("attack_clients", f"client {wrong[0]} is not allowed; give 0 to {len(terms.shares) - 1}")
    sampler = sampler_of(terms, seed)
    if not any(orders.chosen(sampler.clients(number)) for number in orders.rounds(terms.rounds)):
        present = [n for n in range(1, min(terms.rounds, 1000) + 1) if orders.chosen(sampler.clients(n))][:5]
        advice = f"they do in {', '.join(map(str, present))}" if present else "raise per_round or rounds"
        raise WrongInput("attack_clients", f"none of them takes part in an attacked round of seed {seed}; {advice}")
