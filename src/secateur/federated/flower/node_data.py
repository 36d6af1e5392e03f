"""Clients with their own data: their training rows, and limits of a server that does not have these rows.

A node that is started with own-data trains on all train rows of that data, independently of the server's data set. The
server sends the node the shape of an example, the normalisation of pixels, and the number of clients. The node sends
the server only its number of examples, which is the client's weight in the average.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.config import Federate
from secateur.data.dataset import Dataset
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.evaluation.setup import device_of
from secateur.federated.attacks.observer import Observer, RoundObservers
from secateur.federated.federation import Federation

MOST = 1_000_000  # classes or clients that a server may name


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
        right &= 1 <= said["classes"] <= MOST and 1 <= said["clients"] <= MOST and bool(numbers.isfinite().all())
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


def apply_reported_sizes(shares: Sequence[Tensor], examples: Mapping[int, int]) -> list[Tensor]:
    """Return the server's shares; a client with own data gets a share of its reported length, without memory."""
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
