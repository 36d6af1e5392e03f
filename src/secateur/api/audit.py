"""`secateur.audit(...)`: the membership audit of any model that can be asked, from Python.

Models and examples that do not fit together are refused in one sentence before any work begins.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.api import Examples, Printable, check_batch
from secateur.attacks.membership.reference_models import content
from secateur.catalogue import Choice, Compressor, methods
from secateur.config import check_together, choice, compressor
from secateur.config import defense_of_models as read_defense
from secateur.data.examples import InputLayout, read_structured
from secateur.errors import WrongInput
from secateur.evaluation.membership import ModelRecords, cache_answers
from secateur.evaluation.validity import Accuracy, Validity, resemblance, validity_rows
from secateur.experiments.black_box import ROWS, BoxAudit, needs_no_shadows, sparsity_of, sparsity_rows
from secateur.experiments.context import MOVES, check_installed, check_models, shortage
from secateur.experiments.pipeline import Finetuning, build_fit
from secateur.interfaces import Batch, BlackBox, Converter, Reshaper, Shadow, Teaches
from secateur.models.create import adapt, check_labels, explain_failure
from secateur.models.sparsity import copy_module
from secateur.models.wrap import Wrapped, check_repeatable, in_precision, wrap
from secateur.runs.folder import MemoryRun
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.training.recipe import Recipe, Task

Model = Any  # whatever `secateur.wrap` takes


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
    box: BlackBox
    inside: Batch
    outside: Batch
    layout: InputLayout | None = None  # of inputs that are several tensors, packed as one

    @property
    def net(self) -> nn.Module | None:
        """The network of the model, without masks; None if there is none."""
        return self.box.net if isinstance(self.box, Wrapped) else None


def audit(
    model: Model,
    members: Examples,
    nonmembers: Examples,
    *,
    shadows: Sequence[tuple[Model, Examples, Examples]] = (),
    before: Model | None = None,
    attacks: Sequence[str] | str | None = None,
    pruner: str | None = None,
    sparsity: float = 0.7,
    defense: str = "basic",
    recipe: Recipe | None = None,
    seed: int = 0,
    name: str = "model",
    label: str = "label",
    groups: Sequence[Any] | None = None,
) -> Report:
    """Return a report of how much the model reveals about its members.

    A model is anything that `secateur.wrap` takes. Examples are (inputs, labels) as tensors or arrays, a torch Dataset
    or DataLoader, or a Hugging Face data set. A pandas frame has its labels in the column `label`. Inputs of several
    tensors are a mapping or a tuple of them, with as many rows.

    `shadows` are the attacker's models, each with its own members and non-members. By default all attacks run that can
    run with them. `before` is the same model before a compression made elsewhere: it is attacked too, and the report
    has the paired change of each attack that needs no shadows. With a `pruner` the model and the shadows are pruned
    first. Each is then fine-tuned on its own members, with the defense named by `defense`. A tenth of its non-members
    says when to stop, and is left out of the audit. `groups` are values of a column of yours, by which leakage is
    compared: one for each member, then one for each non-member.
    """
    if before is not None and pruner is not None:
        raise WrongInput("before", "is for a model that is compressed already; leave out the pruner")
    sides = check_sides(model, members, nonmembers, shadows, label)
    whole = sides[0].outside.size
    labels_only = sides[0].box.labels_only
    chosen = _attacks([attacks] if isinstance(attacks, str) else attacks, sides)
    original = None if before is None else _read_before(before, sides[0])
    if pruner is not None:
        check_installed([read_defense(defense)])
        method = compressor(pruner)
        check_together([method], [read_defense(defense)])
        sides = [_prune_side(side, method, sparsity, defense, recipe, seed, i) for i, side in enumerate(sides)]
    inside, outside = sides[0].inside, sides[0].outside
    ids = torch.cat([torch.arange(inside.size), inside.size + torch.arange(whole)[whole - outside.size :]])
    if groups is not None and len(groups) != inside.size + whole:
        raise WrongInput("groups", f"{len(groups)} values for {inside.size + whole} examples; use one for each")
    named = None if groups is None else [str(groups[row]) for row in ids.tolist()]
    known = [Shadow(side.box, side.inside, side.outside) for side in sides[1:]]
    work = BoxAudit(MemoryRun(), seed, inside, outside, chosen, known, ids, groups=named)
    net, net_before = sides[0].net, None if original is None else original.net
    labels: dict[str, Any] = {"model": name, "dataset": "given", "pruner": pruner or "given", "adaptive": False}
    share = (sparsity if method.uses_sparsity else 0.0) if pruner else sparsity_of(net, net_before)
    labels |= {"sparsity": share, "defense": defense if pruner else "given", "seed": seed, "extra": {}}
    exposure = work.measure(sides[0].box, labels, name, trained=pruner is None)
    work.run.add([] if pruner else sparsity_rows(labels, net, net_before))
    if known and not labels_only:
        work.run.add(validity_rows(labels, [_check_shadows(sides)]))
    if original is not None:
        alone = replace(work, attacks=[attack for attack in chosen if needs_no_shadows(attack)])
        unpruned = labels | {"pruner": "none", "sparsity": 0.0, "defense": "none"}
        work.compare(alone.measure(original.box, unpruned, f"{name} before"), exposure, labels)
    return Report(work.run.rows, work.run.figures, exposure.record)


def _read_before(model: Model, side: Side) -> Side:
    """Return the model before its compression, with the same examples; refuse one of other classes."""
    original = _side(model, side.inside, side.outside, side.layout)
    rows = side.inside.inputs[:1]
    _check_answers(original, "before")
    classes = [one.box.predict(rows).shape[1] for one in (original, side)]
    if classes[0] != classes[1]:
        raise WrongInput("before", f"it answers with {classes[0]} classes, and the model with {classes[1]}")
    return original


def _check_shadows(sides: Sequence[Side]) -> Validity:
    """Check that the shadows resemble the model."""
    victim, *shadows = [
        Accuracy(*(float((side.box.predict(x.inputs).argmax(1) == x.labels).double().mean()) for x in side[2:4]))
        for side in sides
    ]
    return resemblance(victim, shadows, [side.inside.size for side in sides[1:]])


def check_sides(
    model: Model,
    members: Examples,
    nonmembers: Examples,
    shadows: Sequence[tuple[Model, Examples, Examples]],
    label: str = "label",
) -> list[Side]:
    """Return the victim, then the shadows; refuse models that do not fit their examples, and shared examples."""
    victim = _read_side(model, ("members", members), ("nonmembers", nonmembers), label)
    others = [_read_side(one, ("shadows", a), ("shadows", b), label) for one, a, b in shadows]
    known = _distinct_contents("nonmembers", victim)
    for shadow in others:
        if shared := len(known & _distinct_contents("shadows", shadow)):
            raise WrongInput("shadows", f"{shared} examples are the model's; use other examples for shadows")
    for field, side in [("", victim), *(("shadows", shadow) for shadow in others)]:
        _check_answers(side, field)
    return [victim, *others]


def _distinct_contents(field: str, side: Side) -> set[bytes]:
    """Return the contents of all examples of a side; refuse examples that are members and non-members."""
    members, nonmembers = (set(content(_comparable(batch.inputs))) for batch in (side.inside, side.outside))
    if both := len(members & nonmembers):
        raise WrongInput(field, f"{both} examples are members too; the two sets must not share examples")
    return members | nonmembers


def _comparable(inputs: Tensor) -> Tensor:
    """Return inputs in one precision; whole numbers stay, as large ones would become equal."""
    return inputs.float() if inputs.is_floating_point() else inputs


def _check_answers(side: Side, field: str) -> None:
    """Refuse a model that does not answer each example with a row of classes, or whose labels are none of them."""
    rows = side.inside.inputs[:ROWS]
    with explain_failure(field or "model", rows):
        answers = check_repeatable(field or "model", side.box, rows)
    if (shape := side.outside.inputs.shape[1:]) != rows.shape[1:]:
        problem = f"have inputs of the shape {tuple(shape)}, and the members {tuple(rows.shape[1:])}"
        raise WrongInput(field or "nonmembers", f"{problem}; use one shape")
    for batch, name in ((side.inside, "members"), (side.outside, "nonmembers")):
        check_labels(field or name, batch.labels, answers.shape[1])


def _attacks(names: Sequence[str] | None, sides: Sequence[Side]) -> list[Choice]:
    """Return the named attacks, refused where shadows are too few; by default all attacks that can run."""
    shadows, only_labels = len(sides) - 1, sides[0].box.labels_only
    chosen = [choice("attack", name) for name in (methods("attack") if names is None else names)]
    if names is None:
        able = [attack for attack in chosen if not only_labels or attack.method.info["sees"] == "labels"]
        if not sides[0].inside.inputs.is_floating_point():
            able = [attack for attack in able if attack.name not in MOVES]
        return [attack for attack in able if shortage(attack, shadows) is None]
    for attack in chosen:
        check_models(attack, shadows)
    return chosen


def _prune_side(
    side: Side, method: Compressor, sparsity: float, defense: str, recipe: Recipe | None, seed: int, index: int
) -> Side:
    """Return the side with a compressed and fine-tuned copy of the model, without the non-members that stopped it."""
    model, inside, outside = side.net, side.inside, side.outside
    if model is None or side.layout is not None:
        raise WrongInput("model", "only an nn.Module of one input tensor can be pruned; use one, or no pruner")
    if outside.size < 2:
        raise WrongInput("nonmembers", "one example cannot both stop the fine-tuning and be attacked; use at least two")
    rows = inside.inputs[:2]
    model = adapt(copy_module(model), rows, side.box.predict(rows).shape[1])  # outputs may be a mapping or one number
    tenth, order = max(1, outside.size // 10), torch.arange(outside.size)
    sides = (inside, outside.take(order[:tenth]))
    members, held = (Batch(in_precision(model, batch.inputs), batch.labels) for batch in sides)
    _, fit = build_fit(read_defense(defense), recipe or Recipe(epochs=50))
    task = Task({}, members, held, derive(seed, "fit", index))
    small = _compress(model, method, sparsity, task, fit, derive(seed, "prune", index))
    return _side(small, inside, outside.take(order[tenth:]))


def _compress(
    model: nn.Module, method: Compressor, sparsity: float, task: Task, fit: Finetuning, rng: Generator
) -> nn.Module:
    """Return the model after a compressor: masked or smaller and fine-tuned by the task, then converted."""
    net, first, mask, options = copy.deepcopy(model), method.parts[0].make(), None, {}
    if isinstance(first, Reshaper):
        net = first.reshape(model, task.train, sparsity, rng)
        if isinstance(first, Teaches):
            guide = first.guide(model, task.train.inputs.device)
            options = {"guide": guide, "loss": first.share(fit.keywords["loss"])}
    elif not isinstance(first, Converter):
        mask = first(model, task.train, sparsity, rng)
    if not isinstance(first, Converter):
        ((_, fitted),) = fit(net, [replace(task, state=tree.state_of(net), mask=mask)], **options)
        net.load_state_dict(fitted.state)
    if (converter := method.find_part(Converter)) is not None:
        net = converter.make().convert(net, task.train)
    return net


def _read_side(model: Model, inside: tuple[str, Examples], outside: tuple[str, Examples], label: str) -> Side:
    """Return a side of a user's examples, each set with the field's name; refuse sets of other layouts."""
    (first, layout), (second, other) = (read_structured(field, some, label) for field, some in (inside, outside))
    if layout != other:
        raise WrongInput(outside[0], "have inputs of other names, shapes or types than the members")
    return _side(model, check_batch(inside[0], first), check_batch(outside[0], second), layout)


def _side(model: Model, inside: Batch, outside: Batch, layout: InputLayout | None = None) -> Side:
    """Return a side whose black box caches the model's answers, and unpacks inputs of several tensors."""
    box = wrap(model)
    if layout is not None:
        ask: Callable[[Any], Tensor] = box.predict
        unpack = layout.unpack
        box = replace(box, predict=lambda rows: ask(unpack(rows)))
    cached = box if box is model else replace(box, predict=cache_answers(box.predict).predict)
    return Side(model, cached, inside, outside, layout)
