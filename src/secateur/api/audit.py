"""`secateur.audit(...)`: audit any nn.Module and tensors from Python.

What a user hands over, models and examples, is refused in one sentence where it does not fit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secateur import tree
from secateur.attacks.membership.reference_models import content
from secateur.catalogue import Choice
from secateur.config import choice
from secateur.config import defense_of_models as read_defense
from secateur.errors import WrongInput
from secateur.evaluation.membership import attack_rows, flat, judged, remembering
from secateur.experiments.context import check_installed, check_models, shortage
from secateur.experiments.pipeline import defended
from secateur.inference import answering
from secateur.interfaces import Batch, BlackBox, Candidates, Shadow
from secateur.metrics.gaps import portrait
from secateur.metrics.membership import share
from secateur.runs.artifacts import write
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.training.recipe import Recipe, Task

Data = Batch | tuple[Tensor, Tensor]
Model = nn.Module | BlackBox


class Side(NamedTuple):
    """A model with what it was and was not trained on."""

    model: Model
    inside: Batch
    outside: Batch


def given(model: Model, members: Data, nonmembers: Data, shadows: Sequence[tuple[Model, Data, Data]]) -> list[Side]:
    """The victim, then the shadows, all of which fit their examples and share none that they must not."""
    victim = Side(model, _batch("members", members), _batch("nonmembers", nonmembers))
    own = [Side(shadow, _batch("shadows", inside), _batch("shadows", outside)) for shadow, inside, outside in shadows]
    known = _apart("nonmembers", victim)
    for shadow in own:
        if shared := len(known & _apart("shadows", shadow)):
            raise WrongInput("shadows", f"{shared} examples are the model's; give shadows examples of their own")
    for field, side in [("", victim), *(("shadows", shadow) for shadow in own)]:
        _check_answers(side, field)
    return [victim, *own]


def box_of(model: Model) -> BlackBox:
    """A model as an attacker meets it; examples are converted to the precision of its weights."""
    if isinstance(model, BlackBox):
        return model
    device = next((value.device for value in model.parameters()), torch.device("cpu"))
    answer = answering(model, tree.state_of(model), device)
    return remembering(lambda inputs: answer(in_precision(model, inputs)).softmax(1))


def in_precision(model: nn.Module, inputs: Tensor) -> Tensor:
    """Inputs that are no whole numbers, such as tokens, in the precision of the model's weights."""
    dtypes = (value.dtype for value in model.parameters() if value.is_floating_point())
    return inputs.to(next(dtypes, inputs.dtype)) if inputs.is_floating_point() else inputs


def _batch(field: str, data: Data) -> Batch:
    inputs, labels = data
    if not len(inputs) or labels.shape != inputs.shape[:1]:
        sizes = f"{len(inputs)} inputs and labels of the shape {tuple(labels.shape)}"
        raise WrongInput(field, f"{sizes} do not fit; give at least one input, and one label for each")
    if labels.is_floating_point():
        raise WrongInput(field, f"labels are {labels.dtype}; give whole numbers, the classes from 0")
    return Batch(inputs, labels.long())


def _apart(field: str, side: Side) -> set[bytes]:
    """Every example of a side, by its content; refuses those that are members and non-members."""
    members, nonmembers = (set(content(batch.inputs.float())) for batch in (side.inside, side.outside))
    if both := len(members & nonmembers):
        raise WrongInput(field, f"{both} examples are members too; the two sets must not share examples")
    return members | nonmembers


def _check_answers(side: Side, field: str) -> None:
    """Refuse a model that does not answer its examples with a row of classes, all labels among them."""
    rows = side.inside.inputs[:2]
    try:
        answers = box_of(side.model).predict(rows)
    except WrongInput:
        raise
    except Exception as error:  # whatever the user's own code raises
        reason = f"raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        wanted = f"it must take inputs of the shape {tuple(rows.shape[1:])}"
        raise WrongInput(field or "model", f"{wanted}, and {reason}") from error
    if answers.ndim != 2 or len(answers) != len(rows):
        found = f"answers {tuple(answers.shape)} for {len(rows)} examples"
        raise WrongInput(field or "model", f"{found}; it must give one row of classes for each")
    for batch, name in ((side.inside, "members"), (side.outside, "nonmembers")):
        low, high = int(batch.labels.min()), int(batch.labels.max())
        if low < 0 or high >= answers.shape[1]:
            allowed = f"allowed by the model's outputs: 0 to {answers.shape[1] - 1}"
            raise WrongInput(field or name, f"labels from {low} to {high}; {allowed}")


@dataclass(frozen=True)
class Report:
    """What an audit found."""

    rows: list[Row]
    figures: list[dict[str, Any]]

    def value(self, metric: str, attack: str | None = None) -> float | None:
        """One measure, of an attack or of the model itself."""
        for row in self.rows:
            if row.metric == metric and row.attack == attack:
                return row.value
        raise WrongInput("metric", f"{metric!r} was not measured for {attack or 'the model'}")

    def write(self, path: Path | str) -> Path:
        """Write the page."""
        from secateur.report.page import render
        from secateur.report.sources import Source

        write(Path(path), render([Source("audit", self.rows, self.figures, config="", environment={})]).encode())
        return Path(path)

    def print(self) -> None:
        """Print the table."""
        from secateur.report.terminal import print_audit

        print_audit(self.rows)


def audit(
    model: Model,
    members: Data,
    nonmembers: Data,
    *,
    shadows: Sequence[tuple[Model, Data, Data]] = (),
    attacks: Sequence[str] | None = None,
    pruner: str | None = None,
    sparsity: float = 0.7,
    defense: str = "basic",
    recipe: Recipe | None = None,
    seed: int = 0,
    name: str = "model",
) -> Report:
    """What does this model give away about its members?

    `shadows` are the attacker's models, each with its own members and non-members; without them the attacks that need
    none run. With a `pruner` the model and the shadows are pruned and fine-tuned first, each on its own members, with
    the defense named by `defense`; a tenth of its non-members then says when to stop and is left out of the audit.
    """
    sides = given(model, members, nonmembers, shadows)
    chosen = _attacks(attacks, len(shadows), labels_only=isinstance(model, BlackBox) and model.labels_only)
    if pruner is not None:
        check_installed([read_defense(defense)])
        how = choice("pruner", pruner)
        sides = [_pruned(side, how, sparsity, defense, recipe, seed, i) for i, side in enumerate(sides)]
    boxes = [box_of(side.model) for side in sides]
    box, (_, inside, outside) = boxes[0], sides[0]
    labels: dict[str, Any] = {"model": name, "dataset": "given", "pruner": pruner or "given", "adaptive": False}
    labels |= {"sparsity": sparsity if pruner else 0.0, "defense": defense if pruner else "given", "seed": seed}
    rows, figures = _described(box, inside, outside, labels | {"extra": {}}, seed)
    own = [Shadow(b, side.inside, side.outside) for b, side in zip(boxes[1:], sides[1:], strict=True)]
    for attack in chosen:
        named = labels | {"attack": str(attack), "extra": {}}
        fitted = attack.make().fit(own, derive(seed, "attack", str(attack)))
        both = Batch(torch.cat([inside.inputs, outside.inputs]), torch.cat([inside.labels, outside.labels]))
        truth = torch.arange(both.size) < inside.size
        found = judged(fitted.score(box, Candidates(both)), truth, seed)
        rows += attack_rows(named, found)
        figures.append(flat(named) | found["figure"])
    return Report(rows, figures)


def _described(
    box: BlackBox, inside: Batch, outside: Batch, labels: dict[str, Any], seed: int
) -> tuple[list[Row], list[dict[str, Any]]]:
    answers = {"train_accuracy": (box, inside), "test_accuracy": (box, outside)}
    rows = [
        Row(**labels, metric=name, **share(b.predict(side.inputs).argmax(1) == side.labels)._asdict())
        for name, (b, side) in answers.items()
    ]
    if box.labels_only:
        return rows, []
    classes = box.predict(inside.inputs[:1]).shape[1]
    gaps, figures = portrait(box, inside, outside, classes, derive(seed, "portrait"))
    rows += [Row(**labels, metric=name, **gap._asdict()) for name, gap in gaps.items()]
    return rows, [flat(labels) | {"attack": None} | figure for figure in figures]


def _attacks(names: Sequence[str] | None, shadows: int, labels_only: bool) -> list[Choice]:
    """Those asked for, refused where there are too few shadows; by default all that can run with what there is."""
    from secateur.catalogue import methods

    chosen = [choice("attack", name) for name in (methods("attack") if names is None else names)]
    if names is None:
        able = [attack for attack in chosen if not labels_only or attack.method.info["sees"] == "labels"]
        return [attack for attack in able if shortage(attack, shadows) is None]
    for attack in chosen:
        check_models(attack, shadows)
    return chosen


def _pruned(
    side: Side, how: Choice, sparsity: float, defense: str, recipe: Recipe | None, seed: int, index: int
) -> Side:
    model, inside, outside = side
    if not isinstance(model, nn.Module):
        raise WrongInput("model", "only an nn.Module can be pruned; give one, or leave the pruner out")
    if outside.size < 2:
        raise WrongInput("nonmembers", "one alone cannot stop the fine-tuning and be asked about; give at least two")
    tenth, order = max(1, outside.size // 10), torch.arange(outside.size)
    members, held = (
        Batch(in_precision(model, batch.inputs), batch.labels) for batch in (inside, outside.take(order[:tenth]))
    )
    rng = derive(seed, "prune", index)
    mask = how.make()(model, members, sparsity, rng)
    base = recipe or Recipe(epochs=50)
    _, fit = defended(read_defense(defense), base)
    task = Task(tree.state_of(model), members, held, derive(seed, "fit", index), mask)
    ((_, fitted),) = fit(model, [task])
    twin = copy.deepcopy(model)
    twin.load_state_dict(fitted.state)
    return Side(twin, inside, outside.take(order[tenth:]))
