"""Steps of dgp studies: inversion of defended updates, and collaborative training, whose models later steps attack."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from secateur.catalogue import Choice, Defense, find
from secateur.config import defense_of_updates
from secateur.data.dataset import Dataset
from secateur.defenses.error_feedback import upload_of
from secateur.defenses.precode import with_divergence
from secateur.defenses.uploads import SendAll
from secateur.errors import WrongInput
from secateur.evaluation.client import check_attack, protect, transform_of
from secateur.evaluation.client import scale as pixel_scale
from secateur.experiments.context import SeedContext
from secateur.experiments.invert import ClientExposure, chance_of
from secateur.experiments.invert_targets import add_untrained_generator, needs_generator
from secateur.federated.augment import crop_and_flip
from secateur.federated.collaborative.measurements import Row as Numbers
from secateur.federated.collaborative.plan import SCHEDULES, Liar, Plan, Schedule
from secateur.federated.collaborative.training import CollaborativeResult, CollaborativeTraining, Epoch, collaborate
from secateur.interfaces import Loss, Transform
from secateur.metrics.cost import communication, count_as_paper
from secateur.metrics.membership import share_of
from secateur.models.create import create
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.studies.dgp.scale import CIFAR10, DgpScale, DgpSetting

ADAPTIVE = ("support", "layer", "reapply", "mask")
NAMES = {"gi": "gi-dgp-paper"}  # catalogue names of attacks with the settings of the dgp paper
LAST = (  # measures of a training's last epoch
    *("train_loss", "gamma_1", "gamma_1_whole", "gradient_square", "residual_mean", "error_norm"),
    *("never_sent", "starved", "entries", "bytes", "ratio", "paper_ratio"),
)


@dataclass(frozen=True)
class AttackStep:
    """A step that runs one attack on the updates of one network, under every defense."""

    attack: str  # ig, gi, rob, r-gap or ggl
    defenses: tuple[str, ...]
    model: str = "resnet18"
    data: str = CIFAR10
    batch_size: int = 1
    labels: Literal["inferred", "oracle"] = "inferred"
    adaptive: tuple[str, ...] = ADAPTIVE  # modes that may also be run: those that a defense is known to be weak against
    weights: Path | None = None  # a trained model
    residual: Path | None = None  # of a client in mid-training

    @property
    def name(self) -> str:
        """The attack's name, which selects the step."""
        return self.attack

    def __call__(self, setting: DgpSetting) -> None:
        """Run every attacker; add a row with the reason for an attack that cannot be mounted."""
        model = setting.model(self)
        if model is None:
            return
        for number, defense in enumerate(self.defenses):
            exposure = self.exposure(setting, model, defense)
            if number == 0:
                exposure.show_truths()
            exposure.show_guarantee()
            reasons: set[str] = set()  # adaptive attacks are mostly refused for the same reason as the plain one
            for attack in exposure.config.attacks:
                if (reason := _refused(exposure, attack)) is None:
                    exposure.measure(attack)
                elif reason not in reasons:
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


def _refused(exposure: ClientExposure, attack: Choice) -> str | None:
    """Return the reason why an attack cannot be mounted; None if it can."""
    client = exposure.client
    attacked = add_untrained_generator(client, exposure.config) if needs_generator(attack) else client
    try:
        check_attack(attack, attacked, exposure.targets[0], chance_of(exposure.seed, attack)[0])
    except WrongInput as error:
        return error.message
    return None


@dataclass(frozen=True)
class TrainingStep:
    """A step that trains one network collaboratively under every defense, and records its accuracy by epoch."""

    defenses: tuple[str, ...]
    model: str = "resnet18"
    data: str = CIFAR10
    liar: Liar | None = None  # of adgp: broadcasts other positions than the honest ones
    name: ClassVar[str] = "training"

    def __call__(self, setting: DgpSetting) -> None:
        """Train, and add rows with the accuracy of each epoch and the other measures of the last."""
        model, data = setting.model(self), setting.data(self)
        if model is None:
            return
        for defense in self.defenses:
            more = {"users": setting.scale.users, "augmentation": setting.scale.augmentation}
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
