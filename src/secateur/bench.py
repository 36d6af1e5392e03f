"""What stays the same while the models of one seed are made."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.catalogue import Choice, users_own
from secateur.chance import derive
from secateur.config import Common
from secateur.data.dataset import Dataset, fingerprint
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.interfaces import Batch
from secateur.models.create import check, create, load_weights
from secateur.recipe import Recipe
from secateur.runs import Run


@dataclass(frozen=True)
class Bench:
    """What stays the same while the models of one seed are made: the data, the settings, and where results go."""

    run: Run
    config: Common
    data: Dataset
    device: torch.device
    seed: int
    scratch: Choice | None = None  # a defense that acts on training from the start, and on the structure

    @cached_property
    def net(self) -> nn.Module:
        """The structure of every model here; its own weights are never used."""
        return self.initial("structure")

    @cached_property
    def recipes(self) -> tuple[Recipe, Recipe]:
        """How the originals are trained and the pruned models fine-tuned."""
        return self.config.recipes(tabular=len(self.data.input_shape) == 1)

    @cached_property
    def base(self) -> dict[str, Any]:
        """What every stage depends on."""
        names = ("model", "threads", "way")
        common = {name: getattr(self.config, name) for name in names}
        common["scratch"] = None if self.scratch is None else str(self.scratch)
        common["structure"] = self.structure_key
        return common | {"data": self.data.key, "device": self.device.type, "seed": self.seed}

    @cached_property
    def structure_key(self) -> str:
        """The network itself: its layers, its first weights, and the source of a user's own."""
        digest = hashlib.sha256(repr(self.net).encode())
        digest.update(fingerprint(*self.net.state_dict().values()).encode())
        if ":" in self.config.model:
            source = inspect.getsourcefile(users_own("model", self.config.model))
            digest.update(Path(source).read_bytes() if source else b"")
        return digest.hexdigest()

    def initial(self, role: str) -> nn.Module:
        """A new model of this structure, with the weights that this role starts from."""
        rng = derive(self.seed, "initialise", role)
        net = create(self.config.model, self.data.input_shape, self.data.classes, rng)
        return net if self.scratch is None else self.scratch.make().structure(net)

    def rows(self, indices: Tensor) -> Batch:
        """Some examples, on the device."""
        return self.data.batch.take(indices).to(self.device)


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


def file_key(path: Path) -> str:
    """The sha256 of a file that the user gave."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise WrongInput("weights", f"{path} cannot be read: {error.strerror}") from None
