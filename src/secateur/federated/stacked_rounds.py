"""Stacked rounds: all clients of a round as one function, from the broadcast to the sums of the uploads.

On a GPU the function is one CUDA graph. A round is then some copies to the device and one replay: nothing runs client
by client, and the host neither waits nor launches. Rounds in which clients choose their own masks run stacked too, but
uncaptured. They are few, and their rule may depend on the round.

`ClientStateBank` holds the states of all clients in fixed memory, so that a round reads and writes them at once.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, vmap
from torch.utils._pytree import tree_map

from secateur import tree
from secateur.errors import WrongInput
from secateur.federated.client_training import Choose, ClientInputs, Noise
from secateur.federated.client_turn import ClientTurn, ClientUpdate
from secateur.federated.faults import Fault
from secateur.federated.sampling import SampledClients
from secateur.federated.server import RoundSums, Server
from secateur.federated.traffic import check_stacked
from secateur.gpu.client_ops import put_rows, rows_at
from secateur.gpu.graphs import Captured
from secateur.interfaces import Params
from secateur.seeding import derive, derive_on

log = logging.getLogger(__name__)
LIGHT = 2**20  # bytes of a state that is written faster than its client trains
MANY = 2**26  # bytes of all states: light ones beyond this go to disk, where no checkpoint copies them


class RoundInputs(NamedTuple):
    """The inputs of a round; every tensor has the clients first.

    A graph has fixed shapes, so clients that do not answer train too, and their updates are not counted. A client with
    the fault "nan" counts as one that sent NaN.
    """

    rows: Tensor  # (clients, steps, B)
    table: Tensor  # (clients, 4), one copy to a GPU: the slot of the state, examples, answers (0/1), fault "nan" (0/1)
    noise: Noise
    chance: Params
    state: Params  # of the clients, where the host holds all states; else empty


class RoundOutputs(NamedTuple):
    """The outputs of a round; on a GPU the next round overwrites them."""

    update: ClientUpdate  # of all clients, stacked; before any fault
    alive: Tensor  # (clients,) True for clients that answer with finite numbers
    sizes: Tensor | None  # (clients,) bytes of the values sent; None: as in the measured update
    gathered: RoundSums

    def lane(self, client: int) -> ClientUpdate:
        """Return one client's update, as views."""
        parts = [part and {name: value[client] for name, value in part.items()} for part in self.update[:-1]]
        return ClientUpdate(*parts)  # type: ignore[arg-type]


class StackedRounds:
    """The rounds of a federation whose clients are stacked."""

    def __init__(self, server: Server, turns: ClientTurn, homes: ClientStateBank, seed: int) -> None:
        self.server, self.turns, self.homes, self.seed = server, turns, homes, seed
        self.device = turns.data.inputs.device
        self._usual = Captured(self._round, self.device) if self.device.type == "cuda" else self._round

    def __call__(
        self, number: int, drawn: SampledClients, answered: Sequence[bool], faults: dict[int, Fault]
    ) -> RoundOutputs:
        """Run one round after the broadcast, and keep the clients' states; the caller makes the server's step."""
        round_inputs, choose = self._inputs(number, drawn, answered, faults), self.turns.choice_of_masks(number)
        result = self._usual(round_inputs) if choose is None else self._round(round_inputs, number, choose)
        if self.homes.on_host:
            slots = torch.tensor(self.homes.assign_slots(drawn.clients, answered))
            self.homes.keep(slots, tree.to(result.update.state, "cpu"), result.alive.cpu())
        return result

    def _inputs(
        self, number: int, drawn: SampledClients, answered: Sequence[bool], faults: dict[int, Fault]
    ) -> RoundInputs:
        rows = torch.stack([steps if isinstance(steps, Tensor) else torch.stack([*steps]) for steps in drawn.rows])
        slots, shares = self.homes.assign_slots(drawn.clients, answered), self.turns.terms.shares
        sizes, faulty = zip(*((len(shares[c]), faults.get(c) == "nan") for c in drawn.clients), strict=True)
        table = torch.tensor(list(zip(slots, sizes, answered, faulty, strict=True)))
        rows, table = (tensor.to(self.device, non_blocking=True) for tensor in (rows, table))  # the host does not wait
        state = tree.to(self.homes.read_slots(torch.tensor(slots)), self.device) if self.homes.on_host else {}
        return RoundInputs(rows, table, *self._draws(number, drawn), state)

    def _draws(self, number: int, drawn: SampledClients) -> tuple[Noise, Params]:
        """Return all random draws of a round: on a GPU for all clients at once, on a CPU client by client."""
        if self.device.type == "cuda":
            return self.draws_at_once(number, drawn)
        draws = []
        for client, rows in zip(drawn.clients, drawn.rows, strict=True):
            generators = (derive(self.seed, purpose, number, client) for purpose in ("noise", "defense"))
            draws.append(self.turns.draws(rows, *generators))
        all_draws: tuple[Noise, Params] = tree_map(lambda *lanes: torch.stack(lanes), *draws)
        return all_draws

    def draws_at_once(self, number: int, drawn: SampledClients) -> tuple[Noise, Params]:
        """Return the draws of all clients by one launch a tensor, from one generator of the seed and the round."""
        rng = derive_on(self.device, self.seed, "noise", number)
        draw = vmap(lambda _: self.turns.draws(drawn.rows[0], rng, rng), randomness="different")
        all_draws: tuple[Noise, Params] = draw(torch.empty(len(drawn.clients), device=self.device))
        return all_draws

    def _round(self, round_inputs: RoundInputs, number: int = 0, choose: Choose | None = None) -> RoundOutputs:
        slots, sizes, answered, faulty = round_inputs.table.unbind(1)
        state = round_inputs.state if self.homes.on_host else self.homes.read_slots(slots)
        update = self.turns.run_many(
            ClientInputs(round_inputs.rows, state, round_inputs.noise, round_inputs.chance), number, choose
        )
        squares = bool(self.server.squares)
        (finite, sent_bytes), gathered = check_stacked(update, squares), self.server.begin_sums(choose is not None)
        alive = answered.bool() & ~faulty.bool() & finite
        self.server.add_stacked(gathered, update, sizes.to(next(iter(update.values.values())).dtype), alive)
        if not self.homes.on_host:
            self.homes.keep(slots, update.state, alive)
        varies = self.turns.varies or squares or choose is not None
        return RoundOutputs(update, alive, sent_bytes if varies else None, gathered)


class ClientStateBank(MutableMapping[int, Params]):
    """The states of clients, by client: one tensor a name, (slots + 1, ...), at a fixed address.

    A client gets a slot with its first answer; until then its state is `fresh`. The last slot takes the states that
    must not be kept: those of clients that do not answer, or whose update is not finite. `on_host` holds the states in
    host memory, and a round copies those of its clients to the device and back.
    """

    def __init__(self, fresh: Params, slots: int, on_host: bool = False) -> None:
        self.fresh, self.spare, self.on_host = fresh, slots, on_host
        device = "cpu" if on_host else None
        self.held = {name: value.new_zeros((slots + 1, *value.shape), device=device) for name, value in fresh.items()}
        self.slots: dict[int, int] = {}

    def assign_slots(self, clients: Sequence[int], answered: Sequence[bool]) -> list[int]:
        """Return the slots of a round's clients; new clients start at `fresh`."""
        if not self.fresh:
            return [self.spare] * len(clients)
        for client in (client for client, counts in zip(clients, answered, strict=True) if counts):
            if client not in self.slots:
                self[client] = self.fresh
        return [self.slots[client] if counts else self.spare for client, counts in zip(clients, answered, strict=True)]

    def read_slots(self, slots: Tensor) -> Params:
        """Return the states of these slots, stacked."""
        slots = slots.contiguous()
        return {name: rows_at(value, slots) for name, value in self.held.items()}

    @torch.no_grad()
    def keep(self, slots: Tensor, state: Params, alive: Tensor) -> None:
        """Keep the stacked states of the clients that are `alive` (clients,)."""
        kept = torch.where(alive, slots, self.spare)
        for name, value in self.held.items():
            put_rows(value, kept, state[name])

    def move_to_host(self) -> None:
        """Hold the states in host memory from now on."""
        self.held, self.on_host = tree.to(self.held, "cpu"), True

    def __getitem__(self, client: int) -> Params:
        slot = self.slots[client]
        return {name: value[slot] for name, value in self.held.items()}

    def __setitem__(self, client: int, state: Params) -> None:
        slot = self.slots.setdefault(client, len(self.slots))
        for name, value in self.held.items():
            value[slot].copy_(state[name])

    def __delitem__(self, client: int) -> None:
        raise TypeError("a client's state is never taken away alone")

    def clear(self) -> None:
        """Forget all clients."""
        self.slots.clear()

    def __iter__(self) -> Iterator[int]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)


class Room(NamedTuple):
    """The memory that the states of all clients need, and whether the host or a file holds them."""

    clients: int
    size: int  # bytes
    device: torch.device  # of the federation
    on_host: bool
    on_disk: bool = False

    def __str__(self) -> str:
        memory = "disk" if self.on_disk else "host memory" if self.on_host else f"memory of {self.device.type}"
        return f"the states of {self.clients} clients take {self.size / 1e9:.2f} GB of {memory}"

    def relieve(self) -> Room:
        """Return the room after a GPU ran out of memory: on the host, if the states take at most half of its memory."""
        moves = self.device.type == "cuda" and 0 < self.size <= _host_bytes() / 2
        return self._replace(on_host=self.on_host or moves)


def room_for(fresh: Params, clients: int, device: torch.device, warn: bool = True) -> Room:
    """Return where the states of all clients can be held; refuse states that fit nowhere, `warn` where they are tight.

    A GPU holds them if they take at most half of its free memory, else the host does. A file holds those that take more
    than the host's memory, and many light ones. Without the check a run would fail after hours.
    """
    single = sum(value.nbytes for value in fresh.values())
    size = clients * single
    room = Room(clients, size, device, device.type == "cuda" and size > _free_bytes(device) / 2)
    if device.type == "cuda" and not room.on_host:
        return room
    memory = _host_bytes()
    if size > memory or (size > MANY and single <= LIGHT and not room.on_host):
        room = room._replace(on_host=False, on_disk=True)
        if size > (free := shutil.disk_usage(".").free):
            advice = "use fewer clients, fewer rounds, a smaller model or another defense"
            raise WrongInput("clients", f"{room}; {free / 1e9:.2f} GB are free; {advice}")
    elif size > memory / 2 and warn:
        log.warning("The federation goes on, but memory is tight: %s; this machine has %.2f GB.", room, memory / 1e9)
    return room


def _host_bytes() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that neither this process nor another one uses."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
