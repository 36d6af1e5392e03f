"""`secateur.wrap(...)`: any model that was brought, as the black box that attacks query.

The answers become probabilities of classes, whatever the model returns: logits, probabilities, log-probabilities, one
number for two classes, an object or a mapping with `logits`, or a tuple.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from secateur import tree
from secateur.data.examples import Structured
from secateur.errors import NotFinite, WrongInput
from secateur.gpu.precision import full_precision
from secateur.inference import bind_state
from secateur.interfaces import BlackBox
from secateur.models.create import load_weights
from secateur.models.endpoint import Endpoint
from secateur.models.formats import ASKED, OnnxModel, is_brought, load_model
from secateur.models.outputs import as_table, convert_outputs, read_outputs, recognise_outputs
from secateur.models.sparsity import copy_module, fold_masks

OUTPUTS = ("auto", "logits", "probabilities")
ROWS = 256  # asked at once
REPEATS = 1e-4  # difference of two answers for one input that rounding explains

Outputs = Literal["auto", "logits", "probabilities"]
Inputs = Tensor | Structured
Answer = Callable[[Any], Any]  # a part of the inputs -> whatever the model returns


@dataclass(frozen=True)
class Wrapped(BlackBox):
    """A model that was brought, as a black box."""

    net: nn.Module | None = field(default=None, repr=False)  # without masks: a copy, or the user's own module
    kinds: list[str] = field(default_factory=list, repr=False, compare=False)  # of the outputs, after a first answer


def wrap(
    model: Any,
    *,
    weights: str | Path | None = None,
    outputs: Outputs = "auto",
    classes: int | None = None,
    cache: str | Path | None = None,
) -> BlackBox:
    """Return a model as the black box that attacks query: inputs to (N, K) probabilities.

    Args:
        model: an nn.Module (also scripted, quantised, or masked by torch.nn.utils.prune), a program of torch.export, a
            scikit-learn classifier, a function of inputs, or a BlackBox, which is returned unchanged. A text or path
            is a file (.onnx, .pt2, TorchScript as .pt or .pth), `hf:FOLDER`, or the address of an endpoint.
        weights: a file of the nn.Module's tensors, .safetensors or a state dict as .pt or .pth.
        outputs: `logits` or `probabilities`; `auto` recognises them by the first answers. The softmax of
            log-probabilities gives the probabilities, so they count as logits. A single number is for class 1 of two.
        classes: the number of classes; another one is refused.
        cache: folder in which the answers of an endpoint are kept.

    Example:
        >>> wrap(nn.Identity()).predict(torch.zeros(1, 2)).tolist()
        [[0.5, 0.5]]
    """
    if isinstance(model, BlackBox):
        return model
    if outputs not in OUTPUTS:
        raise WrongInput("outputs", f"{outputs!r} is not known; allowed: {', '.join(OUTPUTS)}")
    if isinstance(model, str | Path):
        model = _load(model, cache)
    if weights is not None and not isinstance(model, nn.Module):
        raise WrongInput("weights", "are for an nn.Module; leave them out")
    kinds: list[str] = []
    if isinstance(model, torch.export.ExportedProgram):
        asked = _plain(model.module(), copied=True, rows=count_fixed_rows(model))
        return Wrapped(_reading(asked, outputs, classes, kinds), kinds=kinds)
    if isinstance(model, nn.Module):
        net = fold_masks(model) if weights is None else load_weights(copy_module(fold_masks(model)), weights)
        return Wrapped(_reading(_module(net), outputs, classes, kinds), net=net, kinds=kinds)
    if hasattr(model, "predict") and hasattr(model, "classes_"):
        return _estimator(model, classes)
    if callable(model):
        asked = model if isinstance(model, Endpoint | OnnxModel) else partial(call, model)
        metered = isinstance(model, Endpoint)
        return Wrapped(_reading(_parts(asked), outputs, classes, kinds), metered=metered, kinds=kinds)
    listed = "an nn.Module, a torch.export program, a scikit-learn classifier, a function or a BlackBox"
    raise WrongInput("model", f"{type(model).__name__} cannot be asked; use {listed}")


def _load(source: str | Path, cache: str | Path | None) -> Any:
    if not is_brought(str(source)):
        listed = f"a file ({', '.join(ASKED)}), hf:FOLDER or an address"
        raise WrongInput("model", f"{source} cannot be asked; use {listed}, or an object such as an nn.Module")
    return load_model(source, None if cache is None else Path(cache))


# Answers of modules ------------------------------------------------------------------------------------------------
def _module(net: nn.Module) -> Answer:
    """Return a module as a function: its pure form, or where that fails the module itself.

    Quantised and scripted modules, and modules with structured outputs, have no pure form.
    """
    chosen: list[Answer] = []

    def answer(inputs: Inputs) -> Any:
        if not isinstance(inputs, Tensor) and not chosen:
            chosen.append(_plain(net))
        if not chosen:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns of copies of scripted modules
                    pure = _pure(net)
                    pure(first_tensor(inputs)[:1])
            except NotFinite:
                raise
            except Exception:  # whatever it is, the module itself answers, or raises what the user shall read
                chosen.append(_plain(net))
            else:
                chosen.append(pure)
        return chosen[0](inputs)

    return answer


def _pure(net: nn.Module) -> Callable[[Tensor], Tensor]:
    answer, device = bind_state(net, tree.state_of(net), device_of(net)), device_of(net)
    return lambda inputs: answer(in_precision(net, inputs).to(device))


def _plain(net: nn.Module, copied: bool = False, rows: int | None = None) -> Answer:
    """Return a module as a function of inputs, part by part, in eval mode.

    Args:
        net: the module.
        copied: True if it is no one else's.
        rows: the only number of rows that it takes; None for any.
    """
    with suppress(Exception):  # some scripted and quantised modules cannot be copied; then the user's own is asked
        net = net if copied else copy_module(net)
    with suppress(NotImplementedError):  # a program of torch.export was traced in one mode
        net.eval()
    device = device_of(net)

    @torch.no_grad()
    def answer(part: Inputs) -> Any:
        with full_precision(device):
            return call(net, map_inputs(part, lambda value: in_precision(net, value).to(device)))

    return _parts(answer, rows)


def _parts(answer: Answer, rows: int | None = None) -> Answer:
    """Return a function that is called for few rows at once, or for exactly `rows`."""
    size = rows or ROWS

    def ask(inputs: Inputs) -> Tensor:
        count = len(first_tensor(inputs))
        if rows is not None:  # the last row is repeated until the last part is whole
            order = torch.arange(-(-count // size) * size).clamp_max(count - 1)
            inputs = map_inputs(inputs, itemgetter(order))
        starts = range(0, len(first_tensor(inputs)), size)
        parts = [map_inputs(inputs, itemgetter(slice(start, start + size))) for start in starts]
        return torch.cat([read_outputs(answer(part)) for part in parts])[:count]

    return ask


def count_fixed_rows(program: torch.export.ExportedProgram) -> int | None:
    """Return the number of rows that a program was exported for; None if it takes any number."""
    names = program.graph_signature.user_inputs
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    first = next((value for value in values if isinstance(value, Tensor) and value.ndim), None)
    return first.shape[0] if first is not None and isinstance(first.shape[0], int) else None


def call(function: Callable[..., Any], inputs: Inputs) -> Any:
    """Call a function with its inputs: a tensor, several by name, or several in order."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    return function(**inputs) if isinstance(inputs, Mapping) else function(*inputs)


def map_inputs(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Return inputs with every tensor changed."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, Mapping):
        return {name: change(value) for name, value in inputs.items()}
    return tuple(change(value) for value in inputs)


def first_tensor(inputs: Inputs) -> Tensor:
    """Return the tensor, or the first of several, whose rows are the examples."""
    if isinstance(inputs, Tensor):
        return inputs
    return next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs[0]


def in_precision(net: nn.Module, inputs: Tensor) -> Tensor:
    """Convert inputs to the precision of the model's weights; whole numbers, such as tokens, stay as they are."""
    dtypes = (value.dtype for value in net.parameters() if value.is_floating_point())
    return inputs.to(next(dtypes, inputs.dtype)) if inputs.is_floating_point() else inputs


def device_of(net: nn.Module) -> torch.device:
    """Return the device of the model's weights."""
    return next((value.device for value in net.parameters()), torch.device("cpu"))


def _estimator(model: Any, classes: int | None) -> BlackBox:
    """Return a scikit-learn classifier; its classes must be whole numbers, which place its columns."""
    labels = np.asarray(model.classes_)
    if labels.dtype.kind not in "iub" or labels.ndim != 1 or labels.min() < 0:
        raise WrongInput("model", f"its classes are {labels.dtype}; train it on whole numbers, the classes from 0")
    places = torch.from_numpy(labels.astype(np.int64))
    columns = int(places.max()) + 1
    method = next((name for name in ("predict_proba", "decision_function") if hasattr(model, name)), "predict")

    def answer(part: Inputs) -> Tensor:
        if not isinstance(part, Tensor):
            raise WrongInput("inputs", "of an estimator must be one table")
        values = torch.from_numpy(np.asarray(getattr(model, method)(part.flatten(1).cpu().numpy())))
        if method == "predict":
            return nn.functional.one_hot(values.long(), columns).float()
        if method == "predict_proba":
            spread = torch.zeros(len(values), columns, dtype=values.dtype)
            return spread.index_copy_(1, places, values)
        return values

    outputs: Outputs = "logits" if method == "decision_function" else "probabilities"
    only_labels = method == "predict"
    predict = _reading(_parts(answer), outputs, classes, [])
    return Wrapped(predict, labels_only=only_labels)


# Answers as probabilities ------------------------------------------------------------------------------------------
def _reading(answer: Answer, outputs: Outputs, classes: int | None, kinds: list[str]) -> Callable[[Inputs], Tensor]:
    """Return the model as a function to (N, K) probabilities; `kinds` gets the kind of its outputs."""

    def predict(inputs: Inputs) -> Tensor:
        rows = first_tensor(inputs)
        values = as_table(answer(inputs), len(rows)).to(rows.device)
        if not kinds:
            kinds.append(recognise_outputs(values) if outputs == "auto" else outputs)
        result = convert_outputs(values, kinds[0])
        if classes is not None and result.shape[1] != classes:
            raise WrongInput("model", f"it answers with {result.shape[1]} classes; the data has {classes}")
        return result

    return predict


def check_repeatable(field_: str, box: BlackBox, inputs: Tensor) -> Tensor:
    """Return the answers for some rows; refuse a model that answers the same rows otherwise when asked again."""
    first, second = box.predict(inputs), box.predict(inputs.clone())
    if first.shape != second.shape or bool(((first - second).abs() > REPEATS).any()):
        cause = "is a dropout left on (use training=self.training), or noise drawn?"
        raise WrongInput(field_, f"it answers the same input differently when asked again; {cause}")
    return first
