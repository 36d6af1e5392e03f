"""Train, prune, fine-tune: the stages that every job shares, kept in the run's folder as they finish.

`ModelFactory` makes the models of one seed on demand, by compression and role.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from secateur import tree
from secateur.catalogue import Choice, Defense
from secateur.data.dataset import fingerprint
from secateur.data.partition import Part
from secateur.defenses.dp_common import Guarantee
from secateur.errors import WrongInput
from secateur.experiments.context import SeedContext, file_key
from secateur.experiments.threat_models import Compression
from secateur.inference import bind_state, to_probabilities
from secateur.interfaces import (
    Batch,
    Converter,
    Loss,
    Mask,
    Params,
    Predict,
    Reshaper,
    Teaches,
    TrainsWithPenalty,
)
from secateur.metrics.cost import cost
from secateur.metrics.membership import share
from secateur.models.create import load_weights
from secateur.models.wrap import wrap
from secateur.progress import progress
from secateur.pruning.channels import CONVS
from secateur.pruning.removal import remove, savings
from secateur.runs.artifacts import Result
from secateur.runs.rows import Row, join_notes
from secateur.seeding import derive
from secateur.training.aided_trainer import fit_by_losses
from secateur.training.recipe import Fitted, Recipe, Task
from secateur.training.trainer import fit_many
from secateur.training.user_function import source_key

Fit = Callable[..., Iterator[tuple[int, Fitted]]]  # trainer.fit_many, or a defense's own loop
Finetuning = partial[Iterator[tuple[int, Fitted]]]  # the same with its recipe and its loss
VICTIM = "victim"
INT8_LATENCY = "latency without compiled kernels, which a deployment has: of torchao's graph, operation by operation"
BY_WEIGHTS = ("l1-unstructured", "l1-structured", "l2-structured", "random", "slimming", "synflow")  # ask no members


@dataclass(frozen=True)
class ModelJob:
    """One model to be made: the context of its seed, its role, and its rows."""

    context: SeedContext
    role: str
    part: Part

    @property
    def base(self) -> dict[str, Any]:
        """The values that every stage of this model depends on; test rows too, as later stages measure on them."""
        rows = fingerprint(self.part.train, self.part.validation, self.part.test)
        return self.context.base | {"part": rows, "role": self.role}

    def task(self, state: Params, mask: Mask | None = None) -> Task:
        """Return the model's training, from a state."""
        context = self.context
        return Task(
            state=tree.to(state, context.device),
            train=context.rows(self.part.train),
            validation=context.rows(self.part.validation),
            rng=derive(context.seed, "fit", self.role, "pruned" if mask is not None else "original"),
            mask=None if mask is None else tree.to(mask, context.device),
        )


class ModelFactory:
    """A maker of models; the run's folder keeps them all, and memory those used last."""

    def __init__(self, context: SeedContext, parts: dict[str, Part]) -> None:
        self.context = context
        self.parts = parts  # by role: the rows that a model is and is not trained on
        self._models = lru_cache(maxsize=4)(self._make)
        self._contexts: dict[Choice | None, SeedContext] = {None: context}

    def context_for(self, compression: Compression) -> SeedContext:
        """Return the context, with the structure that a defense of training from scratch asks for."""
        scratch = compression.defense.find_part("training")
        if scratch not in self._contexts:
            self._contexts[scratch] = replace(self.context, scratch=scratch)
        return self._contexts[scratch]

    def models(self, compression: Compression, roles: Iterable[str]) -> dict[str, Result]:
        """Return the models of these roles after this compression."""
        return self._models(compression, tuple(roles))

    def shadows(self, kind: str = "shadow") -> list[str]:
        """Return the roles of the attacker's models: `shadow` or `in-out`."""
        return [role for role in self.parts if role.startswith(f"{kind}-")]

    def jobs(self, compression: Compression, roles: Iterable[str]) -> list[ModelJob]:
        """Return the models to be made."""
        context = self.context_for(compression)
        return [ModelJob(context, role, self.parts[role]) for role in roles]

    def _make(self, compression: Compression, roles: tuple[str, ...]) -> dict[str, Result]:
        return dict(zip(roles, make(self.jobs(compression, roles), compression), strict=True))


def make(jobs: Sequence[ModelJob], compression: Compression) -> list[Result]:
    """Make the models of these jobs, of one seed or of many, with this compression; on a GPU they train together."""
    if not jobs:
        return []
    models = _originals(jobs, compression)
    if compression.pruner is None:
        return models
    first, converter = compression.pruner.parts[0], compression.pruner.find_part(Converter)
    if first != converter:
        sparsity, defense = compression.sparsity, compression.defense
        if isinstance(first.make(), Reshaper):
            models = reshape_and_finetune(jobs, models, first, sparsity, defense)
        else:
            pairs = zip(jobs, models, strict=True)
            models = prune_and_finetune([PruneJob(*pair, first, sparsity, defense) for pair in pairs])
    return models if converter is None else [_calibrate(*pair, converter) for pair in zip(jobs, models, strict=True)]


def _calibrate(job: ModelJob, model: Result, converter: Choice) -> Result:
    """Return a model that is to be converted, with the training rows that set the ranges of its activations.

    The conversion is a pure function of both, so it is not stored: `module_of` repeats it, and remembers the last ones.
    """
    rows = _draw_rows(job, derive(job.context.seed, "calibrate", job.role))
    return replace(model, data=model.data | {"calibration": rows.tolist()}, key=f"{model.key}+{converter}")


def _originals(jobs: Sequence[ModelJob], compression: Compression) -> list[Result]:
    """Return the dense models: trained, or for a victim the user's weights if there are any."""
    has_weights = jobs[0].context.config.weights is not None
    fresh = [job for job in jobs if not (has_weights and job.role == VICTIM)]
    trained = dict(zip(map(id, fresh), train_originals(fresh, compression.term) if fresh else [], strict=True))
    return [trained[id(job)] if id(job) in trained else _read_victim(job) for job in jobs]


def _read_victim(job: ModelJob) -> Result:
    """Return the victim's weights from the user's file."""
    context, weights = job.context, job.context.config.weights
    assert weights is not None

    def load() -> Result:
        return Result(load_weights(context.initial("structure"), weights).state_dict())

    return context.run.stage("weights", job.base | {"weights": file_key(weights)}, load)


def train_originals(jobs: Sequence[ModelJob], pruner: Choice | None = None) -> list[Result]:
    """Train the dense models together, with the pruner's own term in the loss if it has one (network slimming).

    The user's own training function, if there is one, trains them one by one.
    """
    context = jobs[0].context
    recipe, method = context.recipes[0], pruner.make() if pruner is not None else None
    term = method.penalty(context.net) if isinstance(method, TrainsWithPenalty) else None
    settings = {"recipe": asdict(recipe), "term": None if term is None else str(pruner)}
    function = context.user_function
    if function is not None:
        settings = {"function": function.reference, "source": source_key("train", function.reference)}

    def compute(missing: list[int]) -> Iterator[tuple[int, Result]]:
        def task(i: int) -> Task:
            return jobs[i].task(tree.state_of(jobs[i].context.initial(jobs[i].role)))

        if function is not None:
            fit: Fit = function.fit_many
        elif context.scratch is None:
            fit = partial(fit_many, recipe=recipe, penalty=term)
        else:
            fit = partial(context.scratch.make().fit_many, recipe=recipe)
        for i, fitted in _fit(context, "train", missing, task, fit):
            yield i, Result(fitted.state, _history(fitted))

    return context.run.stages("train", [job.base | settings for job in jobs], compute)


@dataclass(frozen=True)
class PruneJob:
    """One pruned model to be made: its trained original, the pruner, and the fine-tuning under a defense."""

    job: ModelJob
    original: Result
    pruner: Choice
    sparsity: float
    defense: Defense

    @property
    def recipe(self) -> Recipe:
        """The recipe of the fine-tuning."""
        return build_fit(self.defense, self.job.context.recipes[1])[0]

    @property
    def depends(self) -> dict[str, Any]:
        """The values that the model depends on."""
        settings = {"pruner": str(self.pruner), "sparsity": self.sparsity, "defense": str(self.defense)}
        return self.job.base | settings | {"recipe": asdict(self.recipe), "original": self.original.key}

    @property
    def group(self) -> tuple[Recipe, Defense | None]:
        """The fine-tunings that may step together: of one recipe, and of one defense unless each is a loss."""
        is_loss = all(part.method.info["acts_on"] in ("loss", "recipe") for part in self.defense.parts)
        return self.recipe, None if is_loss else self.defense


def prune_and_finetune(jobs: Sequence[PruneJob]) -> list[Result]:
    """Make pruned models together: masks from the trained weights, then fine-tuning with the defenses in place."""
    context = jobs[0].job.context

    def compute(missing: list[int]) -> Iterator[tuple[int, Result]]:
        pruned = {i: prune(jobs[i].job, jobs[i].original.tensors, jobs[i].pruner, jobs[i].sparsity) for i in missing}
        groups: dict[Any, list[int]] = {}
        for i in missing:
            groups.setdefault(jobs[i].group, []).append(i)

        def task(i: int) -> Task:
            return jobs[i].job.task(dict(jobs[i].original.tensors), pruned[i][0])

        for same in groups.values():
            first, defenses = jobs[same[0]], dict.fromkeys(str(jobs[i].defense) for i in same)
            fits = [build_fit(jobs[i].defense, jobs[i].job.context.recipes[1])[1] for i in same]
            fit = fits[0]
            if len(defenses) > 1:
                fit = partial(fit_by_losses, recipe=first.recipe, losses=[one.keywords["loss"] for one in fits])
            compressions = dict.fromkeys(f"{jobs[i].pruner} {jobs[i].sparsity:g} {jobs[i].defense}" for i in same)
            for i, fitted in _fit(context, ", ".join(compressions), same, task, fit):
                mask, notes = pruned[i]
                tensors = {f"state.{k}": v for k, v in fitted.state.items()} | {f"mask.{k}": v for k, v in mask.items()}
                yield i, Result(tensors, _history(fitted) | {"notes": notes})

    return context.run.stages("prune", [job.depends for job in jobs], compute)


def prune_generation(pairs: Sequence[tuple[ModelJob, Compression]]) -> None:
    """Make the pruned models of several compressions together, and leave them in the run's folder for `make`.

    Only where models step together is anything gained. Other compressors than masks are left to `make`.
    """
    if not pairs or trains_alone(context := pairs[0][0].context) or context.config.execution == "ray":
        return
    jobs = []
    for job, compression in pairs:
        assert compression.pruner is not None
        first = compression.pruner.parts[0]
        if first != compression.pruner.find_part(Converter) and not isinstance(first.make(), Reshaper):
            (original,) = _originals([job], compression)
            jobs.append(PruneJob(job, original, first, compression.sparsity, compression.defense))
    if jobs:
        prune_and_finetune(jobs)


def reshape_and_finetune(
    jobs: Sequence[ModelJob], originals: Sequence[Result], reshaper: Choice, sparsity: float, defense: Defense
) -> list[Result]:
    """Make the smaller networks, one by one, as their shapes may differ: each from its original, then trained."""
    context, method = jobs[0].context, reshaper.make()
    teaches = isinstance(method, Teaches)
    recipe, fit = build_fit(defense, context.recipes[0 if teaches else 1])  # a student starts from nothing
    settings = {"pruner": str(reshaper), "sparsity": sparsity, "defense": str(defense), "recipe": asdict(recipe)}
    pairs = list(zip(jobs, originals, strict=True))
    depends = [job.base | settings | {"original": original.key} for job, original in pairs]

    def compute(missing: list[int]) -> Iterator[tuple[int, Result]]:
        with progress(f"{reshaper} {defense}", len(missing)) as advance:
            for i in missing:
                (job, original), seed = pairs[i], jobs[i].context.seed
                net = job.context.initial("structure").to(context.device)
                net.load_state_dict(original.tensors)
                sample = _draw_rows(job, derive(seed, "sample", job.role))
                small = _reshape(job.context, net, reshaper, sparsity, sample, job.role)
                options: dict[str, Any] = {"execution": "sequential"}
                if isinstance(method, Teaches):
                    options["loss"] = method.share(fit.keywords["loss"])
                    options["guide"] = method.guide(net, context.device)
                task = replace(job.task(tree.state_of(small)), rng=derive(seed, "fit", job.role, "reshaped"))
                ((_, fitted),) = fit(small, [task], **options)
                tensors = {f"state.{name}": value for name, value in fitted.state.items()}
                if not teaches:  # the shapes of the smaller network follow from the original's weights
                    tensors |= {f"original.{name}": value for name, value in original.tensors.items()}
                yield i, Result(tensors, _history(fitted) | {"sample": sample.tolist(), "role": job.role})
                advance(1)

    return context.run.stages("reshape", depends, compute)


def _reshape(
    context: SeedContext, net: nn.Module, reshaper: Choice, sparsity: float, sample: Tensor, role: str
) -> nn.Module:
    """Return the smaller network of a role."""
    rng = derive(context.seed, "reshape", role, str(reshaper), sparsity)
    small: nn.Module = reshaper.make().reshape(net, context.rows(sample), sparsity, rng)
    return small


def module_of(context: SeedContext, compression: Compression, model: Result) -> nn.Module:
    """Return a compressed model in the form that is deployed: smaller, quantised, or with its zeros."""
    if model.key in context.converted:
        return context.converted[model.key]
    net, compressor = context.initial("structure").to(context.device), compression.pruner
    if compressor is not None and (reshaper := compressor.find_part(Reshaper)) is not None:
        net.load_state_dict(_part(model, "original.") or net.state_dict())
        sample = torch.tensor(model.data["sample"])
        net = _reshape(context, net, reshaper, compression.sparsity, sample, model.data["role"])
    net.load_state_dict(state_of(model))
    if compressor is None or (converter := compressor.find_part(Converter)) is None:
        return net
    with suppress(WrongInput):  # single weights cannot be removed: their zeros are quantised
        net = remove(net.cpu(), mask_of(model), context.data.input_shape)
    converted: nn.Module = converter.make().convert(net, context.rows(torch.tensor(model.data["calibration"])))
    if len(context.converted) == 4:
        context.converted.pop(next(iter(context.converted)))
    context.converted[model.key] = converted  # every measurement asks it, and to export a network takes seconds
    return converted


def build_predictor(context: SeedContext, compression: Compression, model: Result) -> Predict:
    """Return a model as a function from inputs to (N, K) probabilities."""
    compressor = compression.pruner
    if compressor is not None and compressor.find_part(Converter) is not None:
        box = wrap(module_of(context, compression, model))
        return lambda inputs: box.predict(inputs).to(inputs.device)
    net = context.net
    if compressor is not None and compressor.find_part(Reshaper) is not None:
        net = module_of(context, compression, model)
    answer = bind_state(net, state_of(model), context.device)
    return lambda inputs: to_probabilities(answer(inputs))


def prune(job: ModelJob, state: Mapping[str, Tensor], pruner: Choice, sparsity: float) -> tuple[Mask, list[str]]:
    """Return the mask for one trained model, and the pruner's warnings."""
    context = job.context
    net = context.initial("structure").to(context.device)
    net.load_state_dict(state)
    rng = derive(context.seed, "prune", job.role, str(pruner), sparsity)
    sample = _draw_rows(job, rng)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mask = pruner.make()(net, context.rows(sample), sparsity, rng)
    return mask, [str(warning.message) for warning in caught]


def _draw_rows(job: ModelJob, rng: Generator) -> Tensor:
    """Draw training rows of a model for a compressor: enough of each class for scores and ranges."""
    rows = job.part.train
    return rows[torch.randperm(rows.numel(), generator=rng)[: max(128, 20 * job.context.data.classes)]]


def build_fit(defense: Defense, recipe: Recipe) -> tuple[Recipe, Finetuning]:
    """Return the recipe and the loop of fine-tuning, with every defense at the point where it acts."""
    if part := defense.find_part("recipe"):
        recipe = part.make()(recipe)
    loss: Loss = part.make() if (part := defense.find_part("loss")) else cross_entropy
    loop = defense.find_part("fine-tuning") or defense.find_part("training")
    return recipe, partial(loop.make().fit_many if loop else fit_many, recipe=recipe, loss=loss)


def _fit(
    context: SeedContext, title: str, indices: Sequence[int], task: Callable[[int], Task], fit: Fit
) -> Iterator[tuple[int, Fitted]]:
    """Fit the task of every index. If models train one by one, a task's rows are copied when its turn comes."""
    with progress(title, len(indices)) as advance:
        for group in [[i] for i in indices] if trains_alone(context) else [indices]:
            for index, fitted in fit(context.net, [task(i) for i in group], execution=context.config.execution):
                yield group[index], fitted
                advance(1)


def trains_alone(context: SeedContext) -> bool:
    """Return True if models train one by one, as on a CPU."""
    return context.device.type == "cpu" and context.config.execution in ("auto", "sequential")


def _history(fitted: Fitted) -> dict[str, Any]:
    return {"history": fitted.history, "best_epoch": fitted.best_epoch}


def state_of(result: Result) -> Params:
    """Return the weights of a pruned model's stage, or of an original's."""
    return _part(result, "state.") or dict(result.tensors)


def mask_of(result: Result) -> Mask:
    """Return the mask of a pruned model's stage; empty for an original's."""
    return _part(result, "mask.")


def _part(result: Result, prefix: str) -> Params:
    """Return the tensors of a stage whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): v for name, v in result.tensors.items() if name.startswith(prefix)}


def guarantees(context: SeedContext, compression: Compression, size: int) -> list[Guarantee]:
    """Return the guarantees of a model's defense for `size` training examples: (epsilon, delta), and their scope.

    A mask that a pruner computes from members is outside of every guarantee, and so is a training by other means: of
    weights that were given, or by the user's function.
    """
    here = context.config.weights is None and context.user_function is None
    first, last = compression.defense.find_part("training") is not None, compression.pruner is not None
    if not last and not (first and here):
        return []
    recipes = context.recipes[0 if first else 1 : 2 if last else 1]
    methods = [part.make() for part in compression.defense.parts]
    proved = [method.guarantee(size, *recipes) for method in methods if hasattr(method, "guarantee")]
    parts = () if compression.pruner is None else compression.pruner.parts
    private = here and all(part.name in BY_WEIGHTS for part in parts)
    return [guarantee._replace(whole=guarantee.whole and private) for guarantee in proved]


def model_rows(
    context: SeedContext, compression: Compression, labels: dict[str, Any], model: Result, sides: dict[str, Batch]
) -> list[Row]:
    """Return the utility and cost of one model: its accuracy on each side, and its savings in every form it has."""

    def compute() -> Result:
        answer = build_predictor(context, compression, model)
        hits = {name: answer(side.inputs).argmax(1) == side.labels for name, side in sides.items()}
        values, note = measure_cost(context, compression, model)
        utility = {name: share(hit)._asdict() for name, hit in hits.items()}
        return Result(data={"utility": utility, "cost": values, "note": note})

    done = context.run.stage("model", {"model": model.key, "sides": list(sides), "seed": context.seed}, compute).data
    note = join_notes(*model.data.get("notes", []))
    rows = [Row(**labels, metric=name, **(measures | {"note": note})) for name, measures in done["utility"].items()]
    flat = not any(isinstance(module, CONVS) for module in context.net.modules())
    for name, value in done["cost"].items():
        counted = "of the linear weights: there is no convolution" if flat and name.startswith("conv_") else None
        note = join_notes(counted, done["note"])
        rows.append(Row(**labels, metric=name, value=value, timing=name.startswith("seconds"), note=note))
    return rows


def measure_cost(context: SeedContext, compression: Compression, model: Result) -> tuple[dict[str, float], str | None]:
    """Return the costs of a model by name, and a note on them.

    A mask has the costs of its masked and of its removed form. A smaller or quantised network has its own.
    """
    compressor, shape = compression.pruner, context.data.input_shape
    net = module_of(context, compression, model)
    if compressor is not None and compressor.find_part(Converter) is not None:
        whole = asdict(cost(net, shape))
        return {f"{name}_compressed": whole[name] for name in ("bytes", "seconds")}, INT8_LATENCY
    if compressor is not None and compressor.find_part(Reshaper) is not None:
        return {f"{name}_compressed": value for name, value in asdict(cost(net, shape)).items()}, None
    saved = savings(net.cpu(), mask_of(model), shape)
    costs = {"masked": asdict(saved.masked), "removed": asdict(saved.removed) if saved.removed else {}}
    shares = {"nonzero_parameters": saved.nonzero, "conv_weights_masked": saved.masked_share}
    shares["conv_weights_removed"] = saved.removed_share
    values = shares | {f"{name}_{form}": v for form, measures in costs.items() for name, v in measures.items()}
    return values, saved.note or None
