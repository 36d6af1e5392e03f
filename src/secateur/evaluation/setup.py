"""Data and device of a run file."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from secateur.config import Common
from secateur.data.dataset import Dataset
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.models.create import check, create, load_weights
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
