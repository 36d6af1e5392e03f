"""Examples in the forms that users have: arrays, torch data sets and loaders, Hugging Face data sets, frames.

Inputs of several tensors, such as tokens with their attention mask, are packed as one tensor, which attacks take. The
tensors of an example are laid side by side, and the model gets them back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from secateur.data.columns import read_table
from secateur.errors import WrongInput
from secateur.interfaces import Batch

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


ALLOWED = (
    "(inputs, labels) as tensors or arrays, a torch Dataset or DataLoader of such pairs, a Hugging Face data set, or a "
    "pandas frame with a column of labels"
)
INPUT_COLUMNS = ("inputs", "x", "input_ids", "pixel_values")
TEXT_COLUMNS = ("input_ids", "attention_mask", "token_type_ids")  # together the inputs of a text classifier
LABEL_COLUMNS = ("label", "labels", "y", "target")


def read_examples(field: str, examples: Any, label: str = "label") -> Batch:
    """Return a user's examples as one batch of tensors.

    Args:
        field: the argument's name in an error.
        examples: examples in one of the allowed forms; tensors and arrays keep their kind of numbers.
        label: column of the labels, for frames and Hugging Face data sets.
    """
    if isinstance(examples, Batch):
        return examples
    if _is_frame(examples):
        columns = {str(name): examples[name].to_numpy() for name in examples.columns}
        table = read_table(field, columns, label)
        return Batch(torch.from_numpy(table.inputs), torch.from_numpy(table.labels))
    if hasattr(examples, "column_names") and hasattr(examples, "features"):
        return _read_columns(field, examples, label)
    if _is_pair(examples):
        return _pair(field, *examples)
    if isinstance(examples, DataLoader):
        return _join(field, [_split_item(field, batch) for batch in examples])
    if isinstance(examples, TorchDataset) or _is_sequence_of_pairs(examples):
        return _read_items(field, examples)
    raise WrongInput(field, f"{type(examples).__name__} is not allowed; use {ALLOWED}")


def read_structured(field: str, examples: Any, label: str = "label") -> tuple[Batch, InputLayout | None]:
    """Return a user's examples as one batch, and the layout of inputs that are several tensors, which are packed.

    Such inputs are a mapping or a tuple of tensors beside the labels, or tokens with their attention mask.
    """
    parts = _several(field, examples, label)
    if parts is None:
        return read_examples(field, examples, label), None
    inputs, labels = parts
    if isinstance(inputs, Mapping):
        packed, layout = pack(field, {name: _tensor(field, name, value) for name, value in inputs.items()})
    else:
        packed, layout = pack(field, tuple(_tensor(field, "inputs", value) for value in inputs))
    return Batch(packed, _tensor(field, "labels", labels)), layout


def _several(field: str, examples: Any, label: str) -> tuple[Any, Any] | None:
    """Return inputs of several tensors, and their labels; None for examples of one tensor."""
    if isinstance(examples, tuple | list) and len(examples) == 2:
        inputs, labels = examples
        one = isinstance(labels, Tensor | np.ndarray) and isinstance(inputs, tuple) and len(inputs) > 0
        several = one and all(isinstance(value, Tensor | np.ndarray) for value in inputs)
        return (inputs, labels) if isinstance(inputs, Mapping) or several else None
    if hasattr(examples, "column_names") and "attention_mask" in examples.column_names:
        names = [name for name in TEXT_COLUMNS if name in examples.column_names]
        target = label if label in examples.column_names else _column(field, examples.features, LABEL_COLUMNS)
        return {name: _stack(field, name, examples[name]) for name in names}, _stack(field, target, examples[target])
    if not isinstance(examples, DataLoader):
        return None
    batches = list(examples)
    if not batches or not isinstance(batches[0], Mapping) or "attention_mask" not in batches[0]:
        return None
    target = _column(field, batches[0], LABEL_COLUMNS)
    joined = {name: torch.cat([_tensor(field, name, batch[name]) for batch in batches]) for name in batches[0]}
    return {name: joined[name] for name in TEXT_COLUMNS if name in joined}, joined[target]


def _is_frame(value: Any) -> bool:
    """Return True for a pandas frame, without an import of pandas."""
    return hasattr(value, "columns") and hasattr(value, "iloc")


def _is_pair(value: Any) -> bool:
    """Return True for (inputs, labels); a list of two examples (input, label) is none."""
    inner = tuple if isinstance(value, tuple) else tuple | list
    return isinstance(value, tuple | list) and len(value) == 2 and not isinstance(value[0], inner)


def _is_sequence_of_pairs(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], tuple | list) and len(value[0]) == 2


def _pair(field: str, inputs: Any, labels: Any) -> Batch:
    if isinstance(inputs, Mapping):
        raise WrongInput(field, "several tensors for an example are taken by secateur.audit alone; use one tensor")
    values = inputs
    if _is_frame(inputs):
        columns = {str(name): inputs[name].to_numpy() for name in inputs.columns}
        values = read_table(field, columns | {"": np.zeros(len(inputs))}, "").inputs
    return Batch(_tensor(field, "inputs", values), _tensor(field, "labels", labels))


def _tensor(field: str, part: str, values: Any) -> Tensor:
    """Return values as a tensor; floats of 64 bits become 32, unless they are a tensor already."""
    if isinstance(values, Tensor):
        return values
    try:
        array = np.asarray(values)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"it holds {array.dtype}")
        kept = array.astype(np.float32) if array.dtype.kind == "f" else array
        return torch.from_numpy(np.ascontiguousarray(kept))
    except (TypeError, ValueError) as error:
        raise WrongInput(field, f"{part} are not readable as an array of numbers ({error}); use {ALLOWED}") from None


def _read_items(field: str, items: Iterable[Any]) -> Batch:
    """Return the batch of single examples (input, label); a data set that only counts is read by its length."""
    sized = hasattr(items, "__len__") and hasattr(items, "__getitem__")
    single = (items[i] for i in range(len(items))) if sized else iter(items)  # type: ignore[arg-type, index]
    pairs = [_split_item(field, item) for item in single]
    if not pairs:
        raise WrongInput(field, "has no examples; use at least one")
    inputs = [_tensor(field, "inputs", value) for value, _ in pairs]
    if len({value.shape for value in inputs}) > 1:
        shapes = sorted({str(tuple(value.shape)) for value in inputs})
        raise WrongInput(field, f"inputs have different shapes, {' and '.join(shapes[:2])}; pad or resize them")
    labels = torch.stack([_tensor(field, "labels", label).reshape(()) for _, label in pairs])
    return Batch(torch.stack(inputs), labels)


def _split_item(field: str, item: Any) -> tuple[Any, Any]:
    """Return inputs and label of what a data set or a loader yields: a pair, or a dictionary."""
    if isinstance(item, Mapping):
        return item[_column(field, item, INPUT_COLUMNS, LABEL_COLUMNS)], item[_column(field, item, LABEL_COLUMNS)]
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise WrongInput(field, f"yields {type(item).__name__}; it must yield pairs of input and label")


def _join(field: str, batches: Sequence[tuple[Any, Any]]) -> Batch:
    if not batches:
        raise WrongInput(field, "has no examples; use at least one")
    inputs, labels = zip(*batches, strict=True)
    return Batch(
        torch.cat([_tensor(field, "inputs", value) for value in inputs]),
        torch.cat([_tensor(field, "labels", value) for value in labels]),
    )


def _read_columns(field: str, data: Any, label: str) -> Batch:
    """Return the batch of a Hugging Face data set, by its columns of inputs and labels."""
    names = dict.fromkeys(data.column_names)
    target = label if label in names else _column(field, names, LABEL_COLUMNS)
    source = _column(field, names, INPUT_COLUMNS, (*LABEL_COLUMNS, target))
    return _pair(field, _stack(field, source, data[source]), _stack(field, target, data[target]))


def _stack(field: str, name: str, values: Any) -> Any:
    """Return a column as one array; refuse pictures and texts, whose form as inputs only the user knows."""
    if isinstance(values, Tensor | np.ndarray):
        return values
    rows = list(values)
    if rows and isinstance(rows[0], Tensor):
        return torch.stack(rows)
    try:
        array = np.asarray(rows)
    except ValueError:  # rows of different lengths
        array = np.empty(0, dtype=object)
    if array.dtype.kind in "biuf":
        return array
    advice = "use with_transform or map, so that each row holds the model's inputs as numbers of one shape"
    raise WrongInput(field, f"column {name} holds {type(rows[0]).__name__}, no numbers of one shape; {advice}")


def _column(field: str, names: Mapping[str, Any], wanted: Sequence[str], besides: Sequence[str] = ()) -> str:
    """Return the first wanted name, or the only one that is left beside others."""
    for name in wanted:
        if name in names:
            return name
    rest = [name for name in names if besides and name not in besides]
    if len(rest) == 1:
        return rest[0]
    held = ", ".join(map(str, names)) or "nothing"
    raise WrongInput(field, f"has the columns {held}; one must be named {' or '.join(wanted)}")
