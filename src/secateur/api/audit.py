"""`secateur.audit(...)`: the membership audit of any nn.Module and tensors, from Python.

Models and examples that do not fit together are refused in one sentence before any work begins.
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
from secateur.catalogue import Choice, methods
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


@dataclass(frozen=True)
class Report:
    """The rows and figures of an audit."""

    rows: list[Row]
    figures: list[dict[str, Any]]

    def value(self, metric: str, attack: str | None = None) -> float | None:
        """Return the value of a metric, of an attack or of the model itself."""
        for row in self.rows:
            if row.metric == metric and row.attack == attack:
                return row.value
        raise WrongInput("metric", f"{metric!r} was not measured for {attack or 'the model'}")

    def write(self, path: Path | str) -> Path:
        """Write the report page to `path`."""
        from secateur.report.page import Source, render

        write(Path(path), render([Source("audit", self.rows, self.figures, config="", environment={})]).encode())
        return Path(path)

    def print(self) -> None:
        """Print the table."""
        from secateur.report.terminal import print_audit

        print_audit(self.rows)


class Side(NamedTuple):
    """A model, the examples that it was trained on (inside), and others (outside)."""

    model: Model
    inside: Batch
    outside: Batch


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
    """Return a report of how much the model reveals about its members.

    `shadows` are the attacker's models, each with its own members and non-members. Without them only the attacks that
    need none run. With a `pruner` the model and the shadows are pruned first. Each is then fine-tuned on its own
    members, with the defense named by `defense`. A tenth of its non-members says when to stop, and is left out of the
    audit.
    """
    sides = given(model, members, nonmembers, shadows)
    chosen = _attacks(attacks, len(shadows), labels_only=isinstance(model, BlackBox) and model.labels_only)
    if pruner is not None:
        check_installed([read_defense(defense)])
        method = choice("pruner", pruner)
        sides = [_pruned(side, method, sparsity, defense, recipe, seed, i) for i, side in enumerate(sides)]
    boxes = [box_of(side.model) for side in sides]
    box, (_, inside, outside) = boxes[0], sides[0]
    labels: dict[str, Any] = {"model": name, "dataset": "given", "pruner": pruner or "given", "adaptive": False}
    labels |= {"sparsity": sparsity if pruner else 0.0, "defense": defense if pruner else "given", "seed": seed}
    rows, figures = _described(box, inside, outside, labels | {"extra": {}}, seed)
    known = [Shadow(b, side.inside, side.outside) for b, side in zip(boxes[1:], sides[1:], strict=True)]
    for attack in chosen:
        named = labels | {"attack": str(attack), "extra": {}}
        fitted = attack.make().fit(known, derive(seed, "attack", str(attack)))
        both = Batch(torch.cat([inside.inputs, outside.inputs]), torch.cat([inside.labels, outside.labels]))
        truth = torch.arange(both.size) < inside.size
        measured = judged(fitted.score(box, Candidates(both)), truth, seed)
        rows += attack_rows(named, measured)
        figures.append(flat(named) | measured["figure"])
    return Report(rows, figures)


def given(model: Model, members: Data, nonmembers: Data, shadows: Sequence[tuple[Model, Data, Data]]) -> list[Side]:
    """Return the victim, then the shadows; refuse models that do not fit their examples, and shared examples."""
    victim = Side(model, _batch("members", members), _batch("nonmembers", nonmembers))
    others = [Side(one, _batch("shadows", inside), _batch("shadows", outside)) for one, inside, outside in shadows]
    known = _apart("nonmembers", victim)
    for shadow in others:
        if shared := len(known & _apart("shadows", shadow)):
            raise WrongInput("shadows", f"{shared} examples are the model's; give shadows examples of their own")
    for field, side in [("", victim), *(("shadows", shadow) for shadow in others)]:
        _check_answers(side, field)
    return [victim, *others]


def _batch(field: str, data: Data) -> Batch:
    """Return the data as a batch; refuse labels that do not fit the inputs."""
    inputs, labels = data
    if not len(inputs) or labels.shape != inputs.shape[:1]:
        sizes = f"{len(inputs)} inputs and labels of the shape {tuple(labels.shape)}"
        raise WrongInput(field, f"{sizes} do not fit; give at least one input, and one label for each")
    if labels.is_floating_point():
        raise WrongInput(field, f"labels are {labels.dtype}; give whole numbers, the classes from 0")
    return Batch(inputs, labels.long())


def _apart(field: str, side: Side) -> set[bytes]:
    """Return the contents of all examples of a side; refuse examples that are members and non-members."""
    members, nonmembers = (set(content(batch.inputs.float())) for batch in (side.inside, side.outside))
    if both := len(members & nonmembers):
        raise WrongInput(field, f"{both} examples are members too; the two sets must not share examples")
    return members | nonmembers


def _check_answers(side: Side, field: str) -> None:
    """Refuse a model that does not answer each example with a row of classes, or whose labels are none of them."""
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
        shape = f"answers {tuple(answers.shape)} for {len(rows)} examples"
        raise WrongInput(field or "model", f"{shape}; it must give one row of classes for each")
    for batch, name in ((side.inside, "members"), (side.outside, "nonmembers")):
        low, high = int(batch.labels.min()), int(batch.labels.max())
        if low < 0 or high >= answers.shape[1]:
            allowed = f"allowed by the model's outputs: 0 to {answers.shape[1] - 1}"
            raise WrongInput(field or name, f"labels from {low} to {high}; {allowed}")


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
        raise WrongInput("model", "only an nn.Module can be pruned; give one, or leave the pruner out")
    if outside.size < 2:
        raise WrongInput("nonmembers", "one alone cannot stop the fine-tuning and be asked about; give at least two")
    tenth, order = max(1, outside.size // 10), torch.arange(outside.size)
    members, held = (
        Batch(in_precision(model, batch.inputs), batch.labels) for batch in (inside, outside.take(order[:tenth]))
    )
    rng = derive(seed, "prune", index)
    mask = method.make()(model, members, sparsity, rng)
    base = recipe or Recipe(epochs=50)
    _, fit = defended(read_defense(defense), base)
    task = Task(tree.state_of(model), members, held, derive(seed, "fit", index), mask)
    ((_, fitted),) = fit(model, [task])
    twin = copy.deepcopy(model)
    twin.load_state_dict(fitted.state)
    return Side(twin, inside, outside.take(order[tenth:]))


def box_of(model: Model) -> BlackBox:
    """Return the model as a black box of class probabilities; inputs are converted to the precision of its weights."""
    if isinstance(model, BlackBox):
        return model
    device = next((value.device for value in model.parameters()), torch.device("cpu"))
    answer = answering(model, tree.state_of(model), device)
    return remembering(lambda inputs: answer(in_precision(model, inputs)).softmax(1))


def in_precision(model: nn.Module, inputs: Tensor) -> Tensor:
    """Convert inputs to the precision of the model's weights; whole numbers, such as tokens, stay as they are."""
    dtypes = (value.dtype for value in model.parameters() if value.is_floating_point())
    return inputs.to(next(dtypes, inputs.dtype)) if inputs.is_floating_point() else inputs


def _described(
    box: BlackBox, inside: Batch, outside: Batch, labels: dict[str, Any], seed: int
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Return the rows and figures of the model itself: accuracies, and gaps unless its answers are labels only."""
    rows = [
        Row(**labels, metric=name, **share(box.predict(side.inputs).argmax(1) == side.labels)._asdict())
        for name, side in (("train_accuracy", inside), ("test_accuracy", outside))
    ]
    if box.labels_only:
        return rows, []
    classes = box.predict(inside.inputs[:1]).shape[1]
    gaps, figures = portrait(box, inside, outside, classes, derive(seed, "portrait"))
    rows += [Row(**labels, metric=name, **gap._asdict()) for name, gap in gaps.items()]
    return rows, [flat(labels) | {"attack": None} | figure for figure in figures]
