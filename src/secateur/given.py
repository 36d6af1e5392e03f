"""What a user hands to `secateur.audit`: models and examples, refused in one sentence where they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from secateur import tree
from secateur.attacks.membership.references import content
from secateur.errors import WrongInput
from secateur.interfaces import Batch, BlackBox
from secateur.judging import remembering
from secateur.prediction import answering

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
