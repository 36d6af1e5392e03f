"""How large a study of dgp is run, and what all its steps share: one run, its data, its networks, its seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from secateur.config import Invert, read
from secateur.data.dataset import Dataset
from secateur.data.load import load
from secateur.evaluation.client import check_pictures
from secateur.evaluation.setup import device_of
from secateur.models.create import check, create
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.studies.study import laid_over

NETWORKS = ("resnet18", "lenet-zhu", "cnn6", "vgg11-bn")  # the paper's
CIFAR10, CIFAR100 = "cifar10", "cifar100"
FIXED = ("data", "models", "untrained")  # of a scale: `--set` leaves them alone
TESTED = 0.2  # of a data set without a test part


@dataclass(frozen=True)
class Scale:
    """How large a study is run; the defaults are the paper's setting."""

    data: dict[str, str] = field(default_factory=lambda: {CIFAR10: CIFAR10, CIFAR100: CIFAR100})  # what stands for them
    models: dict[str, str] = field(default_factory=lambda: {name: name for name in NETWORKS})  # absent: left out
    examples: int | None = None  # at most so many of the data set's rows
    targets: int = 20
    iterations: int = 2500  # of ig and gi
    rounds: int = 500  # of ggl
    population: int = 50
    generator_steps: int = 2000
    generator_width: int = 64
    users: int = 10
    epochs: int | None = None  # of collaborative training; None: the paper's 100, with its learning rates
    learning_rate: float = 0.05  # of so many epochs
    augment: bool = True  # crops and flips: dgp does not say so, and its 93 % need them
    in_out: int = 0  # models of lira and rmia, for every defense
    repeats: int = 20  # of a call that is timed
    untrained: tuple[str, ...] = ()  # defenses that training under takes too long for this scale
    threads: int = 1


TINY = Scale(
    data={CIFAR10: "digits", CIFAR100: "digits"},
    models={"resnet18": "digits-cnn", "lenet-zhu": "lenet-zhu", "cnn6": "cnn6"},
    examples=400,
    targets=2,
    iterations=12,
    rounds=4,
    population=6,
    generator_steps=4,
    generator_width=4,
    users=2,
    epochs=2,
    augment=False,
    in_out=4,
    repeats=2,
)
SMALL = Scale(
    models={"resnet18": "resnet18-w16", "lenet-zhu": "lenet-zhu", "cnn6": "cnn6"},
    examples=6000,
    targets=3,
    iterations=300,
    rounds=40,
    population=20,
    generator_steps=400,
    generator_width=16,
    users=4,
    epochs=5,
    augment=False,
    repeats=5,
    untrained=("soteria",),  # a Jacobian for every step of every user
)
SCALES = {"tiny": TINY, "small": SMALL, "full": Scale()}


def scale_of(name: str, overrides: list[str] | None) -> Scale:
    """A scale by its name, with `field=value` laid over it."""
    return laid_over(SCALES, name, overrides, FIXED, zero=("in_out",))


class Step(Protocol):
    """Measures something of one network on one data set, and adds its rows to the run."""

    @property
    def model(self) -> str:
        """The paper's network."""
        ...

    @property
    def data(self) -> str:
        """The paper's data set."""
        ...

    def __call__(self, setting: Setting) -> None:
        """Measure; what an earlier start of the run made is taken as it is."""
        ...


@dataclass(frozen=True, eq=False)
class Setting:
    """What all steps of a study share."""

    run: Run
    scale: Scale
    given: Mapping[str, Any]  # model, data_folder, device and images, where a user gave them
    datasets: Mapping[str, Dataset]  # by what the paper has in their place
    seed: int

    def model(self, step: Step) -> str | None:
        """What stands for a step's network; None where the scale leaves it out."""
        return stand_in(step.model, self.scale, self.given)

    def data(self, step: Step) -> Dataset:
        """What stands for a step's data set."""
        return self.datasets[step.data]

    @cached_property
    def device(self) -> torch.device:
        """Where it is run."""
        return device_of(self.invert("lenet-zhu"))

    def invert(self, model: str, **more: Any) -> Invert:
        """The fields of `secateur invert` that a step is run by."""
        scale = self.scale
        common = {"model": model, "device": self.given.get("device"), "data_folder": self.given.get("data_folder")}
        common |= {"images": self.given.get("images")}
        common |= {"targets": scale.targets, "threads": scale.threads, "seeds": [self.seed]}
        common |= {"generator_steps": scale.generator_steps, "generator_width": scale.generator_width}
        return read(Invert, None, common | more)

    def labels(self, model: str, data: Dataset, defense: str, study: str, **extra: Any) -> dict[str, Any]:
        """What a row carries that is no attack's; `study` says which kind of measurement it is."""
        own = {"model": model, "dataset": data.name, "defense": defense, "seed": self.seed}
        return own | {"extra": {"study": study} | extra}

    def leave_out(self, labels: dict[str, Any], reason: str) -> None:
        """Say in a row what could not be measured."""
        extra = labels["extra"] | {"study": "left out"}
        self.run.add([Row(**(labels | {"extra": extra}), metric="left_out", value=None, note=reason)])


def stand_in(paper: str, scale: Scale, given: Mapping[str, Any]) -> str | None:
    """What stands for a network of the paper; None where the scale leaves it out. A user's own takes all places."""
    return given.get("model") or scale.models.get(paper)


def load_all(steps: Sequence[Step], scale: Scale, given: Mapping[str, Any]) -> dict[str, Dataset]:
    """The data of all steps by what the paper has in its place; refuses networks that do not fit it.

    One without a test part gets a fifth for that.
    """
    found: dict[str, Dataset] = {}
    loaded: dict[str, Dataset] = {}
    for step in steps:
        name = given.get("data") or scale.data[step.data]
        if name not in loaded:
            data = load(name, given.get("data_folder"), True)
            check_pictures(data)
            data = data if scale.examples is None else data.at_most(scale.examples, derive(0, "examples"))
            whole = data.train_size == len(data.inputs)
            loaded[name] = replace(data, train_size=int((1 - TESTED) * len(data.inputs))) if whole else data
        data = found[step.data] = loaded[name]
        if (model := stand_in(step.model, scale, given)) is not None:
            check(create(model, data.input_shape, data.classes, derive(0, "check")), data.input_shape, data.classes)
    return found
