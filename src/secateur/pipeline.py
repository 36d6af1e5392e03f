"""Train, prune, fine-tune: the stages that every job shares, kept in the run's folder as they finish."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from secateur import tree
from secateur.chance import derive
from secateur.config import Choice, Common
from secateur.data.dataset import Dataset
from secateur.data.load import load
from secateur.data.splits import Part
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Loss, Mask, Params, TrainsWithPenalty
from secateur.metrics.membership import share
from secateur.models.create import check, create, load_weights
from secateur.progress import progress
from secateur.pruning.result import savings
from secateur.runs import Result, Row, Run
from secateur.training import Fitted, Recipe, Task, fit_many, predict


@dataclass(frozen=True)
class Bench:
    """What stays the same while the models of one seed are made: the data, the settings, and where results go."""

    run: Run
    config: Common
    data: Dataset
    device: torch.device
    seed: int

    @cached_property
    def net(self) -> nn.Module:
        """The structure of every model here; its own weights are never used."""
        return self.initial("structure")

    @cached_property
    def recipes(self) -> tuple[Recipe, Recipe]:
        """How the originals are trained and the pruned models fine-tuned."""
        return self.config.recipes(tabular=len(self.data.input_shape) == 1)

    @cached_property
    def base(self) -> dict[str, Any]:
        """What every stage depends on."""
        names = ("model", "threads", "way")
        common = {name: getattr(self.config, name) for name in names}
        return common | {"data": fingerprint(*self.data.batch), "device": self.device.type, "seed": self.seed}

    def initial(self, role: str) -> nn.Module:
        """A new model of this structure, with the weights that this role starts from."""
        rng = derive(self.seed, "initialise", role)
        return create(self.config.model, self.data.input_shape, self.data.classes, rng)

    def rows(self, indices: Tensor) -> Batch:
        """Some examples, on the device."""
        return self.data.batch.take(indices).to(self.device)


def device_of(config: Common) -> torch.device:
    """The device to work on; `auto` takes a GPU where there is one."""
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise WrongInput("device", f"{config.device!r} is not there; allowed here: auto, cpu")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def prepare(config: Common) -> tuple[Dataset, torch.device]:
    """The data and the device; refuses a model that does not fit the data before anything is trained."""
    torch.set_num_threads(config.threads)
    data = load(config.data, config.data_folder, config.download)
    net = create(config.model, data.input_shape, data.classes, derive(0, "check"))
    if config.weights is not None:
        load_weights(net, config.weights)
    check(net, data.input_shape, data.classes)
    return data, device_of(config)


def fingerprint(*tensors: Tensor) -> str:
    """The sha256 of the tensors' bytes."""
    digest = hashlib.sha256()
    for value in tensors:
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train_originals(bench: Bench, parts: dict[str, Part], pruner: Choice | None = None) -> dict[str, Result]:
    """The dense models, by role; with the pruner's own term in the loss where it has one (network slimming)."""
    recipe, roles = bench.recipes[0], list(parts)
    made = pruner.make() if pruner is not None else None
    term = made.penalty(bench.net) if isinstance(made, TrainsWithPenalty) else None
    depends = [
        bench.base | {"recipe": asdict(recipe), "part": _key(parts[role]), "role": role, "term": str(pruner)}
        for role in roles
    ]

    def compute(missing: list[int]) -> Iterator[tuple[int, Result]]:
        tasks = [_task(bench, roles[i], parts[roles[i]], tree.state_of(bench.initial(roles[i]))) for i in missing]
        for i, fitted in _fit(bench, "train", tasks, recipe, penalty=term):
            yield missing[i], Result(fitted.state, _history(fitted))

    return dict(zip(roles, bench.run.stages("train", depends, compute), strict=True))


def prune_and_finetune(
    bench: Bench,
    originals: dict[str, Result],
    parts: dict[str, Part],
    pruner: Choice,
    sparsity: float,
    defense: Choice,
) -> dict[str, Result]:
    """The pruned models, by role: a mask from the trained weights, then fine-tuning with the defense in its place."""
    roles = list(originals)
    recipe, loss = defended(defense, bench.recipes[1])
    settings = {"pruner": str(pruner), "sparsity": sparsity, "defense": str(defense), "recipe": asdict(recipe)}
    depends = [
        bench.base | settings | {"original": originals[role].key, "part": _key(parts[role]), "role": role}
        for role in roles
    ]

    def compute(missing: list[int]) -> Iterator[tuple[int, Result]]:
        pruned = [
            prune(bench, roles[i], originals[roles[i]].tensors, parts[roles[i]], pruner, sparsity) for i in missing
        ]
        tasks = [
            _task(bench, roles[i], parts[roles[i]], dict(originals[roles[i]].tensors), mask)
            for i, (mask, _) in zip(missing, pruned, strict=True)
        ]
        for i, fitted in _fit(bench, f"{pruner} {sparsity:g} {defense}", tasks, recipe, loss=loss):
            mask, notes = pruned[i]
            tensors = {f"state.{k}": v for k, v in fitted.state.items()} | {f"mask.{k}": v for k, v in mask.items()}
            yield missing[i], Result(tensors, _history(fitted) | {"notes": notes})

    return dict(zip(roles, bench.run.stages("prune", depends, compute), strict=True))


def prune(
    bench: Bench, role: str, state: Mapping[str, Tensor], part: Part, pruner: Choice, sparsity: float
) -> tuple[Mask, list[str]]:
    """The mask for one trained model, and what the pruner had to say of it."""
    net = bench.initial("structure").to(bench.device)
    net.load_state_dict(state)
    rng = derive(bench.seed, "prune", role, str(pruner), sparsity)
    some = part.train[torch.randperm(part.train.numel(), generator=rng)[: max(128, 20 * bench.data.classes)]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mask = pruner.make()(net, bench.rows(some), sparsity, rng)
    return mask, [str(warning.message) for warning in caught]


def defended(defense: Choice, recipe: Recipe) -> tuple[Recipe, Loss]:
    """The recipe and the loss of fine-tuning, with the defense at the place where it acts."""
    made, place = defense.make(), defense.method.info["acts_on"]
    if place == "recipe":
        return made(recipe), cross_entropy
    if place == "loss":
        return recipe, made
    raise WrongInput("defense", f"{defense} acts on the {place}, which fine-tuning does not have")


def state_of(result: Result) -> Params:
    """The weights of a pruned model's stage, or of an original's."""
    pruned = {name.removeprefix("state."): v for name, v in result.tensors.items() if name.startswith("state.")}
    return pruned or dict(result.tensors)


def mask_of(result: Result) -> Mask:
    """The mask of a pruned model's stage; empty for an original's."""
    return {name.removeprefix("mask."): v for name, v in result.tensors.items() if name.startswith("mask.")}


def model_rows(bench: Bench, labels: dict[str, Any], model: Result, sides: dict[str, Batch]) -> list[Row]:
    """Utility and cost of one model: the accuracy on each side, and what its mask saves, masked and removed."""

    def compute() -> Result:
        state = tree.to(state_of(model), bench.device)
        hits = {name: predict(bench.net, state, side.inputs).argmax(1) == side.labels for name, side in sides.items()}
        net = bench.initial("structure")
        net.load_state_dict(state_of(model))
        saved = savings(net, mask_of(model), bench.data.input_shape)
        costs = {"masked": asdict(saved.masked), "removed": asdict(saved.removed) if saved.removed else {}}
        shares = {"nonzero_parameters": saved.nonzero, "conv_weights_masked": saved.masked_share}
        shares["conv_weights_removed"] = saved.removed_share
        values = shares | {f"{name}_{form}": v for form, found in costs.items() for name, v in found.items()}
        utility = {name: share(hit)._asdict() for name, hit in hits.items()}
        return Result(data={"utility": utility, "cost": values, "note": saved.note or None})

    done = bench.run.stage("model", {"model": model.key, "sides": list(sides), "seed": bench.seed}, compute).data
    note = "; ".join(model.data.get("notes", [])) or None
    rows = [Row(**labels, metric=name, **(found | {"note": note})) for name, found in done["utility"].items()]
    for name, value in done["cost"].items():
        rows.append(Row(**labels, metric=name, value=value, timing=name.startswith("seconds"), note=done["note"]))
    return rows


def _task(bench: Bench, role: str, part: Part, state: Params, mask: Mask | None = None) -> Task:
    rng = derive(bench.seed, "fit", role, "pruned" if mask is not None else "original")
    return Task(
        state=tree.to(state, bench.device),
        train=bench.rows(part.train),
        validation=bench.rows(part.validation),
        rng=rng,
        mask=None if mask is None else tree.to(mask, bench.device),
    )


def _fit(
    bench: Bench, what: str, tasks: Sequence[Task], recipe: Recipe, **arguments: Any
) -> Iterator[tuple[int, Fitted]]:
    with progress(what, len(tasks)) as advance:
        for index, fitted in fit_many(bench.net, tasks, recipe, way=bench.config.way, **arguments):
            yield index, fitted
            advance(1)


def _history(fitted: Fitted) -> dict[str, Any]:
    return {"history": fitted.history, "best_epoch": fitted.best_epoch}


def _key(part: Part) -> str:
    return fingerprint(part.train, part.validation)
