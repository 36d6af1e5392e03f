"""Who only listens: ADGP's broadcast shows every user where the chosen one's gradient is large, and so its labels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from secateur.attacks.inversion.labels import classifier, labels_right
from secateur.attacks.inversion.updates import gradient_update
from secateur.config import defense_of_updates
from secateur.defenses.adgp import AlignedDualGradientPruning
from secateur.defenses.error_feedback import upload_of
from secateur.interfaces import Batch, Mask
from secateur.metrics.membership import Estimate, share_of
from secateur.rows import Row
from secateur.runs import Result
from secateur.studies.claims import Finding, judge
from secateur.studies.dgp_attacked import Attacked
from secateur.studies.dgp_found import Seen
from secateur.studies.dgp_setting import CIFAR10, Setting
from secateur.studies.measured import mean
from secateur.studies.tables import Cells, Line

LISTENED = "What the broadcast alone tells"


@dataclass(frozen=True)
class Overheard:
    """The labels of the user that broadcasts, guessed from its positions alone: an attacker who is any other user."""

    defense: str  # adgp
    model: str = "resnet18"
    data: str = CIFAR10

    def __call__(self, setting: Setting) -> None:
        """One example an update: the class with the most positions of the classifier's weight in I."""
        model = setting.model(self)
        if model is None:
            return
        exposure = Attacked("ig", (self.defense,), self.model, self.data).exposure(setting, model, self.defense)
        upload, client = upload_of(defense_of_updates(self.defense)), exposure.client
        assert isinstance(upload, AlignedDualGradientPruning)

        def listen() -> Result:
            name, right = classifier(client.net, exposure.bench.data.classes), 0
            for target in exposure.targets:
                assert isinstance(target, Batch)
                gradient = gradient_update(client.net, client.state, target).values
                right += labels_right(overheard(upload.positions(gradient), name), target.labels)
            return Result({}, {"right": right / len(exposure.targets)})

        every = range(len(exposure.targets))
        depends = exposure.depends(exposure.config.attacks[0], every) | {"attack": "overheard"}
        right = setting.run.stage("overheard", depends, listen).data["right"]
        labels = setting.labels(model, exposure.bench.data, self.defense, "overheard")
        classes = exposure.bench.data.classes
        setting.run.add(
            [
                Row(**labels, metric="label_accuracy", **share_of(right, len(every))._asdict()),
                Row(**labels, metric="label_chance", value=1 / classes),
            ]
        )


def overheard(inside: Mask, layer: str) -> Tensor:
    """(1,) the label of one example: dL/dz is largest there (dgp Section 4.1), and so is its row of dW.

    Example:
        >>> import torch
        >>> overheard({"4.weight": torch.tensor([[True, False], [True, True], [False, False]])}, "4").tolist()
        [1]
    """
    name = f"{layer}.weight" if layer else "weight"
    return inside[name].sum(1).argmax().view(1)


def overheard_lines(found: Seen) -> list[Line]:
    """What was heard, a line each."""
    lines = []
    for course, measures in found.courses.get("overheard", {}).items():
        cells: Cells = {"label_accuracy": mean(measures["label_accuracy"]), "chance": mean(measures["label_chance"])}
        lines.append(Line({"defense": course.defense, "model": course.model}, cells, part=LISTENED))
    return lines


def overheard_claims(found: Seen) -> list[Finding]:
    """Whether the broadcast keeps labels to itself."""
    courses = found.courses.get("overheard", {})
    told: dict[str, Estimate | None] = {}
    for course, measures in courses.items():
        right, chance = mean(measures["label_accuracy"]), mean(measures["label_chance"])
        if right is not None and chance is not None:
            least, most = chance.value - right.high, chance.value - right.low
            told[course.model] = Estimate(chance.value - right.value, least, most)
    claim = "who only listens to ADGP's broadcast guesses labels no better than by chance (not in the paper)"
    return [judge(claim, told, "every", -0.05)] if told else []
