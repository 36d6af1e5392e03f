"""What `secateur invert` attacks, by its configuration: the client of a seed and the updates it makes.

ATS with policies of its own: `ats:policies=search` searches for them before anything is attacked.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.catalogue import Choice, Defense
from secateur.config import Invert
from secateur.data.dataset import Dataset
from secateur.defenses.ats import CHOSEN, SEARCH, AutomaticTransformationSearch, write_policies
from secateur.defenses.ats_search import search
from secateur.errors import WrongInput
from secateur.evaluation.client import Client, Target, guard_of, protected, scale, transform_of
from secateur.evaluation.update_files import read_update
from secateur.experiments.context import Bench, file_key
from secateur.interfaces import Batch, Gradient, Knowledge, Params, Weights
from secateur.models.create import create, load_weights
from secateur.runs.artifacts import Result
from secateur.seeding import derive
from secateur.training.recipe import Recipe, Task
from secateur.training.trainer import fit

EXAMPLES = 63  # that policies are judged by: about as many as the authors'
TAKEN = 2  # policies, as in the authors' own choice
PARTLY = Recipe(epochs=5, patience=None)  # of the model for the privacy score
LEARNT = 2000  # rows at most that it learns from


def stage_of(config: Invert) -> str:
    """How far the attacked model is trained: near its end gradients vanish, and attacks look weak."""
    return "untrained" if config.weights is None else "weights given"


def client_of(config: Invert, data: Dataset, device: torch.device, seed: int, defense: Defense) -> Client:
    """The client of one seed under a defense: a new model, or the one that was given."""
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
    return Client(
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


def rows_of(config: Invert, data: Dataset, seed: int) -> Tensor:
    """(targets, B) the training rows that each update is made of; more targets begin with the same."""
    if config.update is not None:
        return torch.empty(1, 0, dtype=torch.int64)
    return drawn_rows(data, seed)[: config.targets * config.batch_size].view(config.targets, config.batch_size)


def _other(config: Invert, data: Dataset, seed: int, number: int) -> Batch:
    """The batch of another user in a target's round: rows from the far end of those that targets are taken from."""
    size, end = config.batch_size, data.train_size - number * config.batch_size
    if 2 * config.targets * size > data.train_size:
        many = f"{config.targets} targets and as many other users of {size} examples each"
        raise WrongInput("targets", f"{many} need more than the {data.train_size} training rows; ask for fewer")
    return data.batch.take(drawn_rows(data, seed)[end - size : end])


def public_rows(config: Invert, data: Dataset, seed: int) -> Tensor:
    """Rows that an attacker may learn from: the test part, or training rows that no update is made of."""
    if data.train_size < len(data.inputs):
        return torch.arange(data.train_size, len(data.inputs))
    return drawn_rows(data, seed)[max(data.train_size // 2, config.targets * config.batch_size) :]


def drawn_rows(data: Dataset, seed: int) -> Tensor:
    """The training rows in the order in which targets are taken from them."""
    return torch.randperm(data.train_size, generator=derive(seed, "targets"))


def targets_of(config: Invert, data: Dataset, device: torch.device, seed: int) -> list[Target]:
    """What is attacked: batches of training rows, or the update that was captured elsewhere."""
    if config.update is not None:
        return [_update(config, client_of(config, data, device, seed, config.defense[0]).net)]
    return [data.batch.take(rows).to(device) for rows in rows_of(config, data, seed)]


def _update(config: Invert, net: nn.Module) -> Gradient | Weights:
    assert config.update is not None
    found = read_update(config.update, net, weights=config.local_steps is not None)
    given = [name for name in ("local_steps", "local_batch", "learning_rate") if getattr(config, name) is not None]
    if given and isinstance(found, Gradient):
        raise WrongInput(given[0], f"is of weights, and {config.update} is a gradient; leave it out")
    return found


def asks_search(defense: Defense) -> bool:
    """Whether a defense is ATS whose policies are not known yet."""
    return any(_is_search(part) for part in defense.parts)


def stand_in(defense: Defense) -> Defense:
    """The same with the authors' policies, for what is checked before any work."""
    return _with(defense, CHOSEN)


def searched(defense: Defense, config: Invert, bench: Bench) -> Defense:
    """The defense with the policies that a search finds for this network and data; a stage of the run.

    Judged by 63 training rows: privacy on the given weights, or on a model that five epochs trained; accuracy on the
    untrained one.
    """
    part = next(part for part in defense.parts if _is_search(part))
    data, seed, weights = bench.data, bench.seed, config.weights
    net = create(config.model, data.input_shape, data.classes, derive(seed, "initialise", "client")).to(bench.device)
    rows = drawn_rows(data, seed).flip(0)
    batch = data.batch.take(rows[:EXAMPLES]).to(bench.device)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean or [0.0], data.std or [1.0]))

    def find() -> Result:
        untrained = tree.state_of(net)
        if weights is not None:
            trained = tree.state_of(load_weights(net, weights))
        else:
            learnt = data.batch.take(rows[EXAMPLES : EXAMPLES + LEARNT]).to(bench.device)
            task = Task(untrained, learnt, batch, derive(seed, "policies", "train"))
            trained = fit(net, task, PARTLY).state
        return Result({}, {"policies": policies_for(net, trained, untrained, batch, mean, std, part, seed)})

    depends = bench.base | {"policies": str(part), "weights": None if weights is None else file_key(weights)}
    return _with(defense, str(bench.run.stage("policies", depends, find).data["policies"]))


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
    """The two policies that show least, as text."""
    made: AutomaticTransformationSearch = part.make()
    rng: Generator = derive(seed, "policies", "search")
    found = search(net, trained, untrained, batch, mean, std, rng, made.candidates, made.threshold)
    if not found:
        few = f"none of {made.candidates} candidates reaches an accuracy score of {made.threshold}"
        raise WrongInput("defense ats", f"{few}; lower threshold, or raise candidates")
    return write_policies(tuple(judged.policy for judged in found[:TAKEN]))


def in_python(defense: Defense, model: nn.Module, batch: Batch, mean: Tensor, std: Tensor, seed: int) -> Defense:
    """The same for a user's own model and examples: both scores are of the model as it is."""
    part = next(part for part in defense.parts if _is_search(part))
    state, some = tree.state_of(model), batch.take(torch.arange(min(EXAMPLES, batch.size)))
    return _with(defense, policies_for(model, state, state, some, mean, std, part, seed))


def _is_search(part: Choice) -> bool:
    return part.name == "ats" and dict(part.arguments).get("policies") == SEARCH


def _with(defense: Defense, policies: str) -> Defense:
    found = (("policies", policies),)
    return Defense(tuple(replace(part, arguments=found) if _is_search(part) else part for part in defense.parts))
