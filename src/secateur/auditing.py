"""The main job: train, prune and attack, and say what each way of pruning gives away.

Read `run_audit` first. protocols.py says who attacks what, workshop.py makes the models, arena.py lets them meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from secateur.arena import Arena
from secateur.bench import Bench, prepare
from secateur.chance import derive
from secateur.config import Audit, dump
from secateur.data.dataset import Dataset
from secateur.data.splits import Part, in_out, trained_split, victim_shadow
from secateur.needs import check_audit
from secateur.pipeline import Job
from secateur.predictions import planned
from secateur.protocols import Compression, Duel, duels
from secateur.runs import Row, open_run
from secateur.workshop import VICTIM, Workshop, make


def run_audit(config: Audit, out: Path) -> list[Row]:
    """Audit every pruner, sparsity and defense of the configuration, for every seed, into the folder `out`."""
    from secateur.report.page import write_page

    config = _attacked(config)
    check_audit(config)
    data, device = prepare(config)
    with open_run(out, "audit", dump(config), device=str(device), seeds=config.seeds) as run:
        benches = [Bench(run, config, data, device, seed) for seed in config.seeds]
        arenas = [Arena(config, Workshop(bench, parts_of(config, data, bench.seed))) for bench in benches]
        for round_ in zip(*(duels(config, seed) for seed in config.seeds), strict=True):
            make_together(arenas, round_)
            for arena, duel in zip(arenas, round_, strict=True):
                arena.measure_model(duel.victim)
                for attack in config.attack:
                    arena.measure_attack(duel, attack)
                arena.rest()
        rows = run.rows
    write_page([out])
    return rows


def make_together(arenas: Sequence[Arena], duels: Sequence[Duel]) -> None:
    """Make all seeds' models of one duel at once; the run's folder keeps them for when they are asked for."""
    jobs: dict[Compression, list[Job]] = {}
    for arena, duel in zip(arenas, duels, strict=True):
        others = [role for role in arena.workshop.parts if role != VICTIM]
        for compression, roles in ((duel.victim, [VICTIM]), (duel.attacker, others)):
            if compression is not None:
                jobs.setdefault(compression, []).extend(arena.workshop.jobs(compression, roles))
    for compression, some in jobs.items():
        make(some, compression)


def plan(config: Audit) -> list[str]:
    """What an audit would do, a line each; what it would refuse before it begins is refused here too."""
    if config.predictions is not None:
        return planned(config, config.predictions)
    config = _attacked(config)
    names = ", ".join(map(str, config.attack))
    check_audit(config)
    data, _ = prepare(config)
    seed = config.seeds[0]
    parts_of(config, data, seed)
    every = list(duels(config, seed))
    victims = list(dict.fromkeys(duel.victim for duel in every))
    shadows = config.shadows if config.trains_shadows else 0
    others = f"{shadows} shadow models" + (f" and {config.in_out} in-out models" if config.in_out else "")
    lines = [f"{config.model} on {config.data}, seeds {', '.join(map(str, config.seeds))}; for each seed:"]
    made = "train" if config.weights is None else "take the given weights as"
    lines += [f"  {made} {victim.title}, with {others}" for victim in victims if victim.pruner is None]
    lines += [f"  prune and fine-tune {victim.title}" for victim in victims if victim.pruner is not None]
    return [*lines, f"  attack in {len(every)} duels ({config.protocol}), each with {names}"]


def _attacked(config: Audit) -> Audit:
    """A model given without a recipe is attacked by what needs no shadow models, where nothing else was asked for."""
    return config if config.trains_shadows else config.unaided("correctness", "blindmi")


def parts_of(config: Audit, data: Dataset, seed: int) -> dict[str, Part]:
    """The rows that each model is and is not trained on, by role."""
    rng, rows = derive(seed, "split"), len(data.inputs)
    if config.weights is None:
        split = victim_shadow(rows, config.shadows, rng)
    else:  # its members are known; without a recipe there is nothing to train shadows by
        split = trained_split(rows, data.train_size, config.shadows if config.trains_shadows else 0, rng)
    parts = {VICTIM: split.victim} | {f"shadow-{i}": part for i, part in enumerate(split.shadows)}
    pool = torch.cat([split.victim.train, split.victim.test])
    if config.in_out:
        for i, inside in enumerate(in_out(pool.numel(), config.in_out, derive(seed, "in-out"))):
            parts[f"in-out-{i}"] = Part(pool[inside], split.victim.validation, pool[~inside])
    return parts
