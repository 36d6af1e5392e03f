"""The job of `secateur init`: look at a model and its data, try one batch, and write a commented run file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from secateur.config import Audit, read
from secateur.data.dataset import Dataset
from secateur.evaluation.setup import prepare
from secateur.experiments.black_box import can_only_be_asked, open_trained
from secateur.interfaces import BlackBox
from secateur.metrics.cost import parameters
from secateur.models.create import create
from secateur.models.sparsity import layer_sparsity, overall_sparsity
from secateur.models.wrap import Wrapped
from secateur.runs.artifacts import write
from secateur.seeding import derive

ROWS = 64  # of the batch that is tried
KEPT = "An audit keeps a tenth of the others for early stopping, and asks about the rest."
SHOWN = 3  # layers of a pruned network that are named


def run_init(fields: dict[str, Any], out: Path) -> list[str]:
    """Look at the model and the data of a run file's fields, and write the file; return what was seen, in sentences."""
    config = read(Audit, None, fields | {"pruner": "none"})  # a trained model is looked at as it is
    trained = config.weights is not None or can_only_be_asked(config)
    seen = _describe_trained(config) if trained else _describe_untrained(config)
    write(out, write_starter(fields, seen, trained, can_only_be_asked(config)).encode())
    return seen


def _describe_trained(config: Audit) -> list[str]:
    """Describe a model that was trained elsewhere; one batch is asked."""
    data, box, scaling = open_trained(config)
    net = box.net if isinstance(box, Wrapped) else None
    rows = [describe_data(data), *([] if config.weights is None else [KEPT])]
    return [*rows, f"Scaling: {scaling.sentence}.", *describe_network(net), _try_batch(data, box)]


def _describe_untrained(config: Audit) -> list[str]:
    """Describe a network that the audit will train; `prepare` asks it for a batch."""
    data, _ = prepare(config)
    net = create(config.model, data.input_shape, data.classes, derive(0, "check"))
    tried = f"Two rows were tried: the network answers with {data.classes} finite numbers each."
    return [describe_data(data), f"Scaling: the network gets {data.scaling}.", *describe_network(net)[:1], tried]


def describe_data(data: Dataset) -> str:
    """Describe rows, shapes and classes in a sentence."""
    others = len(data.inputs) - data.train_size
    rows = f"{data.name} has {data.train_size} rows in its train part and {others} others"
    return f"{rows}, inputs of the shape {tuple(data.input_shape)} and {data.classes} classes."


def describe_network(net: nn.Module | None) -> list[str]:
    """Describe the size of a network, and whether it is pruned already and how."""
    if net is None:
        return ["The model can only be asked: its weights are not known."]
    size = f"The network has {parameters(net):,} parameters."
    share = overall_sparsity(net)
    if not share:
        return [size, "Its weights have no zeros: it is not pruned, or its channels were removed."]
    layers = layer_sparsity(net)
    most = sorted(layers, key=lambda name: -layers[name])[:SHOWN]
    listed = ", ".join(f"{name} {100 * layers[name]:.0f} %" for name in most)
    kind = "whole filters" if _drops_filters(net) else "single weights"
    return [size, f"It is pruned already: {100 * share:.0f} % of its weights are zero, {kind} ({listed})."]


def _drops_filters(net: nn.Module) -> bool:
    """Return True if most zeros of a network are in filters that are zero as a whole."""
    weights = [value.detach().flatten(1) for value in net.parameters() if value.ndim > 1]
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    inside = sum(int((weight == 0).all(1).sum()) * weight.shape[1] for weight in weights)
    return 2 * inside > zeros


def _try_batch(data: Dataset, box: BlackBox) -> str:
    """Ask the model about members and others, and say how many it answers right."""
    shares = []
    for rows in (torch.arange(data.train_size), torch.arange(data.train_size, len(data.inputs))):
        batch = data.batch.take(rows[torch.randperm(len(rows), generator=derive(0, "init"))[:ROWS]])
        shares.append(float((box.predict(batch.inputs).argmax(1) == batch.labels).double().mean()))
    return f"One batch was tried: {100 * shares[0]:.0f} % of members and {100 * shares[1]:.0f} % of others are right."


def write_starter(fields: dict[str, Any], seen: list[str], trained: bool, asked_only: bool) -> str:
    """Return the run file: what was seen as comments, the fields, and the fields that one may add."""
    head = "# Written by secateur init; run it with: secateur audit FILE (and --trust if it names your code)"
    lines = [head, *(f"# {line}" for line in seen)]
    lines += [_write_field(name, value) for name, value in fields.items()]
    if trained:
        lines.append("pruner: none  # the model is audited as it is")
    else:
        lines.append("pruner: l1-unstructured,l1-structured  # secateur list pruners")
        lines.append("sparsity: 0.7  # share to remove; a list such as 0.5,0.7 is allowed")
    if trained and not asked_only:
        lines.append("# How the model was trained. With it the attacker trains shadow models: a stronger answer.")
        lines.append("# train: {epochs: 100, batch_size: 128, learning_rate: 0.001}")
    lines.append("# Upper limits on leakage; the exit code is 1 above one of them.")
    lines.append("# limits: {auc: 0.6}")
    return "\n".join(lines) + "\n"


def _write_field(name: str, value: Any) -> str:
    return yaml.safe_dump({name: value}).strip()
