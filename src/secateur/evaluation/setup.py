"""Data and device of a run file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from secateur.attacks.membership.reference_models import content
from secateur.config import Common
from secateur.data.dataset import Dataset
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.models.create import check, check_labels, create, load_weights
from secateur.seeding import derive


def device_of(config: Common) -> torch.device:
    """Return the device of the run; `auto` is $SECATEUR_DEVICE if it is set, else a GPU if there is one."""
    wanted = os.environ.get("SECATEUR_DEVICE", "auto") if config.device == "auto" else config.device
    available = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if wanted not in (*available, *(["cuda"] if torch.cuda.is_available() else [])):
        raise WrongInput("device", f"{wanted!r} is not available; allowed here: {', '.join(available)}")
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def prepare(config: Common, check_data: Callable[[Dataset], None] = lambda data: None) -> tuple[Dataset, torch.device]:
    """Return the data and the device; refuse a model that does not fit the data, before any training."""
    torch.set_num_threads(config.threads)
    data = load(config.data, config.data_folder, config.download)
    check_data(data)
    if config.examples is not None:
        data = data.limit_rows(config.examples, derive(0, "examples"))
    net = create(config.model, data.input_shape, data.classes, derive(0, "check"))
    if config.weights is not None:
        load_weights(net, config.weights)
    check(net, data.input_shape, data.classes)
    return data, device_of(config)


def join_population(config: Common, data: Dataset, source: str) -> Dataset:
    """Return the data with the attacker's population behind them; refuse rows that are members or candidates."""
    other = load(source, config.data_folder, config.download)
    if other.input_shape != data.input_shape:
        shapes = f"inputs of the shape {other.input_shape}, those of {data.name} have {data.input_shape}"
        raise WrongInput("population", f"{source} has {shapes}; use rows of the same kind")
    check_labels("population", other.labels, data.classes)
    inputs = _scale_alike(other, data)
    known = set(content(data.inputs))
    if shared := sum(key in known for key in content(inputs)):
        raise WrongInput("population", f"{shared} of {len(inputs)} rows are in {data.name} too; leave them out")
    rows, labels = torch.cat([data.inputs, inputs]), torch.cat([data.labels, other.labels])
    return replace(data, inputs=rows, labels=labels, writers=None, population=len(inputs))


def _scale_alike(other: Dataset, data: Dataset) -> Tensor:
    """Return the inputs of one data set, scaled as those of another."""
    if bool(other.mean) != bool(data.mean):
        raise WrongInput(
            "population", f"{other.name} and {data.name} are not scaled alike; use bytes or numbers in both"
        )
    if other.mean == data.mean and other.std == data.std:
        return other.inputs
    stats = [torch.tensor(value).view(1, -1, 1, 1) for value in (other.mean, other.std, data.mean, data.std)]
    return (other.inputs * stats[1] + stats[0] - stats[2]) / stats[3]
