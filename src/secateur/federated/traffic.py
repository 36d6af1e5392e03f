"""What a federation says of itself: who was lost, and what was sent; read from the device only when somebody asks.

Bytes up and down, per round and client, in the wire format.

Encoding every message would take longer than training. So one update of each kind (under the server's mask, or under a
mask of the client's own) is encoded when the first one comes, and again in evaluation rounds where something changed;
of any other the bytes of its values are counted from its own entries, and its tables and positions are taken to cost
what they did then. A mask travels as bits, to every client once after each change; where both sides know a mask,
positions are sent inside it only.

An update as the messages of the wire format that carry it: what a client sends, and what is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from secateur.federated.client_turn import Update
from secateur.federated.faults import WORDS, Fault
from secateur.gpu.client_ops import looked
from secateur.interfaces import Mask, Params
from secateur.wire import encode, encode_mask

if TYPE_CHECKING:
    from secateur.federated.attacks.observer import Arrived


def messages(update: Update, mask: Mask, squares: bool) -> dict[str, bytes]:
    """An update as bytes; which entries were sent only where the server counts them and could not know."""
    inside = mask if mask and update.own_mask is None else None
    found = {"values": encode(update.values, inside=inside)}
    if update.buffers:
        found["buffers"] = encode(update.buffers)
    if update.own_mask is not None:
        found["mask"] = encode_mask(update.own_mask)
    if update.sent is not None:
        found["sent"] = encode_mask(update.sent)
    if squares:
        found["squares"] = encode(squares_of(update))
    return found


def squares_of(update: Update) -> Params:
    """PruneFL's: of every entry of the dense gradient."""
    return {name: value.square() for name, value in update.summed.items()}


class Looked(NamedTuple):
    """What can be seen of updates in passing; it stays on the device, which is not asked in the middle of a round."""

    finite: Tensor  # (lanes,) whether all their numbers are: the squares too, which are of what is not sent as well
    size: Tensor  # (lanes,) how many bytes of their messages are values: those of the entries that are not 0


def look(update: Update, squares: bool) -> Looked:
    """At stacked updates, once over all that leaves the clients."""
    parts = [(value, False) for part in (update.values, update.buffers) for value in part.values()]
    parts += [(value, True) for value in update.summed.values()] if squares else []
    return Looked(*looked(parts))


def values_of(update: Update, squares: bool) -> Tensor:
    """() the bytes of one client's."""
    parts = [update.values, update.buffers, *([squares_of(update)] if squares else [])]
    return torch.stack([torch.count_nonzero(v) * v.element_size() for part in parts for v in part.values()]).sum()


def value_bytes(tensors: Params) -> int:
    """The bytes of the entries that are not 0."""
    counts = [torch.count_nonzero(value) * value.element_size() for value in tensors.values()]
    return int(torch.stack(counts).sum())


class Traffic:
    """Counts what goes over the wire."""

    def __init__(self, clients: int, squares: bool) -> None:
        self.up, self.down = [0] * clients, [0] * clients  # bytes since the beginning
        self.known = [-1] * clients  # the version of the mask that a client has
        self.version = 0  # of the mask
        self.squares = squares  # whether squared gradients go up too
        self.model_bytes = self.mask_bytes = 0
        self.sizes: dict[str, tuple[int, int]] = {}  # of an update of each kind: all but its values, and its values
        self.measured: list[str] = []  # kinds whose sizes are of the mask as it is
        self._unread: list[tuple[str, list[int], list[Tensor] | None]] = []

    def changed(self) -> None:
        """The mask is another one."""
        self.version += 1
        self.measured = []

    def due(self, own_masks: bool, evaluating: bool) -> bool:
        """Whether a round's messages are to be measured."""
        kind = _kind(own_masks)
        return kind not in self.sizes or (evaluating and kind not in self.measured)

    def broadcast(self, clients: Sequence[int]) -> None:
        """The model went to these clients, with the mask where they have an older one."""
        for client in clients:
            outdated = self.known[client] != self.version
            self.down[client] += self.model_bytes + (self.mask_bytes if outdated else 0)
            self.known[client] = self.version

    def measure_model(self, model: Params, mask: Mask, dense: bool) -> None:
        """Encode the model that is broadcast, and the mask."""
        self.mask_bytes = len(encode_mask(mask)) if mask else 0
        self.model_bytes = len(encode(model, inside=None if dense or not mask else mask))

    def measure_update(self, update: Update, mask: Mask) -> None:
        """Encode one update, as its client does."""
        self.read()  # what came before was of the sizes that held then
        kind, values = _kind(update.own_mask is not None), int(values_of(update, self.squares))
        whole = sum(map(len, messages(update, mask, self.squares).values()))
        self.sizes[kind] = whole - values, values
        self.measured = [*self.measured, kind]

    def upload(self, clients: list[int], values: list[Tensor] | None, own_masks: bool) -> None:
        """Updates of these clients came in; `values` () each are their values' bytes, None: all like the measured."""
        self._unread.append((_kind(own_masks), clients, values))

    def read(self) -> None:
        """Take over what the device counted since it was asked last."""
        counted = [value for _, _, values in self._unread if values is not None for value in values]
        numbers = iter(torch.stack(counted).tolist() if counted else [])
        for kind, clients, values in self._unread:
            for client in clients:
                rest, usual = self.sizes[kind]
                self.up[client] += rest + (usual if values is None else next(numbers))
        self._unread.clear()

    def state(self) -> dict[str, Any]:
        """All numbers, for a checkpoint."""
        self.read()
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        vars(self).update(state)


def _kind(own_masks: bool) -> str:
    return "own masks" if own_masks else "the server's mask"


@dataclass(frozen=True)
class Measure:
    """One number that a federation says of itself."""

    metric: str
    value: float
    round: int
    client: int | None = None
    note: str | None = None


class Ledger:
    """Lost clients since the last evaluation, and all bytes."""

    def __init__(self, clients: int, squares: bool) -> None:
        self.traffic = Traffic(clients, squares)
        self.turns = [0] * clients  # updates that each may have sent
        self._lost: dict[int, dict[int, Fault]] = {}  # by round
        self._unread: list[tuple[int, int, Tensor]] = []  # round, client, and () whether its update was finite

    def lose(self, number: int, client: int, fault: Fault) -> None:
        """A round goes on without a client."""
        self._lost.setdefault(number, {})[client] = fault

    def trained(self, clients: Iterable[int]) -> None:
        """These made an update in a round, whatever became of it."""
        for client in clients:
            self.turns[client] += 1

    def arrive(self, number: int, arrived: Sequence[Arrived], own_masks: bool) -> None:
        """A round's updates."""
        clients = [one.client for one in arrived]
        sizes = [one.size for one in arrived if one.size is not None]
        self.traffic.upload(clients, sizes or None, own_masks)
        self._unread += [(number, one.client, one.alive) for one in arrived if one.alive is not None]

    def read(self) -> None:
        """Take over what the device knows of finished rounds."""
        self.traffic.read()
        flags = torch.stack([alive for *_, alive in self._unread]).tolist() if self._unread else []
        for (number, client, _), fine in zip(self._unread, flags, strict=True):
            if not fine:
                self.lose(number, client, "nan")
        self._unread.clear()

    def measures(self, number: int, judged: Mapping[str, float], last: bool) -> list[Measure]:
        """What an evaluation says; the last one also of every client."""
        self.read()
        found = [Measure(name, value, number) for name, value in judged.items()]
        for at, clients in sorted(self._lost.items()):
            told = "; ".join(f"client {client} {WORDS[fault]}" for client, fault in clients.items())
            found.append(Measure("lost_clients", len(clients), at, note=f"the round went on without them: {told}"))
        self._lost.clear()
        for name, each in (("bytes_up", self.traffic.up), ("bytes_down", self.traffic.down)):
            found.append(Measure(name, sum(each), number, note="of all clients since the first round"))
            found += [Measure(name, value, number, client) for client, value in enumerate(each)] if last else []
        return found

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        self.read()
        lost = {str(number): {str(c): fault for c, fault in who.items()} for number, who in self._lost.items()}
        return {"lost": lost, "traffic": self.traffic.state(), "turns": self.turns}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._lost = {int(n): {int(c): fault for c, fault in who.items()} for n, who in state["lost"].items()}
        self.traffic.load(state["traffic"])
        self.turns = list(state["turns"])
