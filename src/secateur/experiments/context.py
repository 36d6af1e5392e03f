"""The shared context of the models of one seed, and checks that run before any work.

The checks refuse missing packages of an extra and too few shadow models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from secateur.catalogue import Choice, Compressor, Defense, users_own
from secateur.config import Audit, Common, ModelRun
from secateur.data.dataset import Dataset, fingerprint
from secateur.data.partition import Split, split_trained, victim_shadow
from secateur.errors import WrongInput, require
from secateur.experiments.threat_models import Compression, grid
from secateur.gpu.determinism import device_key
from secateur.interfaces import Batch, ChecksModel, CountsModels, TrainsWithPenalty
from secateur.models.create import create, is_users_own, shrink
from secateur.runs.folder import Run
from secateur.seeding import derive
from secateur.training.recipe import Recipe
from secateur.training.user_function import UserFunction, source_key

MOVES = ("samia", "label-only")  # attacks that move inputs by a little, which tokens cannot be


@dataclass(frozen=True)
class SeedContext:
    """The context in which the models of one seed are made: the data, the settings and the run's folder."""

    run: Run
    config: Common
    data: Dataset
    device: torch.device
    seed: int
    scratch: Choice | None = None  # a defense that acts on training from the start, and on the structure

    @cached_property
    def net(self) -> nn.Module:
        """The structure of every model here; the weights of this instance are never used."""
        return self.initial("structure")

    @cached_property
    def converted(self) -> dict[str, nn.Module]:
        """The quantised models that were used last, by the keys of their stages."""
        return {}

    @cached_property
    def recipes(self) -> tuple[Recipe, Recipe]:
        """The recipes by which originals are trained and pruned models fine-tuned."""
        return self.config.recipes(tabular=len(self.data.input_shape) == 1)

    @cached_property
    def user_function(self) -> UserFunction | None:
        """The user's own training function; None if models are trained by a recipe."""
        function = self.config.train.function if isinstance(self.config, ModelRun) else None
        return None if function is None else UserFunction(function)

    @cached_property
    def base(self) -> dict[str, Any]:
        """The values that the key of every stage depends on."""
        common = {name: getattr(self.config, name) for name in ("model", "threads", "execution")}
        common |= {"scratch": None if self.scratch is None else str(self.scratch), "structure": self.structure_key}
        return common | {"data": self.data.key, "device": device_key(self.device), "seed": self.seed}

    @cached_property
    def structure_key(self) -> str:
        """The sha256 of the network: its layers, its first weights, and the source of a user's own network."""
        digest = hashlib.sha256(repr(self.net).encode())
        digest.update(fingerprint(*self.net.state_dict().values()).encode())
        if is_users_own(self.config.model):
            digest.update(source_key("model", self.config.model).encode())
        return digest.hexdigest()

    def build(self, rng: Generator) -> nn.Module:
        """Return the network as its function makes it, with weights drawn from `rng`."""
        return create(self.config.model, self.data.input_shape, self.data.classes, rng)

    def initial(self, role: str) -> nn.Module:
        """Return a new model of this structure, with the weights that this role starts from."""
        net = self.build(derive(self.seed, "initialise", role))
        if self.config.weights is not None:
            net = shrink(net, self.config.weights)
        return net if self.scratch is None else self.scratch.make().structure(net)

    def rows(self, indices: Tensor) -> Batch:
        """Return these examples on the device."""
        return self.data.batch.take(indices).to(self.device)


def split_rows(config: Common, data: Dataset, shadows: int, seed: int) -> Split:
    """Split the rows among the victim and the shadows. The victim's training does not depend on the shadows' number.

    The members of a victim that is already trained are the train part of the data.
    """
    rng, rows = derive(seed, "split"), len(data.inputs) - data.population
    population = population_of(data) if data.population else None
    if config.weights is None:
        return victim_shadow(rows, shadows, rng, population)
    return split_trained(rows, data.train_size, shadows, rng, population)


def population_of(data: Dataset) -> Tensor:
    """Return the rows (P,) of the attacker's population."""
    return torch.arange(len(data.inputs) - data.population, len(data.inputs))


def file_key(path: Path) -> str:
    """Return the sha256 of a file that the user gave."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise WrongInput("weights", f"{path} cannot be read: {error.strerror}") from None


def check_installed(defenses: Iterable[Defense], training: str = "auto") -> None:
    """Refuse a defense or a kind of training whose package is not installed.

    A defense's `requires` is the package and the extra that brings it.
    """
    for part in (part for defense in defenses for part in defense.parts):
        if "requires" in part.method.info:
            require(*part.method.info["requires"])
    if training == "ray":
        require("ray", "ray")


def check_function(config: ModelRun, pruners: Iterable[Compressor], defenses: Iterable[Defense]) -> None:
    """Refuse a training function that is not there, and methods that change the training that the function is."""
    if config.train.function is None:
        return
    users_own("train", config.train.function)
    methods = [str(pruner) for pruner in pruners if pruner.find_part(TrainsWithPenalty) is not None]
    methods += [str(part) for defense in defenses if (part := defense.find_part("training"))]
    if methods:
        problem = f"{methods[0]} acts on the training, which {config.train.function} does"
        raise WrongInput("train", f"{problem}; leave one of them out, or put the method into the function")


def check_audit(config: Audit) -> None:
    """Refuse an audit that lacks a package, or has fewer shadow models than one of its attacks needs."""
    if config.claim is not None and config.weights is None:
        raise WrongInput("claim", "is about a model that you bring; set weights or predictions, or leave it out")
    check_installed(config.defense, config.execution)
    check_function(config, config.pruner, config.defense)
    unpruned = [Compression(defense=defense).original for defense in config.defense if config.weights is None]
    check_defenses(config, config.defense, grid(config) or unpruned)
    if config.population is not None and not config.trains_shadows:
        raise WrongInput("population", "is for the attacker's models; set a `train:` recipe or function for them")
    if not config.trains_shadows:
        if config.protocol == "select":
            raise WrongInput("protocol", "select needs shadow models; set a `train:` recipe for them")
        return  # attacks that need shadows are left out, and their rows say so
    for attack in config.attack:
        check_models(attack, config.shadows, config.in_out)
        if config.protocol == "select":
            check_models(attack, config.shadows - 1, left="the adversary keeps one shadow to try its recipes on: ")


def check_defenses(config: Common, defenses: Iterable[Defense], models: Iterable[Compression]) -> None:
    """Refuse a defense that none of the models gets: all but those of training act on the fine-tuning after pruning.

    `basic` and `none` are recipes that an original's own training may follow.
    """
    applied = {model.defense for model in models}
    for defense in defenses:
        if defense not in applied and str(defense) not in ("basic", "none"):
            problem = f"{defense} acts on a fine-tuning, and no pruned model is fine-tuned here"
            if config.weights is not None and defense.find_part("training") is not None:
                problem = f"{defense} acts on the training, which the given weights have behind them"
            raise WrongInput("defense", f"{problem}; add a pruner with a sparsity above 0, or leave {defense} out")


def check_pruners(compressors: Iterable[Compressor], config: Common, data: Dataset) -> None:
    """Refuse, before any training, a compressor that cannot take the network."""
    parts = dict.fromkeys(part for compressor in compressors for part in compressor.parts)
    checking = [pruner for pruner in (part.make() for part in parts) if isinstance(pruner, ChecksModel)]
    if checking:
        net = create(config.model, data.input_shape, data.classes, derive(0, "initialise", "structure"))
        for pruner in checking:
            pruner.check(net, data.input_shape)


def fit_pruners(config: Audit, data: Dataset, chosen: bool) -> Audit:
    """Return the configuration without the default compressors that cannot take the network.

    A compressor that the user has `chosen` is refused instead, and so is a network that none can take.
    """
    able = []
    for compressor in [] if chosen else config.pruner:
        with suppress(WrongInput):
            check_pruners([compressor], config, data)
            able.append(compressor)
    if not able:
        check_pruners(config.pruner, config, data)
        return config
    return config.model_copy(update={"pruner": able})


def fit_attacks(config: Audit, data: Dataset, chosen: bool) -> Audit:
    """Return the configuration without attacks that move inputs, if inputs are whole numbers.

    An attack that the user has `chosen` is refused instead.
    """
    moving = [attack.name for attack in config.attack if attack.name in MOVES]
    if data.inputs.is_floating_point() or not moving:
        return config
    if chosen:
        problem = f"{moving[0]} moves inputs by a little, which whole numbers such as tokens cannot be"
        raise WrongInput("attack", f"{problem}; leave it out")
    kept = [attack for attack in config.attack if attack.name not in MOVES]
    return config.model_copy(update={"attack": kept})


def check_models(attack: Choice, shadows: int, in_out: int = 0, left: str = "") -> None:
    """Refuse an attack that needs more attacker's models than there are."""
    if (missing := shortage(attack, shadows, in_out)) is not None:
        raise WrongInput("shadows", left + missing)


def check_possible(attacks: Sequence[Choice], reason: str) -> None:
    """Refuse attacks of which none can run without shadow models; where some can, a note says what the others need."""
    if attacks and all(shortage(attack, 0) is not None for attack in attacks):
        raise WrongInput("attack", f"{attacks[0]} {reason}; or add conf, which needs none")


def shortage(attack: Choice, shadows: int, in_out: int = 0) -> str | None:
    """Return why an attack cannot run with this many disjoint shadows and in-out models; None if it can."""
    if attack.method.info["shadows"] in ("none", "for a threshold"):
        return None
    attacker = attack.make()
    if isinstance(attacker, CountsModels):
        return attacker.shortage(shadows, in_out)
    return None if shadows or in_out else f"{attack.name} needs at least 1 shadow model; 0 given"
