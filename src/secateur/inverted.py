"""`secateur.invert(...)`: attack an update of any nn.Module, made of tensors or captured elsewhere, from Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from secateur import gallery, tree
from secateur.artifacts import write
from secateur.catalogue import Choice, Defense
from secateur.chance import derive
from secateur.client import Client, Target, check_attack, scale
from secateur.config import defense_of_updates, inversion
from secateur.errors import WrongInput
from secateur.exposure import attack_labels, chance_of, compared_with, marked
from secateur.guard import guard_of, protected, remarked, transform_of
from secateur.interfaces import Batch, InversionAttack, Knowledge, Loss, Params, Reconstruction, Weights
from secateur.judging import flat
from secateur.likeness import Scoring, judge, summary_rows, target_rows
from secateur.metrics.lpips import load_weights
from secateur.policies import asks_search, in_python
from secateur.progress import progress
from secateur.rows import Row
from secateur.update_given import Update, check_pixels, check_settings, classes_of, given_targets
from secateur.watching import Onlooker


@dataclass(frozen=True, eq=False)
class Inversion:
    """What attacks made of updates."""

    rows: list[Row]
    pictures: dict[str, list[Tensor]]  # by attack, a target each: (B, C, H, W) pixels in the order of the truths
    figures: list[dict[str, Any]]

    def write(self, path: Path | str) -> Path:
        """Write the page; it shows the pictures."""
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
    """What does this model's update reveal of the batch it was made of?

    The model as it is is what the server sent. A batch (inputs, labels) becomes one update, or several of `batch_size`
    examples each; an update (a Gradient, Weights, or a .safetensors file) was captured elsewhere and needs
    `input_shape`. `mean` and `std` say how pixels in [0, 1] became inputs, by channel. With `local_steps` the client
    sends its weights after them instead of a gradient. A `defense` such as dgp rewrites the gradient that it sends,
    with error feedback by the `residual` that a training left (`Collaborated.client`, or a file of it).
    `generator` makes pictures of noise (N, 128) and labels, for attacks that search through one. `over` is laid over
    every attack, such as iterations=500.
    """
    chosen = [inversion(each, **over) for each in ([attack] if isinstance(attack, str) else attack)]
    if not chosen:
        raise WrongInput("attack", "give at least one")
    check_settings(labels, batchnorm, batch_size, local_steps, learning_rate)
    targets, inputs = given_targets(model, batch_or_update, batch_size, input_shape, local_steps is not None)
    own = isinstance(targets[0], Batch)
    if labels == "oracle" and not own:
        raise WrongInput("labels", "an update that was captured comes without its labels; only inferred is possible")
    centre, spread = scale(mean, std, inputs)
    if own:
        check_pixels(inputs, centre, spread)
    guarded, classes = defense_of_updates(defense), classes_of(model, inputs, targets)
    if own and asks_search(guarded):
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
        learning_rate=learning_rate or (0.1 if own else None),
        generator=generator,
    )
    sends_weights = local_steps is not None if own else isinstance(targets[0], Weights)
    if residual is not None and guarded.acting_on("residual") is None:
        raise WrongInput("residual", "is what error feedback keeps; ask for it: defense='dgp+error-feedback'")
    users = [target for target in targets if isinstance(target, Batch)]
    other = (lambda number: users[(number + 1) % len(users)]) if len(users) > 1 else None
    guard = guard_of(guarded, residual, seed, other)
    if str(guarded) != "none" and (sends_weights or not own):
        raise WrongInput("defense", "acts on the gradient of a batch; leave it out of weights and captured updates")
    client = Client(
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
    for each in chosen:
        check_attack(each, client, targets[0], chance_of(seed, each)[0])
    common = {"model": name, "dataset": "given", "seed": seed, "defense": str(guarded)}
    extra = {"labels": labels, "stage": "given", "batch_size": knowledge.batch_size, "update": client.sends}
    return _attacked(client, targets, chosen, common | {"extra": extra}, guarded)


def _joined(targets: Sequence[Target]) -> Batch:
    """The examples of all targets."""
    batches = [target for target in targets if isinstance(target, Batch)]
    return Batch(torch.cat([batch.inputs for batch in batches]), torch.cat([batch.labels for batch in batches]))


def _attacked(
    client: Client, targets: Sequence[Target], chosen: Sequence[Choice], labels: dict[str, Any], defense: Defense
) -> Inversion:
    """Every attack on all targets, judged."""
    seed = labels["seed"]
    truths, used = (
        [target if isinstance(target, Batch) else None for target in some]
        for some in (targets, [client.used(target, number) for number, target in enumerate(targets)])
    )
    found, against = Inversion([], {}, []), compared_with(client)
    for number, truth in enumerate(truths):
        if truth is not None:
            shown = flat(attack_labels(labels, labels["extra"], None))
            pixels = client.knowledge.pixels(truth.inputs)
            found.figures.extend(gallery.truths(shown, number, pixels, truth.labels.tolist(), images=True))
    for attack in chosen:
        named, numbers = attack_labels(labels, labels["extra"], attack), range(len(targets))
        made = _reconstructed(client, targets, attack, seed)
        told = {"threat": attack.method.info["threat"], "knows": client.against(attack.make()).knows}
        outcomes = [judge(each, *made, Scoring(load_weights())) for each in (used, truths)[: len(against)]]
        for outcome, which in zip(outcomes, against, strict=True):
            found.rows.extend(target_rows(marked(named, which), numbers, outcome))
            rows = summary_rows(marked(named, which | told), outcome, derive(seed, "bootstrap"))
            trained = client.guard is not None and client.guard.residual is not None
            found.rows.extend(remarked(rows, defense, chosen, trained))
        found.figures.extend(gallery.shown(flat(named), numbers, outcomes[0], images=True))
        found.pictures[str(attack)] = [each.guess for each in outcomes[0].alike]
    return found


def _reconstructed(
    client: Client, targets: Sequence[Target], attack: Choice, seed: int
) -> tuple[list[Reconstruction | None], Knowledge, float]:
    made: InversionAttack = attack.make()
    begun, many = time.monotonic(), f"{len(targets)} update{'s' if len(targets) > 1 else ''}"
    with progress(f"{attack} on {many}", getattr(made, "iterations", None), rate=True) as advance:
        tampering, starts = chance_of(seed, attack)
        knowledge, views = client.seen(made, targets, tampering)
        found = dict(made.reconstruct(views, knowledge, [starts] * len(views), Onlooker(advance)))
    return [found.get(i) for i in range(len(targets))], knowledge, time.monotonic() - begun
