"""Scaling of inputs: the form in which a data set stores them, and the form that a model was trained on.

Pictures are counted in pixels from 0 to 1. A scaling is (pixel - mean) / std for each channel, so each scaling of a
data set can be turned into another. Columns of a table are scaled in their own units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from secateur.catalogue import users_own
from secateur.data.dataset import Dataset, Stats
from secateur.errors import WrongInput

NEUTRAL = 0.2  # of a deviation: columns that were standardised by the train part alone have such statistics
AT_ONCE = 1024  # rows that a user's transform gets in one call


@dataclass(frozen=True)
class Scaling:
    """A map from pixels in [0, 1], or from a table's columns, to a model's inputs: (value - mean) / std."""

    name: str
    mean: Stats  # one number, or one for each channel or column
    std: Stats


PIXELS = Scaling("pixels in [0, 1]", (0.0,), (1.0,))
SIGNED = Scaling("pixels in [-1, 1]", (0.5,), (0.5,))
BYTES = Scaling("pixels in [0, 255]", (0.0,), (1 / 255,))
IMAGENET = Scaling("pixels standardised by ImageNet's statistics", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
AS_STORED = Scaling("inputs as they are stored", (0.0,), (1.0,))
POOL = "standardised by the pool's own statistics"


@dataclass(frozen=True)
class DataForm:
    """The user's description of a data set of their own; None and empty: nothing is said."""

    inputs_are: Literal["pixels", "normalised"] | None = None
    mean: Stats = ()
    std: Stats = ()
    transform: str | None = None  # module:function
    resize: int | None = None  # side of the pictures of a folder
    label: str = "label"  # column of a table
    classes: int | None = None
    train_size: int | None = None  # members, the first rows
    group: str | None = None  # column of a table, or array of a file, that is no input

    @property
    def says_scaling(self) -> bool:
        """True if the user said how inputs are scaled."""
        return self.inputs_are is not None or bool(self.mean) or self.transform is not None


def apply_form(data: Dataset, form: DataForm) -> Dataset:
    """Return the data set with inputs scaled as the user says; unchanged if the user says nothing.

    A transform gets pixels in [0, 1], or rows as they are stored. `normalised` inputs stay as they are stored; a mean
    and a deviation then only describe them. Values below 0 are no pixels, so they are normalised already.
    """
    return replace(_apply(data, form), described=True) if form.says_scaling else data


def _apply(data: Dataset, form: DataForm) -> Dataset:
    current = scaling_of(data)
    if form.transform is not None:
        return _transform(data, current, form.transform)
    if not data.inputs.is_floating_point():
        raise WrongInput("inputs_are", f"{data.name} holds whole numbers, such as tokens; they are not scaled")
    stated = None if not form.mean else Scaling(_name(form.mean, form.std), form.mean, form.std)
    is_table = current is None and data.inputs.ndim == 2
    if form.inputs_are == "pixels" and current is None:
        low, high = float(data.inputs.min()), float(data.inputs.max())
        problem = f"{data.name} holds values from {low:.4g} to {high:.4g} of shape {data.input_shape}"
        raise WrongInput("inputs_are", f"{problem}, which are no pixels; use normalised, or mean and std")
    if form.inputs_are == "normalised" or (current is None and not is_table):
        return _describe(data, current, stated)
    return rescale(data, current or AS_STORED, stated or PIXELS)


def _describe(data: Dataset, current: Scaling | None, stated: Scaling | None) -> Dataset:
    """Return the data set as it is stored; bytes go back to [0, 255]."""
    if data.scaling.endswith(POOL) and current is not None:
        data = rescale(data, current, BYTES)
    if stated is None:
        return replace(data, scaling=AS_STORED.name)
    mean, std = (_per_channel(field, value, data) for field, value in (("mean", stated.mean), ("std", stated.std)))
    return replace(data, mean=mean, std=std, scaling=f"{AS_STORED.name}, normalised by {stated.name}")


def _name(mean: Stats, std: Stats) -> str:
    shown = ["/".join(f"{value:.4g}" for value in side[:4]) + ("/..." if len(side) > 4 else "") for side in (mean, std)]
    return f"mean {shown[0]} and deviation {shown[1]}"


def scaling_of(data: Dataset) -> Scaling | None:
    """Return the present scaling of pictures; None if the inputs are no pixels that can be recognised.

    Inputs with known statistics are pixels. Other pictures (N, C, H, W) are, if all values are from 0 to 255.
    """
    if data.mean:
        return Scaling(data.scaling, data.mean, data.std)
    if data.inputs.ndim != 4 or not data.inputs.is_floating_point() or float(data.inputs.min()) < 0:
        return None
    top = float(data.inputs.max())
    return PIXELS if top <= 1 else BYTES if top <= 255 else None


def candidates(data: Dataset) -> list[Scaling]:
    """Return the scalings that a model may have been trained on; published statistics come first."""
    present = scaling_of(data)
    if present is None:
        pool = _pool_scaling("columns", data.inputs, PIXELS) if data.inputs.ndim == 2 else None
        return [AS_STORED] + ([pool] if pool is not None and not _is_neutral(pool) else [])
    pool = present if data.scaling.endswith(POOL) else _pool_scaling("pixels", data.inputs, present)
    listed = [PIXELS, pool, SIGNED, BYTES] + ([IMAGENET] if data.input_shape[0] == 3 else [])
    return listed if present in listed else [present, *listed]


def _is_neutral(scaling: Scaling) -> bool:
    """Return True if a scaling hardly changes its inputs: they are standardised already."""
    return max(map(abs, scaling.mean)) < NEUTRAL and max(abs(value - 1) for value in scaling.std) < NEUTRAL


def _pool_scaling(unit: str, inputs: Tensor, present: Scaling) -> Scaling:
    """Return the scaling by mean and deviation of each channel or column of all rows."""
    axes = [axis for axis in range(inputs.ndim) if axis != 1]
    mean, std = inputs.mean(axes).double(), inputs.std(axes, correction=0).double()
    old_mean, old_std = torch.tensor(present.mean).double(), torch.tensor(present.std).double()
    spread = torch.where(std > 0, std * old_std, 1.0)
    return Scaling(f"{unit} {POOL}", tuple((mean * old_std + old_mean).tolist()), tuple(spread.tolist()))


def rescale(data: Dataset, present: Scaling, wanted: Scaling) -> Dataset:
    """Return the data set with inputs of another scaling.

    Example:
        >>> pixels = Dataset("one", torch.full((1, 1, 2, 2), 0.25), torch.zeros(1).long(), 1, 1)
        >>> rescale(pixels, PIXELS, SIGNED).inputs[0, 0, 0, 0].item()
        -0.5
    """
    inputs = rescale_inputs(data, data.inputs, present, wanted)
    mean, std = _per_channel("mean", wanted.mean, data), _per_channel("std", wanted.std, data)
    return replace(data, inputs=inputs, mean=mean, std=std, scaling=wanted.name)


def rescale_inputs(data: Dataset, inputs: Tensor, present: Scaling, wanted: Scaling) -> Tensor:
    """Return some inputs of the data set in another scaling."""
    if present == wanted:
        return inputs
    shape = (1, -1, *[1] * (inputs.ndim - 2))
    fields = {"mean": (present.mean, wanted.mean), "std": (present.std, wanted.std)}
    numbers = {
        name: [torch.tensor(_per_channel(name, side, data), dtype=torch.float64) for side in sides]
        for name, sides in fields.items()
    }
    (old_mean, new_mean), (old_std, new_std) = numbers["mean"], numbers["std"]
    factor, shift = old_std / new_std, (old_mean - new_mean) / new_std
    return inputs * factor.float().view(shape) + shift.float().view(shape)


def _per_channel(field: str, values: Stats, data: Dataset) -> Stats:
    """Return one number for each channel or column."""
    wanted = data.input_shape[0]
    if len(values) not in (1, wanted):
        raise WrongInput(field, f"{len(values)} numbers do not fit {data.name}; use 1 or {wanted}")
    return tuple(values) * (wanted if len(values) == 1 else 1)


def _transform(data: Dataset, present: Scaling | None, reference: str) -> Dataset:
    """Return the data set with inputs by the user's `module:function`, called on some rows at a time."""
    function: Callable[[Tensor], Any] = users_own("transform", reference)
    parts = []
    for part in torch.split(data.inputs, AT_ONCE):
        pixels = part if present is None else rescale_inputs(data, part, present, PIXELS)
        try:
            answer = function(pixels)
        except Exception as error:  # the user's code may raise anything
            raise WrongInput("transform", f"{reference} failed with {type(error).__name__}: {error}") from error
        if not isinstance(answer, Tensor) or len(answer) != len(part):
            raise WrongInput("transform", f"{reference} must return a tensor with one row for each of {len(part)}")
        parts.append(answer if answer.dtype == torch.int64 else answer.float())
    return replace(data, inputs=torch.cat(parts), mean=(), std=(), scaling=f"inputs by {reference}")
