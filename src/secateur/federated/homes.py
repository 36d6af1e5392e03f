"""What clients keep at home, where a round of many reads and writes it in one go."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, MutableMapping, Sequence

import torch
from torch import Tensor

from secateur.errors import WrongInput
from secateur.interfaces import Params
from secateur.lanes import put_rows, rows_at

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
