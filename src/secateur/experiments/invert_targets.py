"""The client and the targets of `secateur invert`, built from its configuration.

ATS with `policies=search` searches for policies before any attack.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.catalogue import Choice, Defense
from secateur.config import Invert
from secateur.data.dataset import Dataset
from secateur.defenses.ats import CHOSEN, SEARCH, AutomaticTransformationSearch, search, write_policies
from secateur.errors import WrongInput
from secateur.evaluation.client import AttackedClient, Target, guard_of, protected, scale, transform_of
from secateur.evaluation.update_files import read_update
from secateur.experiments.context import SeedContext, file_key
from secateur.interfaces import Batch, Gradient, Knowledge, Params, Weights
from secateur.models.create import create, load_weights
from secateur.runs.artifacts import Result
from secateur.seeding import derive
from secateur.training.recipe import Recipe, Task
from secateur.training.trainer import fit

EXAMPLES = 63  # that score policies: about as many as the authors use
TAKEN = 2  # policies of the result, as in the authors' choice
PARTLY = Recipe(epochs=5, patience=None)  # of the model that the privacy score uses
LEARNT = 2000  # rows at most that train this model


def client_of(config: Invert, data: Dataset, device: torch.device, seed: int, defense: Defense) -> AttackedClient:
    """Return the client of one seed under a defense: with a new model, or the given one."""
    net = create(config.model, data.input_shape, data.classes, derive(seed, "initialise", "client"))
    net, precode = protected(net, defense, data.classes, derive(seed, "initialise", "defense"))
    net = (net if config.weights is None else load_weights(net, config.weights)).to(device)
    mean, std = scale(data.mean, data.std, data.inputs[: data.train_size])
    weights = isinstance(_update(config, net), Weights) if config.update else config.local_steps is not None
    knowledge = Knowledge(
        net,
        data.input_shape,
        data.classes,
        mean.to(device),
        std.to(device),
        batch_size=config.batch_size,
        batchnorm=config.batchnorm,
        local_steps=config.local_steps or 1,
        learning_rate=config.learning_rate or (None if config.update else 0.1),
        local_batch=config.local_batch,
    )
    guard = guard_of(defense, config.residual, seed, lambda number: _other(config, data, seed, number).to(device))
    return AttackedClient(
        net,
        tree.state_of(net),
        knowledge,
        weights,
        config.labels == "oracle",
        config.statistics,
        guard,
        transform_of(defense, knowledge.mean, knowledge.std),
        precode,
        seed,
    )


def targets_of(config: Invert, data: Dataset, device: torch.device, seed: int) -> list[Target]:
    """Return the targets: batches of training rows, or an update that was captured elsewhere."""
    if config.update is not None:
        return [_update(config, client_of(config, data, device, seed, config.defense[0]).net)]
    return [data.batch.take(rows).to(device) for rows in rows_of(config, data, seed)]


def _update(config: Invert, net: nn.Module) -> Gradient | Weights:
    """Read the captured update; refuse settings of local training beside a gradient."""
    assert config.update is not None
    update = read_update(config.update, net, weights=config.local_steps is not None)
    settings = [name for name in ("local_steps", "local_batch", "learning_rate") if getattr(config, name) is not None]
    if settings and isinstance(update, Gradient):
        raise WrongInput(settings[0], f"is of weights, and {config.update} is a gradient; leave it out")
    return update


def rows_of(config: Invert, data: Dataset, seed: int) -> Tensor:
    """Return (targets, B): the training rows of each update; a larger number of targets begins with the same rows."""
    if config.update is not None:
        return torch.empty(1, 0, dtype=torch.int64)
    return drawn_rows(data, seed)[: config.targets * config.batch_size].view(config.targets, config.batch_size)


def _other(config: Invert, data: Dataset, seed: int, number: int) -> Batch:
    """Return another user's batch in a target's round: rows from the far end of the drawn rows."""
    size, end = config.batch_size, data.train_size - number * config.batch_size
    if 2 * config.targets * size > data.train_size:
        many = f"{config.targets} targets and as many other users of {size} examples each"
        raise WrongInput("targets", f"{many} need more than the {data.train_size} training rows; ask for fewer")
    return data.batch.take(drawn_rows(data, seed)[end - size : end])


def public_rows(config: Invert, data: Dataset, seed: int) -> Tensor:
    """Return rows that an attacker may learn from: the test part, or training rows that no update is made of."""
    if data.train_size < len(data.inputs):
        return torch.arange(data.train_size, len(data.inputs))
    return drawn_rows(data, seed)[max(data.train_size // 2, config.targets * config.batch_size) :]


def drawn_rows(data: Dataset, seed: int) -> Tensor:
    """Return the training rows in the order in which targets are taken from them."""
    return torch.randperm(data.train_size, generator=derive(seed, "targets"))


def stage_of(config: Invert) -> str:
    """Return how far the attacked model is trained: near the end gradients vanish, and attacks look weak."""
    return "untrained" if config.weights is None else "weights given"


def asks_search(defense: Defense) -> bool:
    """Return True if a defense is ATS with policies that must be searched first."""
    return any(_is_search(part) for part in defense.parts)


def stand_in(defense: Defense) -> Defense:
    """Return the defense with the authors' policies, for checks before any work."""
    return _with(defense, CHOSEN)


def searched(defense: Defense, config: Invert, bench: SeedContext) -> Defense:
    """Return the defense with the policies that a search finds for this network and data; a stage of the run.

    The scores use 63 training rows. Privacy is scored on the given weights, or on a model trained for five epochs.
    Accuracy is scored on the untrained model.
    """
    part = next(part for part in defense.parts if _is_search(part))
    data, seed, weights = bench.data, bench.seed, config.weights
    net = create(config.model, data.input_shape, data.classes, derive(seed, "initialise", "client")).to(bench.device)
    rows = drawn_rows(data, seed).flip(0)
    batch = data.batch.take(rows[:EXAMPLES]).to(bench.device)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean or [0.0], data.std or [1.0]))

    def compute() -> Result:
        untrained = tree.state_of(net)
        if weights is not None:
            trained = tree.state_of(load_weights(net, weights))
        else:
            learnt = data.batch.take(rows[EXAMPLES : EXAMPLES + LEARNT]).to(bench.device)
            task = Task(untrained, learnt, batch, derive(seed, "policies", "train"))
            trained = fit(net, task, PARTLY).state
        return Result({}, {"policies": policies_for(net, trained, untrained, batch, mean, std, part, seed)})

    depends = bench.base | {"policies": str(part), "weights": None if weights is None else file_key(weights)}
    return _with(defense, str(bench.run.stage("policies", depends, compute).data["policies"]))


def in_python(defense: Defense, model: nn.Module, batch: Batch, mean: Tensor, std: Tensor, seed: int) -> Defense:
    """Return the defense with searched policies for a user's own model; both scores are of the model as it is."""
    part = next(part for part in defense.parts if _is_search(part))
    state, examples = tree.state_of(model), batch.take(torch.arange(min(EXAMPLES, batch.size)))
    return _with(defense, policies_for(model, state, state, examples, mean, std, part, seed))


def policies_for(
    net: nn.Module,
    trained: Params,
    untrained: Params,
    batch: Batch,
    mean: Tensor,
    std: Tensor,
    part: Choice,
    seed: int,
) -> str:
    """Search and return, as text, the two policies with the least leakage."""
    ats: AutomaticTransformationSearch = part.make()
    rng: Generator = derive(seed, "policies", "search")
    policies = search(net, trained, untrained, batch, mean, std, rng, ats.candidates, ats.threshold)
    if not policies:
        few = f"none of {ats.candidates} candidates reaches an accuracy score of {ats.threshold}"
        raise WrongInput("defense ats", f"{few}; lower threshold, or raise candidates")
    return write_policies(tuple(scored.policy for scored in policies[:TAKEN]))


def _is_search(part: Choice) -> bool:
    """Return True if a part is ATS with policies to be searched."""
    return part.name == "ats" and dict(part.arguments).get("policies") == SEARCH


def _with(defense: Defense, policies: str) -> Defense:
    """Return the defense with these policies in place of those to be searched."""
    arguments = (("policies", policies),)
    return Defense(tuple(replace(part, arguments=arguments) if _is_search(part) else part for part in defense.parts))
