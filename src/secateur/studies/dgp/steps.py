"""Steps of dgp studies, and what they share: scale, data and networks.

An attack step inverts defended updates. A training step trains collaboratively; later steps attack its models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from secateur.catalogue import Defense, find
from secateur.config import Invert, defense_of_updates, read
from secateur.data.dataset import Dataset
from secateur.defenses.error_feedback import upload_of
from secateur.defenses.precode import with_divergence
from secateur.defenses.uploads import SendAll
from secateur.errors import WrongInput
from secateur.evaluation.client import protect, transform_of
from secateur.evaluation.client import scale as pixel_scale
from secateur.evaluation.setup import device_of
from secateur.experiments.context import SeedContext
from secateur.experiments.invert import ClientExposure, refusal_of
from secateur.federated.augment import crop_and_flip
from secateur.federated.collaborative.measurements import Row as Numbers
from secateur.federated.collaborative.plan import SCHEDULES, Liar, Plan, Schedule
from secateur.federated.collaborative.training import CollaborativeResult, CollaborativeTraining, Epoch, collaborate
from secateur.interfaces import Loss, Transform
from secateur.metrics.cost import communication, count_as_paper
from secateur.metrics.membership import share_of
from secateur.models.create import check, create
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.studies.study import load_pictures, read_scales

NETWORKS = ("resnet18", "lenet-zhu", "cnn6", "vgg11-bn")  # the paper's
CIFAR10, CIFAR100 = "cifar10", "cifar100"
TESTED = 0.2  # test share of a data set without a test part
ADAPTIVE = ("support", "layer", "reapply", "mask")
NAMES = {"gi": "gi-dgp-paper"}  # catalogue names of attacks with the settings of the dgp paper
LAST = (  # measures of a training's last epoch
    *("train_loss", "gamma_1", "gamma_1_whole", "gradient_square", "residual_mean", "error_norm"),
    *("never_sent", "starved", "entries", "bytes", "ratio", "paper_ratio"),
)


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


@dataclass(frozen=True)
class Step:
    """A measurement of one network on one data set under several defenses, which adds its rows to the run."""

    defenses: tuple[str, ...]
    model: str = "resnet18"  # the paper's network
    data: str = CIFAR10  # the paper's data set
    name: ClassVar[str]  # by which `--set steps=` selects the step

    def __call__(self, setting: DgpSetting) -> None:
        """Measure under every defense, unless the scale skips the network."""
        model = self.network(setting)
        if model is not None:
            for defense in self.defenses:
                self.measure(setting, model, defense)

    def network(self, setting: DgpSetting) -> str | None:
        """Return the stand-in for the paper's network; None if the scale skips the network."""
        return stand_in(self.model, setting.scale, setting.options)

    def measure(self, setting: DgpSetting, model: str, defense: str) -> None:
        """Measure under one defense, and add the rows; stages finished by an earlier start of the run are reused."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class DgpSetting:
    """The context that all steps of a study share."""

    run: Run
    scale: DgpScale
    options: Mapping[str, Any]  # the user's model, data_folder, device and images, if set
    datasets: Mapping[str, Dataset]  # by the paper's data set that they stand in for
    seed: int

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
            data = load_pictures(name, options, scale.examples)
            untested = data.train_size == len(data.inputs)
            loaded[name] = replace(data, train_size=int((1 - TESTED) * len(data.inputs))) if untested else data
        data = by_paper[step.data] = loaded[name]
        if (model := stand_in(step.model, scale, options)) is not None:
            check(create(model, data.input_shape, data.classes, derive(0, "check")), data.input_shape, data.classes)
    return by_paper


@dataclass(frozen=True)
class AttackStep(Step):
    """A step that runs one attack on the updates of one network, under every defense."""

    attack: str = "ig"  # or gi, rob, r-gap or ggl
    batch_size: int = 1
    labels: Literal["inferred", "oracle"] = "inferred"
    adaptive: tuple[str, ...] = ADAPTIVE  # modes that may also be run: those that a defense is known to be weak against
    weights: Path | None = None  # a trained model
    residual: Path | None = None  # of a client in mid-training

    @property
    def name(self) -> str:  # type: ignore[override]
        """The attack's name, which selects the step."""
        return self.attack

    def measure(self, setting: DgpSetting, model: str, defense: str) -> None:
        """Run every attacker; add a row with the reason for an attack that cannot be mounted."""
        exposure = self.exposure(setting, model, defense)
        if defense == self.defenses[0]:
            exposure.show_truths()
        exposure.show_guarantee()
        reasons: set[str] = set()  # adaptive attacks are mostly refused for the same reason as the plain one
        for attack in exposure.config.attacks:
            error = refusal_of(attack, exposure.client, exposure.config, exposure.targets[0], exposure.seed)
            if error is None:
                exposure.measure(attack)
            elif (reason := error.message) not in reasons:
                reasons.add(reason)
                more = {"batch_size": self.batch_size, "attacked_by": self.attack}
                labels = setting.labels(model, exposure.context.data, defense, "left out", **more)
                setting.leave_out(labels, f"{attack} cannot be mounted: {reason}")

    def exposure(self, setting: DgpSetting, model: str, defense: str) -> ClientExposure:
        """Return the client under a defense, with all its attackers."""
        data = setting.data(self)
        config = setting.invert(
            model,
            data=data.name,
            defense=[defense],
            attack=list(attack_texts(self.attack, defense, setting.scale, self.adaptive)),
            batch_size=self.batch_size,
            labels=self.labels,
            weights=self.weights,
            residual=self.residual if "error-feedback" in defense else None,
        )
        context = SeedContext(setting.run, config, data, setting.device, setting.seed)
        trained = "" if self.weights is None else f"-{self.weights.stem}"  # a trained model's pictures: another folder
        folder = re.sub(r"[^\w.-]", "_", f"{model}-{data.name}-batch{self.batch_size}-{self.labels}{trained}")
        return ClientExposure(config, context, config.defense[0], f"pictures/{folder}")


def attack_texts(attack: str, defense: str, scale: DgpScale, adaptive: Sequence[str] = ADAPTIVE) -> Iterator[str]:
    """Yield the plain attack, then one adaptive attack per mode in `adaptive` that the defense is weak against."""
    name = NAMES.get(attack, attack)
    entry = find("inversion", name)
    defaults, adapts = entry.defaults, entry.info.get("adapts", ADAPTIVE)
    sizes = {"iterations": scale.rounds if attack == "ggl" else scale.iterations, "population": scale.population}
    text = ":".join([name, *(f"{key}={value}" for key, value in sizes.items() if key in defaults)])
    yield text
    if "adaptive" in defaults:
        weak = [mode for part in defense_of_updates(defense).parts for mode in part.method.info.get("adaptive", ())]
        yield from (f"{text}:adaptive={mode}" for mode in dict.fromkeys(weak) if mode in adapts and mode in adaptive)


@dataclass(frozen=True)
class TrainingStep(Step):
    """A step that trains one network collaboratively under every defense, and records its accuracy by epoch."""

    liar: Liar | None = None  # of adgp: broadcasts other positions than the honest ones
    name: ClassVar[str] = "training"

    def measure(self, setting: DgpSetting, model: str, defense: str) -> None:
        """Train, and add rows with the accuracy of each epoch and the other measures of the last."""
        data, more = setting.data(self), {"users": setting.scale.users, "augmentation": setting.scale.augmentation}
        title = defense if self.liar is None else f"{defense} ({self.liar})"
        labels = setting.labels(model, data, title, "training", **more)
        try:
            trained = train(setting, model, data, defense, liar=self.liar)
        except WrongInput as error:
            setting.leave_out(labels, f"not trained: {error.message}")
        else:
            setting.run.add(history_rows(labels, trained, len(data.inputs) - data.train_size))


@dataclass(frozen=True)
class TrainingTraffic:
    """Traffic of a training's last step, in bytes and as a share of dense: as encoded, and as dgp counts."""

    epochs: int

    def __call__(self, epoch: Epoch) -> Numbers:
        """Measure in the last epoch only, because encoding takes as long as several steps."""
        if epoch.row["epoch"] < self.epochs:
            return {}
        real, counted = communication(epoch.sent[0], epoch.inside), count_as_paper(epoch.sent[0], epoch.inside)
        return {"bytes": real.bytes, "ratio": real.ratio, "paper_ratio": counted.ratio}


@dataclass(frozen=True, eq=False)
class Both:
    """Composition of two transforms."""

    first: Transform
    second: Transform

    def __call__(self, inputs: Tensor, rng: Generator) -> Tensor:
        """Return the inputs after both transforms."""
        return self.second(self.first(inputs, rng), rng)


def train(
    setting: DgpSetting, model: str, data: Dataset, defense: str, role: str = "shared", liar: Liar | None = None
) -> CollaborativeResult:
    """Return the model that all users train together under a defense, as a stage of the run.

    Each `role` has its own initial model and random draws.
    """
    chosen, scale, seed = defense_of_updates(defense), setting.scale, setting.seed
    if slow := [part.name for part in chosen.parts if part.name in scale.untrained]:
        raise WrongInput("defense", f"training under {', '.join(slow)} takes too long for this scale")
    net = create(model, data.input_shape, data.classes, derive(seed, "initialise", role))
    net, precode = protect(net, chosen, data.classes, derive(seed, "initialise", "defense"))
    loss: Loss = cross_entropy
    if precode is not None:
        net, loss = with_divergence(net, cross_entropy, precode.beta)
    plan = Plan(
        scale.users,
        upload_of(chosen) or SendAll(),
        schedule_of(scale, model),
        transform=_transform(scale, data, chosen),
        liar=liar,
        loss=loss,
    )
    rng = derive(seed, "collaborate", role)
    training = CollaborativeTraining(net.to(setting.device), data, plan, rng, setting.device)
    return collaborate(setting.run, training, measure=TrainingTraffic(plan.schedule.epochs))


def build_structure(setting: DgpSetting, model: str, data: Dataset, defense: str) -> nn.Module:
    """Return the network structure of a training under this defense."""
    net = create(model, data.input_shape, data.classes, derive(setting.seed, "initialise", "shared"))
    return protect(net, defense_of_updates(defense), data.classes, derive(setting.seed, "initialise", "defense"))[0]


def schedule_of(scale: DgpScale, model: str) -> Schedule:
    """Return the paper's schedule, which has separate rates for LeNet, or the scale's epochs at one rate."""
    if scale.epochs is not None:
        return Schedule(scale.epochs, ((1, scale.learning_rate),))
    return SCHEDULES["paper-lenet" if model == "lenet-zhu" else "paper"]


def history_rows(labels: dict[str, Any], trained: CollaborativeResult, tested: int) -> list[Row]:
    """Return rows with each epoch's accuracy, with Wilson's interval, and the other measures of the last epoch."""
    rows, last = [], trained.history[-1]
    extra = labels["extra"] | {"epochs": len(trained.history)}
    for epoch in trained.history:
        labelled = labels | {"extra": extra | {"epoch": epoch["epoch"]}}
        rows.append(Row(**labelled, metric="test_accuracy", **share_of(epoch["test_accuracy"], tested)._asdict()))
    labelled = labels | {"extra": extra | {"epoch": last["epoch"]}}
    rows += [Row(**labelled, metric=name, value=last[name]) for name in LAST if name in last]
    seconds = sum(epoch["seconds"] for epoch in trained.history) / len(trained.history)
    return [*rows, Row(**labelled, metric="epoch_seconds", value=seconds, timing=True)]


def _transform(scale: DgpScale, data: Dataset, defense: Defense) -> Transform | None:
    shifted = crop_and_flip(data) if scale.augment else None
    changed = transform_of(defense, *pixel_scale(data.mean, data.std, data.inputs[: data.train_size]))
    return Both(shifted, changed) if shifted and changed else shifted or changed


def with_parts(data: Dataset, members: Tensor, others: Tensor) -> Dataset:
    """Return a data set whose train part is the members and whose test part is the others."""
    rows = torch.cat([members, others])
    return replace(data, inputs=data.inputs[rows], labels=data.labels[rows], train_size=len(members), writers=None)
