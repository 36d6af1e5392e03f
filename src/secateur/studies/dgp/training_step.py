"""The training step of a dgp study: collaborative training under defenses, whose models later steps attack."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from secateur.catalogue import Defense
from secateur.config import defense_of_updates
from secateur.data.dataset import Dataset
from secateur.defenses.error_feedback import upload_of
from secateur.defenses.precode import with_divergence
from secateur.defenses.uploads import SendAll
from secateur.errors import WrongInput
from secateur.evaluation.client import protected, transform_of
from secateur.evaluation.client import scale as pixel_scale
from secateur.federated.augment import crop_and_flip
from secateur.federated.collaborative.measurements import Row as Numbers
from secateur.federated.collaborative.plan import SCHEDULES, Liar, Plan, Schedule
from secateur.federated.collaborative.training import CollaborativeResult, CollaborativeTraining, Epoch, collaborate
from secateur.interfaces import Loss, Transform
from secateur.metrics.cost import communication, paper_accounting
from secateur.metrics.membership import share_of
from secateur.models.create import create
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.studies.dgp.scale import CIFAR10, DgpScale, DgpSetting

LAST = (  # measures of a training's last epoch
    *("train_loss", "gamma_1", "gamma_1_whole", "gradient_square", "residual_mean", "error_norm"),
    *("never_sent", "starved", "entries", "bytes", "ratio", "paper_ratio"),
)


@dataclass(frozen=True)
class TrainingStep:
    """A step that trains one network collaboratively under every defense, and records its accuracy by epoch."""

    defenses: tuple[str, ...]
    model: str = "resnet18"
    data: str = CIFAR10
    liar: Liar | None = None  # of adgp: broadcasts other positions than the honest ones

    def __call__(self, setting: DgpSetting) -> None:
        """Train, and add rows with the accuracy of each epoch and the other measures of the last."""
        model, data = setting.model(self), setting.data(self)
        if model is None:
            return
        for defense in self.defenses:
            more = {"users": setting.scale.users, "augmentation": "crop and flip" if setting.scale.augment else "none"}
            named = defense if self.liar is None else f"{defense} ({self.liar})"
            labels = setting.labels(model, data, named, "training", **more)
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
        real, counted = communication(epoch.sent[0], epoch.inside), paper_accounting(epoch.sent[0], epoch.inside)
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
    net, precode = protected(net, chosen, data.classes, derive(seed, "initialise", "defense"))
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
    training = CollaborativeTraining(
        net.to(setting.device), data, plan, derive(seed, "collaborate", role), setting.device
    )
    return collaborate(setting.run, training, measure=TrainingTraffic(plan.schedule.epochs))


def structure(setting: DgpSetting, model: str, data: Dataset, defense: str) -> nn.Module:
    """Return the network structure of a training under this defense."""
    net = create(model, data.input_shape, data.classes, derive(setting.seed, "initialise", "shared"))
    return protected(net, defense_of_updates(defense), data.classes, derive(setting.seed, "initialise", "defense"))[0]


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
    mean, std = pixel_scale(data.mean, data.std, data.inputs[: data.train_size])
    changed = transform_of(defense, mean, std)
    if shifted is not None and changed is not None:
        return Both(shifted, changed)
    return shifted or changed


def parted(data: Dataset, members: Tensor, others: Tensor) -> Dataset:
    """Return a data set whose train part is the members and whose test part is the others."""
    rows = torch.cat([members, others])
    return replace(data, inputs=data.inputs[rows], labels=data.labels[rows], train_size=len(members), writers=None)
