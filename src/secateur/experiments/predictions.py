"""Audit of saved predictions: a table of probabilities, labels and membership, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.catalogue import Choice
from secateur.config import Audit, choice, dump
from secateur.data.prediction_files import PredictionFile, read_predictions
from secateur.errors import WrongInput
from secateur.evaluation.attack_strength import name_missing_members
from secateur.evaluation.limits import claim_rows
from secateur.evaluation.membership import write_records
from secateur.evaluation.validity import Accuracy, Validity, doubt_order, member_accuracy, resemblance, validity_rows
from secateur.evaluation.validity import labels as check_labels
from secateur.experiments.context import file_key, shortage
from secateur.experiments.exposure import RANKING, MembershipExposure, fit_attack
from secateur.inference import ask, ask_labels, true_probability
from secateur.interfaces import Batch, BlackBox, Candidates, InOut, MembershipAttack, Shadow
from secateur.metrics.epsilon import LEVEL
from secateur.metrics.membership import share
from secateur.progress import progress
from secateur.runs.folder import open_run
from secateur.runs.rows import Row
from secateur.seeding import derive

STRONGER = ("lira", "rmia", "nn")  # attacks that need them; samia asks new questions
LARGE = 200_000  # rows of a file above which the network of nn, which takes an hour, runs only if it is asked for
COMPARED = 20_000  # rows on which shadow models are compared with the victim
AT_ONCE = 1 << 12  # rows of the file that are in memory at a time; temporaries of more rows leave the cache
NO_SHADOWS = "needs shadow models' predictions; add shadow_probabilities and shadow_membership to the file"
NO_MEMBERS = "needs shadow models that were trained on some of the rows; none of these was"
NO_MODEL = "asks the model new questions, which saved predictions cannot answer"


def run_predictions(config: Audit, file: Path, out: Path) -> list[Row]:
    """Attack the saved predictions of a file, into the folder `out`."""
    from secateur.report.page import write_page

    check_predictions(config)
    attacker, seed = PredictionsAttacker(read_predictions(file, config.group)), config.seeds[0]
    config, victim = attacker.choose_attacks(config), attacker.victim
    labels: dict[str, Any] = {"model": file.stem, "dataset": "saved predictions", "pruner": "given", "sparsity": 0.0}
    labels |= {"defense": "given", "adaptive": False, "seed": seed, "extra": {}}
    key = file_key(file)
    with open_run(out, "audit", dump(config), seeds=[seed]) as run:
        level = LEVEL / max(1, len(config.attack))
        facts: dict[str, Any] = {"title": file.stem, "level": level, "groups": victim.groups}
        if config.claim is not None:
            facts["delta"] = config.claim.delta
            run.add(claim_rows(labels, config.claim))
        exposure = MembershipExposure(
            run, seed, *attacker.sides, attacker.candidates, lambda: attacker.box, truth=victim.membership, **facts
        )
        run.add(_model_rows(attacker, labels))
        models = attacker.models.boxes if isinstance(attacker.models, InOut) and attacker.has_members else []
        names = map(str, config.attack)
        unmet = name_missing_members(labels["defense"], names, in_out=len(models), flags=False)
        with progress(f"attacks on {file.name}", len(config.attack)) as advance:
            for attack in config.attack:
                named = labels | {"attack": str(attack)}
                try:
                    exposure.measure_attack(named, partial(attacker.fit, attack, seed), unmet, file=key)
                except WrongInput as error:
                    run.add([Row(**named, metric="auc", value=None, note=error.message)])
                advance(1)
        run.write_parts("records.csv", write_records([exposure.record]))
        rows = run.rows
    write_page([out])
    return rows


def check_predictions(config: Audit) -> None:
    """Refuse settings of models: saved predictions are audited as they are."""
    for name in config.list_changed("weights", "before", "pruner", "defense", "shadows", "in_out", "population"):
        raise WrongInput(name, f"needs a model, and saved predictions are audited as they are; leave {name} out")


def describe_plan(config: Audit, file: Path) -> list[str]:
    """Describe the audit of the file in lines; the file is read for that."""
    check_predictions(config)
    names = ", ".join(map(str, PredictionsAttacker(read_predictions(file, config.group)).choose_attacks(config).attack))
    return [f"attack the saved predictions {file} with {names}"]


class PredictionsAttacker:
    """An attacker who has a file of predictions. A row's input is a random mark, so an altered input is refused."""

    def __init__(self, contents: PredictionFile) -> None:
        self.contents, self.victim = contents, contents.victim
        self._marks = _marks(len(self.victim.labels), "")
        self.models = self._models()

    def choose_attacks(self, config: Audit) -> Audit:
        """Return the configuration with all attacks that the file can answer, unless the user chose attacks."""
        if "attack" in config.model_fields_set:
            reasons = [self._reason(attack) for attack in config.attack]
            if reasons and None not in reasons:
                raise WrongInput("attack", f"{config.attack[0]} {reasons[0]}")
            return config
        names = [name for name in (*STRONGER, *RANKING) if len(self._marks) <= LARGE or name != "nn"]
        able = [attack for name in names if self._reason(attack := choice("attack", name)) is None]
        return config.model_copy(update={"attack": able})

    @property
    def box(self) -> BlackBox:
        """The victim's saved answers."""
        return _box(self.victim.probabilities, self._marks)

    @property
    def candidates(self) -> Candidates:
        """All rows, in the order of the file."""
        online = isinstance(self.models, InOut)
        return Candidates(Batch(self._marks, self.victim.labels), torch.arange(len(self._marks)) if online else None)

    @property
    def sides(self) -> tuple[Batch, Batch]:
        """The members, and the non-members."""
        batch, membership = Batch(self._marks, self.victim.labels), self.victim.membership
        return batch.take(membership), batch.take(~membership)

    def fit(self, attack: Choice, seed: int) -> MembershipAttack:
        """Return the attack, fitted to the shadow models of the file."""
        if (reason := self._reason(attack)) is not None:
            raise WrongInput("attack", reason)
        learns = attack.method.info["shadows"] != "for a threshold" or self.has_members
        return fit_attack(attack, self.models if learns else [], seed)

    def _models(self) -> Sequence[Shadow] | InOut:
        """Return the shadow models of the file: several over the victim's rows, or one with rows of its own."""
        if self.contents.answers is not None and self.contents.trained_on is not None:
            boxes = [_box(answers, self._marks) for answers in self.contents.answers]
            return InOut(boxes, Batch(self._marks, self.victim.labels), self.contents.trained_on)
        if self.contents.shadow is None:
            return []
        shadow = self.contents.shadow
        marks = _marks(len(shadow.labels), "shadow_")
        batch = Batch(marks, shadow.labels)
        inside, outside = (batch.take(side) for side in (shadow.membership, ~shadow.membership))
        return [Shadow(_box(shadow.probabilities, marks), inside, outside)]

    @property
    def has_members(self) -> bool:
        """True if some shadow model was trained on rows of the file."""
        return not isinstance(self.models, InOut) or bool(self.models.membership.any())

    def _reason(self, attack: Choice) -> str | None:
        """Return why the file cannot answer an attack; None if it can."""
        needs = attack.method.info["shadows"]
        if needs in ("none", "for a threshold"):
            return None
        if isinstance(self.models, InOut):
            if not self.has_members:
                return None if needs == "in-out or disjoint" else NO_MEMBERS
            return shortage(attack, 0, len(self.models.boxes)) if needs == "in-out or disjoint" else None
        return NO_SHADOWS if not self.models else shortage(attack, len(self.models))


def _model_rows(attacker: PredictionsAttacker, labels: dict[str, Any]) -> list[Row]:
    """Return the rows of the model itself: accuracies, numbers of rows, and the checks that need no inputs."""
    victim = attacker.victim
    classes = victim.probabilities.shape[1]
    hits, confidence = ask(attacker.box, attacker.candidates.batch, _rate)
    sides = {"train_accuracy": victim.membership, "test_accuracy": ~victim.membership}
    rows = [Row(**labels, metric=name, **share(hits[side])._asdict()) for name, side in sides.items()]
    counts = {"members": victim.membership, "nonmembers": ~victim.membership}
    rows += [Row(**labels, metric=name, value=float(side.sum())) for name, side in counts.items()]
    members, _ = attacker.sides
    accuracy = Accuracy(*(float(hits[side].double().mean()) for side in (victim.membership, ~victim.membership)))
    checks = [member_accuracy(accuracy.train, classes), check_labels(members, classes)]
    checks += doubt_order(hits, confidence, victim.membership)
    return rows + validity_rows(labels, [*checks, *_compare_shadows(attacker, accuracy)])


def _rate(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return (2, N): 1 where an answer is right, and the probability of the true label."""
    return torch.stack([(probabilities.argmax(1) == labels).to(probabilities), true_probability(probabilities, labels)])


def _compare_shadows(attacker: PredictionsAttacker, victim: Accuracy) -> list[Validity]:
    """Check that the shadow models of the file resemble the victim, on a sample of their rows."""
    models, rng = attacker.models, derive(0, "resemblance")
    if isinstance(models, InOut):
        drawn = torch.randperm(models.pool.size, generator=rng)[:COMPARED]
        pool, inside = models.pool.take(drawn), models.membership[:, drawn]
        hits = [_mark_right(box, pool) for box in models.boxes]
        sides = [(hit[side], hit[~side]) for hit, side in zip(hits, inside, strict=True)]
        rows = models.membership.sum(1).tolist()
    else:
        both = [(shadow.box, shadow.members, shadow.nonmembers) for shadow in models]
        sides = [(_mark_right(box, inside), _mark_right(box, outside)) for box, inside, outside in both]
        rows = [shadow.members.size for shadow in models]
    shadows = [Accuracy(*(float(side.double().mean()) for side in pair)) for pair in sides]
    return [resemblance(victim, shadows, rows)] if shadows else []


def _mark_right(box: BlackBox, batch: Batch) -> Tensor:
    """Return (N,) bool: True where a model's label is right."""
    return ask_labels(box, batch) == batch.labels


def _marks(rows: int, name: str) -> Tensor:
    """Return inputs (N, 4) that stand for rows whose inputs are not in the file: the row's number, and random ones."""
    noise = torch.rand(rows, 3, generator=derive(0, "marks", name), dtype=torch.float64)
    return torch.cat([torch.arange(rows, dtype=torch.float64)[:, None], noise], 1)


def _box(probabilities: Tensor, marks: Tensor) -> BlackBox:
    """Return the saved answers as a black box of marks; an altered mark is none of them."""

    def answer(inputs: Tensor) -> Tensor:
        rows = inputs[:, 0].long().clamp(0, len(marks) - 1)
        if not torch.equal(marks[rows], inputs.to(marks.dtype)):
            raise WrongInput("attack", NO_MODEL)
        answers = probabilities[rows]
        return answers if answers.dtype in (torch.float32, torch.float64) else answers.double()

    return BlackBox(answer, rows=AT_ONCE)
