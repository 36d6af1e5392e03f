"""Clients that bring data of their own: what they train on, and what a server that has none of it may do with them.

A node that is started with own-data trains on all train rows of it, wherever the server's data set came from; of the
server it is told the shape of an example, how pixels become inputs, and how many clients there are. The server is told
how many examples a client has, which is its weight in the average, and nothing else.
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
from secateur.federated.attacks.observer import Observer, Panel
from secateur.federated.federation import Federation


def said_of(data: Dataset, clients: int) -> str:
    """JSON of what a client with data of its own must know of the server's."""
    shape = {"shape": data.input_shape, "classes": data.classes, "clients": clients}
    return json.dumps(shape | {"mean": data.mean, "std": data.std})


def own_data(source: str, folder: Path | str | None) -> Dataset:
    """The train rows of a node's own data set: whatever `data` may be, on its machine."""
    data = load(source, folder, download=False)
    size = data.train_size
    return replace(data, inputs=data.inputs[:size], labels=data.labels[:size], writers=None)


def fitted(data: Dataset, said: Mapping[str, Any]) -> Dataset:
    """Own data in the server's units; refused where the federation's network cannot take it."""
    if list(data.input_shape) != said["shape"]:
        wanted = f"the federation's have {tuple(said['shape'])}"
        raise WrongInput("own-data", f"the examples of {data.name} have the shape {data.input_shape}; {wanted}")
    inputs, mean, std = data.inputs, tuple(said["mean"]), tuple(said["std"])
    if data.mean and mean:
        had, by, has, over = (torch.tensor(each).view(-1, 1, 1) for each in (data.mean, data.std, mean, std))
        inputs = (inputs * by + had - has) / over
    return replace(data, inputs=inputs, classes=said["classes"], mean=mean, std=std)


def own_of(config: Federate, source: str, said: Mapping[str, Any]) -> tuple[Dataset, torch.device, list[Tensor]]:
    """A node's own data, its device, and shares: all rows for whichever client it is.

    Who is drawn for a round depends on how many clients there are, and not on their shares.
    """
    if config.submodels:
        raise WrongInput("own-data", "is not possible over sub-models; start the node with data-folder, or without")
    torch.set_num_threads(config.threads)
    data = fitted(own_data(source, config.data_folder), said)
    return data, device_of(config), [torch.arange(data.train_size)] * said["clients"]


def believed(shares: Sequence[Tensor], examples: Mapping[int, int]) -> list[Tensor]:
    """The server's shares, with those of clients with data of their own as long as they say; no memory is taken."""
    row = torch.zeros((), dtype=torch.int64)
    return [row.expand(examples[client]) if client in examples else rows for client, rows in enumerate(shares)]


class KnownPanel(Panel):
    """Shows observers only updates whose examples the server has: no other can be scored."""

    def __init__(self, observers: Sequence[Observer], federation: Federation, owners: Mapping[int, int]) -> None:
        super().__init__(observers, federation)
        self.owners = owners  # clients with data of their own

    def victims(self, number: int, clients: Sequence[int]) -> set[int]:
        """Who is sent another model: nobody whose answer could not be followed."""
        return super().victims(number, clients) - self.owners.keys()

    def show(self, number: int, drawn: Any, faults: Any, arrived: Sequence[Any], average: Any) -> None:
        """A round without the updates of those; not at all where they are in its sum."""
        known = [one for one in arrived if one.client not in self.owners]
        if self.federation.terms.view == "update" or len(known) == len(arrived):
            super().show(number, drawn, faults, known, average)
