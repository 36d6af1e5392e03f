"""Steps and tables that go beyond dgp: ADGP under attack, clients in mid-training, and membership inference.

ADGP's broadcast shows every user where the chosen user's gradient is large, and so reveals its labels. A client in
mid-training has a residual. Membership inference attacks the models trained under defenses of updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from secateur.attacks.inversion.label_inference import labels_right
from secateur.attacks.inversion.updates import gradient_update
from secateur.catalogue import Choice
from secateur.config import choice, defense_of_updates
from secateur.data.dataset import Dataset, fingerprint
from secateur.data.partition import Part, in_out, victim_shadow
from secateur.defenses.adgp import AlignedDualGradientPruning
from secateur.defenses.error_feedback import upload_of
from secateur.errors import WrongInput
from secateur.evaluation.membership import attack_rows, cache_answers, evaluate_guesses, flat_labels
from secateur.federated.collaborative.training import CollaborativeResult
from secateur.functional import classifier
from secateur.inference import bind_state
from secateur.interfaces import Batch, BlackBox, Candidates, InOut, Mask, Params, Shadow
from secateur.metrics.estimates import combine, mean
from secateur.metrics.membership import Estimate, share, share_of
from secateur.runs.artifacts import Result, explained, write
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.studies.claims import Cases, Finding, judge_claims
from secateur.studies.dgp.results import ACCURACY, DgpResults
from secateur.studies.dgp.steps import (
    ADAPTIVE,
    AttackStep,
    DgpSetting,
    Step,
    TrainingStep,
    build_structure,
    train,
    with_parts,
)
from secateur.studies.dgp.tables import FEEDBACK, accuracy_lines, case, hide, judge_adaptive, privacy_lines
from secateur.studies.results import AuditResults, VictimKey
from secateur.studies.table import Cells, TableLine, Tabulated
from secateur.theory.convergence import lemma_1

LISTENED = "What the broadcast alone tells"
HELD = "What error feedback holds back"
SHADOWED, IN_OUT = ("conf", "mentr"), ("lira", "rmia")
VICTIM, SHADOW = "victim", "shadow"
GUESSING = 0.5  # the AUC of random guessing


@dataclass(frozen=True)
class BroadcastStep(Step):
    """The step in which any other user guesses the labels of the user that broadcasts, from its positions alone."""

    name: ClassVar[str] = "overheard"

    def measure(self, setting: DgpSetting, model: str, defense: str) -> None:
        """Guess each example's label: the class with the most positions of the classifier's weight in I."""
        exposure = AttackStep((defense,), self.model, self.data).exposure(setting, model, defense)
        upload, client, data = upload_of(defense_of_updates(defense)), exposure.client, exposure.context.data
        assert isinstance(upload, AlignedDualGradientPruning)

        def listen() -> Result:
            name, right = classifier(client.net, data.classes), 0
            for target in exposure.targets:
                assert isinstance(target, Batch)
                gradient = gradient_update(client.net, client.state, target).values
                right += labels_right(guess_label(upload.positions(gradient), name), target.labels)
            return Result({}, {"right": right / len(exposure.targets)})

        numbers = range(len(exposure.targets))
        depends = exposure.depends(exposure.config.attacks[0], numbers) | {"attack": "overheard"}
        right = share_of(setting.run.stage("overheard", depends, listen).data["right"], len(numbers))
        labels = setting.labels(model, data, defense, "overheard")
        chance = Row(**labels, metric="label_chance", value=1 / data.classes)
        setting.run.add([Row(**labels, metric="label_accuracy", **right._asdict()), chance])


@dataclass(frozen=True)
class ResidualStep(Step):
    """The step in which IG attacks the trained model: a client without a residual yet, and one with its own.

    Defenses have error feedback.
    """

    adaptive: tuple[str, ...] = ADAPTIVE
    name: ClassVar[str] = "midway"

    def __call__(self, setting: DgpSetting) -> None:
        """Train, then attack the model and the first user as the training left them."""
        TrainingStep(self.defenses, self.model, self.data)(setting)
        super().__call__(setting)

    def measure(self, setting: DgpSetting, model: str, defense: str) -> None:
        """Attack after the training under one defense; the first of all trainings is attacked without a defense too."""
        number = self.defenses.index(defense)
        try:
            trained = train(setting, model, setting.data(self), defense)
        except WrongInput:  # the training has a row that says so
            return
        folder = setting.run.folder / "models"
        weights = _write_tensors(folder / f"seed{setting.seed}-{number}.safetensors", trained.state)
        residual = _write_tensors(weights.with_suffix(".residual.safetensors"), trained.client)
        defenses = (*(("none",) if number == 0 else ()), defense.removesuffix(FEEDBACK), defense)
        step = AttackStep(defenses, self.model, self.data, adaptive=self.adaptive, weights=weights, residual=residual)
        step(setting)


@dataclass(frozen=True)
class Silence:
    """The lie of an ADGP user that broadcasts no position when it is drawn: no user sends anything in that round."""

    user: int = 0

    def __call__(self, user: int, inside: Mask) -> Mask:
        """Return the positions that the user broadcasts."""
        return {name: torch.zeros_like(where) for name, where in inside.items()} if user == self.user else inside

    def __str__(self) -> str:
        return f"user {self.user} broadcasts nothing"


def align(results: DgpResults) -> Tabulated:
    """Return the table of ADGP against attackers, which the paper leaves to future work."""
    cases: Cases = {}
    for cell in results.select(defense="adgp"):
        other = cell._replace(defense="dgp")
        cases |= hide(results, cell, other, case(results, cell))
    trainings = results.trainings()
    honest, dgp = trainings.under(f"adgp{FEEDBACK}"), trainings.under(f"dgp{FEEDBACK}")
    lied = next((training for training in trainings.keys if str(Silence()) in training.defense), None)
    cost = {"accuracy": trainings.less(honest, dgp, ACCURACY)}
    harm = {"accuracy": trainings.less(lied, honest, ACCURACY)}
    return privacy_lines(results) + broadcast_lines(results) + accuracy_lines(results), [
        *judge_broadcast(results),
        *judge_claims("dgp", "adgp", hidden=cases, cost=cost, harm=harm),
        *judge_adaptive(results),
    ]


def residual(results: DgpResults) -> Tabulated:
    """Return the table of an empty against a trained residual, with the entries that error feedback holds back."""
    cases: Cases = {}
    for cell in results.clients:
        if cell.defense.endswith(FEEDBACK):
            empty = cell._replace(defense=cell.defense.removesuffix(FEEDBACK))
            cases |= hide(results, cell, empty, empty.defense)
    trainings = results.trainings()
    dgp, top_k = trainings.under(f"dgp{FEEDBACK}"), trainings.under(f"top-k{FEEDBACK}")
    released = next((training for training in trainings.keys if "release=" in training.defense), None)
    starved = {"residual": trainings.less(dgp, top_k, "residual_mean")}
    fewer = {"never sent": trainings.less(dgp, released, "never_sent")}
    gain = {"accuracy": trainings.less(released, dgp, ACCURACY)}
    lines = privacy_lines(results) + accuracy_lines(results) + _residual_lines(results)
    return lines, judge_claims("dgp", "residual", hidden=cases, starved=starved, fewer=fewer, gain=gain)


def guess_label(inside: Mask, layer: str) -> Tensor:
    """Return (1,) the guessed label of one example: dL/dz is largest there (dgp Section 4.1), and so is its row of dW.

    Example:
        >>> import torch
        >>> guess_label({"4.weight": torch.tensor([[True, False], [True, True], [False, False]])}, "4").tolist()
        [1]
    """
    name = f"{layer}.weight" if layer else "weight"
    return inside[name].sum(1).argmax().view(1)


def _write_tensors(path: Path, tensors: Params) -> Path:
    """Write tensors to a file that `secateur invert --weights` and `--residual` read too."""
    from safetensors.torch import save

    with explained(path):
        path.parent.mkdir(exist_ok=True)
    write(path, save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}))
    return path


def broadcast_lines(results: DgpResults) -> list[TableLine]:
    """Return a line for each run: the accuracy of labels guessed from the broadcast."""
    lines, heard = [], results.trainings("overheard")
    for key in heard.keys:
        cells: Cells = {"label_accuracy": heard.mean(key, "label_accuracy"), "chance": heard.mean(key, "label_chance")}
        lines.append(TableLine({"defense": key.defense, "model": key.model}, cells, part=LISTENED))
    return lines


def judge_broadcast(results: DgpResults) -> list[Finding]:
    """Judge if the broadcast hides the labels."""
    cases, heard = Cases(), results.trainings("overheard")
    for key in heard.keys:
        right, chance = heard.mean(key, "label_accuracy"), heard.mean(key, "label_chance")
        if right is not None and chance is not None:
            least, most = chance.value - right.high, chance.value - right.low
            cases[key.model] = Estimate(chance.value - right.value, least, most)
    return judge_claims("dgp", "adgp", broadcast=cases) if cases else []


def _residual_lines(results: DgpResults) -> list[TableLine]:
    """Return lines of the residual's norm beside Lemma 1's bound, and of the entries that were never sent."""
    lines, trainings = [], results.trainings()
    for training in trainings.keys:
        if FEEDBACK not in training.defense:
            continue
        of = partial(trainings.of, training)
        never = combine(lambda part, whole: part / whole, of("never_sent"), of("entries"))
        bound = combine(lemma_1, of("gamma_1_whole"), of("gradient_square"))
        cells: Cells = {"gamma 1, all tensors": mean(of("gamma_1_whole"))}
        cells |= {"mean residual, squared norm": combine(lambda norm: norm * abs(norm), of("error_norm"))}
        cells |= {"Lemma 1 says at most": "" if bound is None else f"{bound.value:.3g}", "share never sent": never}
        lines.append(TableLine({"defense": training.defense, "model": training.model}, cells, part=HELD))
    return lines


@dataclass(frozen=True)
class MembershipStep(Step):
    """A step that attacks membership in collaborative training under every defense.

    The attacker's models are trained under the same defense.
    """

    name: ClassVar[str] = "members"

    def measure(self, setting: DgpSetting, model: str, defense: str) -> None:
        """Train a victim and the attacker's models, and attack the victim's predictions.

        The shadow model has disjoint data; models of LiRA and RMIA have random subsets of the victim's data.
        """
        data = setting.data(self)
        split = victim_shadow(len(data.inputs), 1, derive(setting.seed, "membership"))
        try:
            MembershipMatch(setting, model, data, defense, split.victim, split.shadows[0]).measure()
        except WrongInput as error:
            setting.leave_out(setting.labels(model, data, defense, "left out"), f"not attacked: {error.message}")


@dataclass(frozen=True, eq=False)
class MembershipMatch:
    """The victim and the attackers under one defense."""

    setting: DgpSetting
    model: str
    data: Dataset
    defense: str
    victim: Part
    shadow: Part

    def measure(self) -> None:
        """Measure the victim's accuracy on members and non-members, and run every attack."""
        setting, members, outside = self.setting, self._rows(self.victim.train), self._rows(self.victim.test)
        victim = self._train(self.victim.train, self.victim.test, VICTIM)
        box, labels = self._box(victim), self._labels()
        for name, side in (("train_accuracy", members), ("test_accuracy", outside)):
            right = share(box.predict(side.inputs).argmax(1) == side.labels)
            setting.run.add([Row(**labels, attack=None, metric=name, **right._asdict())])
        shadow = self._train(self.shadow.train, self.shadow.test, SHADOW)
        disjoint = [Shadow(self._box(shadow), self._rows(self.shadow.train), self._rows(self.shadow.test))]
        for name in SHADOWED:
            self._attack(name, victim, box, disjoint, [shadow])
        if setting.scale.in_out:
            pool = torch.cat([self.victim.train, self.victim.test])
            design = in_out(len(pool), setting.scale.in_out, derive(setting.seed, "in-out"))
            models = [self._train(pool[row], pool[~row], f"in-out-{i}") for i, row in enumerate(design)]
            known = InOut([self._box(model) for model in models], self._rows(pool), design)
            for name in IN_OUT:
                self._attack(name, victim, box, known, models)

    def _attack(
        self,
        name: str,
        victim: CollaborativeResult,
        box: BlackBox,
        known: Sequence[Shadow] | InOut,
        models: Sequence[CollaborativeResult],
    ) -> None:
        """Run one attack as a stage of the run, and add its rows."""
        attack: Choice = choice("attack", name)
        labels = self._labels() | {"attack": str(attack)}
        both = self._rows(torch.cat([self.victim.train, self.victim.test]))
        is_member = torch.arange(both.size) < len(self.victim.train)

        def compute() -> Result:
            fitted = attack.make().fit(known, derive(self.setting.seed, "attack", str(attack)))
            ids = torch.arange(both.size) if isinstance(known, InOut) else None
            return Result(data=evaluate_guesses(fitted.score(box, Candidates(both, ids)), is_member))

        keys = [fingerprint(*trained.state.values()) for trained in (victim, *models)]
        scores = self.setting.run.stage("membership", {"attack": str(attack), "models": keys}, compute).data
        self.setting.run.add(attack_rows(labels, scores))
        self.setting.run.show([flat_labels(labels) | scores["figure"]])

    def _train(self, members: Tensor, outside: Tensor, role: str) -> CollaborativeResult:
        return train(self.setting, self.model, with_parts(self.data, members, outside), self.defense, role)

    def _box(self, trained: CollaborativeResult) -> BlackBox:
        net = build_structure(self.setting, self.model, self.data, self.defense)
        answer = bind_state(net, trained.state, self.setting.device)
        return cache_answers(lambda inputs: answer(inputs).softmax(1))

    def _rows(self, rows: Tensor) -> Batch:
        return self.data.batch.take(rows).to(self.setting.device)

    def _labels(self) -> dict[str, Any]:
        labels = {"model": self.model, "dataset": self.data.name, "pruner": "none", "sparsity": 0.0}
        return labels | {"defense": self.defense, "adaptive": True, "seed": self.setting.seed, "extra": {}}


def membership(results: DgpResults) -> Tabulated:
    """Return one line per defense and attack, and per defense the verdict that it hides members."""
    audit = AuditResults([row for row in results.rows if not row.extra])
    lines, findings = [], []
    bare = VictimKey("none", 0.0, "none", None)
    for model in audit.keys:
        for attack in audit.attacks:
            names = ("auc", "attack_accuracy", "tpr_at_fpr_0.01")
            cells: Cells = {name: audit.mean(model, name, attack) for name in names}
            cells |= {name: audit.mean(model, name) for name in ("test_accuracy", "train_accuracy")}
            lines.append(TableLine({"defense": model.defense, "attack": attack}, cells))
        if model != bare:
            findings.append(_judge_members(audit, bare, model))
    return lines, findings


def _judge_members(audit: AuditResults, bare: VictimKey, model: VictimKey) -> Finding:
    """Judge that a defense lowers the AUC of every attack that beats guessing on the undefended model.

    The undefended model alone selects the attacks, so that no defense selects its own test.
    """
    plain = {attack: audit.mean(bare, "auc", attack) for attack in audit.attacks}
    blind = [attack for attack, auc in plain.items() if auc is not None and auc.low <= GUESSING]
    cases = {attack: audit.less(bare, model, "auc", attack) for attack in plain if attack not in blind}
    (finding,) = judge_claims("dgp", "membership", {"defense": model.defense}, hidden=cases)
    if not blind:
        return finding
    left_out = f"left out, not clearly above {GUESSING:g} without a defense: {', '.join(blind)}"
    return replace(finding, measured=f"{finding.measured}; {left_out}" if cases else left_out)
