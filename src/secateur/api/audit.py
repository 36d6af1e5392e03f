"""`secateur.audit(...)`: the membership audit of any nn.Module and tensors, from Python.

Models and examples that do not fit together are refused in one sentence before any work begins.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from secateur import tree
from secateur.api.shared import Examples, Printable, device_of, in_precision, read_batch
from secateur.attacks.membership.reference_models import content
from secateur.catalogue import Choice, methods
from secateur.config import choice
from secateur.config import defense_of_models as read_defense
from secateur.errors import WrongInput
from secateur.evaluation.membership import cache_answers
from secateur.evaluation.records import ModelRecords
from secateur.evaluation.validity import Accuracy, Validity, member_accuracy, resemblance, validity_rows
from secateur.experiments.context import check_installed, check_models, shortage
from secateur.experiments.exposure import MembershipExposure, fit_attack
from secateur.experiments.pipeline import build_fit
from secateur.inference import answering, to_probabilities
from secateur.interfaces import Batch, BlackBox, Candidates, Shadow
from secateur.metrics.epsilon import LEVEL
from secateur.models.create import check_labels, explain_failure
from secateur.runs.folder import MemoryRun
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.training.recipe import Recipe, Task

Model = nn.Module | BlackBox


@dataclass(frozen=True)
class Report(Printable):
    """The rows and figures of an audit, and every example's scores.

    An example's id in `records` counts the members, then the non-members, as they were given.
    """

    kind = "audit"
    rows: list[Row]
    figures: list[dict[str, Any]]
    records: ModelRecords

    def value(self, metric: str, attack: str | None = None) -> float | None:
        """Return the value of a metric, of an attack or of the model itself."""
        for row in self.rows:
            if row.metric == metric and row.attack == attack:
                return row.value
        raise WrongInput("metric", f"{metric!r} was not measured for {attack or 'the model'}")


class Side(NamedTuple):
    """A model, the examples that it was trained on (inside), and others (outside)."""

    model: Model
    inside: Batch
    outside: Batch


def audit(
    model: Model,
    members: Examples,
    nonmembers: Examples,
    *,
    shadows: Sequence[tuple[Model, Examples, Examples]] = (),
    attacks: Sequence[str] | None = None,
    pruner: str | None = None,
    sparsity: float = 0.7,
    defense: str = "basic",
    recipe: Recipe | None = None,
    seed: int = 0,
    name: str = "model",
) -> Report:
    """Return a report of how much the model reveals about its members.

    `shadows` are the attacker's models, each with its own members and non-members. By default all attacks run that can
    run with them. With a `pruner` the model and the shadows are pruned first. Each is then fine-tuned on its own
    members, with the defense named by `defense`. A tenth of its non-members says when to stop, and is left out of the
    audit.
    """
    sides = check_sides(model, members, nonmembers, shadows)
    whole = sides[0].outside.size
    chosen = _attacks(attacks, len(shadows), labels_only=isinstance(model, BlackBox) and model.labels_only)
    if pruner is not None:
        check_installed([read_defense(defense)])
        method = choice("pruner", pruner)
        sides = [_pruned(side, method, sparsity, defense, recipe, seed, i) for i, side in enumerate(sides)]
    boxes = [box_of(side.model) for side in sides]
    box, (_, inside, outside) = boxes[0], sides[0]
    run, both = MemoryRun(), Batch(*(torch.cat(parts) for parts in zip(inside, outside, strict=True)))
    ids = torch.cat([torch.arange(inside.size), inside.size + torch.arange(whole)[whole - outside.size :]])
    level = LEVEL / max(1, len(chosen))
    exposure = MembershipExposure(run, seed, inside, outside, Candidates(both), lambda: box, name, ids, level)
    labels: dict[str, Any] = {"model": name, "dataset": "given", "pruner": pruner or "given", "adaptive": False}
    labels |= {"sparsity": sparsity if pruner else 0.0, "defense": defense if pruner else "given", "seed": seed}
    labels |= {"extra": {}}
    exposure.measure_accuracy(labels)
    if not box.labels_only:
        classes = box.predict(inside.inputs[:1]).shape[1]
        exposure.check_validity(labels, classes)
        run.add(validity_rows(labels, _check_models(boxes, sides, classes, trained=pruner is None)))
        exposure.measure_gaps(labels, classes)
    known = [Shadow(b, side.inside, side.outside) for b, side in zip(boxes[1:], sides[1:], strict=True)]
    for attack in chosen:
        exposure.measure_attack(labels | {"attack": str(attack)}, partial(fit_attack, attack, known, seed))
    return Report(run.rows, run.figures, exposure.record)


def _check_models(boxes: Sequence[BlackBox], sides: Sequence[Side], classes: int, trained: bool) -> list[Validity]:
    """Check that a model as the user trained it knows its members, and that the shadows resemble the model."""
    accuracies = [
        Accuracy(*(float((box.predict(x.inputs).argmax(1) == x.labels).double().mean()) for x in side[1:]))
        for box, side in zip(boxes, sides, strict=True)
    ]
    victim, *shadows = accuracies
    checks = [member_accuracy(victim.train, classes)] if trained else []
    rows = [side.inside.size for side in sides[1:]]
    return checks + ([resemblance(victim, shadows, rows)] if shadows else [])


def check_sides(
    model: Model, members: Examples, nonmembers: Examples, shadows: Sequence[tuple[Model, Examples, Examples]]
) -> list[Side]:
    """Return the victim, then the shadows; refuse models that do not fit their examples, and shared examples."""
    victim = Side(model, read_batch("members", members), read_batch("nonmembers", nonmembers))
    others = [Side(one, read_batch("shadows", a), read_batch("shadows", b)) for one, a, b in shadows]
    known = _distinct_contents("nonmembers", victim)
    for shadow in others:
        if shared := len(known & _distinct_contents("shadows", shadow)):
            raise WrongInput("shadows", f"{shared} examples are the model's; use other examples for shadows")
    for field, side in [("", victim), *(("shadows", shadow) for shadow in others)]:
        _check_answers(side, field)
    return [victim, *others]


def _distinct_contents(field: str, side: Side) -> set[bytes]:
    """Return the contents of all examples of a side; refuse examples that are members and non-members."""
    members, nonmembers = (set(content(batch.inputs.float())) for batch in (side.inside, side.outside))
    if both := len(members & nonmembers):
        raise WrongInput(field, f"{both} examples are members too; the two sets must not share examples")
    return members | nonmembers


def _check_answers(side: Side, field: str) -> None:
    """Refuse a model that does not answer each example with a row of classes, or whose labels are none of them."""
    rows = side.inside.inputs[:2]
    with explain_failure(field or "model", rows.shape[1:]):
        answers = box_of(side.model).predict(rows)
    if answers.ndim != 2 or len(answers) != len(rows):
        shape = f"answers {tuple(answers.shape)} for {len(rows)} examples"
        raise WrongInput(field or "model", f"{shape}; it must return one row of classes for each")
    for batch, name in ((side.inside, "members"), (side.outside, "nonmembers")):
        check_labels(field or name, batch.labels, answers.shape[1])


def _attacks(names: Sequence[str] | None, shadows: int, labels_only: bool) -> list[Choice]:
    """Return the named attacks, refused where shadows are too few; by default all attacks that can run."""
    chosen = [choice("attack", name) for name in (methods("attack") if names is None else names)]
    if names is None:
        able = [attack for attack in chosen if not labels_only or attack.method.info["sees"] == "labels"]
        return [attack for attack in able if shortage(attack, shadows) is None]
    for attack in chosen:
        check_models(attack, shadows)
    return chosen


def _pruned(
    side: Side, method: Choice, sparsity: float, defense: str, recipe: Recipe | None, seed: int, index: int
) -> Side:
    """Return the side with a pruned and fine-tuned copy of the model, without the non-members that stopped it."""
    model, inside, outside = side
    if not isinstance(model, nn.Module):
        raise WrongInput("model", "only an nn.Module can be pruned; use one, or no pruner")
    if outside.size < 2:
        raise WrongInput("nonmembers", "one example cannot both stop the fine-tuning and be attacked; use at least two")
    tenth, order = max(1, outside.size // 10), torch.arange(outside.size)
    sides = (inside, outside.take(order[:tenth]))
    members, held = (Batch(in_precision(model, batch.inputs), batch.labels) for batch in sides)
    rng = derive(seed, "prune", index)
    mask = method.make()(model, members, sparsity, rng)
    base = recipe or Recipe(epochs=50)
    _, fit = build_fit(read_defense(defense), base)
    task = Task(tree.state_of(model), members, held, derive(seed, "fit", index), mask)
    ((_, fitted),) = fit(model, [task])
    twin = copy.deepcopy(model)
    twin.load_state_dict(fitted.state)
    return Side(twin, inside, outside.take(order[tenth:]))


def box_of(model: Model) -> BlackBox:
    """Return the model as a black box of class probabilities; inputs are converted to the precision of its weights."""
    if isinstance(model, BlackBox):
        return model
    answer = answering(model, tree.state_of(model), device_of(model))
    return cache_answers(lambda inputs: to_probabilities(answer(in_precision(model, inputs))))
