"""The generator of pictures that some attackers have: trained once a seed on public rows, none of them a target."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from secateur.attacks.inversion.generator import train_generator
from secateur.attacks.inversion.wgan import Generator
from secateur.bench import Bench, file_key
from secateur.catalogue import Choice, users_own
from secateur.chance import derive
from secateur.client import Client
from secateur.config import Invert
from secateur.data.dataset import fingerprint
from secateur.interfaces import Batch, Knowledge
from secateur.progress import progress
from secateur.runs import Result, Run
from secateur.targets import public_rows


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
    size = config.generator_steps, config.generator_width
    return _with(
        client,
        stored(
            bench.run,
            learnt_from(config, bench),
            untrained(client.knowledge, config.generator_width),
            lambda: trained(client.knowledge, examples, *size, bench.seed, bench.device),
        ).to(bench.device),
    )


def stored(run: Run, depends: dict[str, Any], made: Generator, train: Callable[[], Generator]) -> Generator:
    """A generator that is trained as a stage of a run; `made` takes its weights."""
    result = run.stage("generator", depends, lambda: Result(train().state_dict()))
    made.load_state_dict(dict(result.tensors))
    return made


def trained(
    knowledge: Knowledge, examples: Batch, steps: int, width: int, seed: int, device: torch.device
) -> Generator:
    """A generator that learnt from public examples."""
    rng, kind = derive(seed, "generator"), (knowledge.classes, knowledge.input_shape, knowledge.box)
    with progress("train a generator of pictures", steps, rate=True) as advance:
        return train_generator(examples, *kind, steps, rng, device, advance, width=width)


def untrained(knowledge: Knowledge, width: int) -> Generator:
    """One that knows nothing yet."""
    with torch.random.fork_rng(devices=[]):  # its first weights are never used
        return Generator(knowledge.input_shape, knowledge.classes, knowledge.box, width).eval()


def _with(client: Client, made: Generator) -> Client:
    return replace(client, knowledge=replace(client.knowledge, generator=made.requires_grad_(False)))
