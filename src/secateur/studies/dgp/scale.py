"""Scales of dgp studies, and the setting that all steps share: run, data, networks and seed."""

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
from secateur.studies.study import read_scales

NETWORKS = ("resnet18", "lenet-zhu", "cnn6", "vgg11-bn")  # the paper's
CIFAR10, CIFAR100 = "cifar10", "cifar100"
TESTED = 0.2  # test share of a data set without a test part


@dataclass(frozen=True)
class DgpScale:
    """The size of a study; the defaults are the paper's setting."""

    data: dict[str, str] = field(default_factory=lambda: {CIFAR10: CIFAR10, CIFAR100: CIFAR100})  # stand-ins
    models: dict[str, str] = field(default_factory=lambda: {name: name for name in NETWORKS})  # absent: skipped
    examples: int | None = None  # upper limit on the rows of a data set
    targets: int = 20
    iterations: int = 2500  # of ig and gi
    rounds: int = 500  # of ggl
    population: int = 50
    generator_steps: int = 2000
    generator_width: int = 64
    users: int = 10
    epochs: int | None = None  # of collaborative training; None: the paper's 100, with its learning rates
    learning_rate: float = 0.05  # where the paper's schedule does not apply
    augment: bool = True  # crops and flips: dgp does not mention them, but its 93 % need them
    in_out: int = field(default=0, metadata={"least": 0})  # models of lira and rmia per defense; 0: no such attacks
    repeats: int = 20  # of a timed call
    untrained: tuple[str, ...] = ()  # defenses under which training takes too long, such as soteria with its Jacobians
    threads: int = 1

    @property
    def augmentation(self) -> str:
        """The augmentation of training pictures, for readers."""
        return "crop and flip" if self.augment else "none"


SCALES = read_scales(DgpScale, "dgp")


class Step(Protocol):
    """A measurement of one network on one data set that adds its rows to the run."""

    @property
    def name(self) -> str:
        """The name by which `--set steps=` selects the step."""
        ...

    @property
    def model(self) -> str:
        """The paper's network."""
        ...

    @property
    def data(self) -> str:
        """The paper's data set."""
        ...

    def __call__(self, setting: DgpSetting) -> None:
        """Measure; stages finished by an earlier start of the run are reused."""
        ...


@dataclass(frozen=True, eq=False)
class DgpSetting:
    """The context that all steps of a study share."""

    run: Run
    scale: DgpScale
    options: Mapping[str, Any]  # the user's model, data_folder, device and images, if set
    datasets: Mapping[str, Dataset]  # by the paper's data set that they stand in for
    seed: int

    def model(self, step: Step) -> str | None:
        """Return the stand-in for a step's network; None if the scale skips the network."""
        return stand_in(step.model, self.scale, self.options)

    def data(self, step: Step) -> Dataset:
        """Return the stand-in for a step's data set."""
        return self.datasets[step.data]

    @cached_property
    def device(self) -> torch.device:
        """Device of the run."""
        return device_of(self.invert("lenet-zhu"))

    def invert(self, model: str, **more: Any) -> Invert:
        """Return the configuration of `secateur invert` for a step."""
        scale = self.scale
        common = {name: self.options.get(name) for name in ("device", "data_folder", "images")} | {"model": model}
        common |= {"targets": scale.targets, "threads": scale.threads, "seeds": [self.seed]}
        common |= {"generator_steps": scale.generator_steps, "generator_width": scale.generator_width}
        return read(Invert, None, common | more)

    def labels(self, model: str, data: Dataset, defense: str, study: str, **extra: Any) -> dict[str, Any]:
        """Return the labels of a row without an attack; `study` is the kind of measurement."""
        labels = {"model": model, "dataset": data.name, "defense": defense, "seed": self.seed}
        return labels | {"extra": {"study": study} | extra}

    def leave_out(self, labels: dict[str, Any], reason: str) -> None:
        """Add a row for a measurement that could not be made, with the reason."""
        extra = labels["extra"] | {"study": "left out"}
        self.run.add([Row(**(labels | {"extra": extra}), metric="left_out", value=None, note=reason)])


def stand_in(paper: str, scale: DgpScale, options: Mapping[str, Any]) -> str | None:
    """Return the stand-in for a network of the paper; None if the scale skips it. A user's model replaces all."""
    return options.get("model") or scale.models.get(paper)


def load_datasets(steps: Sequence[Step], scale: DgpScale, options: Mapping[str, Any]) -> dict[str, Dataset]:
    """Load the data of all steps, by the paper's data set; raise for networks that do not fit the data.

    A data set without a test part gets a fifth of its rows as test part.
    """
    by_paper: dict[str, Dataset] = {}
    loaded: dict[str, Dataset] = {}
    for step in steps:
        name = options.get("data") or scale.data[step.data]
        if name not in loaded:
            data = load(name, options.get("data_folder"), True)
            check_pictures(data)
            data = data if scale.examples is None else data.limit_rows(scale.examples, derive(0, "examples"))
            untested = data.train_size == len(data.inputs)
            loaded[name] = replace(data, train_size=int((1 - TESTED) * len(data.inputs))) if untested else data
        data = by_paper[step.data] = loaded[name]
        if (model := stand_in(step.model, scale, options)) is not None:
            check(create(model, data.input_shape, data.classes, derive(0, "check")), data.input_shape, data.classes)
    return by_paper
