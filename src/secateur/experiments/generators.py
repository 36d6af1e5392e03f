"""The generator of pictures that some attackers have: trained once a seed on public rows, none of them a target."""

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
from secateur.evaluation.client import Client
from secateur.experiments.context import Bench, file_key
from secateur.experiments.invert_targets import public_rows
from secateur.interfaces import Batch, Knowledge
from secateur.progress import progress
from secateur.runs.artifacts import Result, key_of
from secateur.runs.folder import Run
from secateur.runs.unfinished import Keeper, forget
from secateur.seeding import derive


def needs_generator(attack: Choice) -> bool:
    """Whether the run must train one: the attack needs it, and the user gave none."""
    return attack.method.info.get("needs") == "generator" and dict(attack.arguments).get("generator") is None


def generator_key(attack: Choice, config: Invert, bench: Bench) -> dict[str, Any]:
    """What a stage of this attack depends on for its generator: how it was trained, or the user's own source."""
    if needs_generator(attack):
        return {"generator": learnt_from(config, bench)}
    own = dict(attack.arguments).get("generator")
    source = None if own is None else inspect.getsourcefile(users_own("generator", own))
    return {} if source is None else {"generator": file_key(Path(source))}


def with_untrained(client: Client, config: Invert) -> Client:
    """The client of an attacker with a generator that knows nothing yet, for what is checked before any work."""
    return _with(client, untrained(client.knowledge, config.generator_width))


def learnt_from(config: Invert, bench: Bench) -> dict[str, Any]:
    """What the generator depends on."""
    rows = fingerprint(public_rows(config, bench.data, bench.seed))
    depends = {"data": bench.data.key, "rows": rows, "device": bench.device.type, "threads": config.threads}
    return depends | {"seed": bench.seed, "steps": config.generator_steps, "width": config.generator_width}


def with_trained(client: Client, config: Invert, bench: Bench) -> Client:
    """The client of an attacker whose generator learnt from public rows; a stage of the run."""
    examples = bench.data.batch.take(public_rows(config, bench.data, bench.seed))
    return _with(client, stored(bench.run, learnt_from(config, bench), client.knowledge, examples, bench.device))


def stored(run: Run, depends: dict[str, Any], knowledge: Knowledge, examples: Batch, device: torch.device) -> Generator:
    """A generator that learnt from public examples, trained as a stage of a run: killed, it goes on where it was.

    `depends` says of its training at least `steps`, `width` and `seed`.
    """
    key, kind = key_of("generator", depends), (knowledge.classes, knowledge.input_shape, knowledge.box)

    def train() -> Result:
        with progress("train a generator of pictures", depends["steps"], rate=True) as advance:
            keeper = Keeper(run.folder, "generator", key, advance, lambda _: [])
            rng = derive(depends["seed"], "generator")
            made = train_generator(examples, *kind, depends["steps"], rng, device, keeper, width=depends["width"])
        return Result(made.state_dict())

    made = untrained(knowledge, depends["width"])
    made.load_state_dict(dict(run.stage("generator", depends, train).tensors))
    forget(run.folder, "generator", key)
    return made.to(device)


def untrained(knowledge: Knowledge, width: int) -> Generator:
    """One that knows nothing yet."""
    with torch.random.fork_rng(devices=[]):  # its first weights are never used
        return Generator(knowledge.input_shape, knowledge.classes, knowledge.box, width).eval()


def _with(client: Client, made: Generator) -> Client:
    return replace(client, knowledge=replace(client.knowledge, generator=made.requires_grad_(False)))
