"""Steps of dgp studies, and what they share: scale, data and networks.

A step inverts defended updates or trains collaboratively. cost.py, extensions.py and theory.py have further measures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from secateur.attacks.inversion.adaptive import settings_of_mode
from secateur.catalogue import Defense, find
from secateur.config import Invert, defense_of_updates, read
from secateur.data.dataset import Dataset
from secateur.defenses.error_feedback import upload_of
from secateur.defenses.precode import with_divergence
from secateur.defenses.uploads import SendAll
from secateur.errors import WrongInput
from secateur.evaluation.client import loss_of, protect, transform_of
from secateur.evaluation.client import scale as pixel_scale
from secateur.evaluation.setup import device_of
from secateur.experiments.context import SeedContext
from secateur.experiments.invert import ClientExposure, refusal_of
from secateur.federated.augment import crop_and_flip
from secateur.federated.collaborative.measurements import Row as Numbers
from secateur.federated.collaborative.plan import SCHEDULES, Liar, Plan, Schedule
from secateur.federated.collaborative.training import CollaborativeResult, CollaborativeTraining, Epoch, collaborate
from secateur.interfaces import Loss, Mask, Transform
from secateur.metrics.cost import communication, count_as_paper
from secateur.metrics.membership import share_of
from secateur.models.create import check, create
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.studies.study import Scale, load_pictures

CIFAR10 = "cifar10"
TESTED = 0.2  # test share of a data set without a test part
ADAPTIVE = ("support", "layer", "reapply", "mask", "support+follows", "loss")
NAMES = {"gi": "gi-dgp-paper"}  # catalogue names of attacks with the settings of the dgp paper
LAST = (  # measures of a training's last epoch
    *("train_loss", "gamma_1", "gamma_1_whole", "gradient_square", "residual_mean", "error_norm"),
    *("never_sent", "starved", "entries", "bytes", "ratio", "paper_ratio"),
)


@dataclass(frozen=True)
class Step:
    """A measurement of one network on one data set under several defenses, each of which adds rows to the run."""

    name: str  # an attack (ig, gi, rob, r-gap, ggl), training, ...; `--set steps=` selects by it
    defenses: tuple[str, ...]
    model: str = "resnet18"  # the paper's network
    data: str = CIFAR10  # the paper's data set
    batch_size: int = 1
    labels: Literal["inferred", "oracle"] = "inferred"
    adaptive: tuple[str, ...] = ADAPTIVE  # modes that may also be run: those that a defense is known to be weak against
    weights: Path | None = None  # a trained model
    residual: Path | None = None  # of a client in mid-training
    trained: bool = False  # the client has taken part in rounds before the attacked one, as many as the scale has
    silent: bool = False  # the first user of adgp lies: it broadcasts no position
    exact: bool = False  # the paper's network where another stands in for it, if the images are 3x32x32


@dataclass(frozen=True, eq=False)
class DgpSetting:
    """A step under one defense for one seed, with the run that its rows go to."""

    run: Run
    scale: Scale
    options: Mapping[str, Any]  # the user's model, data_folder, device and images, if set
    seed: int
    step: Step
    data: Dataset
    model: str
    defense: str

    @cached_property
    def device(self) -> torch.device:
        """Device of the run."""
        return device_of(self.invert())

    def invert(self, **more: Any) -> Invert:
        """Return the configuration of `secateur invert`."""
        scale = self.scale
        common = {name: self.options.get(name) for name in ("device", "data_folder", "images")} | {"model": self.model}
        common |= {"targets": scale.targets, "threads": scale.threads, "seeds": [self.seed]}
        common |= {"generator_steps": scale.generator_steps, "generator_width": scale.generator_width}
        return read(Invert, None, common | more)

    def labels(self, study: str, **extra: Any) -> dict[str, Any]:
        """Return the labels of a row without an attack; `study` is the kind of measurement."""
        labels = {"model": self.model, "dataset": self.data.name, "defense": self.defense, "seed": self.seed}
        return labels | {"extra": {"study": study} | extra}

    def leave_out(self, labels: dict[str, Any], reason: str) -> None:
        """Add a row for a measurement that could not be made, with the reason."""
        extra = labels["extra"] | {"study": "left out"}
        self.run.add([Row(**(labels | {"extra": extra}), metric="left_out", value=None, note=reason)])

    @property
    def exposure(self) -> ClientExposure:
        """The client under the defense, with all attackers of the step."""
        step = self.step
        config = self.invert(
            data=self.data.name,
            defense=[self.defense],
            attack=list(attack_texts(step.name, self.defense, self.scale, step.adaptive)),
            batch_size=step.batch_size,
            labels=step.labels,
            weights=step.weights,
            residual=step.residual if "error-feedback" in self.defense else None,
            **self._rounds_before(),
        )
        context = SeedContext(self.run, config, self.data, self.device, self.seed)
        trained = "" if step.weights is None else f"-{step.weights.stem}"  # a trained model's pictures: another folder
        trained += "-trained" if step.trained else ""
        folder = re.sub(r"[^\w.-]", "_", f"{self.model}-{self.data.name}-batch{step.batch_size}-{step.labels}{trained}")
        return ClientExposure(config, context, config.defense[0], f"pictures/{folder}")

    def _rounds_before(self) -> dict[str, Any]:
        """Return the fields of the rounds before the attacked update, at the learning rate of the first epoch."""
        if not self.step.trained:
            return {}
        rate = schedule_of(self.scale, self.model).rate(1)
        return {"rounds_before": self.scale.rounds_before, "users": self.scale.users, "learning_rate": rate}


def network_of(step: Step, scale: Scale, options: Mapping[str, Any], data: Dataset) -> str | None:
    """Return the network that a step measures; None if there is none."""
    model = stand_in(step.model, scale, options)
    if not step.exact:
        return model
    return step.model if model != step.model and data.input_shape == (3, 32, 32) else None


def stand_in(paper: str, scale: Scale, options: Mapping[str, Any]) -> str | None:
    """Return the stand-in for a network of the paper; None if the scale skips it. A user's model replaces all."""
    model: str | None = options.get("model") or scale.models.get(paper)
    return model


def load_datasets(steps: Sequence[Step], scale: Scale, options: Mapping[str, Any]) -> dict[str, Dataset]:
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


def attack_updates(setting: DgpSetting) -> None:
    """Run every attacker of a step; add a row with the reason for an attack that cannot be mounted."""
    exposure, step = setting.exposure, setting.step
    if setting.defense == step.defenses[0]:
        exposure.show_truths()
    exposure.show_guarantee()
    reasons: set[str] = set()  # adaptive attacks are mostly refused for the same reason as the plain one
    for attack in exposure.config.attacks:
        error = refusal_of(attack, exposure.client, exposure.config, exposure.targets[0], exposure.seed)
        if error is None:
            exposure.measure(attack)
        elif (reason := error.message) not in reasons:
            reasons.add(reason)
            labels = setting.labels("left out", batch_size=step.batch_size, attacked_by=step.name)
            setting.leave_out(labels, f"{attack} cannot be mounted: {reason}")


def attack_texts(attack: str, defense: str, scale: Scale, adaptive: Sequence[str] = ADAPTIVE) -> Iterator[str]:
    """Yield the plain attack, then one adaptive attack per mode in `adaptive` that the defense is weak against."""
    name = NAMES.get(attack, attack)
    defaults = find("inversion", name).defaults
    sizes = {"iterations": scale.rounds if attack == "ggl" else scale.iterations, "population": scale.population}
    text = ":".join([name, *(f"{key}={value}" for key, value in sizes.items() if key in defaults)])
    yield text
    yield from (f"{text}:{settings_of_mode(mode)}" for mode in weak_modes(attack, defense) if mode in adaptive)


def weak_modes(attack: str, defense: str) -> list[str]:
    """Return the modes of an attack that a defense is known to be weak against.

    Example:
        >>> weak_modes("gi", "dgp+error-feedback"), weak_modes("rob", "dgp"), weak_modes("rob", "soteria")
        (['support', 'reapply', 'support+follows'], ['support'], [])
    """
    entry = find("inversion", NAMES.get(attack, attack))
    adapts = entry.info.get("adapts", ADAPTIVE) if "adaptive" in entry.defaults else ()
    weak = [mode for part in defense_of_updates(defense).parts for mode in part.method.info.get("adaptive", ())]
    return [mode for mode in dict.fromkeys(weak) if mode in adapts]


@dataclass(frozen=True)
class Silence:
    """The lie of an ADGP user that broadcasts no position when it is drawn: no user sends anything in that round."""

    user: int = 0

    def __call__(self, user: int, inside: Mask) -> Mask:
        """Return the positions that the user broadcasts."""
        return {name: torch.zeros_like(where) for name, where in inside.items()} if user == self.user else inside

    def __str__(self) -> str:
        return f"user {self.user} broadcasts nothing"


def measure_training(setting: DgpSetting) -> None:
    """Train collaboratively, and add rows with the accuracy of each epoch and the other measures of the last."""
    scale, data, liar = setting.scale, setting.data, Silence() if setting.step.silent else None
    labels = setting.labels("training", users=scale.users, augmentation=augmentation_of(scale))
    labels["defense"] = setting.defense if liar is None else f"{setting.defense} ({liar})"
    try:
        trained = train(setting, liar=liar)
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
        return {"bytes": real.bytes, "bytes_up": real.up, "ratio": real.ratio, "paper_ratio": counted.ratio}


@dataclass(frozen=True, eq=False)
class Both:
    """Composition of two transforms."""

    first: Transform
    second: Transform

    def __call__(self, inputs: Tensor, rng: Generator) -> Tensor:
        """Return the inputs after both transforms."""
        return self.second(self.first(inputs, rng), rng)


def train(setting: DgpSetting, role: str = "shared", liar: Liar | None = None, **more: Any) -> CollaborativeResult:
    """Return the model that all users train together under a defense, as a stage of the run.

    Each `role` has its own initial model and random draws; `more` are further fields of the plan.
    """
    chosen, scale, data = defense_of_updates(setting.defense), setting.scale, setting.data
    if slow := [part.name for part in chosen.parts if part.name in scale.untrained]:
        raise WrongInput("defense", f"training under {', '.join(slow)} takes too long for this scale")
    net, precode = _protect(setting, role)
    loss: Loss = loss_of(chosen, more.get("batch_size", Plan.batch_size)) or cross_entropy
    if precode is not None:
        net, loss = with_divergence(net, loss, precode.beta)
    plan = Plan(
        scale.users,
        upload_of(chosen) or SendAll(),
        schedule_of(scale, setting.model),
        transform=_transform(scale, data, chosen),
        liar=liar,
        loss=loss,
        **more,
    )
    rng = derive(setting.seed, "collaborate", role)
    training = CollaborativeTraining(net.to(setting.device), data, plan, rng, setting.device)
    return collaborate(setting.run, training, measure=TrainingTraffic(plan.schedule.epochs))


def build_structure(setting: DgpSetting) -> nn.Module:
    """Return the network structure of a training under the defense."""
    return _protect(setting, "shared")[0]


def _protect(setting: DgpSetting, role: str) -> tuple[nn.Module, Any]:
    """Return the initial network of a role with the defense's part of it, and PRECODE if that is the defense."""
    data, seed = setting.data, setting.seed
    net = create(setting.model, data.input_shape, data.classes, derive(seed, "initialise", role))
    return protect(net, defense_of_updates(setting.defense), data.classes, derive(seed, "initialise", "defense"))


def augmentation_of(scale: Scale) -> str:
    """Return the augmentation of training pictures, for readers."""
    return "crop and flip" if scale.augment else "none"


def schedule_of(scale: Scale, model: str) -> Schedule:
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


def _transform(scale: Scale, data: Dataset, defense: Defense) -> Transform | None:
    shifted = crop_and_flip(data) if scale.augment else None
    changed = transform_of(defense, *pixel_scale(data.mean, data.std, data.inputs[: data.train_size]))
    return Both(shifted, changed) if shifted and changed else shifted or changed


def with_parts(data: Dataset, members: Tensor, others: Tensor) -> Dataset:
    """Return a data set whose train part is the members and whose test part is the others."""
    rows = torch.cat([members, others])
    return replace(data, inputs=data.inputs[rows], labels=data.labels[rows], train_size=len(members), writers=None)
