"""Inputs of several tensors, such as tokens with their attention mask, packed as one tensor.

Attacks take one tensor of examples. So the tensors of an example are laid side by side, and the model gets them back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.errors import WrongInput

Structured = Mapping[str, Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class InputLayout:
    """Names, shapes and types of the tensors of one example."""

    names: tuple[str, ...] | None  # None: the tensors are told apart by their order
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def unpack(self, rows: Tensor) -> Structured:
        """Return the tensors of packed rows (N, D)."""
        parts = torch.split(rows, [math.prod(shape) for shape in self.shapes], 1)
        tensors = [
            _decode(part, dtype).reshape(len(rows), *shape)
            for part, shape, dtype in zip(parts, self.shapes, self.dtypes, strict=True)
        ]
        return tuple(tensors) if self.names is None else dict(zip(self.names, tensors, strict=True))


def pack(field: str, inputs: Structured) -> tuple[Tensor, InputLayout]:
    """Return the tensors side by side as (N, D), and their layout; nothing is rounded.

    Floats stay floats, so that an attack can move them by a little. Beside whole numbers they become whole numbers of
    the same bits, which no attack moves.

    Example:
        >>> packed, layout = pack("members", {"tokens": torch.tensor([[5, 6]]), "weight": torch.tensor([0.5])})
        >>> packed.dtype, layout.unpack(packed)
        (torch.int64, {'tokens': tensor([[5, 6]]), 'weight': tensor([0.5000])})
    """
    named = isinstance(inputs, Mapping)
    tensors: Sequence[Tensor] = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    if not tensors or len({len(value) for value in tensors}) > 1:
        sizes = ", ".join(str(len(value)) for value in tensors) or "no"
        raise WrongInput(field, f"the tensors of the inputs have {sizes} rows; all must have as many")
    layout = InputLayout(
        tuple(map(str, inputs)) if named else None,
        tuple(tuple(value.shape[1:]) for value in tensors),
        tuple(value.dtype for value in tensors),
    )
    if all(value.is_floating_point() for value in tensors):
        exact = torch.float64 if torch.float64 in layout.dtypes else torch.float32
        return torch.cat([value.reshape(len(value), -1).to(exact) for value in tensors], 1), layout
    return torch.cat([_encode(value).reshape(len(value), -1) for value in tensors], 1), layout


def _encode(value: Tensor) -> Tensor:
    """Return whole numbers of 64 bits from which `_decode` restores the value."""
    if not value.is_floating_point():
        return value.long()
    bits = torch.int64 if value.dtype == torch.float64 else torch.int32
    exact = value if value.dtype == torch.float64 else value.float()
    return exact.contiguous().view(bits).long()


def _decode(part: Tensor, dtype: torch.dtype) -> Tensor:
    if part.is_floating_point() or not dtype.is_floating_point:
        return part.to(dtype)
    if dtype == torch.float64:
        return part.contiguous().view(dtype)
    return part.int().view(torch.float32).to(dtype)
