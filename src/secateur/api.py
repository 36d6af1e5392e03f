"""`secateur.audit(...)`: audit any nn.Module and tensors from Python."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur import tree
from secateur.artifacts import write
from secateur.catalogue import Choice
from secateur.chance import derive
from secateur.config import choice
from secateur.config import defense_of_models as read_defense
from secateur.errors import WrongInput
from secateur.given import Data, Model, Side, box_of, given, in_precision
from secateur.interfaces import Batch, BlackBox, Candidates, Shadow
from secateur.judging import attack_rows, flat, judged
from secateur.metrics.membership import share
from secateur.metrics.portrait import portrait
from secateur.needs import check_installed, check_models, shortage
from secateur.pipeline import defended
from secateur.recipe import Recipe, Task
from secateur.rows import Row


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
        from secateur.report.page import Source, render

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
