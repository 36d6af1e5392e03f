"""The models of one seed, by what was done to them and whose they are; made when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from secateur.bench import Bench, file_key
from secateur.catalogue import Choice
from secateur.data.splits import Part
from secateur.models.create import load_weights
from secateur.pipeline import Job, prune_and_finetune, train_originals
from secateur.protocols import Compression
from secateur.runs import Result

VICTIM = "victim"


class Workshop:
    """Makes models; the run's folder remembers them, and the memory those asked for last."""

    def __init__(self, bench: Bench, parts: dict[str, Part]) -> None:
        self.bench = bench
        self.parts = parts  # by role: the rows that each model is and is not trained on
        self._models = lru_cache(maxsize=4)(self._make)
        self._benches: dict[Choice | None, Bench] = {None: bench}

    def bench_for(self, compression: Compression) -> Bench:
        """The bench, with the structure that a defense from the start asks for."""
        scratch = compression.defense.acting_on("training")
        if scratch not in self._benches:
            self._benches[scratch] = replace(self.bench, scratch=scratch)
        return self._benches[scratch]

    def models(self, compression: Compression, roles: Iterable[str]) -> dict[str, Result]:
        """The models of these roles after this compression."""
        return self._models(compression, tuple(roles))

    def shadows(self, kind: str = "shadow") -> list[str]:
        """The roles of the attacker's models: `shadow` or `in-out`."""
        return [role for role in self.parts if role.startswith(f"{kind}-")]

    def jobs(self, compression: Compression, roles: Iterable[str]) -> list[Job]:
        """The models to be made."""
        bench = self.bench_for(compression)
        return [Job(bench, role, self.parts[role]) for role in roles]

    def _make(self, compression: Compression, roles: tuple[str, ...]) -> dict[str, Result]:
        return dict(zip(roles, make(self.jobs(compression, roles), compression), strict=True))


def make(jobs: Sequence[Job], compression: Compression) -> list[Result]:
    """The models of these jobs after this compression, of one seed or of many; on a GPU they train together."""
    if not jobs:
        return []
    originals = _originals(jobs, compression)
    if compression.pruner is None:
        return originals
    return prune_and_finetune(jobs, originals, compression.pruner, compression.sparsity, compression.defense)


def _originals(jobs: Sequence[Job], compression: Compression) -> list[Result]:
    given = jobs[0].bench.config.weights is not None
    fresh = [job for job in jobs if not (given and job.role == VICTIM)]
    trained = dict(zip(map(id, fresh), train_originals(fresh, compression.term) if fresh else [], strict=True))
    return [trained[id(job)] if id(job) in trained else _given(job) for job in jobs]


def _given(job: Job) -> Result:
    """The victim's weights as the user gave them."""
    weights = job.bench.config.weights
    assert weights is not None
    return job.bench.run.stage(
        "weights",
        job.base | {"weights": file_key(weights)},
        lambda: Result(load_weights(job.bench.initial("structure"), weights).state_dict()),
    )
