"""The models of one seed, by what was done to them and whose they are; made when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from secateur.bench import Bench, file_key
from secateur.data.splits import Part
from secateur.models.create import load_weights
from secateur.pipeline import prune_and_finetune, train_originals
from secateur.protocols import Compression, Duel
from secateur.runs import Result

VICTIM = "victim"


class Workshop:
    """Makes models; the run's folder remembers them, and the memory those asked for last."""

    def __init__(self, bench: Bench, parts: dict[str, Part]) -> None:
        self.bench = bench
        self.parts = parts  # by role: the rows that each model is and is not trained on
        self._models = lru_cache(maxsize=4)(self._make)

    def prepare(self, duel: Duel) -> None:
        """Make a victim and its attacker's models together where one recipe serves both: on a GPU that is faster."""
        if duel.victim == duel.attacker:
            self.models(duel.victim, self.parts)

    def bench_for(self, compression: Compression) -> Bench:
        """The bench, with the structure that a defense from the start asks for."""
        return replace(self.bench, scratch=compression.defense.acting_on("training"))

    def models(self, compression: Compression, roles: Iterable[str]) -> dict[str, Result]:
        """The models of these roles after this compression."""
        return self._models(compression, tuple(roles))

    def _make(self, compression: Compression, roles: tuple[str, ...]) -> dict[str, Result]:
        bench, parts = self.bench_for(compression), {role: self.parts[role] for role in roles}
        originals = self._originals(bench, compression, parts)
        if compression.pruner is None:
            return originals
        pruner, sparsity, defense = compression.pruner, compression.sparsity, compression.defense
        return prune_and_finetune(bench, originals, parts, pruner, sparsity, defense)

    def shadows(self, kind: str = "shadow") -> list[str]:
        """The roles of the attacker's models: `shadow` or `in-out`."""
        return [role for role in self.parts if role.startswith(f"{kind}-")]

    def _originals(self, bench: Bench, compression: Compression, parts: dict[str, Part]) -> dict[str, Result]:
        weights = bench.config.weights
        if weights is None or VICTIM not in parts:
            return train_originals(bench, parts, compression.term)
        given = bench.run.stage(
            "weights",
            bench.base | {"weights": file_key(weights)},
            lambda: Result(load_weights(bench.initial("structure"), weights).state_dict()),
        )
        others = {role: part for role, part in parts.items() if role != VICTIM}
        return {VICTIM: given} | (train_originals(bench, others, compression.term) if others else {})
