"""Picture generators of attackers: trained once a seed on public rows that contain no target."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from secateur.attacks.inversion.generator import Generator, train_generator
from secateur.catalogue import Choice, users_own
from secateur.config import Invert
from secateur.data.dataset import fingerprint
from secateur.evaluation.client import AttackedClient
from secateur.experiments.context import SeedContext, file_key
from secateur.experiments.invert_targets import public_rows
from secateur.interfaces import Batch, Knowledge
from secateur.progress import progress
from secateur.runs.artifacts import Result, key_of
from secateur.runs.folder import Run
from secateur.runs.unfinished import StageWatcher, forget
from secateur.seeding import derive


def needs_generator(attack: Choice) -> bool:
    """Return True if the run must train a generator: the attack needs one, and the user provides none."""
    return attack.method.info.get("needs") == "generator" and dict(attack.arguments).get("generator") is None


def generator_key(attack: Choice, config: Invert, context: SeedContext) -> dict[str, Any]:
    """Return the generator's part of a stage key: the training's settings, or the file of the user's generator."""
    if needs_generator(attack):
        return {"generator": learnt_from(config, context)}
    users_generator = dict(attack.arguments).get("generator")
    source = None if users_generator is None else inspect.getsourcefile(users_own("generator", users_generator))
    return {} if source is None else {"generator": file_key(Path(source))}


def with_untrained(client: AttackedClient, config: Invert) -> AttackedClient:
    """Return the client with an untrained generator, for checks before any work."""
    return _with(client, untrained(client.knowledge, config.generator_width))


def learnt_from(config: Invert, context: SeedContext) -> dict[str, Any]:
    """Return the settings that the generator's training depends on."""
    rows = fingerprint(public_rows(config, context.data, context.seed))
    depends = {"data": context.data.key, "rows": rows, "device": context.device.type, "threads": config.threads}
    return depends | {"seed": context.seed, "steps": config.generator_steps, "width": config.generator_width}


def with_trained(client: AttackedClient, config: Invert, context: SeedContext) -> AttackedClient:
    """Return the client with a generator trained on public rows; the training is a stage of the run."""
    examples = context.data.batch.take(public_rows(config, context.data, context.seed))
    return _with(client, stored(context.run, learnt_from(config, context), client.knowledge, examples, context.device))


def stored(run: Run, depends: dict[str, Any], knowledge: Knowledge, examples: Batch, device: torch.device) -> Generator:
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

    generator = untrained(knowledge, depends["width"])
    generator.load_state_dict(dict(run.stage("generator", depends, train).tensors))
    forget(run.folder, "generator", key)
    return generator.to(device)


def untrained(knowledge: Knowledge, width: int) -> Generator:
    """Return an untrained generator."""
    with torch.random.fork_rng(devices=[]):  # its first weights are never used
        return Generator(knowledge.input_shape, knowledge.classes, knowledge.box, width).eval()


def _with(client: AttackedClient, generator_net: Generator) -> AttackedClient:
    return replace(client, knowledge=replace(client.knowledge, generator=generator_net.requires_grad_(False)))
