"""The job of `secateur invert`: a client makes updates, attacks turn them back into pictures, and the truth judges.

Read `run_invert` first. client.py makes the updates, exposure.py attacks them, likeness.py compares.
"""

from __future__ import annotations

from pathlib import Path

import torch

from secateur.bench import Bench, prepare
from secateur.client import check_attack, check_pictures
from secateur.config import Invert, dump
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.exposure import Exposure, chance_of
from secateur.generators import needs_generator, with_untrained
from secateur.needs import check_installed
from secateur.paging import page_afterwards
from secateur.policies import asks_search, searched, stand_in
from secateur.runs import Row, open_run
from secateur.targets import client_of, public_rows, stage_of, targets_of


def run_invert(config: Invert, out: Path) -> list[Row]:
    """Attack every target with every attack, under every defense, for every seed, into the folder `out`."""
    data, device = prepare(config, check_pictures)
    check_invert(config, data, device)
    with page_afterwards(out), open_run(out, "invert", dump(config), device=str(device), seeds=config.seeds) as run:
        for seed in config.seeds:
            bench = Bench(run, config, data, device, seed)
            defenses = [searched(each, config, bench) if asks_search(each) else each for each in config.defense]
            exposures = [Exposure(config, bench, defense) for defense in defenses]
            exposures[0].show_truths()
            for exposure in exposures:
                exposure.show_guarantee()
                for attack in config.attacks:
                    exposure.measure(attack)
    return run.rows


def check_invert(config: Invert, data: Dataset, device: torch.device) -> None:
    """Refuse what cannot be attacked before any work: no pictures, too few, an unfit update, an unfit attack."""
    needed = config.targets * config.batch_size
    if config.update is None and needed > data.train_size:
        many = f"{config.targets} targets of {config.batch_size} need {needed} training rows"
        raise WrongInput("targets", f"{many}, and {config.data} has {data.train_size}; ask for fewer")
    seed = config.seeds[0]
    if any(map(needs_generator, config.attacks)) and not len(public_rows(config, data, seed)):
        raise WrongInput("targets", "leave no row to train a generator on, which an attack needs; ask for fewer")
    check_installed(config.defense)
    targets = targets_of(config, data, device, seed)
    for defense in config.defense:
        client = client_of(config, data, device, seed, stand_in(defense))
        for attack in config.attacks:
            met = with_untrained(client, config) if needs_generator(attack) else client
            check_attack(attack, met, targets[0], chance_of(seed, attack)[0])


def plan(config: Invert) -> list[str]:
    """What the job would do, a line each; what it would refuse before it begins is refused here too."""
    data, device = prepare(config, check_pictures)
    check_invert(config, data, device)
    client = client_of(config, data, device, config.seeds[0], stand_in(config.defense[0]))
    size = f"{config.batch_size} example{'s' if config.batch_size > 1 else ''}"
    many = f"{config.targets} update{'s' if config.targets > 1 else ''}"
    taken = f"{many} of {size} of {data.name}" if config.update is None else str(config.update)
    lines = [f"{config.model} ({stage_of(config)}), seeds {', '.join(map(str, config.seeds))}; for each seed:"]
    lines.append(f"  take {taken}; the client sends its {client.sends}")
    for defense in filter(asks_search, config.defense):
        lines.append(f"  search policies for {defense}")
    lines.append(f"  defend with {', '.join(map(str, config.defense))}")
    if any(map(needs_generator, config.attacks)):
        rows = len(public_rows(config, data, config.seeds[0]))
        lines.append(f"  train a generator for {config.generator_steps} steps on {rows} rows that are no target")
    return lines + [f"  attack with {attack}: {attack.method.info['threat']}" for attack in config.attacks]
