"""Ledger of a federation: bytes up and down by client in the wire format, lost clients, and spent privacy.

The device is read only at an evaluation or a checkpoint.

Encoding every message would take longer than training, so sizes are estimated. One update of each kind (under the
server's mask, or under the client's own) is encoded when the first arrives. It is encoded again after each change of
the mask, and in evaluation rounds where something else changed. Of any other update the bytes of its values are
counted; its tables and positions are taken to cost as much as the encoded one's. A mask travels as bits, to every
client once after each change. Where both sides know a mask, positions are sent inside the mask only.

The privacy budget of a client under local differential privacy is the epsilon of all its updates (`measure_epsilon`).
It is for adding or removing one of the client's examples, against a server that sees every update.
Every update counts in full: a client takes its rows in passes, or the same rows again, so there is no amplification by
sampling. If a client has fewer rows than a batch, an example can be in a batch several times. It counts that many times
in the sum. Under distributed-dp it is for adding or removing one client, against a server that sees sums (`view`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from secateur import tree
from secateur.data.partition import count_rows
from secateur.defenses.distributed_dp import DistributedPrivacy
from secateur.defenses.dp import LOOKS, DifferentialPrivacy, PrivateTurn
from secateur.defenses.dp_common import Guarantee
from secateur.defenses.uploads import inner_of
from secateur.federated.client_turn import ClientUpdate
from secateur.federated.faults import WORDS, Fault
from secateur.federated.spec import FederationSpec
from secateur.gpu.client_ops import check_finite
from secateur.interfaces import Mask, Params
from secateur.wire import encode, encode_mask

if TYPE_CHECKING:
    from secateur.federated.attacks.observer import Arrived


@dataclass(frozen=True)
class Measure:
    """One number that a federation reports."""

    metric: str
    value: float
    round: int
    client: int | None = None
    note: str | None = None


@dataclass(frozen=True)
class Round:
    """A finished round; clients lost in rounds without an evaluation are listed in the next round with one."""

    number: int
    measures: list[Measure] = field(default_factory=list)
    parts: Sequence[Round] = ()  # one a federation, where several run together


class Ledger:
    """Lost clients since the last evaluation, and all bytes; only clients that were sampled take memory."""

    def __init__(self, squares: bool) -> None:
        self.traffic = Traffic(squares)
        self.turns: Counter[int] = Counter()  # by client: updates that it may have sent
        self.least: int | None = None  # updates in the smallest sum so far
        self._lost: dict[int, dict[int, Fault]] = {}  # by round
        self._unread: list[tuple[int, int, Tensor]] = []  # round, client, and () True if its update was finite

    def lose(self, number: int, client: int, fault: Fault) -> None:
        """Note that a round goes on without a client."""
        self._lost.setdefault(number, {})[client] = fault

    def record_trained(self, clients: Iterable[int]) -> None:
        """Note that these clients made an update in a round, arrived or not."""
        self.turns.update(clients)

    def arrive(self, number: int, arrived: Sequence[Arrived], own_masks: bool) -> None:
        """Note a round's updates."""
        clients = [one.client for one in arrived]
        if clients:
            self.least = min(len(clients), self.least or len(clients))
        sizes = [one.size for one in arrived if one.size is not None]
        self.traffic.upload(clients, sizes or None, own_masks)
        self._unread += [(number, one.client, one.alive) for one in arrived if one.alive is not None]

    def read(self) -> None:
        """Read the device's flags and counts of finished rounds."""
        self.traffic.read()
        flags = torch.stack([alive for *_, alive in self._unread]).tolist() if self._unread else []
        for (number, client, _), fine in zip(self._unread, flags, strict=True):
            if not fine:
                self.lose(number, client, "nan")
        self._unread.clear()

    def measures(self, number: int, judged: Mapping[str, float], last: bool) -> list[Measure]:
        """Return the measures of an evaluation; those of the last one include the bytes of every client."""
        self.read()
        reported = [Measure(name, value, number) for name, value in judged.items()]
        for at, clients in sorted(self._lost.items()):
            lost = "; ".join(f"client {client} {WORDS[fault]}" for client, fault in clients.items())
            reported.append(Measure("lost_clients", len(clients), at, note=f"the round went on without them: {lost}"))
        self._lost.clear()
        sampled = sorted(self.traffic.down) if last else []
        for name, by_client in (("bytes_up", self.traffic.up), ("bytes_down", self.traffic.down)):
            reported.append(Measure(name, by_client.total(), number, note="of all clients since the first round"))
            reported += [Measure(name, by_client[client], number, client) for client in sampled]
        return reported

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        self.read()
        lost = {str(number): {str(c): fault for c, fault in clients.items()} for number, clients in self._lost.items()}
        return {"lost": lost, "traffic": self.traffic.state(), "turns": list(self.turns.items()), "least": self.least}

    def load(self, state: dict[str, Any]) -> None:
        """Resume from the output of `state`."""
        self._lost = {int(n): {int(c): fault for c, fault in clients.items()} for n, clients in state["lost"].items()}
        self.traffic.load(state["traffic"])
        self.turns, self.least = Counter(dict(state["turns"])), state["least"]


class Traffic:
    """Counts of the bytes on the wire."""

    def __init__(self, squares: bool) -> None:
        self.up: Counter[int] = Counter()  # by client: bytes since the first round
        self.down: Counter[int] = Counter()
        self.known: dict[int, int] = {}  # by client: the version of its mask
        self.version = 0  # of the mask
        self.squares = squares  # True: squared gradients go up too
        self.model_bytes = self.mask_bytes = 0
        self.sizes: dict[str, tuple[int, int]] = {}  # by kind: bytes of an update without its values, and of its values
        self.measured: list[str] = []  # kinds measured under the present mask
        self.versions: dict[str, int] = {}  # by kind: the version of the mask under which it was measured
        self.encoded: dict[str, int] = {}  # by kind: bytes of a sub-model's message without its values
        self._unread: list[tuple[str, list[int], list[Tensor] | None]] = []

    def note_change(self) -> None:
        """Note that the mask changed."""
        self.version += 1
        self.measured = []

    def due(self, own_masks: bool, evaluating: bool) -> bool:
        """Return True if the messages of the round are to be measured."""
        kind = _kind(own_masks)
        changed = self.versions.get(kind) != self.version
        return kind not in self.sizes or ((evaluating or changed) and kind not in self.measured)

    def broadcast(self, clients: Sequence[int]) -> None:
        """Count the model sent to these clients, with the mask where theirs is outdated."""
        for client in clients:
            outdated = self.known.get(client) != self.version
            self.down[client] += self.model_bytes + (self.mask_bytes if outdated else 0)
            self.known[client] = self.version

    def measure_model(self, model: Params, mask: Mask, dense: bool) -> None:
        """Encode the model that is broadcast, and the mask."""
        self.mask_bytes = len(encode_mask(mask)) if mask else 0
        self.model_bytes = len(encode(model, inside=None if dense or not mask else mask))

    def measure_update(self, update: ClientUpdate, mask: Mask) -> None:
        """Encode one update, as its client does."""
        self.read()  # earlier updates count with the earlier sizes
        kind, values = _kind(update.own_mask is not None), int(values_of(update, self.squares))
        whole = sum(map(len, messages(update, mask, self.squares).values()))
        self.sizes[kind] = whole - values, values
        self.measured, self.versions = [*self.measured, kind], self.versions | {kind: self.version}

    def submodel_bytes(self, kind: str, message: Params, values: int = 0) -> int:
        """Return the bytes of a sub-model's message, `values` of them for values; one of each kind is encoded."""
        if kind not in self.encoded:
            self.encoded[kind] = len(encode(tree.to(message, "cpu"))) - values
        return values + self.encoded[kind]

    def upload(self, clients: list[int], values: list[Tensor] | None, own_masks: bool) -> None:
        """Count updates of these clients; `values` are the bytes () of their values, None: all as measured."""
        self._unread.append((_kind(own_masks), clients, values))

    def read(self) -> None:
        """Add the counts that the device made since the last reading."""
        counted = [value for _, _, values in self._unread if values is not None for value in values]
        numbers = iter(torch.stack(counted).tolist() if counted else [])
        for kind, clients, values in self._unread:
            for client in clients:
                rest, usual = self.sizes[kind]
                self.up[client] += rest + (usual if values is None else next(numbers))
        self._unread.clear()

    def state(self) -> dict[str, Any]:
        """Return all numbers, for a checkpoint."""
        self.read()
        numbers = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return numbers | {name: list(numbers[name].items()) for name in ("up", "down", "known")}  # JSON has no int keys

    def load(self, state: dict[str, Any]) -> None:
        """Resume from the output of `state`."""
        counts = {name: Counter(dict(state[name])) for name in ("up", "down")}
        vars(self).update(state | counts | {"known": dict(state["known"])})


def _kind(own_masks: bool) -> str:
    return "own masks" if own_masks else "the server's mask"


def messages(update: ClientUpdate, mask: Mask, squares: bool) -> dict[str, bytes]:
    """Return an update as the messages that carry it, by name.

    The mask of sent entries is included only where the server counts them and cannot derive it.
    """
    inside = mask if mask and update.own_mask is None else None
    encoded = {"values": encode(update.values, inside=inside)}
    if update.buffers:
        encoded["buffers"] = encode(update.buffers)
    if update.own_mask is not None:
        encoded["mask"] = encode_mask(update.own_mask)
    if update.sent is not None:
        encoded["sent"] = encode_mask(update.sent)
    if squares:
        encoded["squares"] = encode(squares_of(update))
    return encoded


def squares_of(update: ClientUpdate) -> Params:
    """Return the squares of every entry of the dense gradient, for PruneFL."""
    return {name: value.square() for name, value in update.summed.items()}


def check_stacked(update: ClientUpdate, squares: bool) -> tuple[Tensor, Tensor]:
    """Check stacked updates in one pass over all that leaves the clients; the tensors stay on the device.

    Return (clients,) True if all numbers are finite, the squares of entries that are not sent included. Return also
    (clients,) the bytes of the values in the messages: of the entries that are not 0.
    """
    parts = [(value, False) for part in (update.values, update.buffers) for value in part.values()]
    parts += [(value, True) for value in update.summed.values()] if squares else []
    finite, size = check_finite(parts)
    return finite, size


def values_of(update: ClientUpdate, squares: bool) -> Tensor:
    """Return () the bytes of the values in one client's messages."""
    parts = [update.values, update.buffers, *([squares_of(update)] if squares else [])]
    return _nonzero_bytes(value for part in parts for value in part.values())


def value_bytes(tensors: Params) -> int:
    """Return the bytes of the entries that are not 0."""
    return int(_nonzero_bytes(tensors.values()))


def _nonzero_bytes(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([torch.count_nonzero(value) * value.element_size() for value in tensors]).sum()


def measure_epsilon(
    terms: FederationSpec, turns: Mapping[int, int], number: int, last: bool, least: int | None = None
) -> list[Measure]:
    """Return the epsilon of the worst client so far, and in the last round of every client; empty without dp.

    `least` is the number of updates in the smallest sum; None: all clients of a round answer.
    """
    private, looks = _promise(terms)
    if private is None or not turns:
        return []
    sizes = count_rows(terms.shares)
    if isinstance(private, DistributedPrivacy):
        answered = (least or terms.per_round) if terms.view == "sum" else 1
        weights = 1.0 if terms.averaging == "uniform" or terms.view != "sum" else min(sizes) / max(sizes)
        guarantees = {client: _sum_guarantee(private, turns[client], answered, weights) for client in sorted(turns)}
    else:
        guarantees = {
            client: _guarantee(private, looks * turns[client], -(-terms.local.batch_size // sizes[client]))
            for client in sorted(turns)
        }
    worst = max(guarantees.values())
    note = f"of the client that spent most: {worst}"
    note += "" if isinstance(private, DistributedPrivacy) else ", the noise its own (local)"
    note += f"; {looks} looks a turn: which weights are withheld is covered" if looks > 1 else ""
    note += "; a mask that was made of a client's examples (snip, grasp) is not covered" if terms.base.rate else ""
    worst_measure = [Measure("epsilon", worst.epsilon, number, note=note)]
    client_measures = [
        Measure("epsilon", guarantee.epsilon, number, client, str(guarantee))
        for client, guarantee in guarantees.items()
    ]
    return worst_measure + (client_measures if last else [])


def _promise(terms: FederationSpec) -> tuple[DifferentialPrivacy | DistributedPrivacy | None, int]:
    """Return the differential privacy of a client, if any, and its number of looks at a batch per turn."""
    if isinstance(terms.custom_turn, PrivateTurn):
        return terms.custom_turn.private, LOOKS
    private = None if terms.upload is None else inner_of(terms.upload)
    return (private, 1) if isinstance(private, DifferentialPrivacy | DistributedPrivacy) else (None, 0)


def check_spending(terms: FederationSpec) -> None:
    """Raise WrongInput, before any work, for a budget that the accountant cannot compute."""
    sizes = count_rows(terms.shares)
    measure_epsilon(terms, {sizes.index(min(sizes)): terms.rounds}, terms.rounds, False)


@lru_cache
def _sum_guarantee(private: DistributedPrivacy, rounds: int, answered: int, weights: float) -> Guarantee:
    return private.guarantee(rounds, answered, weights)


@lru_cache
def _guarantee(private: DifferentialPrivacy, updates: int, copies: int) -> Guarantee:
    return replace(private, noise_multiplier=private.noise_multiplier / copies).guarantee(updates)
