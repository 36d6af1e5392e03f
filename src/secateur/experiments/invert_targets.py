"""The client and the targets of `secateur invert`, built from its configuration, and the attackers' generators.

ATS with `policies=search` searches for policies before any attack. A picture generator is trained once a seed, on
public rows that contain no target.
"""

from __future__ import annotations

import copy
import inspect
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.attacks.inversion.generator import Generator as PictureGenerator
from secateur.attacks.inversion.generator import train_generator
from secateur.attacks.inversion.label_inference import last_layer
from secateur.attacks.inversion.optimiser_estimate import estimate_optimiser
from secateur.catalogue import Choice, Defense, users_own
from secateur.config import Invert
from secateur.config.base import UNKNOWN
from secateur.data.dataset import Dataset, fingerprint
from secateur.data.load import load
from secateur.defenses.ats import CHOSEN, SEARCH, AutomaticTransformationSearch, search, write_policies
from secateur.errors import WrongInput
from secateur.evaluation.calibration import UPDATES
from secateur.evaluation.client import AttackedClient, Target, guard_of, loss_of, protect, scale, transform_of
from secateur.evaluation.update_files import read_update
from secateur.experiments.context import SeedContext, file_key
from secateur.gpu.determinism import device_key
from secateur.interfaces import Batch, Gradient, Knowledge, Params, ServerView, Weights
from secateur.models.create import create, load_weights
from secateur.progress import progress
from secateur.runs.artifacts import Result, key_of
from secateur.runs.folder import Run
from secateur.runs.unfinished import StageWatcher, forget
from secateur.seeding import derive
from secateur.training.optimisers import parse_optimiser
from secateur.training.recipe import Recipe, Task
from secateur.training.trainer import fit

log = logging.getLogger(__name__)

EXAMPLES = 63  # that score policies: about as many as the authors use
TAKEN = 2  # policies of the result, as in the authors' choice
PARTLY = Recipe(epochs=5, patience=None)  # of the model that the privacy score uses
LEARNT = 2000  # rows at most that train this model


LOCAL = ("local_steps", "local_epochs", "local_batch", "learning_rate")  # settings of local training


def data_of(config: Invert) -> Dataset:
    """Return the data of the run.

    Without data it is one blank picture, of which an attacker can make no update of its own.
    """
    if config.lacks_data:
        blank, label = torch.zeros(1, *config.input_shape), torch.zeros(1, dtype=torch.int64)
        mean, std = tuple(config.mean), tuple(config.std)
        return Dataset("no data", blank, label, config.classes or 1, 1, mean=mean, std=std)
    data = load(config.data, config.data_folder, config.download, config.form)
    if config.input_shape and tuple(config.input_shape) != data.input_shape:
        raise WrongInput("input_shape", f"is {tuple(config.input_shape)}; {config.data} has {data.input_shape}")
    return data


def client_of(config: Invert, data: Dataset, device: torch.device, seed: int, defense: Defense) -> AttackedClient:
    """Return the client of one seed under a defense: with a new model, or the given one."""
    net = create(config.model, data.input_shape, data.classes, derive(seed, "initialise", "client"))
    net, precode = protect(net, defense, data.classes, derive(seed, "initialise", "defense"))
    net = (net if config.weights is None else load_weights(net, config.weights)).to(device)
    mean, std = scale(data.mean, data.std, data.inputs[: data.train_size])
    weights = isinstance(_update(config, net), Weights) if config.captured else config.trains
    knowledge = Knowledge(
        net,
        data.input_shape,
        data.classes,
        mean.to(device),
        std.to(device),
        batch_size=config.batch_size,
        batchnorm=config.batchnorm,
        local_steps=config.local_steps or 1,
        learning_rate=config.rate,
        local_batch=config.local_batch,
        local_epochs=config.local_epochs,
    )
    knowledge, estimate = _know_optimiser(config, knowledge, net)
    guard = guard_of(defense, config.residual, seed, lambda number: _draw_other(config, data, seed, number).to(device))
    state, transform = tree.state_of(net), transform_of(defense, knowledge.mean, knowledge.std)
    tells = (config.labels == "oracle", config.statistics)
    client = AttackedClient(net, state, knowledge, weights, *tells, guard, transform, precode, seed)
    client = replace(client, loss=loss_of(defense, config.batch_size), repeats=config.repeats, estimate=estimate)
    return replace(client, further=_list_views(config, net)[1:]) if config.update[1:] else client


def _know_optimiser(config: Invert, knowledge: Knowledge, net: nn.Module) -> tuple[Knowledge, str | None]:
    """Return the knowledge with the client's optimiser, and the words of its estimate if it is estimated."""
    if config.optimiser != UNKNOWN:
        return replace(knowledge, optimiser=parse_optimiser(config.optimiser)), None
    views = _list_views(config, net)
    estimate = estimate_optimiser(views, knowledge)
    rate = knowledge.learning_rate or estimate.learning_rate
    if rate is None and (knowledge.local_steps > 1 or knowledge.local_epochs):
        raise WrongInput("learning_rate", "cannot be read from several steps of gradient descent; write the client's")
    source = f", from {len(views)} rounds" if len(views) > 1 else ""
    return replace(knowledge, optimiser=estimate.optimiser, learning_rate=rate or 1.0), f"{estimate}{source}"


def _list_views(config: Invert, net: nn.Module) -> list[ServerView]:
    """Return the captured rounds of the client: the attacked one, and the further ones with their models."""
    views = [ServerView(tree.state_of(net), _update(config, net))]
    for number, file in enumerate(config.update[1:]):
        model = load_weights(copy.deepcopy(net), config.sent[number]) if config.sent else net
        views.append(ServerView(tree.state_of(model), read_update(file, model, weights=config.trains)))
    return views


def targets_of(config: Invert, data: Dataset, device: torch.device, seed: int) -> list[Target]:
    """Return the targets: batches of training rows, or an update that was captured elsewhere."""
    if config.captured is not None:
        return [_update(config, client_of(config, data, device, seed, config.defense[0]).net)]
    return [data.batch.take(rows).to(device) for rows in rows_of(config, data, seed)]


def _update(config: Invert, net: nn.Module) -> Gradient | Weights:
    """Read the captured update; refuse settings of local training beside a gradient."""
    assert config.captured is not None
    update = read_update(config.captured, net, weights=config.trains)
    settings = [name for name in LOCAL if getattr(config, name) is not None]
    if settings and isinstance(update, Gradient):
        raise WrongInput(settings[0], f"cannot be combined with {config.captured}, which is a gradient; leave it out")
    return update


def warn_of_labels(update: Gradient, knowledge: Knowledge) -> None:
    """Warn of a captured gradient that shows more labels than the one example which it is taken to be made of.

    The gradient of the last bias is p - onehot(y), so that of one example has one negative entry.
    """
    try:
        _, bias = last_layer(update.values, knowledge)
    except WrongInput:
        return
    labels = 0 if bias is None else int((bias < 0).sum())
    if labels > 1:
        log.warning("The update shows %d labels, so it has more than one example; set --batch-size.", labels)


def rows_of(config: Invert, data: Dataset, seed: int) -> Tensor:
    """Return (targets, B): the training rows of each update; a larger number of targets begins with the same rows."""
    if config.captured is not None:
        return torch.empty(1, 0, dtype=torch.int64)
    return draw_rows(data, seed)[: config.targets * config.batch_size].view(config.targets, config.batch_size)


def _draw_other(config: Invert, data: Dataset, seed: int, number: int) -> Batch:
    """Return another user's batch in a target's round: rows from the far end of the drawn rows."""
    size, end = config.batch_size, data.train_size - number * config.batch_size
    if 2 * config.targets * size > data.train_size:
        many = f"{config.targets} targets and as many other users of {size} examples each"
        raise WrongInput("targets", f"{many} need more than the {data.train_size} training rows; use fewer")
    return data.batch.take(draw_rows(data, seed)[end - size : end])


def public_rows(config: Invert, data: Dataset, seed: int) -> Tensor:
    """Return rows that an attacker may learn from: the test part, or training rows that no update is made of."""
    if data.train_size < len(data.inputs):
        return torch.arange(data.train_size, len(data.inputs))
    return draw_rows(data, seed)[max(data.train_size // 2, config.targets * config.batch_size) :]


def own_rows(config: Invert, data: Dataset, seed: int) -> Tensor:
    """Return (updates, B): public rows of updates that an attacker makes itself; there may be none."""
    rows = public_rows(config, data, seed)
    rows = rows[torch.randperm(len(rows), generator=derive(seed, "calibrate", "rows"))]
    count = min(UPDATES, len(rows) // config.batch_size)
    return rows[: count * config.batch_size].view(count, config.batch_size)


def draw_rows(data: Dataset, seed: int) -> Tensor:
    """Return the training rows in the order in which targets are taken from them."""
    return torch.randperm(data.train_size, generator=derive(seed, "targets"))


def stage_of(config: Invert) -> str:
    """Return how far the attacked model is trained: near the end gradients vanish, and attacks look weak."""
    if config.rounds_before:
        return f"after {config.rounds_before} rounds"
    return "untrained" if config.weights is None else "weights given"


def asks_search(defense: Defense) -> bool:
    """Return True if a defense is ATS with policies that must be searched first."""
    return any(_is_search(part) for part in defense.parts)


def choose_policies(defense: Defense) -> Defense:
    """Return the defense with the authors' policies, for checks before any work."""
    return _with_policies(defense, CHOSEN)


def search_policies(defense: Defense, config: Invert, context: SeedContext) -> Defense:
    """Return the defense with policies from a search for this network and data, if it asks for a search.

    The search is a stage of the run.
    The scores use 63 training rows. Privacy is scored on the given weights, or on a model trained for five epochs.
    Accuracy is scored on the untrained model.
    """
    part = next(filter(_is_search, defense.parts), None)
    if part is None:
        return defense
    data, seed, weights = context.data, context.seed, config.weights
    net = create(config.model, data.input_shape, data.classes, derive(seed, "initialise", "client")).to(context.device)
    rows = draw_rows(data, seed).flip(0)
    batch = data.batch.take(rows[:EXAMPLES]).to(context.device)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean or [0.0], data.std or [1.0]))

    def compute() -> Result:
        untrained = tree.state_of(net)
        if weights is not None:
            trained = tree.state_of(load_weights(net, weights))
        else:
            learnt = data.batch.take(rows[EXAMPLES : EXAMPLES + LEARNT]).to(context.device)
            task = Task(untrained, learnt, batch, derive(seed, "policies", "train"))
            trained = fit(net, task, PARTLY).state
        return Result({}, {"policies": policies_for(net, trained, untrained, batch, mean, std, part, seed)})

    depends = context.base | {"policies": str(part), "weights": None if weights is None else file_key(weights)}
    return _with_policies(defense, str(context.run.stage("policies", depends, compute).data["policies"]))


def with_policies_for_model(
    defense: Defense, model: nn.Module, batch: Batch, mean: Tensor, std: Tensor, seed: int
) -> Defense:
    """Return the defense with policies searched for a user's model, if it asks for a search.

    Both scores are of the model as it is.
    """
    part = next(filter(_is_search, defense.parts), None)
    if part is None:
        return defense
    state, examples = tree.state_of(model), batch.take(torch.arange(min(EXAMPLES, batch.size)))
    return _with_policies(defense, policies_for(model, state, state, examples, mean, std, part, seed))


def policies_for(
    net: nn.Module, trained: Params, untrained: Params, batch: Batch, mean: Tensor, std: Tensor, part: Choice, seed: int
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


def _with_policies(defense: Defense, policies: str) -> Defense:
    """Return the defense with these policies in place of those to be searched."""
    arguments = (("policies", policies),)
    return Defense(tuple(replace(part, arguments=arguments) if _is_search(part) else part for part in defense.parts))


def needs_generator(attack: Choice) -> bool:
    """Return True if the run must train a generator: the attack needs one, and the user provides none."""
    return attack.method.info.get("needs") == "generator" and dict(attack.arguments).get("generator") is None


def generator_key(attack: Choice, config: Invert, context: SeedContext) -> dict[str, Any]:
    """Return the generator's part of a stage key: the training's settings, or the file of the user's generator."""
    if needs_generator(attack):
        return {"generator": generator_settings(config, context)}
    users_generator = dict(attack.arguments).get("generator")
    source = None if users_generator is None else inspect.getsourcefile(users_own("generator", users_generator))
    return {} if source is None else {"generator": file_key(Path(source))}


def add_untrained_generator(client: AttackedClient, config: Invert) -> AttackedClient:
    """Return the client with an untrained generator, for checks before any work."""
    return _set_generator(client, build_generator(client.knowledge, config.generator_width))


def generator_settings(config: Invert, context: SeedContext) -> dict[str, Any]:
    """Return the settings that the generator's training depends on."""
    rows = fingerprint(public_rows(config, context.data, context.seed))
    depends = {"data": context.data.key, "rows": rows, "device": device_key(context.device), "threads": config.threads}
    return depends | {"seed": context.seed, "steps": config.generator_steps, "width": config.generator_width}


def add_trained_generator(client: AttackedClient, config: Invert, context: SeedContext) -> AttackedClient:
    """Return the client with a generator trained on public rows; the training is a stage of the run."""
    examples = context.data.batch.take(public_rows(config, context.data, context.seed))
    return _set_generator(
        client,
        train_stored(context.run, generator_settings(config, context), client.knowledge, examples, context.device),
    )


def train_stored(
    run: Run, depends: dict[str, Any], knowledge: Knowledge, examples: Batch, device: torch.device
) -> PictureGenerator:
    """Return a generator trained on public examples, as a stage of a run; an interrupted training resumes.

    `depends` holds at least `steps`, `width` and `seed` of the training.
    """
    key, kind = key_of("generator", depends), (knowledge.classes, knowledge.input_shape, knowledge.box)

    def train() -> Result:
        with progress("train a generator of pictures", depends["steps"], rate=True) as advance:
            keeper = StageWatcher(run.folder, "generator", key, advance, lambda _: [])
            rng = derive(depends["seed"], "generator")
            generator = train_generator(examples, *kind, depends["steps"], rng, device, keeper, width=depends["width"])
        return Result(generator.state_dict())

    generator = build_generator(knowledge, depends["width"])
    generator.load_state_dict(dict(run.stage("generator", depends, train).tensors))
    forget(run.folder, "generator", key)
    return generator.to(device)


def build_generator(knowledge: Knowledge, width: int) -> PictureGenerator:
    """Return an untrained generator."""
    with torch.random.fork_rng(devices=[]):  # its first weights are never used
        return PictureGenerator(knowledge.input_shape, knowledge.classes, knowledge.box, width).eval()


def _set_generator(client: AttackedClient, generator_net: PictureGenerator) -> AttackedClient:
    return replace(client, knowledge=replace(client.knowledge, generator=generator_net.requires_grad_(False)))
