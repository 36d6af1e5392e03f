"""Lemma 1 and Theorem 2 of dgp on a real run: plain SGD at one learning rate, as both assume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn.functional import cross_entropy

from secateur.config import defense_of_updates
from secateur.data.dataset import Dataset
from secateur.defenses.error_feedback import upload_of
from secateur.defenses.uploads import SendAll
from secateur.federated.collaborative.plan import Plan, Schedule
from secateur.federated.collaborative.training import CollaborativeTraining, depends_of
from secateur.functional import Functional
from secateur.interfaces import Batch, Params
from secateur.metrics.estimates import Measure, mean
from secateur.metrics.membership import Estimate
from secateur.models.create import create
from secateur.progress import progress
from secateur.runs.artifacts import Result
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.studies.claims import Finding, judge
from secateur.studies.dgp.results import DgpResults
from secateur.studies.dgp.scale import CIFAR10, DgpSetting
from secateur.studies.table import Cells, TableLine
from secateur.theory.convergence import (
    Checked,
    check_lemma_1,
    check_theorem_2,
    constants,
    full_gradient,
    observed_smoothness,
)

EPOCHS = 10  # if the scale sets none; the theorems assume one learning rate, so the paper's schedule does not apply
BOUNDS = {"lemma_1": "Lemma 1", "theorem_2": "Theorem 2"}
PARTS = ("measured", "bound", "tight", "trivial")
ENDLESS = 1e9  # cap on bound / trivial bound, for infinite bounds


@dataclass(frozen=True)
class Bounded:
    """A step that measures residual and gradient in a training by plain SGD, and computes the theorems' bounds."""

    defenses: tuple[str, ...]  # none, or with error feedback
    model: str = "lenet-zhu"  # no BatchNorm: its statistics make the evaluated loss differ from the trained loss
    data: str = CIFAR10

    def __call__(self, setting: DgpSetting) -> None:
        """Train once per defense, with the gradient over the full train part before every epoch."""
        model, data = setting.model(self), setting.data(self)
        if model is None:
            return
        for defense in self.defenses:
            training = self._training(setting, model, data, defense)
            measures = setting.run.stage("bounds", depends_of(training), partial(_follow, training)).data
            labels = setting.labels(model, data, defense, "bounds")
            setting.run.add(Row(**labels, metric=name, value=value) for name, value in measures.items())

    def _training(self, setting: DgpSetting, model: str, data: Dataset, defense: str) -> CollaborativeTraining:
        scale = setting.scale
        net = create(model, data.input_shape, data.classes, derive(setting.seed, "initialise", "shared"))
        schedule = Schedule(scale.epochs or EPOCHS, ((1, scale.learning_rate),))
        upload = upload_of(defense_of_updates(defense)) or SendAll()
        plan = Plan(scale.users, upload, schedule, momentum=0.0, weight_decay=0.0)
        rng = derive(setting.seed, "collaborate", "bounds")
        return CollaborativeTraining(net.to(setting.device), data, plan, rng, setting.device)


def _follow(training: CollaborativeTraining) -> Result:
    """Train, and evaluate both theorems at the observed constants.

    The minimal loss l* is taken as 0, and the smoothness K is estimated from the models between epochs.
    """
    data = training.data
    examples = Batch(data.inputs[: data.train_size], data.labels[: data.train_size]).to(training.device)
    models, rows, steps = [training.model()], [], 0

    def count(number: int) -> None:
        nonlocal steps
        steps += number
        advance(number)

    with progress("plain SGD, for the theorems", None, rate=True) as advance:
        for epoch in training.epochs(count):
            rows.append(epoch.row)
            models.append(training.model())
    gradients = [full_gradient(training.net, model, examples) for model in models]
    met = constants(rows, observed_smoothness(models, gradients), _loss(training, models[0], examples))
    squares = [sum(float(value.double().square().sum()) for value in gradient.values()) for gradient in gradients[:-1]]
    rate = training.plan.schedule.rate(1)
    checked = {
        "lemma_1": check_lemma_1(rows, steps // len(rows))[-1],
        "theorem_2": check_theorem_2(squares, met, rate, steps),
    }
    values = {f"{name}_{part}": getattr(check, part) for name, check in checked.items() for part in PARTS}
    return Result({}, values | {"gamma_1_whole": met.gamma, "smoothness": met.smoothness, "steps": float(steps)})


def _loss(training: CollaborativeTraining, model: Params, batch: Batch) -> float:
    """Return the mean loss over the train part, in batches of 1024 examples."""
    forward, total = Functional(training.net, training=False, device=training.device), 0.0
    parts = zip(batch.inputs.split(1024), batch.labels.split(1024), strict=True)  # type: ignore[no-untyped-call]
    for inputs, labels in parts:
        logits: Tensor = forward({name: value.to(training.device) for name, value in model.items()}, inputs)
        total += float(cross_entropy(logits, labels, reduction="sum").detach())
    return total / batch.size


def convergence(results: DgpResults) -> tuple[list[TableLine], list[Finding]]:
    """Return one line per theorem and training, and verdicts: the theorems hold, and their bounds are not vacuous."""
    lines: list[TableLine] = []
    holds: dict[str, Estimate | None] = {}
    tighter: dict[str, Estimate | None] = {}
    for course, measures in results.courses.get("bounds", {}).items():
        for name, title in BOUNDS.items():
            check, case = _checked(measures, name), f"{title}, {course.defense}"
            if check.bound == 0:  # everything is sent, so there is no residual
                continue
            holds[case] = _sure(1 - check.measured / check.bound)
            tighter[case] = _sure(1 - min(check.bound / check.trivial, ENDLESS))
            cells: Cells = {"measured": f"{check.measured:.3g}", "says at most": f"{check.bound:.3g}"}
            cells |= {"as tight as its proof allows": f"{check.tight:.3g}", "without a theorem": f"{check.trivial:.3g}"}
            cells |= {"gamma 1, all tensors": mean(measures["gamma_1_whole"])}
            cells |= {"K, at least": mean(measures["smoothness"])}
            mark = "broken" if not check.holds else "says nothing" if check.vacuous else ""
            lines.append(TableLine({"theorem": title, "defense": course.defense}, cells, "", mark))
    return lines, [
        judge("Lemma 1 and Theorem 2 hold: what is measured is below what they say", holds, "every", unit=""),
        judge("and say more than the assumptions alone, (t G)^2 and G^2", tighter, "every", unit=""),
    ]


def _checked(measures: Mapping[str, Measure], name: str) -> Checked:
    """Return the mean of each part over the seeds."""
    values = []
    for part in PARTS:
        by_seed = [estimate.value for estimate in measures[f"{name}_{part}"].values()]
        values.append(sum(by_seed) / len(by_seed))
    return Checked(*values)


def _sure(value: float) -> Estimate:
    """Return a number without sampling error: the bounds concern this one run."""
    return Estimate(value, value, value)
