"""Train, prune, fine-tune: the stages that every job shares, kept in the run's folder as they finish."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from secateur import tree
from secateur.bench import Bench
from secateur.catalogue import Choice, Defense
from secateur.chance import derive
from secateur.data.dataset import fingerprint
from secateur.data.splits import Part
from secateur.defenses.accounting import Guarantee
from secateur.interfaces import Batch, Loss, Mask, Params, TrainsWithPenalty
from secateur.metrics.membership import share
from secateur.progress import progress
from secateur.pruning.operations import CONVS
from secateur.pruning.result import savings
from secateur.recipe import Fitted, Recipe, Task
from secateur.runs import Result, Row
from secateur.training import fit_many, predict

Fit = Callable[..., Iterator[tuple[int, Fitted]]]  # training.fit_many, or a defense's own loop


@dataclass(frozen=True)
class Job:
    """One model to be made: at whose bench (a seed's), in which role, on which rows."""

    bench: Bench
    role: str
    part: Part

    @property
    def base(self) -> dict[str, Any]:
        """What every stage of this model depends on; its test rows too, as later stages measure on them."""
        rows = fingerprint(self.part.train, self.part.validation, self.part.test)
        return self.bench.base | {"part": rows, "role": self.role}

    def task(self, state: Params, mask: Mask | None = None) -> Task:
        """The model's training, from a state."""
        bench = self.bench
        return Task(
            state=tree.to(state, bench.device),
            train=bench.rows(self.part.train),
            validation=bench.rows(self.part.validation),
            rng=derive(bench.seed, "fit", self.role, "pruned" if mask is not None else "original"),
            mask=None if mask is None else tree.to(mask, bench.device),
        )


def train_originals(jobs: Sequence[Job], pruner: Choice | None = None) -> list[Result]:
    """The dense models, all together; with the pruner's own term in the loss where it has one (network slimming)."""
    bench = jobs[0].bench
    recipe, made = bench.recipes[0], pruner.make() if pruner is not None else None
    term = made.penalty(bench.net) if isinstance(made, TrainsWithPenalty) else None
    settings = {"recipe": asdict(recipe), "term": None if term is None else str(pruner)}

    def compute(missing: list[int]) -> Iterator[tuple[int, Result]]:
        def task(i: int) -> Task:
            return jobs[i].task(tree.state_of(jobs[i].bench.initial(jobs[i].role)))

        if bench.scratch is None:
            fit: Fit = partial(fit_many, recipe=recipe, penalty=term)
        else:
            fit = partial(bench.scratch.make().fit_many, recipe=recipe)
        for i, fitted in _fit(bench, "train", missing, task, fit):
            yield i, Result(fitted.state, _history(fitted))

    return bench.run.stages("train", [job.base | settings for job in jobs], compute)


def prune_and_finetune(
    jobs: Sequence[Job], originals: Sequence[Result], pruner: Choice, sparsity: float, defense: Defense
) -> list[Result]:
    """The pruned models, all together: a mask from the trained weights, then fine-tuning with the defense in place."""
    bench = jobs[0].bench
    recipe, fit = defended(defense, bench.recipes[1])
    settings = {"pruner": str(pruner), "sparsity": sparsity, "defense": str(defense), "recipe": asdict(recipe)}
    pairs = zip(jobs, originals, strict=True)
    depends = [job.base | settings | {"original": original.key} for job, original in pairs]

    def compute(missing: list[int]) -> Iterator[tuple[int, Result]]:
        pruned = {i: prune(jobs[i], originals[i].tensors, pruner, sparsity) for i in missing}

        def task(i: int) -> Task:
            return jobs[i].task(dict(originals[i].tensors), pruned[i][0])

        for i, fitted in _fit(bench, f"{pruner} {sparsity:g} {defense}", missing, task, fit):
            mask, notes = pruned[i]
            tensors = {f"state.{k}": v for k, v in fitted.state.items()} | {f"mask.{k}": v for k, v in mask.items()}
            yield i, Result(tensors, _history(fitted) | {"notes": notes})

    return bench.run.stages("prune", depends, compute)


def prune(job: Job, state: Mapping[str, Tensor], pruner: Choice, sparsity: float) -> tuple[Mask, list[str]]:
    """The mask for one trained model, and what the pruner had to say of it."""
    bench, rows = job.bench, job.part.train
    net = bench.initial("structure").to(bench.device)
    net.load_state_dict(state)
    rng = derive(bench.seed, "prune", job.role, str(pruner), sparsity)
    some = rows[torch.randperm(rows.numel(), generator=rng)[: max(128, 20 * bench.data.classes)]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mask = pruner.make()(net, bench.rows(some), sparsity, rng)
    return mask, [str(warning.message) for warning in caught]


def defended(defense: Defense, recipe: Recipe) -> tuple[Recipe, Fit]:
    """The recipe and the loop of fine-tuning, with every defense at the place where it acts."""
    if made := defense.acting_on("recipe"):
        recipe = made.make()(recipe)
    loss: Loss = made.make() if (made := defense.acting_on("loss")) else cross_entropy
    loop = defense.acting_on("fine-tuning") or defense.acting_on("training")
    return recipe, partial(loop.make().fit_many if loop else fit_many, recipe=recipe, loss=loss)


def guarantees(bench: Bench, defense: Defense, size: int) -> list[Guarantee]:
    """What a defense proves about `size` training examples: (epsilon, delta), and what it covers."""
    recipes = bench.recipes if defense.acting_on("training") else bench.recipes[1:]
    return [made.guarantee(size, *recipes) for part in defense.parts if hasattr(made := part.make(), "guarantee")]


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
    flat = not any(isinstance(module, CONVS) for module in bench.net.modules())
    for name, value in done["cost"].items():
        counted = "of the linear weights: there is no convolution" if flat and name.startswith("conv_") else None
        note = "; ".join(filter(None, (counted, done["note"]))) or None
        rows.append(Row(**labels, metric=name, value=value, timing=name.startswith("seconds"), note=note))
    return rows


def _fit(
    bench: Bench, what: str, indices: Sequence[int], task: Callable[[int], Task], fit: Fit
) -> Iterator[tuple[int, Fitted]]:
    """Fit the task of every index. Where models train one by one, a task's rows are copied when its turn comes."""
    alone = bench.device.type == "cpu" and bench.config.way in ("auto", "sequential")
    with progress(what, len(indices)) as advance:
        for some in [[i] for i in indices] if alone else [indices]:
            for index, fitted in fit(bench.net, [task(i) for i in some], way=bench.config.way):
                yield some[index], fitted
                advance(1)


def _history(fitted: Fitted) -> dict[str, Any]:
    return {"history": fitted.history, "best_epoch": fitted.best_epoch}
