"""Steps and tables that go beyond dgp: ADGP under attack, clients in mid-training, and membership inference.

ADGP's broadcast shows every user where the chosen user's gradient is large, and so reveals its labels. A client in
mid-training has a residual. Membership inference attacks the models trained under defenses of updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.attacks.inversion.label_inference import labels_right
from secateur.attacks.inversion.updates import gradient_update
from secateur.catalogue import Choice
from secateur.config import choice, defense_of_updates
from secateur.data.dataset import fingerprint
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
from secateur.studies.dgp.results import DgpResults
from secateur.studies.dgp.steps import DgpSetting, attack_updates, build_structure, train, with_parts
from secateur.studies.dgp.tables import FEEDBACK, accuracy_lines, judge_attackers, privacy_lines
from secateur.studies.results import AuditResults, VictimKey
from secateur.studies.table import Cases, Cells, Finding, TableLine, Tabulated
from secateur.theory.convergence import lemma_1

LISTENED = "What the broadcast alone tells"
HELD = "What error feedback holds back"
SHADOWED, IN_OUT = ("conf", "mentr"), ("lira", "rmia")
VICTIM, SHADOW = "victim", "shadow"
GUESSING = 0.5  # the AUC of random guessing


def overhear_broadcast(setting: DgpSetting) -> None:
    """Guess the labels of the user that broadcasts from its positions alone, as any other user can.

    The guess is the class with the most positions of the classifier's weight in I.
    """
    exposure = replace(setting, step=replace(setting.step, name="ig", defenses=(setting.defense,))).exposure
    upload, client, data = upload_of(defense_of_updates(setting.defense)), exposure.client, setting.data
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
    labels = setting.labels("overheard")
    chance = Row(**labels, metric="label_chance", value=1 / data.classes)
    setting.run.add([Row(**labels, metric="label_accuracy", **right._asdict()), chance])


def attack_midway(setting: DgpSetting) -> None:
    """Run IG on the trained model: on a client without a residual yet, and on one with its own.

    Defenses have error feedback. The model of the first is attacked without a defense too.
    """
    defense, number = setting.defense, setting.step.defenses.index(setting.defense)
    try:
        trained = train(setting)
    except WrongInput:  # the training has a row that says so
        return
    folder = setting.run.folder / "models"
    weights = write_tensors(folder / f"seed{setting.seed}-{number}.safetensors", trained.state)
    residual = write_tensors(weights.with_suffix(".residual.safetensors"), trained.client)
    defenses = (*(("none",) if number == 0 else ()), defense.removesuffix(FEEDBACK), defense)
    step = replace(setting.step, name="ig", defenses=defenses, weights=weights, residual=residual)
    for name in defenses:
        attack_updates(replace(setting, step=step, defense=name))


def align(results: DgpResults) -> Tabulated:
    """Return the table of ADGP against attackers, which the paper leaves to future work."""
    return privacy_lines(results) + broadcast_lines(results) + accuracy_lines(results), [
        *judge_broadcast(results),
        *results.judge("adgp"),
        *judge_attackers(results),
    ]


def residual(results: DgpResults) -> Tabulated:
    """Return the table of an empty against a trained residual, with the entries that error feedback holds back."""
    cases: Cases = {}
    for cell in results.clients:
        if cell.defense.endswith(FEEDBACK):
            empty = cell._replace(defense=cell.defense.removesuffix(FEEDBACK))
            cases |= results.contrast(cell, empty, case=empty.defense)
    lines = privacy_lines(results) + accuracy_lines(results) + _residual_lines(results)
    return lines, results.judge("residual", hidden=cases)


def guess_label(inside: Mask, layer: str) -> Tensor:
    """Return (1,) the guessed label of one example: dL/dz is largest there (dgp Section 4.1), and so is its row of dW.

    Example:
        >>> import torch
        >>> guess_label({"4.weight": torch.tensor([[True, False], [True, True], [False, False]])}, "4").tolist()
        [1]
    """
    name = f"{layer}.weight" if layer else "weight"
    return inside[name].sum(1).argmax().view(1)


def write_tensors(path: Path, tensors: Params) -> Path:
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
    return results.judge("broadcast", hidden=cases) if cases else []


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


def infer_members(setting: DgpSetting) -> None:
    """Train a victim and the attacker's models under one defense, and attack the victim's predictions.

    The shadow model has disjoint data; models of LiRA and RMIA have random subsets of the victim's data.
    """
    split = victim_shadow(len(setting.data.inputs), 1, derive(setting.seed, "membership"))
    try:
        MembershipMatch(setting, split.victim, split.shadows[0]).measure()
    except WrongInput as error:
        setting.leave_out(setting.labels("left out"), f"not attacked: {error.message}")


@dataclass(frozen=True, eq=False)
class MembershipMatch:
    """The victim and the attackers under one defense."""

    setting: DgpSetting
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
        return train(replace(self.setting, data=with_parts(self.setting.data, members, outside)), role)

    def _box(self, trained: CollaborativeResult) -> BlackBox:
        answer = bind_state(build_structure(self.setting), trained.state, self.setting.device)
        return cache_answers(lambda inputs: answer(inputs).softmax(1))

    def _rows(self, rows: Tensor) -> Batch:
        return self.setting.data.batch.take(rows).to(self.setting.device)

    def _labels(self) -> dict[str, Any]:
        return self.setting.labels("") | {"pruner": "none", "sparsity": 0.0, "adaptive": True, "extra": {}}


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
            findings.append(_judge_members(results, audit, bare, model))
    return lines, findings


def _judge_members(results: DgpResults, audit: AuditResults, bare: VictimKey, model: VictimKey) -> Finding:
    """Judge that a defense lowers the AUC of every attack that beats guessing on the undefended model.

    The undefended model alone selects the attacks, so that no defense selects its own test.
    """
    plain = {attack: audit.mean(bare, "auc", attack) for attack in audit.attacks}
    blind = [attack for attack, auc in plain.items() if auc is not None and auc.low <= GUESSING]
    cases = {attack: audit.less(bare, model, "auc", attack) for attack in plain if attack not in blind}
    (finding,) = results.judge("membership", {"defense": model.defense}, hidden=cases)
    if not blind:
        return finding
    left_out = f"left out, not clearly above {GUESSING:g} without a defense: {', '.join(blind)}"
    return replace(finding, measured=f"{finding.measured}; {left_out}" if cases else left_out)
