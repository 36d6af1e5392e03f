"""The job `secateur prune`: one pruned, fine-tuned model, in a .safetensors file that carries its recipe."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur import tree
from secateur.config import Common, Prune, compressor, defense, dump, dump_recipes
from secateur.data.dataset import Dataset
from secateur.data.partition import Part
from secateur.data.scaling import Scaling, rescale, scaling_of
from secateur.errors import WrongInput
from secateur.evaluation.setup import choose_scaling, prepare, with_scaling
from secateur.evaluation.validity import Validity
from secateur.experiments.context import (
    SeedContext,
    check_defenses,
    check_function,
    check_installed,
    check_pruners,
    split_rows,
)
from secateur.experiments.pipeline import VICTIM, ModelJob, make, mask_of, model_rows, module_of, prune
from secateur.experiments.threat_models import compress_by
from secateur.gpu.determinism import deterministic
from secateur.inference import predict
from secateur.interfaces import Converter, Mask, Teaches
from secateur.models.create import create, example_rows, load_weights, read_tensors
from secateur.pruning.removal import remove
from secateur.runs.artifacts import explained, version, write
from secateur.runs.folder import open_run
from secateur.runs.rows import Row
from secateur.seeding import derive

SCHEMA = 1


def run_prune(config: Prune, out: Path) -> list[Row]:
    """Train (or load weights), prune, fine-tune and write `out`; the stages are stored beside it.

    By default it is the model that `secateur audit` attacks with these settings: equal rows, seed and stopping.
    """
    quantises = config.pruner.find_part(Converter) is not None
    if out.suffix != (suffix := ".pt2" if quantises else ".safetensors"):
        raise WrongInput("out", f"{out} is not allowed; {config.pruner} is written to a file that ends in {suffix}")
    check_installed([config.defense], config.execution)
    check_function(config, [config.pruner], [config.defense])
    compression = compress_by(config.pruner, config.sparsity, config.defense)
    check_defenses(config, [config.defense], [compression])
    data, device = prepare(config)
    data, _ = scale_inputs(config, data)
    config = with_scaling(config, data)
    check_pruners([config.pruner], config, data)
    part = public_split(data, config.seed) if config.rows == "all" else select_audited(config, data)
    folder = out.with_suffix(".run")
    settings = dump_recipes(config, tabular=len(data.input_shape) == 1)
    opened = open_run(folder, "prune", settings, device=str(device), seeds=[config.seed], data=data.key)
    with deterministic(config.deterministic), opened as run:
        context = SeedContext(run, config, data, device, config.seed, scratch=config.defense.find_part("training"))
        job = ModelJob(context, VICTIM, part)
        if config.remove:
            check_removable(job, config)
        (model,) = make([job], compression)
        labels: dict[str, Any] = {"model": config.model, "dataset": data.name, "pruner": str(config.pruner)}
        sparsity = config.sparsity if config.pruner.uses_sparsity else 0.0
        labels |= {"sparsity": sparsity, "defense": str(config.defense), "seed": config.seed}
        run.add(model_rows(context, compression, labels, model, {"test_accuracy": context.rows(part.test)}))
        net = module_of(context, compression, model).cpu()
        if config.remove:
            net = remove(net, mask_of(model), data.input_shape)
        if quantises:
            save_program(out, net, data.input_shape)
        else:
            save(out, net, mask_of(model), config, data)
    return run.rows


def select_audited(config: Prune, data: Dataset) -> Part:
    """Return the rows of the victim of `secateur audit`, which draws the attacker's rows from the same data."""
    try:
        return split_rows(config, data, shadows=0, seed=config.seed).victim
    except WrongInput as error:
        raise WrongInput(error.field, f"{error.message}; or train on all rows by --rows all") from None


def public_split(data: Dataset, seed: int) -> Part:
    """Split public data: a tenth of its train part for validation, the rest for training, its test part for testing.

    Without a public test part, a tenth of the train part is the test part.
    """
    rng = derive(seed, "public split")
    order = torch.randperm(data.train_size, generator=rng)
    test = torch.arange(data.train_size, len(data.inputs))
    if test.numel() == 0:
        test, order = order[: order.numel() // 10], order[order.numel() // 10 :]
    held = max(1, order.numel() // 10)
    if not test.numel() or order.numel() == held:
        few = f"{data.train_size} rows of {data.name} are too few to train on, to stop by and to test on"
        raise WrongInput("data", f"{few}; use at least 10")
    return Part(train=order[held:], validation=order[:held], test=test)


def check_removable(job: ModelJob, config: Prune) -> None:
    """Refuse, before any training, a pruning that `remove` cannot apply; try it on the current weights."""
    net = job.context.initial(job.role)
    if config.weights is not None:
        load_weights(net, config.weights)
    mask, _ = prune(job, net.state_dict(), config.pruner.parts[0], config.sparsity)
    try:
        remove(net, mask, job.context.data.input_shape)
    except WrongInput as error:
        raise WrongInput("remove", f"{config.pruner} cannot be removed from this model ({error})") from error


def save(out: Path, net: nn.Module, mask: Mask, config: Prune, data: Dataset) -> None:
    """Write the weights, with the recipe and the input shape in the file's metadata."""
    from safetensors.torch import save as encode

    recipe = {
        "schema": SCHEMA,
        "secateur": version(),
        "config": dump(config),
        "input_shape": list(data.input_shape),
        "classes": data.classes,
        "pruned": {name: int((~kept).sum()) for name, kept in mask.items()},
    }
    # safetensors refuses tensors that share memory, as tied weights do
    contiguous = torch.contiguous_format
    tensors = {name: value.cpu().clone(memory_format=contiguous) for name, value in net.state_dict().items()}
    with explained(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write(out, encode(tensors, metadata={"secateur": json.dumps(recipe)}))


def save_program(out: Path, net: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Write a quantised model as a program of torch.export, which takes any number of rows."""
    file = io.BytesIO()
    free = ({0: torch.export.Dim.AUTO},)
    torch.export.save(torch.export.export(net, (example_rows(net, input_shape),), dynamic_shapes=free), file)
    with explained(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write(out, file.getvalue())


def scale_inputs(config: Common, data: Dataset) -> tuple[Dataset, Validity | None]:
    """Return the data as given weights take them, and the comparison that decided it; None if there was none.

    A file of `secateur prune` or of an audit says its scaling. For other weights the members' accuracy decides, unless
    the user or the data say it.
    """
    weights = config.weights
    if weights is None or config.form.says_scaling or data.described:
        return data, None
    metadata = read_tensors("weights", weights)[1] if weights.suffix == ".safetensors" else {}
    if "secateur" not in metadata:
        net = load_weights(create(config.model, data.input_shape, data.classes, derive(0, "check")), weights)
        return choose_scaling(data, partial(predict, net, tree.state_of(net)))
    recipe = json.loads(metadata["secateur"])["config"]
    present = scaling_of(data)
    if not recipe.get("mean") or present is None:
        return data, None  # the default scaling
    stated = Scaling(f"pixels by the statistics of {weights.name}", tuple(recipe["mean"]), tuple(recipe["std"]))
    return rescale(data, present, stated), None


def load_pruned(path: Path | str) -> nn.Module:
    """Load a model written by `secateur prune`, in eval mode; its layers are smaller if channels were removed."""
    _, metadata = read_tensors("weights", path)
    if "secateur" not in metadata:
        raise WrongInput("weights", f"{path} was not written by secateur prune: it carries no recipe")
    recipe: dict[str, Any] = json.loads(metadata["secateur"])
    rng = derive(recipe["config"]["seed"], "load")
    student = compressor(recipe["config"]["pruner"]).find_part(Teaches)
    name = recipe["config"]["model"] if student is None else student.make().student
    net = create(name, tuple(recipe["input_shape"]), recipe["classes"], rng)
    if scratch := defense(recipe["config"]["defense"]).find_part("training"):
        net = scratch.make().structure(net)
    return load_weights(net, path).eval()
