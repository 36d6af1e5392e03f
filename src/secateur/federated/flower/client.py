"""Clients of a federation over Flower: their data, one turn on the client's machine, and its records between rounds.

A node that is started with own-data trains on all train rows of that data, independently of the server's data set. The
server sends the node the shape of an example, the normalisation of pixels, and the number of clients. The node sends
the server only its number of examples, which is the client's weight in the average.

A client's Context keeps its state after the last two rounds and the server's mask.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from torch import Tensor, nn

from secateur import tree
from secateur.config import Federate
from secateur.data.dataset import Dataset
from secateur.data.load import load
from secateur.defenses.withholding import rates
from secateur.errors import WrongInput
from secateur.evaluation.setup import device_of
from secateur.federated.attacks.observer import Observer, RoundObservers
from secateur.federated.base_pruning import BasePruning
from secateur.federated.client_training import BroadcastModel
from secateur.federated.client_turn import ClientTurn, ClientUpdate
from secateur.federated.federation import Federation
from secateur.federated.flower.link import load_tensors, pack, store_tensors, unpack
from secateur.federated.sampling import sampler_of
from secateur.federated.spec import FederationSpec
from secateur.federated.traffic import messages
from secateur.functional import join_state, split
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.masks import weights_of
from secateur.wire import decode, decode_mask

HOME = "secateur.home"  # the record of the federation's key, and of the rounds of the kept tensors
STATE, BEFORE, MASK = "secateur.state", "secateur.before", "secateur.mask"
MOST_NAMED = 1_000_000  # classes or clients that a server may name


class Clients:
    """The client side of a federation: runs the turn of any client."""

    def __init__(self, net: nn.Module, train: Batch, terms: FederationSpec, seed: int, device: torch.device) -> None:
        self.terms, self.seed, self.device = terms, seed, device
        self.train = train.to(device)
        self.base = terms.base.bound(net, tuple(train.inputs.shape[1:]))
        self.sampler = sampler_of(terms, seed, device)
        self.shapes = {name: tuple(value.shape) for name, value in tree.state_of(net).items()}
        self.dtypes = {name: value.dtype for name, value in tree.state_of(net).items()}
        self.server = Received(net, self.base, device)
        self.turns = ClientTurn(net, terms, self.server, self.train, "sequential")

    def answer(self, content: RecordDict, home: RecordDict) -> RecordDict:
        """Return the answer of a client to a message; `home` holds the records of its context."""
        turn, sent = content.config_records["turn"], unpack(content.array_records["model"])
        number, client, taken = (int(str(turn[name])) for name in ("round", "client", "taken"))
        reset_if_other(home, str(turn["key"]))
        mask = mask_of(home, sent.get("mask"), int(str(turn["version"])), self.shapes)
        inside = mask if turn["inside"] else None
        state = tree.to(decode(sent["model"], self.shapes, inside=inside, dtypes=self.dtypes), self.device)
        update = self.turn(number, client, state, tree.to(mask, self.device), load_state(home, taken, self.device))
        if update.state:
            save_state(home, number, update.state)
        upload = messages(update, mask, self.base.wants_squares)
        reply = RecordDict({"update": pack(**upload)})
        if update.withheld:
            shares = rates(update.withheld, mask)._asdict()
            reply["withheld"] = MetricRecord({name: float(value) for name, value in shares.items()})
        return reply

    def turn(self, number: int, client: int, state: Params, mask: Mask, kept: Params | None) -> ClientUpdate:
        """Return the update of one client in a round; the draws are those of an in-process federation."""
        drawn, turns = self.sampler(number), self.turns
        rows = drawn.rows[drawn.clients.index(client)]
        self.server.load(state, mask)
        before = turns.init() if kept is None else kept
        return next(turns([turns.inputs(self.seed, number, client, rows, before)], number))


class Received:
    """The client's view of the server: the received model, and the base pruning rule."""

    def __init__(self, net: nn.Module, base: BasePruning, device: torch.device) -> None:
        self.net, self.base, self.prunes = net, base, base.rate > 0
        params, buffers = split(net, tree.state_of(net))
        self.weights = tree.to(tree.clone(params), device)
        whole = {name: torch.ones_like(self.weights[name], dtype=torch.bool) for name in weights_of(net)}
        self.mask: Mask = whole
        self.model = BroadcastModel(self.weights, tree.to(tree.clone(buffers), device), whole if self.prunes else {})

    @property
    def received(self) -> Params:
        """Parameters and buffers of the received model."""
        return join_state(self.net, self.model.params | self.model.buffers)

    def load(self, state: Params, mask: Mask) -> None:
        """Load the model and the mask of another round, into the memory of the last."""
        for held, new in zip((self.model.params, self.model.buffers), split(self.net, state), strict=True):
            for name, value in held.items():
                value.copy_(new[name])
        for name, where in self.model.mask.items():
            where.copy_(mask[name])


def reset_if_other(home: RecordDict, key: str) -> None:
    """Clear the context if it belongs to another federation."""
    if HOME not in home.config_records or home.config_records[HOME]["key"] != key:
        for name in list(home):
            del home[name]
        home[HOME] = ConfigRecord({"key": key, STATE: 0, BEFORE: 0, MASK: -1})


def mask_of(home: RecordDict, sent: bytes | None, version: int, shapes: dict[str, tuple[int, ...]]) -> Mask:
    """Return the mask of a version: sent with the message, or kept from an earlier one."""
    if version < 0:
        return {}
    versions: Any = home.config_records[HOME]
    if sent is not None:
        home[MASK] = pack(mask=sent)
        versions[MASK] = version
    if versions[MASK] != version:
        raise WrongInput("mask", "of this round was never received here")
    return decode_mask(unpack(home.array_records[MASK])["mask"], shapes)


def load_state(home: RecordDict, taken: int, device: torch.device) -> Params | None:
    """Return the state after the round whose update the server took last; None where there is none.

    A turn that the server did not take leaves no trace.
    """
    rounds = home.config_records[HOME]
    for name in (STATE, BEFORE):
        if rounds[name] == taken and taken:
            state = load_tensors(home, name)
            return None if state is None else tree.to(state, device)
    return None


def save_state(home: RecordDict, number: int, state: Params) -> None:
    """Keep the state after this round and the one before, in case the server does not take this turn."""
    rounds: Any = home.config_records[HOME]
    if rounds[STATE] != number and STATE in home:
        home[BEFORE] = home.array_records[STATE]
        rounds[BEFORE] = rounds[STATE]
    store_tensors(home, STATE, state)
    rounds[STATE] = number


def describe_data(data: Dataset, clients: int) -> str:
    """Return JSON of the server's data format, for a client with its own data."""
    shape = {"shape": data.input_shape, "classes": data.classes, "clients": clients}
    return json.dumps(shape | {"mean": data.mean, "std": data.std, "whole": not data.inputs.is_floating_point()})


def read_description(text: str) -> dict[str, Any]:
    """Return the server's data format (`describe_data`); refuse another form, and numbers that only memory bounds."""
    try:
        said = json.loads(text)
        numbers = torch.tensor([[*said["mean"]], [*said["std"]]])
        right = all(type(size) is int for size in (*said["shape"], said["classes"], said["clients"]))
        right &= (
            1 <= said["classes"] <= MOST_NAMED and 1 <= said["clients"] <= MOST_NAMED and bool(numbers.isfinite().all())
        )
    except (ValueError, LookupError, TypeError, RecursionError, RuntimeError, OverflowError):
        right = False
    if not right:
        raise WrongInput("task", "is refused: the server describes its data in another form than a node knows")
    return dict(said)


def load_own_data(source: str, folder: Path | str | None) -> Dataset:
    """Return the train rows of a node's own data set; `source` takes the same values as the field `data`."""
    data = load(source, folder, download=False)
    size = data.train_size
    return replace(data, inputs=data.inputs[:size], labels=data.labels[:size], writers=None)


def fit_to_server(data: Dataset, said: Mapping[str, Any]) -> Dataset:
    """Return own data in the server's normalisation; raise WrongInput if the shape does not fit the network."""
    if list(data.input_shape) != said["shape"]:
        wanted = f"the federation's have {tuple(said['shape'])}"
        raise WrongInput("own-data", f"the examples of {data.name} have the shape {data.input_shape}; {wanted}")
    mean, std = tuple(said["mean"]), tuple(said["std"])
    inputs = data.inputs if said.get("whole") else data.inputs.float()  # a network of tokens takes whole numbers
    if data.mean and mean:
        old_mean, old_std, new_mean, new_std = (
            torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std, mean, std)
        )
        inputs = (inputs * old_std + old_mean - new_mean) / new_std
    return replace(data, inputs=inputs, classes=said["classes"], mean=mean, std=std)


def load_node(config: Federate, source: str, description: str) -> tuple[Dataset, torch.device, list[Tensor]]:
    """Return a node's own data, its device, and shares; every client has all rows.

    That is safe: the sampled clients of a round depend on the number of clients, not on their shares.
    """
    if config.submodels:
        raise WrongInput("own-data", "is not possible over sub-models; start the node with data-folder, or without")
    torch.set_num_threads(config.threads)
    said = read_description(description)
    data = fit_to_server(load_own_data(source, config.data_folder), said)
    return data, device_of(config), [torch.arange(data.train_size)] * said["clients"]


def apply_reported_sizes(shares: Sequence[Tensor], examples: Mapping[int, int]) -> Sequence[Tensor]:
    """Return the server's shares; a client with own data gets a share of its reported length, without memory."""
    if not examples:
        return shares
    row = torch.zeros((), dtype=torch.int64)
    return [row.expand(examples[client]) if client in examples else rows for client, rows in enumerate(shares)]


class KnownPanel(RoundObservers):
    """A panel that shows observers only updates whose examples the server has; others cannot be scored."""

    def __init__(self, observers: Sequence[Observer], federation: Federation, owners: Mapping[int, int]) -> None:
        super().__init__(observers, federation)
        self.owners = owners  # clients with their own data

    def victims(self, number: int, clients: Sequence[int]) -> set[int]:
        """Return the clients that receive a changed model: none with own data, whose update cannot be scored."""
        return super().victims(number, clients) - self.owners.keys()

    def show(self, number: int, drawn: Any, faults: Any, arrived: Sequence[Any], average: Any) -> None:
        """Show a round without updates of clients with own data; show nothing if a sum contains them."""
        known = [update for update in arrived if update.client not in self.owners]
        if self.federation.terms.view == "update" or len(known) == len(arrived):
            super().show(number, drawn, faults, known, average)
