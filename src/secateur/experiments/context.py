"""What stays the same while the models of one seed are made, and what a job needs and may not have.

That is said before any of it is done: packages of an extra, and shadow models.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.catalogue import Choice, Defense, users_own
from secateur.config import Audit, Common
from secateur.data.dataset import Dataset, fingerprint
from secateur.errors import WrongInput, require
from secateur.interfaces import Batch, CountsModels
from secateur.models.create import create
from secateur.runs.folder import Run
from secateur.seeding import derive
from secateur.training.recipe import Recipe


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


def file_key(path: Path) -> str:
    """The sha256 of a file that the user gave."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise WrongInput("weights", f"{path} cannot be read: {error.strerror}") from None


def check_installed(defenses: Iterable[Defense], way: str = "auto") -> None:
    """Refuse a defense whose `requires` (a package, and the extra that brings it) is not installed, or a way's."""
    for part in (part for defense in defenses for part in defense.parts):
        if "requires" in part.method.info:
            require(*part.method.info["requires"])
    if way == "ray":
        require("ray", "ray")


def check_audit(config: Audit) -> None:
    """Refuse an audit that would miss a package, or have fewer shadow models than one of its attacks needs."""
    check_installed(config.defense, config.way)
    if not config.trains_shadows:
        return  # attacks that need them are left out, and their rows say so
    for attack in config.attack:
        check_models(attack, config.shadows, config.in_out)
        if config.protocol == "select":
            check_models(attack, config.shadows - 1, left="the adversary keeps one shadow to try its recipes on: ")


def check_models(attack: Choice, shadows: int, in_out: int = 0, left: str = "") -> None:
    """Refuse an attack that needs more models of the attacker's than there are."""
    if (missing := shortage(attack, shadows, in_out)) is not None:
        raise WrongInput("shadows", left + missing)


def shortage(attack: Choice, shadows: int, in_out: int = 0) -> str | None:
    """Why an attack cannot run with so many disjoint shadows and in-out models; None where it can."""
    if attack.method.info["shadows"] == "none":
        return None
    made = attack.make()
    if isinstance(made, CountsModels):
        return made.shortage(shadows, in_out)
    return None if shadows else f"{attack.name} needs at least 1 shadow model; 0 given"
