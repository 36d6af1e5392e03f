"""What dgp leaves open: ADGP under attack, and clients in the midst of a training, whose residual is sent along."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import sub
from pathlib import Path

import torch

from secateur.artifacts import explained, write
from secateur.errors import WrongInput
from secateur.interfaces import Mask, Params
from secateur.metrics.convergence import lemma_1
from secateur.metrics.membership import Estimate
from secateur.studies.claims import Finding, judge
from secateur.studies.dgp_accuracy import FEEDBACK, accuracy_lines
from secateur.studies.dgp_attacked import ADAPTIVE, Attacked
from secateur.studies.dgp_found import Course, Seen
from secateur.studies.dgp_listening import overheard_claims, overheard_lines
from secateur.studies.dgp_privacy import SAME, Cases, case, hidden, knowing_claims, privacy_lines
from secateur.studies.dgp_setting import CIFAR10, Setting
from secateur.studies.dgp_trained import Trained, train
from secateur.studies.measured import combine, mean
from secateur.studies.tables import Cells, Line

HELD = "What error feedback holds back"


@dataclass(frozen=True)
class Midway:
    """IG on the trained model: updates of a client that has no residual yet, and of one that kept its own."""

    defenses: tuple[str, ...]  # with error feedback
    model: str = "resnet18"
    data: str = CIFAR10
    adaptive: tuple[str, ...] = ADAPTIVE

    def __call__(self, setting: Setting) -> None:
        """Train, then attack the model and the first user as the training left them."""
        Trained(self.defenses, self.model, self.data)(setting)
        model, data = setting.model(self), setting.data(self)
        for number, defense in enumerate(self.defenses):
            if model is None:
                return
            try:
                made = train(setting, model, data, defense)
            except WrongInput:  # the training said so in a row
                continue
            weights = _kept(setting.run.folder / "models" / f"seed{setting.seed}-{number}.safetensors", made.state)
            residual = _kept(weights.with_suffix(".residual.safetensors"), made.client)
            met = (*(("none",) if number == 0 else ()), defense.removesuffix(FEEDBACK), defense)
            attacked = Attacked("ig", met, self.model, self.data, adaptive=self.adaptive)
            replace(attacked, weights=weights, residual=residual)(setting)


@dataclass(frozen=True)
class Silence:
    """One user of ADGP broadcasts no position at all whenever it is drawn: nobody sends anything in that round."""

    user: int = 0

    def __call__(self, user: int, inside: Mask) -> Mask:
        """What is broadcast."""
        return {name: torch.zeros_like(where) for name, where in inside.items()} if user == self.user else inside

    def __str__(self) -> str:
        return f"user {self.user} broadcasts nothing"


def _kept(path: Path, tensors: Params) -> Path:
    """Write tensors where `secateur invert --weights` and `--residual` read them too."""
    from safetensors.torch import save

    with explained(path):
        path.parent.mkdir(exist_ok=True)
    write(path, save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}))
    return path


def aligned(found: Seen) -> tuple[list[Line], list[Finding]]:
    """ADGP against attackers, which the paper leaves to future work."""
    cases: Cases = {}
    for place in found.select(defense="adgp"):
        other = place._replace(defense="dgp")
        cases |= hidden(found, place, other, case(found, place))
    own = {course.defense: course for course in found.courses.get("training", {})}
    honest, dgp = own.get(f"adgp{FEEDBACK}"), own.get(f"dgp{FEEDBACK}")
    lied = next((course for name, course in own.items() if str(Silence()) in name), None)
    cost, harm = _change(found, honest, dgp, "test_accuracy"), _change(found, lied, honest, "test_accuracy")
    claim = f"ADGP hides as much as DGP, within {SAME:g} (not in the paper)"
    return privacy_lines(found, lambda place: "") + overheard_lines(found) + accuracy_lines(found), [
        *overheard_claims(found),
        judge(claim, cases, "every", -SAME, unit=""),
        judge("ADGP is as accurate as DGP (at most 1 point less)", {"accuracy": cost}, "every", -0.01),
        judge(
            "one user that lies does no harm (at most 1 point; not in the paper)", {"accuracy": harm}, "every", -0.01
        ),
        *knowing_claims(found),
    ]


def residual(found: Seen) -> tuple[list[Line], list[Finding]]:
    """An empty against a trained residual, and what error feedback holds back."""
    cases: Cases = {}
    for place in found.places:
        if place.defense.endswith(FEEDBACK):
            empty = place._replace(defense=place.defense.removesuffix(FEEDBACK))
            cases |= hidden(found, place, empty, empty.defense)
    courses = {course.defense: course for course in found.courses.get("training", {})}
    dgp, top_k = courses.get(f"dgp{FEEDBACK}"), courses.get(f"top-k{FEEDBACK}")
    released = next((course for name, course in courses.items() if "release=" in name), None)
    starved = {"residual": _change(found, dgp, top_k, "residual_mean")}
    fewer = {"never sent": _change(found, dgp, released, "never_sent")}
    gain = {"accuracy": _change(found, released, dgp, "test_accuracy")}
    mine = "(not in the paper)"
    lines = privacy_lines(found, lambda place: "") + accuracy_lines(found) + _held(found)
    return lines, [
        judge(f"a residual from training hides more than an empty one {mine}", cases, "every", unit=""),
        judge(f"error feedback holds back more under DGP than under Top-k {mine}", starved, "every", unit=""),
        judge(f"releasing starved entries leaves fewer that were never sent {mine}", fewer, "every", unit=""),
        judge(f"and costs no accuracy (at most 1 point less) {mine}", gain, "every", -0.01),
    ]


def _held(found: Seen) -> list[Line]:
    """The residual's norm beside Lemma 1's bound, and the entries that were never sent."""
    lines = []
    for course, measures in found.courses.get("training", {}).items():
        if FEEDBACK not in course.defense:
            continue
        never = combine(lambda part, whole: part / whole, measures["never_sent"], measures["entries"])
        bound = combine(lemma_1, measures["gamma_1_whole"], measures["gradient_square"])
        cells: Cells = {"gamma 1, all tensors": mean(measures["gamma_1_whole"])}
        cells |= {"mean residual, squared norm": combine(lambda norm: norm * abs(norm), measures["error_norm"])}
        cells |= {"Lemma 1 says at most": "" if bound is None else f"{bound.value:.3g}", "share never sent": never}
        lines.append(Line({"defense": course.defense, "model": course.model}, cells, part=HELD))
    return lines


def _change(found: Seen, one: Course | None, other: Course | None, metric: str) -> Estimate | None:
    if one is None or other is None:
        return None
    courses = found.courses["training"]
    return combine(sub, courses[one].get(metric, {}), courses[other].get(metric, {}))
