"""Who attacks what: the victim's compression, and what the attacker guesses it to be (samia_ppb 5.2.5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from secateur.catalogue import Choice, Defense
from secateur.config import Audit
from secateur.interfaces import TrainsWithPenalty
from secateur.seeding import derive

BASIC = Defense((Choice("defense", "basic"),))


@dataclass(frozen=True)
class Compression:
    """What was done to a model: nothing (an original), or pruning and fine-tuning with a defense."""

    pruner: Choice | None = None
    sparsity: float = 0.0
    defense: Defense = BASIC
    term: Choice | None = None  # the pruner whose own term trained the original (network slimming)

    @property
    def labels(self) -> dict[str, Any]:
        """A row's fields."""
        name = "none" if self.pruner is None else str(self.pruner)
        own = [str(part) for part in (self.term, self.defense.acting_on("training")) if part]
        extra = {"original": "+".join(own)} if own else {}  # which original it came from, where not the common one
        return {"pruner": name, "sparsity": self.sparsity, "defense": str(self.defense), "extra": extra}

    @property
    def title(self) -> str:
        """What a person calls it."""
        if self.pruner is None:
            own = self.labels["extra"].get("original")
            return f"the original ({own})" if own else "the original"
        return f"{self.pruner} {self.sparsity:g} with {self.defense}"

    @property
    def original(self) -> Compression:
        """The model that was pruned; only a defense from the start leaves a trace in it."""
        scratch = self.defense if self.defense.acting_on("training") else BASIC
        return Compression(defense=scratch, term=self.term)


@dataclass(frozen=True)
class Duel:
    """A victim, and the compression that the attacker gives its own shadow models (None: it selects one itself)."""

    victim: Compression
    attacker: Compression | None
    adaptive: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, Any]:
        """A row's fields."""
        labels = self.victim.labels
        return labels | {"adaptive": self.adaptive, "extra": labels["extra"] | self.extra}


def pruned(pruner: Choice, sparsity: float, defense: Defense) -> Compression:
    """A pruned model; sparsity 0 is the original it would have come from."""
    term = pruner if isinstance(pruner.make(), TrainsWithPenalty) else None
    whole = Compression(pruner, sparsity, defense, term)
    return whole if sparsity > 0 else whole.original


def grid(config: Audit) -> list[Compression]:
    """Every pruned model of the audit."""
    return [pruned(*each) for each in product(config.pruner, config.sparsity, config.defense)]


def guess(config: Audit, victim: Compression) -> Compression:
    """What an attacker that knows the pruning does: the defense too if it is adaptive, else `basic`."""
    return victim if config.adaptive else Compression(victim.pruner, victim.sparsity, BASIC, victim.term)


def duels(config: Audit, seed: int) -> Iterator[Duel]:
    """All duels of one seed. The originals come first in `known`, each against shadows that are originals too."""
    if config.protocol == "known":
        models = grid(config)
        originals = dict.fromkeys([model.original for model in models] or [Compression()])
        for original in originals:
            yield Duel(original, original)
        for model in models:
            if model not in originals:  # sparsity 0 is an original
                yield Duel(model, guess(config, model), config.adaptive)
    elif config.protocol == "unknown-sparsity":
        for pruner, defense in product(config.pruner, config.defense):
            models = [pruned(pruner, sparsity, defense) for sparsity in [0.0, *config.sparsity]]
            for victim, attacker in product(models, models):
                yield _blind(config, victim, attacker)
    elif config.protocol == "unknown":
        models, rng = grid(config), derive(seed, "unknown")
        for number in range(config.experiments):
            victim, attacker = (models[int(torch.randint(len(models), (), generator=rng))] for _ in range(2))
            for side in (victim, attacker):  # the same victim, attacked with and without knowing
                yield _blind(config, victim, side, experiment=number)
    else:
        for model in grid(config):
            yield Duel(model, guess(config, model), config.adaptive)
            yield Duel(model, None, config.adaptive, {"protocol": "select"})


def _blind(config: Audit, victim: Compression, attacker: Compression, **extra: Any) -> Duel:
    guessed = guess(config, attacker)
    name = "none" if guessed.pruner is None else str(guessed.pruner)
    extra |= {"protocol": config.protocol, "attacker_pruner": name, "attacker_sparsity": guessed.sparsity}
    return Duel(victim, guessed, config.adaptive, extra | {"known": attacker == victim})
