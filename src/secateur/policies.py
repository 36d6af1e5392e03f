"""ATS with policies of its own: `ats:policies=search` searches for them before anything is attacked."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.bench import Bench, file_key
from secateur.catalogue import Choice, Defense
from secateur.chance import derive
from secateur.config import Invert
from secateur.defenses.ats import CHOSEN, SEARCH, AutomaticTransformationSearch, write_policies
from secateur.defenses.ats_search import search
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Params
from secateur.models.create import create, load_weights
from secateur.runs import Result
from secateur.targets import drawn_rows
from secateur.training import Recipe, Task, fit

EXAMPLES = 63  # that policies are judged by: about as many as the authors'
TAKEN = 2  # policies, as in the authors' own choice
PARTLY = Recipe(epochs=5, patience=None)  # of the model for the privacy score
LEARNT = 2000  # rows at most that it learns from


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
