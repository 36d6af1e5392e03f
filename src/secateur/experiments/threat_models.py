"""Threat models: the victim's compression, and the attacker's guess of that compression (samia_ppb 5.2.5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from secateur.catalogue import Choice, Compressor, Defense
from secateur.config import Audit
from secateur.interfaces import TrainsWithPenalty
from secateur.seeding import derive

BASIC = Defense((Choice("defense", "basic"),))


@dataclass(frozen=True)
class Compression:
    """Compression of a model: none (an original), or a compressor, with fine-tuning under a defense if it has one."""

    pruner: Compressor | None = None
    sparsity: float = 0.0
    defense: Defense = BASIC
    term: Choice | None = None  # the pruner whose penalty trained the original (network slimming)

    @property
    def labels(self) -> dict[str, Any]:
        """The labels of rows."""
        name = "none" if self.pruner is None else str(self.pruner)
        training_parts = [str(part) for part in (self.term, self.defense.find_part("training")) if part]
        extra = {"original": "+".join(training_parts)} if training_parts else {}
        return {"pruner": name, "sparsity": self.sparsity, "defense": str(self.defense), "extra": extra}

    @property
    def title(self) -> str:
        """The compression in words."""
        if self.pruner is None:
            training = self.labels["extra"].get("original")
            return f"the original ({training})" if training else "the original"
        amount = f" {self.sparsity:g}" if self.pruner.uses_sparsity else ""
        return f"{self.pruner}{amount} with {self.defense}"

    @property
    def original(self) -> Compression:
        """The model before pruning; of the defenses, only one that acts on training applies to it."""
        scratch = self.defense if self.defense.find_part("training") else BASIC
        return Compression(defense=scratch, term=self.term)


@dataclass(frozen=True)
class Matchup:
    """Victim, and the compression of the attacker's shadow models (None: the attacker selects one)."""

    victim: Compression
    attacker: Compression | None
    adaptive: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, Any]:
        """The labels of rows."""
        labels = self.victim.labels
        return labels | {"adaptive": self.adaptive, "extra": labels["extra"] | self.extra}


def compress_by(pruner: Compressor, sparsity: float, defense: Defense) -> Compression:
    """Return the compression of a pruned model; sparsity 0 is its original, unless the compressor takes none."""
    term = pruner.find_part(TrainsWithPenalty)
    if not pruner.uses_sparsity:
        return Compression(pruner, 0.0, defense, term)
    compression = Compression(pruner, sparsity, defense, term)
    return compression if sparsity > 0 else compression.original


def grid(config: Audit) -> list[Compression]:
    """Return every pruned model of the audit, each once: a compressor without a sparsity ignores the list."""
    models = [compress_by(*settings) for settings in product(config.pruner, config.sparsity, config.defense)]
    return list(dict.fromkeys(models))


def guess(config: Audit, victim: Compression) -> Compression:
    """Return the guess of an attacker that knows the pruning: with the defense if adaptive, else with `basic`."""
    return victim if config.adaptive else Compression(victim.pruner, victim.sparsity, BASIC, victim.term)


def list_matchups(config: Audit, seed: int) -> Iterator[Matchup]:
    """Yield all match-ups of one seed; in `known` the originals come first, against shadows that are originals."""
    if config.protocol == "known":
        models = grid(config)
        defenses = config.defense if config.weights is None else []  # given weights have their training behind them
        unpruned = [Compression(defense=defense) for defense in defenses] or [Compression()]
        originals = dict.fromkeys(model.original for model in models or unpruned)
        for original in originals:
            yield Matchup(original, original)
        for model in models:
            if model not in originals:  # sparsity 0 is an original
                yield Matchup(model, guess(config, model), config.adaptive)
    elif config.protocol == "unknown-sparsity":
        for pruner, defense in product(config.pruner, config.defense):
            models = [compress_by(pruner, sparsity, defense) for sparsity in [0.0, *config.sparsity]]
            for victim, attacker in product(models, models):
                yield _build_blind(config, victim, attacker)
    elif config.protocol == "unknown":
        models, rng = grid(config), derive(seed, "unknown")
        for number in range(config.experiments):
            victim, attacker = (models[int(torch.randint(len(models), (), generator=rng))] for _ in range(2))
            for side in (victim, attacker):  # the same victim, attacked with and without knowing
                yield _build_blind(config, victim, side, experiment=number)
    else:
        for model in grid(config):
            yield Matchup(model, guess(config, model), config.adaptive)
            yield Matchup(model, None, config.adaptive, {"protocol": "select"})


def _build_blind(config: Audit, victim: Compression, attacker: Compression, **extra: Any) -> Matchup:
    guessed = guess(config, attacker)
    extra |= {"protocol": config.protocol, "attacker_pruner": guessed.labels["pruner"]}
    extra |= {"attacker_sparsity": guessed.sparsity, "known": attacker == victim}
    return Matchup(victim, guessed, config.adaptive, extra)
