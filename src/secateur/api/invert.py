"""`secateur.invert(...)`: gradient inversion of an update of any nn.Module, from Python.

The update is made of tensors here, or was captured elsewhere. A model, batch or update that does not fit is refused in
one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from secateur import tree
from secateur.api import Examples, Printable, read_batch
from secateur.attacks.inversion.problem import structure
from secateur.catalogue import Defense
from secateur.config import defense_of_updates, inversion
from secateur.errors import WrongInput, check_number, check_whole, unknown
from secateur.evaluation.client import (
    AttackedClient,
    Target,
    check_attack,
    check_shape,
    guard_of,
    loss_of,
    protect,
    scale,
    transform_of,
)
from secateur.evaluation.update_files import fit_update, read_update
from secateur.experiments.invert import UpdateExposure, chance_of
from secateur.experiments.invert_targets import with_policies_for_model
from secateur.interfaces import PLAIN_SGD, Batch, Gradient, Knowledge, Loss, Optimiser, Params, Weights
from secateur.models.create import check_labels, explain_failure
from secateur.models.wrap import device_of, in_precision
from secateur.runs.folder import MemoryRun
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.training.optimisers import check_optimiser, parse_optimiser

Update = Gradient | Weights | Path | str
SLACK = 1e-3  # how far a pixel may lie beyond [0, 1], as normalisation rounds


@dataclass(frozen=True, eq=False)
class Inversion(Printable):
    """The rows, reconstructions and figures of attacks on updates."""

    kind = "invert"
    rows: list[Row]
    pictures: dict[str, list[Tensor]]  # by attack, a target each: (B, C, H, W) pixels in the order of the truths
    figures: list[dict[str, Any]]


def invert(
    model: nn.Module,
    batch_or_update: Examples | Update,
    attack: str | Sequence[str] = "ig",
    *,
    defense: str = "none",
    residual: Params | Path | str | None = None,
    batch_size: int | None = None,
    input_shape: Sequence[int] | None = None,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    labels: Literal["inferred", "oracle"] = "inferred",
    loss: Loss = nn.functional.cross_entropy,
    batchnorm: Literal["eval", "batch"] = "eval",
    local_steps: int | None = None,
    local_epochs: int | None = None,
    local_batch: int | None = None,
    optimiser: str | Optimiser = PLAIN_SGD,
    learning_rate: float | None = None,
    repeats: int = 1,
    generator: Callable[[Tensor, Tensor], Tensor] | None = None,
    public: Examples | None = None,
    seed: int = 0,
    name: str = "model",
    **over: Any,
) -> Inversion:
    """Attack an update of the model, and return the reconstructions and their similarity to the batch.

    Args:
        model: The model that the server sent.
        batch_or_update: A batch (inputs, labels), or examples in another form that `secateur.audit` takes, which
            become one update or several of `batch_size` examples each. Or an update captured elsewhere: a Gradient,
            Weights, or a .safetensors file.
        attack: One attack or several.
        defense: A defense such as dgp, which rewrites the gradient that the client sends.
        residual: The residual of error feedback that a training left (`CollaborativeResult.client`, or a file of it).
        batch_size: The examples of an update; None: all of the batch.
        input_shape: (channels, height, width); needed with a captured update.
        mean: By channel, with `std`: how pixels in [0, 1] became inputs.
        std: See `mean`.
        labels: "oracle" if the attacker knows the labels.
        loss: The client's loss.
        batchnorm: The mode of BatchNorm in which the client computes its update.
        local_steps: The client's steps; if given, it sends its weights after them instead of a gradient.
        local_epochs: The client's epochs of batches of `local_batch`, instead of steps.
        local_batch: The examples of a local step; None: all.
        optimiser: The client's, such as "sgd:momentum=0.9" or "adam". Another than "sgd" means that it sends weights.
        learning_rate: The client's; for a batch 0.1, and 0.001 with Adam.
        repeats: The rounds in a row that are of the same batch, which an attack with `rounds` joins.
        generator: A function of noise (N, 128) and labels that makes pictures, for attacks that search through one.
        public: Inputs and labels of the attacker's own, none of them in the batch. An attack such as ig chooses its
            weight of total variation on them; without them it runs with every weight, each under a name of its own.
        seed: The seed of all that is drawn.
        name: The model's name in the rows.
        over: Hyper-parameters laid over every attack, such as iterations=500.
    """
    chosen = [inversion(one, **over) for one in ([attack] if isinstance(attack, str) else attack)]
    if not chosen:
        raise WrongInput("attack", "must name at least one attack")
    rule = parse_optimiser(optimiser) if isinstance(optimiser, str) else check_optimiser(optimiser)
    local = {"local_steps": local_steps, "local_epochs": local_epochs, "local_batch": local_batch}
    check_settings(labels, batchnorm, batch_size, local, learning_rate)
    trains = local_steps is not None or local_epochs is not None or rule != PLAIN_SGD
    targets, inputs = check_targets(model, batch_or_update, batch_size, input_shape, trains)
    from_batch = isinstance(targets[0], Batch)
    if labels == "oracle" and not from_batch:
        raise WrongInput("labels", "an update that was captured comes without its labels; only inferred is possible")
    centre, spread = scale(mean, std, inputs)
    if from_batch:
        check_pixels(inputs, centre, spread)
    knowledge = Knowledge(
        model,
        tuple(inputs.shape[1:]),
        count_classes(model, inputs, targets),
        centre,
        spread,
        batch_size=targets[0].size if isinstance(targets[0], Batch) else batch_size or 1,
        loss=loss,
        batchnorm=batchnorm,
        local_steps=local_steps or 1,
        learning_rate=learning_rate or ((0.001 if rule.is_adaptive else 0.1) if from_batch else None),
        local_batch=local_batch,
        local_epochs=local_epochs,
        optimiser=rule,
        generator=generator,
    )
    guarded = defense_of_updates(defense)
    if from_batch:
        guarded = with_policies_for_model(guarded, model, _join_targets(targets), centre, spread, seed)
    sends_weights = trains if from_batch else isinstance(targets[0], Weights)
    check_whole("repeats", repeats)
    client = build_client(knowledge, targets, guarded, residual, sends_weights, labels == "oracle", seed)
    client = replace(client, repeats=repeats)
    for choice in chosen:
        check_attack(choice, client, targets[0], chance_of(seed, choice)[0])
    common = {"model": name, "dataset": "given", "seed": seed, "defense": str(guarded)}
    extra = {"labels": labels, "stage": "given", "batch_size": knowledge.batch_size, "update": client.sends}
    run = MemoryRun()
    examples = read_public(model, public, knowledge)
    exposure = UpdateExposure(run, client, targets, guarded, chosen, common | {"extra": extra}, public=examples)
    exposure.show_truths()
    mounted = [attack for choice in chosen for attack in exposure.tune(choice)]
    pictures = {str(attack): [match.guess for match in exposure.measure(attack)[0].matches] for attack in mounted}
    return Inversion(run.rows, pictures, run.figures)


def read_public(model: nn.Module, public: Examples | None, knowledge: Knowledge) -> list[Batch]:
    """Return examples of the attacker's own in batches of the size of an update."""
    if public is None:
        return []
    inputs, labels = read_batch("public", public)
    if tuple(inputs.shape[1:]) != tuple(knowledge.input_shape):
        raise WrongInput("public", f"has the shape {tuple(inputs.shape[1:])}; use {tuple(knowledge.input_shape)}")
    check_labels("public", labels, knowledge.classes)
    whole, size = Batch(_match_model(model, inputs), labels.to(device_of(model))), knowledge.batch_size
    if whole.size < size:
        raise WrongInput("public", f"has {whole.size} examples; use at least {size}, those of an update")
    rows = torch.arange(whole.size // size * size).view(-1, size)
    return [whole.take(one) for one in rows]


def check_settings(
    labels: str, batchnorm: str, batch_size: int | None, local: dict[str, int | None], learning_rate: float | None
) -> None:
    """Refuse settings that are not allowed."""
    options = {"labels": (labels, ("inferred", "oracle")), "batchnorm": (batchnorm, ("eval", "batch"))}
    for field, (word, allowed) in options.items():
        if word not in allowed:
            raise unknown(field, word, allowed)
    for field, number in ({"batch_size": batch_size} | local).items():
        if number is not None:
            check_whole(field, number)
    if local["local_steps"] is not None and local["local_epochs"] is not None:
        raise WrongInput("local_epochs", "cannot be combined with local_steps; leave one of them out")
    if learning_rate is not None:
        check_number("learning_rate", learning_rate, "(0, inf)")


def check_targets(
    model: nn.Module, batch_or_update: Any, batch_size: int | None, input_shape: Sequence[int] | None, weights: bool
) -> tuple[list[Target], Tensor]:
    """Return the targets of the attack, and inputs of the shape, precision and device that the model takes."""
    if not isinstance(model, nn.Module):
        raise WrongInput("model", f"is {type(model).__name__}; must be a torch.nn.Module")
    if isinstance(batch_or_update, Gradient | Weights | Path | str):
        update = _update(model, batch_or_update, input_shape, weights)
        return [update], _match_model(model, torch.zeros(1, *(input_shape or ())))
    inputs, labels = read_batch("batch", batch_or_update)
    check_shape("batch", "the batch", inputs.shape[1:])
    if not bool(torch.isfinite(inputs).all()):
        raise WrongInput("batch", "its inputs hold NaN or infinity; every number must be finite")
    size = batch_size or len(inputs)
    if len(inputs) % size:
        raise WrongInput("batch_size", f"{size} does not divide the {len(inputs)} examples; use one that does")
    batch = Batch(_match_model(model, inputs), labels.to(device_of(model)))
    parts = zip(torch.split(batch.inputs, size), torch.split(batch.labels, size), strict=True)
    return [Batch(*part) for part in parts], batch.inputs


def _update(model: nn.Module, update: Update, input_shape: Sequence[int] | None, weights: bool) -> Gradient | Weights:
    """Return a captured update; refuse one whose tensors are not the model's."""
    if input_shape is None:
        raise WrongInput("input_shape", "must be given with an update: (channels, height, width)")
    check_shape("input_shape", "the update", input_shape)
    if isinstance(update, Path | str):
        return read_update(Path(update), model, weights)
    return type(update)(fit_update(update.values, model, "the update"))


def _match_model(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the inputs in the precision and on the device of the model's weights."""
    return in_precision(model, inputs).to(device_of(model))


def check_pixels(inputs: Tensor, mean: Tensor, std: Tensor) -> None:
    """Refuse a mean and a std by which the inputs were no pixels in [0, 1]: scores would be of other pictures."""
    pixels = inputs * std + mean
    low, high = float(pixels.min()), float(pixels.max())
    if low < -SLACK or high > 1 + SLACK:
        raise WrongInput("mean", f"with std it puts the pixels in [{low:.3g}, {high:.3g}]; they must lie in [0, 1]")


def count_classes(model: nn.Module, inputs: Tensor, targets: Sequence[Target]) -> int:
    """Return the number of the model's classes; refuse labels that are none of them."""
    with explain_failure("model", inputs), torch.no_grad(), torch.random.fork_rng(devices=[]):
        answers = structure(model, "eval")(torch.zeros_like(inputs[:1]))
    if answers.ndim != 2:
        raise WrongInput("model", f"answers {tuple(answers.shape)} for one example; it must return one row of classes")
    if isinstance(targets[0], Batch):
        check_labels("batch", _join_targets(targets).labels, answers.shape[1])
    return int(answers.shape[1])


def _join_targets(targets: Sequence[Target]) -> Batch:
    """Return the examples of all targets as one batch."""
    batches = [target for target in targets if isinstance(target, Batch)]
    return Batch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def build_client(
    knowledge: Knowledge,
    targets: Sequence[Target],
    defense: Defense,
    residual: Params | Path | str | None,
    sends_weights: bool,
    tells_labels: bool,
    seed: int,
) -> AttackedClient:
    """Return the client that sends the updates under a defense; refuse a defense that cannot act on them."""
    net, precode = protect(knowledge.net, defense, knowledge.classes, derive(seed, "initialise", "defense"))
    if residual is not None and defense.find_part("residual") is None:
        raise WrongInput("residual", "belongs to error feedback; use defense='dgp+error-feedback'")
    users = [target for target in targets if isinstance(target, Batch)]
    other = (lambda number: users[(number + 1) % len(users)]) if len(users) > 1 else None
    guard = guard_of(defense, residual, seed, other)
    if str(defense) != "none" and (sends_weights or not users):
        raise WrongInput("defense", "acts on the gradient of a batch; use none for weights and captured updates")
    transform, known = transform_of(defense, knowledge.mean, knowledge.std), replace(knowledge, net=net)
    state = tree.state_of(net)
    client = AttackedClient(net, state, known, sends_weights, tells_labels, False, guard, transform, precode, seed)
    return replace(client, loss=loss_of(defense, knowledge.batch_size))
