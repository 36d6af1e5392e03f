"""`secateur.invert(...)`: gradient inversion of an update of any nn.Module, from Python.

The update is made of tensors here, or was captured elsewhere. A model, batch or update that does not fit is refused in
one sentence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from secateur import tree
from secateur.api.audit import in_precision
from secateur.attacks.inversion.problem import structure
from secateur.catalogue import Choice, Defense
from secateur.config import defense_of_updates, inversion
from secateur.errors import WrongInput, unknown
from secateur.evaluation import gallery
from secateur.evaluation.client import (
    AttackedClient,
    Target,
    check_attack,
    check_shape,
    guard_of,
    protected,
    remarked,
    scale,
    transform_of,
)
from secateur.evaluation.membership import flat
from secateur.evaluation.reconstruction import Scoring, attack_labels, judge, summary_rows, target_rows
from secateur.evaluation.update_files import fitting, read_update
from secateur.experiments.invert import chance_of, compared_with, marked
from secateur.experiments.invert_targets import asks_search, in_python
from secateur.interfaces import Batch, Gradient, InversionAttack, Knowledge, Loss, Params, Reconstruction, Weights
from secateur.metrics.lpips import load_weights
from secateur.progress import progress
from secateur.runs.artifacts import write
from secateur.runs.rows import Row
from secateur.runs.unfinished import NullWatcher
from secateur.seeding import derive

Update = Gradient | Weights | Path | str
SLACK = 1e-3  # how far a pixel may lie beyond [0, 1], as normalisation rounds


@dataclass(frozen=True, eq=False)
class Inversion:
    """The rows, reconstructions and figures of attacks on updates."""

    rows: list[Row]
    pictures: dict[str, list[Tensor]]  # by attack, a target each: (B, C, H, W) pixels in the order of the truths
    figures: list[dict[str, Any]]

    def write(self, path: Path | str) -> Path:
        """Write the report page, with the pictures, to `path`."""
        from secateur.report.page import Source, render

        write(Path(path), render([Source("invert", self.rows, self.figures, config="", environment={})]).encode())
        return Path(path)

    def print(self) -> None:
        """Print the table."""
        from secateur.report.terminal import print_inversion

        print_inversion(self.rows)


def invert(
    model: nn.Module,
    batch_or_update: Batch | tuple[Tensor, Tensor] | Update,
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
    learning_rate: float | None = None,
    generator: Callable[[Tensor, Tensor], Tensor] | None = None,
    seed: int = 0,
    name: str = "model",
    **over: Any,
) -> Inversion:
    """Return what attacks reconstruct from an update of the model, and how close that is to the batch.

    Args:
        model: The model that the server sent.
        batch_or_update: A batch (inputs, labels), which becomes one update or several of `batch_size` examples each.
            Or an update captured elsewhere: a Gradient, Weights, or a .safetensors file.
        attack: One attack or several.
        defense: A defense such as dgp, which rewrites the gradient that the client sends.
        residual: The residual of error feedback that a training left (`CollaborativeResult.client`, or a file of it).
        batch_size: The examples of an update; None: all of the batch.
        input_shape: (channels, height, width); needed with a captured update.
        mean: By channel, with `std`: how pixels in [0, 1] became inputs.
        std: See `mean`.
        labels: "oracle" if the attacker is given the labels.
        loss: The client's loss.
        batchnorm: The mode of BatchNorm in which the client computes its update.
        local_steps: The client's steps; if given, it sends its weights after them instead of a gradient.
        learning_rate: The client's; 0.1 for a batch.
        generator: A function of noise (N, 128) and labels that makes pictures, for attacks that search through one.
        seed: The seed of all that is drawn.
        name: The model's name in the rows.
        over: Hyper-parameters laid over every attack, such as iterations=500.
    """
    chosen = [inversion(one, **over) for one in ([attack] if isinstance(attack, str) else attack)]
    if not chosen:
        raise WrongInput("attack", "give at least one")
    check_settings(labels, batchnorm, batch_size, local_steps, learning_rate)
    targets, inputs = given_targets(model, batch_or_update, batch_size, input_shape, local_steps is not None)
    from_batch = isinstance(targets[0], Batch)
    if labels == "oracle" and not from_batch:
        raise WrongInput("labels", "an update that was captured comes without its labels; only inferred is possible")
    centre, spread = scale(mean, std, inputs)
    if from_batch:
        check_pixels(inputs, centre, spread)
    guarded, classes = defense_of_updates(defense), classes_of(model, inputs, targets)
    if from_batch and asks_search(guarded):
        guarded = in_python(guarded, model, _joined(targets), centre, spread, seed)
    model, precode = protected(model, guarded, classes, derive(seed, "initialise", "defense"))
    knowledge = Knowledge(
        model,
        tuple(inputs.shape[1:]),
        classes,
        centre,
        spread,
        batch_size=targets[0].size if isinstance(targets[0], Batch) else batch_size or 1,
        loss=loss,
        batchnorm=batchnorm,
        local_steps=local_steps or 1,
        learning_rate=learning_rate or (0.1 if from_batch else None),
        generator=generator,
    )
    sends_weights = local_steps is not None if from_batch else isinstance(targets[0], Weights)
    if residual is not None and guarded.acting_on("residual") is None:
        raise WrongInput("residual", "is what error feedback keeps; ask for it: defense='dgp+error-feedback'")
    users = [target for target in targets if isinstance(target, Batch)]
    other = (lambda number: users[(number + 1) % len(users)]) if len(users) > 1 else None
    guard = guard_of(guarded, residual, seed, other)
    if str(guarded) != "none" and (sends_weights or not from_batch):
        raise WrongInput("defense", "acts on the gradient of a batch; leave it out of weights and captured updates")
    client = AttackedClient(
        model,
        tree.state_of(model),
        knowledge,
        sends_weights,
        labels == "oracle",
        guard=guard,
        transform=transform_of(guarded, centre, spread),
        precode=precode,
        seed=seed,
    )
    for choice in chosen:
        check_attack(choice, client, targets[0], chance_of(seed, choice)[0])
    common = {"model": name, "dataset": "given", "seed": seed, "defense": str(guarded)}
    extra = {"labels": labels, "stage": "given", "batch_size": knowledge.batch_size, "update": client.sends}
    return _attacked(client, targets, chosen, common | {"extra": extra}, guarded)


def check_settings(
    labels: str, batchnorm: str, batch_size: int | None, local_steps: int | None, learning_rate: float | None
) -> None:
    """Refuse settings that are not allowed."""
    for field, word, allowed in (
        ("labels", labels, ("inferred", "oracle")),
        ("batchnorm", batchnorm, ("eval", "batch")),
    ):
        if word not in allowed:
            raise unknown(field, word, allowed)
    for field, number in (("batch_size", batch_size), ("local_steps", local_steps)):
        if number is not None and number < 1:
            raise WrongInput(field, f"{number} is not allowed; give a whole number from 1")
    if learning_rate is not None and not 0 < learning_rate < math.inf:
        raise WrongInput("learning_rate", f"{learning_rate} is not allowed; give a number above 0")


def given_targets(
    model: nn.Module, batch_or_update: Any, batch_size: int | None, input_shape: Sequence[int] | None, weights: bool
) -> tuple[list[Target], Tensor]:
    """Return the targets of the attack, and inputs of the shape, precision and device that the model takes."""
    if not isinstance(model, nn.Module):
        raise WrongInput("model", f"is {type(model).__name__}; give a torch.nn.Module")
    if isinstance(batch_or_update, Gradient | Weights | Path | str):
        return [_update(model, batch_or_update, input_shape, weights)], _like(
            model, torch.zeros(1, *(input_shape or ()))
        )
    if (
        not isinstance(batch_or_update, tuple | list)
        or len(batch_or_update) != 2
        or not all(isinstance(part, Tensor) for part in batch_or_update)
    ):
        raise WrongInput("batch", "give two tensors (inputs, labels), or an update: Gradient, Weights or a file")
    inputs, labels = batch_or_update
    if not len(inputs) or labels.shape != inputs.shape[:1] or labels.is_floating_point():
        sizes = f"{len(inputs)} inputs and {labels.dtype} labels of the shape {tuple(labels.shape)}"
        raise WrongInput("batch", f"{sizes} do not fit; give at least one input, and one whole number for each")
    check_shape("batch", "the batch", inputs.shape[1:])
    if not bool(torch.isfinite(inputs).all()):
        raise WrongInput("batch", "its inputs hold NaN or infinity; every number must be finite")
    size = batch_size or len(inputs)
    if len(inputs) % size:
        raise WrongInput("batch_size", f"{size} does not divide the {len(inputs)} examples; give one that does")
    batch = Batch(_like(model, inputs), labels.long().to(_device(model)))
    parts = zip(torch.split(batch.inputs, size), torch.split(batch.labels, size), strict=True)
    return [Batch(*part) for part in parts], batch.inputs


def _update(model: nn.Module, update: Update, input_shape: Sequence[int] | None, weights: bool) -> Gradient | Weights:
    """Return a captured update; refuse one whose tensors are not the model's."""
    if input_shape is None:
        raise WrongInput("input_shape", "must be given with an update: (channels, height, width)")
    check_shape("input_shape", "the update", input_shape)
    if isinstance(update, Path | str):
        return read_update(Path(update), model, weights)
    return type(update)(fitting(update.values, model, "the update"))


def _like(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the inputs in the precision and on the device of the model's weights."""
    return in_precision(model, inputs).to(_device(model))


def _device(model: nn.Module) -> torch.device:
    return next((value.device for value in model.parameters()), torch.device("cpu"))


def check_pixels(inputs: Tensor, mean: Tensor, std: Tensor) -> None:
    """Refuse a mean and a std by which the inputs were no pixels in [0, 1]: scores would be of other pictures."""
    pixels = inputs * std + mean
    low, high = float(pixels.min()), float(pixels.max())
    if low < -SLACK or high > 1 + SLACK:
        raise WrongInput("mean", f"by it and std the pixels lie from {low:.3g} to {high:.3g}; they must lie in [0, 1]")


def classes_of(model: nn.Module, inputs: Tensor, targets: Sequence[Target]) -> int:
    """Return the number of the model's classes; refuse labels that are none of them."""
    rows = torch.zeros_like(inputs[:1])
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            answers = structure(model, "eval")(rows)
    except Exception as error:  # whatever the user's own code raises
        reason = f"raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise WrongInput(
            "model", f"it must take inputs of the shape {tuple(inputs.shape[1:])}, and {reason}"
        ) from error
    if answers.ndim != 2:
        raise WrongInput("model", f"answers {tuple(answers.shape)} for one example; it must give one row of classes")
    every = [target.labels for target in targets if isinstance(target, Batch)]
    if every and not 0 <= int(torch.cat(every).min()) <= int(torch.cat(every).max()) < answers.shape[1]:
        low, high = int(torch.cat(every).min()), int(torch.cat(every).max())
        allowed = f"allowed by the model's outputs: 0 to {answers.shape[1] - 1}"
        raise WrongInput("batch", f"labels from {low} to {high}; {allowed}")
    return int(answers.shape[1])


def _joined(targets: Sequence[Target]) -> Batch:
    """Return the examples of all targets as one batch."""
    batches = [target for target in targets if isinstance(target, Batch)]
    return Batch(torch.cat([batch.inputs for batch in batches]), torch.cat([batch.labels for batch in batches]))


def _attacked(
    client: AttackedClient,
    targets: Sequence[Target],
    chosen: Sequence[Choice],
    labels: dict[str, Any],
    defense: Defense,
) -> Inversion:
    """Run every attack on all targets, and score the reconstructions."""
    seed = labels["seed"]
    truths, used = (
        [target if isinstance(target, Batch) else None for target in some]
        for some in (targets, [client.used(target, number) for number, target in enumerate(targets)])
    )
    result, against = Inversion([], {}, []), compared_with(client)
    for number, truth in enumerate(truths):
        if truth is not None:
            shown = flat(attack_labels(labels, labels["extra"], None))
            pixels = client.knowledge.pixels(truth.inputs)
            result.figures.extend(gallery.truths(shown, number, pixels, truth.labels.tolist(), images=True))
    for attack in chosen:
        named, numbers = attack_labels(labels, labels["extra"], attack), range(len(targets))
        reconstructed = _reconstructed(client, targets, attack, seed)
        threat = {"threat": attack.method.info["threat"], "knows": client.against(attack.make()).knows}
        outcomes = [
            judge(batches, *reconstructed, Scoring(load_weights())) for batches in (used, truths)[: len(against)]
        ]
        for outcome, which in zip(outcomes, against, strict=True):
            result.rows.extend(target_rows(marked(named, which), numbers, outcome))
            rows = summary_rows(marked(named, which | threat), outcome, derive(seed, "bootstrap"))
            trained = client.guard is not None and client.guard.residual is not None
            result.rows.extend(remarked(rows, defense, chosen, trained))
        result.figures.extend(gallery.shown(flat(named), numbers, outcomes[0], images=True))
        result.pictures[str(attack)] = [pair.guess for pair in outcomes[0].alike]
    return result


def _reconstructed(
    client: AttackedClient, targets: Sequence[Target], attack: Choice, seed: int
) -> tuple[list[Reconstruction | None], Knowledge, float]:
    """Return the reconstruction of each target, the attacker's knowledge, and the seconds."""
    attacker: InversionAttack = attack.make()
    start, many = time.monotonic(), f"{len(targets)} update{'s' if len(targets) > 1 else ''}"
    with progress(f"{attack} on {many}", getattr(attacker, "iterations", None), rate=True) as advance:
        tampering, starts = chance_of(seed, attack)
        knowledge, views = client.seen(attacker, targets, tampering)
        guesses = dict(attacker.reconstruct(views, knowledge, [starts] * len(views), NullWatcher(advance)))
    return [guesses.get(i) for i in range(len(targets))], knowledge, time.monotonic() - start
