"""The data and the device that a run file names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from secateur.config import Common
from secateur.data.dataset import Dataset
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.models.create import check, create, load_weights
from secateur.seeding import derive


def device_of(config: Common) -> torch.device:
    """The device to work on; `auto` takes a GPU where there is one."""
    there = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if config.device not in (*there, *(["cuda"] if torch.cuda.is_available() else [])):
        raise WrongInput("device", f"{config.device!r} is not there; allowed here: {', '.join(there)}")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def prepare(config: Common, check_data: Callable[[Dataset], None] = lambda data: None) -> tuple[Dataset, torch.device]:
    """The data and the device; refuses a model that does not fit the data before anything is trained."""
    torch.set_num_threads(config.threads)
    data = load(config.data, config.data_folder, config.download)
    check_data(data)
    if config.examples is not None:
        data = data.at_most(config.examples, derive(0, "examples"))
    net = create(config.model, data.input_shape, data.classes, derive(0, "check"))
    if config.weights is not None:
        load_weights(net, config.weights)
    check(net, data.input_shape, data.classes)
    return data, device_of(config)
