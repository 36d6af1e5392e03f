"""Steps and tables of dgp that go beyond the paper: ADGP under attack, and clients in mid-training with their residual.

ADGP's broadcast shows every user where the chosen user's gradient is large, and so reveals its labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import sub
from pathlib import Path

import torch
from torch import Tensor

from secateur.attacks.inversion.label_inference import labels_right
from secateur.attacks.inversion.updates import gradient_update
from secateur.config import defense_of_updates
from secateur.defenses.adgp import AlignedDualGradientPruning
from secateur.defenses.error_feedback import upload_of
from secateur.errors import WrongInput
from secateur.functional import classifier
from secateur.interfaces import Batch, Mask, Params
from secateur.metrics.estimates import combine, mean
from secateur.metrics.membership import Estimate, share_of
from secateur.runs.artifacts import Result, explained, write
from secateur.runs.rows import Row
from secateur.studies.claims import Finding, judge
from secateur.studies.dgp.accuracy_tables import FEEDBACK, accuracy_lines
from secateur.studies.dgp.attack_step import ADAPTIVE, Attacked
from secateur.studies.dgp.privacy_tables import SAME, Cases, case, hidden, knowing_claims, privacy_lines
from secateur.studies.dgp.results import DgpResults, TrainingKey
from secateur.studies.dgp.scale import CIFAR10, DgpSetting
from secateur.studies.dgp.training_step import TrainingStep, train
from secateur.studies.table import Cells, TableLine
from secateur.theory.convergence import lemma_1

LISTENED = "What the broadcast alone tells"
HELD = "What error feedback holds back"


@dataclass(frozen=True)
class Overheard:
    """The step in which any other user guesses the labels of the user that broadcasts, from its positions alone."""

    defense: str  # adgp
    model: str = "resnet18"
    data: str = CIFAR10

    def __call__(self, setting: DgpSetting) -> None:
        """Guess each example's label: the class with the most positions of the classifier's weight in I."""
        model = setting.model(self)
        if model is None:
            return
        exposure = Attacked("ig", (self.defense,), self.model, self.data).exposure(setting, model, self.defense)
        upload, client = upload_of(defense_of_updates(self.defense)), exposure.client
        assert isinstance(upload, AlignedDualGradientPruning)

        def listen() -> Result:
            name, right = classifier(client.net, exposure.context.data.classes), 0
            for target in exposure.targets:
                assert isinstance(target, Batch)
                gradient = gradient_update(client.net, client.state, target).values
                right += labels_right(overheard(upload.positions(gradient), name), target.labels)
            return Result({}, {"right": right / len(exposure.targets)})

        numbers = range(len(exposure.targets))
        depends = exposure.depends(exposure.config.attacks[0], numbers) | {"attack": "overheard"}
        right = setting.run.stage("overheard", depends, listen).data["right"]
        labels = setting.labels(model, exposure.context.data, self.defense, "overheard")
        classes = exposure.context.data.classes
        setting.run.add(
            [
                Row(**labels, metric="label_accuracy", **share_of(right, len(numbers))._asdict()),
                Row(**labels, metric="label_chance", value=1 / classes),
            ]
        )


@dataclass(frozen=True)
class Midway:
    """The step in which IG attacks the trained model: a client without a residual yet, and one with its own."""

    defenses: tuple[str, ...]  # with error feedback
    model: str = "resnet18"
    data: str = CIFAR10
    adaptive: tuple[str, ...] = ADAPTIVE

    def __call__(self, setting: DgpSetting) -> None:
        """Train, then attack the model and the first user as the training left them."""
        TrainingStep(self.defenses, self.model, self.data)(setting)
        model, data = setting.model(self), setting.data(self)
        for number, defense in enumerate(self.defenses):
            if model is None:
                return
            try:
                trained = train(setting, model, data, defense)
            except WrongInput:  # the training has a row that says so
                continue
            weights = _kept(setting.run.folder / "models" / f"seed{setting.seed}-{number}.safetensors", trained.state)
            residual = _kept(weights.with_suffix(".residual.safetensors"), trained.client)
            defenses = (*(("none",) if number == 0 else ()), defense.removesuffix(FEEDBACK), defense)
            step = Attacked("ig", defenses, self.model, self.data, adaptive=self.adaptive)
            replace(step, weights=weights, residual=residual)(setting)


@dataclass(frozen=True)
class Silence:
    """The lie of an ADGP user that broadcasts no position when it is drawn: no user sends anything in that round."""

    user: int = 0

    def __call__(self, user: int, inside: Mask) -> Mask:
        """Return the positions that the user broadcasts."""
        return {name: torch.zeros_like(where) for name, where in inside.items()} if user == self.user else inside

    def __str__(self) -> str:
        return f"user {self.user} broadcasts nothing"


def aligned(results: DgpResults) -> tuple[list[TableLine], list[Finding]]:
    """Return the table of ADGP against attackers, which the paper leaves to future work."""
    cases: Cases = {}
    for cell in results.select(defense="adgp"):
        other = cell._replace(defense="dgp")
        cases |= hidden(results, cell, other, case(results, cell))
    courses = _trainings(results)
    honest, dgp = courses.get(f"adgp{FEEDBACK}"), courses.get(f"dgp{FEEDBACK}")
    lied = next((course for name, course in courses.items() if str(Silence()) in name), None)
    cost, harm = _change(results, honest, dgp, "test_accuracy"), _change(results, lied, honest, "test_accuracy")
    claim = f"ADGP hides as much as DGP, within {SAME:g} (not in the paper)"
    return privacy_lines(results, lambda cell: "") + overheard_lines(results) + accuracy_lines(results), [
        *overheard_claims(results),
        judge(claim, cases, "every", -SAME, unit=""),
        judge("ADGP is as accurate as DGP (at most 1 point less)", {"accuracy": cost}, "every", -0.01),
        judge(
            "one user that lies does no harm (at most 1 point; not in the paper)", {"accuracy": harm}, "every", -0.01
        ),
        *knowing_claims(results),
    ]


def residual(results: DgpResults) -> tuple[list[TableLine], list[Finding]]:
    """Return the table of an empty against a trained residual, with the entries that error feedback holds back."""
    cases: Cases = {}
    for cell in results.places:
        if cell.defense.endswith(FEEDBACK):
            empty = cell._replace(defense=cell.defense.removesuffix(FEEDBACK))
            cases |= hidden(results, cell, empty, empty.defense)
    courses = _trainings(results)
    dgp, top_k = courses.get(f"dgp{FEEDBACK}"), courses.get(f"top-k{FEEDBACK}")
    released = next((course for name, course in courses.items() if "release=" in name), None)
    starved = {"residual": _change(results, dgp, top_k, "residual_mean")}
    fewer = {"never sent": _change(results, dgp, released, "never_sent")}
    gain = {"accuracy": _change(results, released, dgp, "test_accuracy")}
    mine = "(not in the paper)"
    lines = privacy_lines(results, lambda cell: "") + accuracy_lines(results) + _held(results)
    return lines, [
        judge(f"a residual from training hides more than an empty one {mine}", cases, "every", unit=""),
        judge(f"error feedback holds back more under DGP than under Top-k {mine}", starved, "every", unit=""),
        judge(f"releasing starved entries leaves fewer that were never sent {mine}", fewer, "every", unit=""),
        judge(f"and costs no accuracy (at most 1 point less) {mine}", gain, "every", -0.01),
    ]


def overheard(inside: Mask, layer: str) -> Tensor:
    """Return (1,) the guessed label of one example: dL/dz is largest there (dgp Section 4.1), and so is its row of dW.

    Example:
        >>> import torch
        >>> overheard({"4.weight": torch.tensor([[True, False], [True, True], [False, False]])}, "4").tolist()
        [1]
    """
    name = f"{layer}.weight" if layer else "weight"
    return inside[name].sum(1).argmax().view(1)


def _kept(path: Path, tensors: Params) -> Path:
    """Write tensors to a file that `secateur invert --weights` and `--residual` read too."""
    from safetensors.torch import save

    with explained(path):
        path.parent.mkdir(exist_ok=True)
    write(path, save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}))
    return path


def overheard_lines(results: DgpResults) -> list[TableLine]:
    """Return a line for each run: the accuracy of labels guessed from the broadcast."""
    lines = []
    for course, measures in results.courses.get("overheard", {}).items():
        cells: Cells = {"label_accuracy": mean(measures["label_accuracy"]), "chance": mean(measures["label_chance"])}
        lines.append(TableLine({"defense": course.defense, "model": course.model}, cells, part=LISTENED))
    return lines


def overheard_claims(results: DgpResults) -> list[Finding]:
    """Judge if the broadcast hides the labels."""
    courses = results.courses.get("overheard", {})
    cases: Cases = {}
    for course, measures in courses.items():
        right, chance = mean(measures["label_accuracy"]), mean(measures["label_chance"])
        if right is not None and chance is not None:
            least, most = chance.value - right.high, chance.value - right.low
            cases[course.model] = Estimate(chance.value - right.value, least, most)
    claim = "who only listens to ADGP's broadcast guesses labels no better than by chance (not in the paper)"
    return [judge(claim, cases, "every", -0.05)] if cases else []


def _held(results: DgpResults) -> list[TableLine]:
    """Return lines of the residual's norm beside Lemma 1's bound, and of the entries that were never sent."""
    lines = []
    for course, measures in results.courses.get("training", {}).items():
        if FEEDBACK not in course.defense:
            continue
        never = combine(lambda part, whole: part / whole, measures["never_sent"], measures["entries"])
        bound = combine(lemma_1, measures["gamma_1_whole"], measures["gradient_square"])
        cells: Cells = {"gamma 1, all tensors": mean(measures["gamma_1_whole"])}
        cells |= {"mean residual, squared norm": combine(lambda norm: norm * abs(norm), measures["error_norm"])}
        cells |= {"Lemma 1 says at most": "" if bound is None else f"{bound.value:.3g}", "share never sent": never}
        lines.append(TableLine({"defense": course.defense, "model": course.model}, cells, part=HELD))
    return lines


def _trainings(results: DgpResults) -> dict[str, TrainingKey]:
    """Return the trainings by their defense."""
    return {course.defense: course for course in results.courses.get("training", {})}


def _change(results: DgpResults, one: TrainingKey | None, other: TrainingKey | None, metric: str) -> Estimate | None:
    """Return a metric of one training less that of the other."""
    if one is None or other is None:
        return None
    courses = results.courses["training"]
    return combine(sub, courses[one].get(metric, {}), courses[other].get(metric, {}))
