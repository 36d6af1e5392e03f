"""A round of many clients as one function: from what they receive to the sums of what they send, in one CUDA graph.

On a GPU a round then is what is copied in and one replay: nothing is done client by client, and the host neither waits
nor launches. Rounds in which clients choose masks of their own run stacked too, and uncaptured: they are few, and their
rule may depend on the round.

What clients keep at home, where a round of many reads and writes it in one go.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor, vmap
from torch.utils._pytree import tree_leaves, tree_map

from secateur.errors import WrongInput
from secateur.federated.client_training import Choose, Given, Noise
from secateur.federated.client_turn import Turns, Update
from secateur.federated.faults import Fault
from secateur.federated.sampling import Drawn
from secateur.federated.server import Gathered, Server
from secateur.federated.traffic import look
from secateur.gpu.client_ops import put_rows, rows_at
from secateur.gpu.graphs import Captured
from secateur.interfaces import Params
from secateur.seeding import derive

log = logging.getLogger(__name__)


class Homes(MutableMapping[int, Params]):
    """The states of clients, by client: one tensor a name, (places + 1, ...), that stays where it is.

    A client has a place once it has been heard, and its state there until then is `fresh`. The last place is where
    goes what must not be kept, of clients that are not heard or went astray.
    """

    def __init__(self, fresh: Params, places: int) -> None:
        self.fresh, self.spare = fresh, places
        self.held = {name: value.new_zeros((places + 1, *value.shape)) for name, value in fresh.items()}
        self.places: dict[int, int] = {}

    def settled(self, clients: Sequence[int], heard: Sequence[bool]) -> list[int]:
        """The places of a round's clients, new ones made ready."""
        if not self.fresh:
            return [self.spare] * len(clients)
        for client in (client for client, there in zip(clients, heard, strict=True) if there):
            if client not in self.places:
                self[client] = self.fresh
        return [self.places[client] if there else self.spare for client, there in zip(clients, heard, strict=True)]

    def at(self, places: Tensor) -> Params:
        """The states of these places, stacked."""
        places = places.contiguous()
        return {name: rows_at(value, places) for name, value in self.held.items()}

    @torch.no_grad()
    def keep(self, places: Tensor, state: Params, alive: Tensor) -> None:
        """Take over the stacked states of those that are `alive` (clients,)."""
        kept = torch.where(alive, places, self.spare)
        for name, value in self.held.items():
            put_rows(value, kept, state[name])

    def __getitem__(self, client: int) -> Params:
        place = self.places[client]
        return {name: value[place] for name, value in self.held.items()}

    def __setitem__(self, client: int, state: Params) -> None:
        place = self.places.setdefault(client, len(self.places))
        for name, value in self.held.items():
            value[place].copy_(state[name])

    def __delitem__(self, client: int) -> None:
        raise TypeError("a client's state is never taken away alone")

    def clear(self) -> None:
        """Nobody has been heard."""
        self.places.clear()

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def check_room(fresh: Params, clients: int, device: torch.device) -> None:
    """Refuse states that cannot all be in memory, which a run would find out after hours; warn where it is tight."""
    needed, there = clients * sum(value.nbytes for value in fresh.values()), _memory(device)
    told = f"the states of {clients} clients take {needed / 1e9:.1f} GB, and this machine has {there / 1e9:.1f}"
    if needed > there:
        raise WrongInput("clients", f"{told}; take fewer clients, fewer rounds, a smaller model or another defense")
    if needed > there / 2:
        log.warning("%s", told)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Stacked(NamedTuple):
    """What a round is given; every tensor has the clients first.

    In a graph of fixed shapes the silent train too, and are not heard. Who goes astray counts as one that sent NaN.
    """

    rows: Tensor  # (clients, steps, B)
    told: Tensor  # (clients, 4), as one copy to a GPU: place of its state, examples it has, whether heard, and astray
    noise: Noise
    chance: Params

    def tensors(self) -> list[Tensor]:
        """In a fixed order."""
        return tree_leaves(self)

    def clone(self) -> Stacked:
        """The same in memory of its own."""
        copy: Stacked = tree_map(torch.clone, self)
        return copy


class Made(NamedTuple):
    """What it comes to; on a GPU overwritten by the next round."""

    update: Update  # of all, stacked; of who goes astray what it had been
    alive: Tensor  # (clients,) who is heard, and finite
    sizes: Tensor | None  # (clients,) bytes of the values that are sent; None: as of any other
    gathered: Gathered

    def lane(self, client: int) -> Update:
        """One client's update: views."""
        parts = [part and {name: value[client] for name, value in part.items()} for part in self.update[:-1]]
        return Update(*parts)  # type: ignore[arg-type]


class Together:
    """The rounds of a federation whose clients are stacked."""

    def __init__(self, server: Server, turns: Turns, homes: Homes, seed: int) -> None:
        self.server, self.turns, self.homes, self.seed = server, turns, homes, seed
        self.device = turns.data.inputs.device
        self._usual = Captured(self._round, self.device) if self.device.type == "cuda" else self._round

    def __call__(self, number: int, drawn: Drawn, heard: Sequence[bool], faults: dict[int, Fault]) -> Made:
        """One round, after the broadcast; the states are kept, the server's step is the caller's."""
        given, choose = self._given(number, drawn, heard, faults), self.turns.choosing(number)
        return self._usual(given) if choose is None else self._round(given, number, choose)

    def _round(self, given: Stacked, number: int = 0, choose: Choose | None = None) -> Made:
        places, sizes, heard, astray = given.told.unbind(1)
        state = self.homes.at(places)
        update = self.turns.many(Given(given.rows, state, given.noise, given.chance), number, choose)
        squares = bool(self.server.squares)
        seen, gathered = look(update, squares), self.server.gathering(own_masks=choose is not None)
        alive = heard.bool() & ~astray.bool() & seen.finite
        self.server.add_stacked(gathered, update, sizes.to(next(iter(update.values.values())).dtype), alive)
        self.homes.keep(places, update.state, alive)
        varies = self.turns.varies or squares or choose is not None
        return Made(update, alive, seen.size if varies else None, gathered)

    def _given(self, number: int, drawn: Drawn, heard: Sequence[bool], faults: dict[int, Fault]) -> Stacked:
        rows = torch.stack([one if isinstance(one, Tensor) else torch.stack([*one]) for one in drawn.rows])
        places, shares = self.homes.settled(drawn.clients, heard), self.turns.terms.shares
        sizes, astray = zip(*((len(shares[c]), faults.get(c) == "nan") for c in drawn.clients), strict=True)
        told = torch.tensor(list(zip(places, sizes, heard, astray, strict=True)))
        rows, told = (each.to(self.device, non_blocking=True) for each in (rows, told))  # else the host would wait
        return Stacked(rows, told, *self._draws(number, drawn))

    def _draws(self, number: int, drawn: Drawn) -> tuple[Noise, Params]:
        """All chance of a round: on a GPU drawn for all clients at once, on a CPU as each draws alone."""
        if self.device.type == "cuda":
            return self.draws_at_once(number, drawn)
        found = []
        for client, rows in zip(drawn.clients, drawn.rows, strict=True):
            own = (derive(self.seed, what, number, client) for what in ("noise", "defense"))
            found.append(self.turns.draws(rows, *own))
        stacked: tuple[Noise, Params] = tree_map(lambda *lanes: torch.stack(lanes), *found)
        return stacked

    def draws_at_once(self, number: int, drawn: Drawn) -> tuple[Noise, Params]:
        """A launch for each tensor, from a generator that the seed and the round make."""
        rng = Generator(self.device).manual_seed(derive(self.seed, "noise", number).initial_seed())
        each = vmap(lambda _: self.turns.draws(drawn.rows[0], rng, rng), randomness="different")
        drawn_at_once: tuple[Noise, Params] = each(torch.empty(len(drawn.clients), device=self.device))
        return drawn_at_once
