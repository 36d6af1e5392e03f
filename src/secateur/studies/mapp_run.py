"""The federations of a study of mapp_fl as stages of its run: one by one on a CPU, several stacked on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from secateur.catalogue import Choice
from secateur.chance import derive
from secateur.data.dataset import Dataset
from secateur.federated.checkpoint import Story, depends_of, federated
from secateur.federated.federation import Round
from secateur.federated.ledger import Measure
from secateur.federated.submodels.alone import Alone
from secateur.federated.submodels.exposure import Asking, Exposer
from secateur.federated.submodels.federation import SubmodelFederation
from secateur.federated.submodels.together import Rounds, Together
from secateur.federated.telling import row_of
from secateur.models.create import create
from secateur.progress import progress
from secateur.recipe import Recipe
from secateur.runs import Run
from secateur.studies.mapp_setting import CLIENTS, Case, Scale, terms_of


class Job(NamedTuple):
    """One federation of one seed."""

    case: Case
    seed: int


@dataclass(frozen=True, eq=False)
class Hall:
    """What all federations of a study share."""

    run: Run
    scale: Scale
    data: Dataset
    device: torch.device
    attacks: Sequence[Choice]

    @cached_property
    def near(self) -> Dataset:
        """The data where the attacks run, once for all of them."""
        inputs, labels = self.data.batch.to(self.device)
        return replace(self.data, inputs=inputs, labels=labels)

    def hold(self, cases: Sequence[Case], seeds: Sequence[int]) -> None:
        """Run every federation for every seed, and add what each came to."""
        jobs = [Job(case, seed) for seed in seeds for case in cases]
        for some in self._groups(jobs):
            self._measure(some)

    def _groups(self, jobs: Sequence[Job]) -> Iterator[list[Job]]:
        """Those that are stacked: on a CPU none; clients that train alone end at different times."""
        most = self.scale.at_once if self.device.type == "cuda" else 1
        stacked = [job for job in jobs if not _alone(job)]
        yield from (stacked[start : start + most] for start in range(0, len(stacked), most))
        yield from ([job] for job in jobs if _alone(job))

    def _measure(self, jobs: Sequence[Job]) -> None:
        story = Story()
        exposers = [self._exposer(job, story) for job in jobs]
        federations: list[SubmodelFederation] = []
        for job, exposer in zip(jobs, exposers, strict=True):
            federations.append(self._federation(job, exposer, federations[0] if federations else None))
        depends = {
            "each": [
                depends_of(each, self.data) | {"alone": _alone(job)}
                for each, job in zip(federations, jobs, strict=True)
            ],
            "attacks": [str(attack) for attack in self.attacks],
            "asking": repr(exposers[0].asking),
            "threads": torch.get_num_threads(),
        }
        first = federations[0]
        whole = Alone(first) if _alone(jobs[0]) else first if len(jobs) == 1 else Together(federations)
        title = jobs[0].case.submodels if len(jobs) == 1 else f"{len(jobs)} federations"
        with progress(f"{title}, seed {jobs[0].seed}", self.scale.rounds, rate=True) as advance:
            tell = self._teller(federations, exposers, story, advance)
            _, told = federated(self.run, whole, story, tell, depends)
        self.run.show(told.figures)
        self.run.add(told.rows)
        timed = Measure("seconds", told.seconds / len(jobs), self.scale.rounds)
        self.run.add([row_of(exposer.labels, timed, timing=True) for exposer in exposers])

    def _federation(self, job: Job, exposer: Exposer, beside: SubmodelFederation | None) -> SubmodelFederation:
        data, rng = self.data, derive(job.seed, "initialise", "server")
        net = create(job.case.model, data.input_shape, data.classes, rng)
        terms = terms_of(job.case, self.scale, data, job.seed)
        watching = [(exposer.pace(terms), exposer)]
        return SubmodelFederation(net, data, terms, job.seed, self.device, observers=watching, beside=beside)

    def _exposer(self, job: Job, story: Story) -> Exposer:
        scale = self.scale
        asking = Asking(updates=scale.updates, shadows=scale.shadows, shuffles=scale.shuffles)
        turn = Recipe(epochs=1, batch_size=scale.batch_size, weight_decay=0.0, patience=None)
        labels = labels_of(job, self.data, scale)
        return Exposer(
            self.attacks, self.near, labels, story, scale.rounds, asking=asking, turn=turn, device=self.device
        )

    def _teller(
        self,
        federations: Sequence[SubmodelFederation],
        exposers: Sequence[Exposer],
        story: Story,
        advance: Callable[..., None],
    ) -> Callable[[Any], None]:
        """Adds a round's measures to the story, and in the last one attacks clients and servers."""
        shown = 0

        def tell(done: Round | Rounds) -> None:
            nonlocal shown
            each = done.each if isinstance(done, Rounds) else [done]
            for federation, exposer, one in zip(federations, exposers, each, strict=True):
                story.rows += [row_of(exposer.labels, measure) for measure in one.measures]
                if done.number == self.scale.rounds:
                    exposer.finish(federation)
            advance(done.number - shown, f"round {done.number}")
            shown = done.number

        return tell


def labels_of(job: Job, data: Dataset, scale: Scale) -> dict[str, Any]:
    """What every row of a federation carries."""
    case = job.case
    large = CLIENTS if case.submodels == "none" else case.large
    extra = {"submodels": case.submodels, "large_clients": large, "clients": CLIENTS, "uncovered": case.uncovered}
    extra |= {"augment": True} if scale.augment else {}
    return {"model": case.model, "dataset": data.name, "defense": case.defense, "seed": job.seed, "extra": extra}


def _alone(job: Job) -> bool:
    return job.case.submodels == "local"
