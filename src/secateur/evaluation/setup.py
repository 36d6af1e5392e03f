"""Data and device of a run file, and the scaling of inputs that a model brought along was trained on."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from secateur.attacks.membership.reference_models import content
from secateur.catalogue import methods
from secateur.config import AuditApp, Common
from secateur.data.dataset import Dataset
from secateur.data.load import load
from secateur.data.scaling import AS_STORED, BYTES, Scaling, candidates, rescale, rescale_inputs, scaling_of
from secateur.errors import NotFinite, WrongInput
from secateur.evaluation.validity import Validity, member_accuracy
from secateur.interfaces import Batch, Predict
from secateur.models.create import accepts, check, check_labels, create, load_weights
from secateur.seeding import derive

COMPARED = 2000  # members by which scalings are compared
DISTINCT = 0.01  # least difference in accuracy by which one scaling is better than another
NOISE = 2.0  # standard deviations that the difference must exceed too
C = TypeVar("C", bound=Common)

ADVICE = "say it by inputs_are (pixels or normalised), mean and std, or transform"


def device_of(config: Common | AuditApp) -> torch.device:
    """Return the device of the run; `auto` is $SECATEUR_DEVICE if it is set, else a GPU if there is one."""
    wanted = os.environ.get("SECATEUR_DEVICE", "auto") if config.device == "auto" else config.device
    available = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if wanted not in (*available, *(["cuda"] if torch.cuda.is_available() else [])):
        raise WrongInput("device", f"{wanted!r} is not available; allowed here: {', '.join(available)}")
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def load_data(config: Common) -> Dataset:
    """Return the data that a run file names."""
    return load(config.data, config.data_folder, config.download, config.form)


def prepare(
    config: C, check_data: Callable[[Dataset], None] = lambda data: None, load_data: Callable[[C], Dataset] = load_data
) -> tuple[Dataset, torch.device]:
    """Return the data and the device; refuse a model that does not fit the data, before any training."""
    torch.set_num_threads(config.threads)
    data = load_data(config)
    check_data(data)
    check_groups(config, data)
    if config.examples is not None:
        data = data.limit_rows(config.examples, derive(0, "examples"))
    net = create(config.model, data.input_shape, data.classes, derive(0, "check"))
    if config.weights is not None:
        load_weights(net, config.weights)
    data = fit_inputs(net, data)
    check(net, data.input_shape, data.classes)
    return data, device_of(config)


def check_groups(config: Common, data: Dataset) -> None:
    """Refuse a column of groups that the data do not have."""
    if config.form.group is not None and data.groups is None:
        problem = f"{data.name} has no column {config.form.group!r}"
        raise WrongInput("group", f"{problem}; name an array of an .npz file, or a column of a table")


def join_population(config: Common, data: Dataset, source: str) -> Dataset:
    """Return the data with the attacker's population behind them; refuse rows that are members or candidates."""
    form = replace(config.form, classes=data.classes)
    other = load(source, config.data_folder, config.download, form)
    if other.input_shape != data.input_shape:
        shapes = f"inputs of the shape {other.input_shape}, those of {data.name} have {data.input_shape}"
        raise WrongInput("population", f"{source} has {shapes}; use rows of the same kind")
    check_labels("population", other.labels, data.classes)
    inputs = _scale_alike(other, data)
    known = set(content(_round(data.inputs)))
    if shared := sum(key in known for key in content(_round(inputs))):
        raise WrongInput("population", f"{shared} of {len(inputs)} rows are in {data.name} too; leave them out")
    rows, labels = torch.cat([data.inputs, inputs]), torch.cat([data.labels, other.labels])
    groups = None if data.groups is None else data.groups + ("",) * len(inputs)
    return replace(data, inputs=rows, labels=labels, writers=None, groups=groups, population=len(inputs))


def _round(inputs: Tensor) -> Tensor:
    """Return inputs to four digits, so that equal pixels are equal after another scaling too."""
    return (inputs * 1e4).round() + 0.0 if inputs.is_floating_point() else inputs  # + 0: there are two zeros


def _scale_alike(other: Dataset, data: Dataset) -> Tensor:
    """Return the inputs of one data set, scaled as those of another."""
    if not data.mean and not other.mean:
        return other.inputs.to(data.inputs.dtype)
    present = scaling_of(other) or (AS_STORED if other.inputs.ndim == 2 else None)
    if present is None or not data.mean:
        raise WrongInput(
            "population", f"{other.name} and {data.name} are not scaled alike; use bytes or numbers in both"
        )
    return rescale_inputs(other, other.inputs, present, Scaling(data.scaling, data.mean, data.std))


def fit_inputs(net: nn.Module, data: Dataset) -> Dataset:
    """Return the data as the model takes them: whole numbers become floats if the model refuses whole numbers."""
    if data.inputs.is_floating_point() or accepts(net, data.inputs[:2]):
        return data
    return replace(data, inputs=data.inputs.float())


def choose_scaling(data: Dataset, predict: Predict) -> tuple[Dataset, Validity]:
    """Return the data in the scaling that a trained model knows its members by, and the comparison as a sentence.

    Candidate scalings are compared by the model's accuracy on the same members. Raise WrongInput where none is
    plausible, or where the best is not better than another beyond chance: the user must then say the scaling.
    """
    if not data.inputs.is_floating_point():
        return data, Validity("scaling", True, "inputs are whole numbers and are not scaled")
    present = scaling_of(data) or AS_STORED
    rows = torch.randperm(data.train_size, generator=derive(0, "scaling"))[:COMPARED]
    right: dict[Scaling, Tensor] = {}
    for scaling in candidates(data):
        batch = Batch(rescale_inputs(data, data.inputs[rows], present, scaling), data.labels[rows])
        right[scaling] = _answer_right(predict, batch)
    order = sorted(right, key=lambda scaling: -float(right[scaling].mean()))
    text = f"members' accuracy is {', '.join(f'{_percent(right[scaling])} with {scaling.name}' for scaling in order)}"
    if not member_accuracy(float(right[order[0]].mean()), data.classes).holds:
        raise WrongInput("inputs_are", f"{text}: none is plausible for a trained model; {ADVICE}")
    rivals = [scaling for scaling in order if not _is_better(right[order[0]], right[scaling])]
    best = _prefer(rivals, data)
    if best is None:
        near = " and ".join(scaling.name for scaling in rivals if scaling is not BYTES)
        raise WrongInput("inputs_are", f"{text}: {near} cannot be told apart; {ADVICE}")
    chosen = data if best is AS_STORED else rescale(data, present, best)
    used = f"{best.name} are used, as nothing was said; if it was trained on other statistics, set mean and std"
    return chosen, Validity("scaling", True, f"{text}: {used}")


def _is_better(first: Tensor, second: Tensor) -> bool:
    """Return True if the first answers (N,), 1 where right, are better than the second on the same rows, beyond chance.

    Only rows on which they differ count (McNemar).
    """
    noise = NOISE * math.sqrt(float((first != second).sum())) / len(first)
    return float((first - second).mean()) > max(DISTINCT, noise)


def _percent(right: Tensor) -> str:
    """Return an accuracy with as many digits as tell near ones apart."""
    return f"{100 * float(right.mean()):.1f}".removesuffix(".0") + " %"


def _prefer(rivals: Sequence[Scaling], data: Dataset) -> Scaling | None:
    """Return the scaling to use of those that are equally good; None if it cannot be told.

    A network hardly notices that its inputs are larger than in training, as its biases then matter less. So pixels in
    [0, 255] count only where no other scaling does as well. The statistics of a data set of ours are published.
    """
    likely = [scaling for scaling in rivals if scaling is not BYTES] or list(rivals)
    published = [scaling for scaling in likely if data.name in methods("dataset") and scaling.name == data.scaling]
    return (published or likely)[0] if published or len(likely) == 1 else None


def with_scaling(config: C, data: Dataset) -> C:
    """Return the configuration with the scaling of the user's own data said, so that its run file repeats it."""
    if config.form.says_scaling or config.data in methods("dataset") or not data.inputs.is_floating_point():
        return config
    is_stored = data.scaling.startswith(AS_STORED.name)
    kind = "normalised" if is_stored else "pixels" if data.inputs.ndim > 2 else None
    return config.model_copy(update={"inputs_are": kind, "mean": list(data.mean), "std": list(data.std)})


def _answer_right(predict: Predict, batch: Batch) -> Tensor:
    """Return (N,) 1 where the model is right, else 0."""
    try:
        return (predict(batch.inputs).argmax(1) == batch.labels).double().cpu()
    except NotFinite:  # a wrong scaling may overflow
        return torch.zeros(batch.size, dtype=torch.float64)
