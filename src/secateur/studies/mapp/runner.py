"""The runner of mapp_fl's studies: all federations into one run folder, then a table beside the paper's numbers.

Each federation is a stage of the run: one by one on a CPU, several stacked on a GPU. Its result is stored by itself, so
studies in one folder share the federations that they have in common, and an interrupted study resumes. Every table ends
with the effect of scoring batches and of more updates on Yeom's attack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from secateur.catalogue import Choice
from secateur.config import Federate, read
from secateur.config.methods import choice
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.evaluation.setup import device_of
from secateur.federated.checkpoint import STAGE, FederationLog, depends_of, follow
from secateur.federated.result_rows import row_of
from secateur.federated.spec import SubmodelSpec
from secateur.federated.submodels.exposure import ExposureObserver
from secateur.federated.submodels.federation import StackedFederations, SubmodelFederation
from secateur.federated.submodels.local_baseline import LocalBaseline
from secateur.federated.submodels.membership_attacks import Asking
from secateur.federated.submodels.networks import without_statistics
from secateur.federated.traffic import Measure, Round
from secateur.models.create import create
from secateur.progress import progress
from secateur.runs.artifacts import Result, key_of
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.runs.unfinished import forget
from secateur.seeding import derive
from secateur.studies.mapp.results import MappResults
from secateur.studies.mapp.scale import CLIENTS, SCALES, Case, MappScale, load_data, terms_of, with_augmentation
from secateur.studies.mapp.tables import by_query
from secateur.studies.study import Request, StudyPlan, run_steps, scale_of
from secateur.studies.table import Tabulated

ONE = "Intervals (95 %) are over the examples asked about and who is known, of one repeat; another may differ by more."
MANY = "Values are means over repeats, with Student's 95 % intervals over them."


@dataclass(frozen=True)
class MappStudy:
    """A figure or table of the paper: its federations at a scale, and the function from their rows to the table."""

    cases: Callable[[MappScale], Sequence[Case]]
    tabulate: Callable[[MappResults, MappScale], Tabulated]
    attacks: tuple[str, ...] = ("yeom",)

    def plan(self, request: Request) -> StudyPlan:
        """Return the plan of all federations for every seed."""
        scale, options = scale_of(SCALES, request.scale, request.overrides), request.options
        if options.get("model") is not None:
            raise WrongInput("model", "studies of mapp_fl have networks of their own widths; leave it out")
        cases = self.cases(scale)
        fields = {"seeds": options.get("seeds") or (scale.draws if cases[0].fresh else scale.repeats)}
        fields |= {} if options.get("device") is None else {"device": options["device"]}
        config = read(Federate, None, fields)
        device, data = device_of(config), load_data(scale, options)
        scale = with_augmentation(scale, data)
        attacks = [choice("attack", name) for name in self.attacks]
        facts: dict[str, Any] = {"data": data.name, "rounds": scale.rounds}
        facts |= {} if scale.examples is None else {"examples": scale.examples}
        facts |= {"augmentation": "crop and flip" if scale.augment else "none"}
        facts |= {"attacks": list(self.attacks), "seeds": config.seeds}

        def measure(run: Run) -> None:
            MappRunner(run, scale, data, device, attacks).run_all(cases, config.seeds)

        def tabulate(rows: Sequence[Row]) -> Tabulated:
            results = MappResults(rows)
            lines, findings = self.tabulate(results, scale)
            return [*lines, *by_query(results)], findings

        return StudyPlan(
            run=lambda: run_steps(request, scale, device, config.seeds, measure, attacks=self.attacks),
            tabulate=tabulate,
            facts=lambda rows: facts,
            intervals=ONE if len(config.seeds) == 1 else MANY,
        )


class FederationJob(NamedTuple):
    """One federation of one seed before its first round."""

    case: Case
    seed: int
    terms: SubmodelSpec
    net: nn.Module
    device: torch.device

    @property
    def alone(self) -> bool:
        """True if the clients train alone."""
        return self.terms.rule.alone


@dataclass(frozen=True, eq=False)
class MappRunner:
    """The run of a study's federations, with the data, device and attacks that they share."""

    run: Run
    scale: MappScale
    data: Dataset
    device: torch.device
    attacks: Sequence[Choice]

    @cached_property
    def attacked_data(self) -> Dataset:
        """The data on the device of the attacks, copied once."""
        inputs, labels = self.data.batch.to(self.device)
        return replace(self.data, inputs=inputs, labels=labels)

    @property
    def at_once(self) -> int:
        """The number of federations that are stacked; 1 on a CPU."""
        return self.scale.at_once if self.device.type == "cuda" else 1

    @property
    def asking(self) -> Asking:
        """The settings of the attacks' queries."""
        return Asking(updates=self.scale.updates, shadows=self.scale.shadows, shuffles=self.scale.shuffles)

    def run_all(self, cases: Sequence[Case], seeds: Sequence[int]) -> None:
        """Run every federation that the run does not have, for every seed; add all rows in the order of the jobs."""
        jobs = [self._job(case, seed) for seed in seeds for case in cases]
        depends = [self._depends(job) for job in jobs]
        added = 0

        def add(until: int) -> None:
            nonlocal added
            kept = self.run.stages(STAGE, depends[added:until], lambda missing: ())
            for job, result in zip(jobs[added:until], kept, strict=True):
                self._add(job, result)
            added = until

        def compute(missing: Sequence[int]) -> Iterator[tuple[int, Result]]:
            for group in self._groups(jobs, missing):
                add(group[0])  # groups begin in the order of the jobs, so all before this one are done
                key = key_of(STAGE, {"each": [depends[i] for i in group]})
                yield from zip(group, self._measured(key, [jobs[i] for i in group]), strict=True)
                forget(self.run.folder, STAGE, key)

        self.run.stages(STAGE, depends, compute)
        add(len(jobs))

    def _job(self, case: Case, seed: int) -> FederationJob:
        """Return a federation with the server's initial network."""
        data, rng = self.data, derive(seed, "initialise", "server")
        net = without_statistics(create(case.model, data.input_shape, data.classes, rng))
        return FederationJob(case, seed, terms_of(case, self.scale, data, seed), net, self.device)

    def _depends(self, job: FederationJob) -> dict[str, Any]:
        """Return all that the rows of a federation depend on; federations stacked with it do not count."""
        settings: dict[str, Any] = {"alone": job.alone, "attacks": [str(attack) for attack in self.attacks]}
        return (
            depends_of(job.terms, job.net, self.data, job.seed, self.device)
            | settings
            | {"asking": repr(self.asking), "threads": torch.get_num_threads()}
        )

    def _groups(self, jobs: Sequence[FederationJob], missing: Sequence[int]) -> list[list[int]]:
        """Return the stacks by their first job; clients that train alone end at different times, so are not stacked."""
        stacked, most = [i for i in missing if not jobs[i].alone], self.at_once
        groups = [stacked[start : start + most] for start in range(0, len(stacked), most)]
        return sorted([*groups, *([i] for i in missing if jobs[i].alone)])

    def _measured(self, key: str, jobs: Sequence[FederationJob]) -> list[Result]:
        """Run some federations, stacked if there are several; after a kill they resume by their common key."""
        exposers = [self._exposer(job) for job in jobs]
        federations: list[SubmodelFederation] = []
        for job, exposer in zip(jobs, exposers, strict=True):
            beside = federations[0] if federations else None
            federations.append(
                SubmodelFederation(
                    job.net, self.data, job.terms, job.seed, self.device, observers=[exposer], beside=beside
                )
            )
        trainings: list[Any] = [LocalBaseline(federations[0])] if jobs[0].alone else federations
        training = trainings[0] if len(jobs) == 1 else StackedFederations(federations)
        logs = [exposer.log for exposer in exposers]
        with progress(_title(jobs), self.scale.rounds, rate=True) as advance:
            follow(self.run.folder, key, training, logs, self._round_adder(federations, exposers, advance))
        return [Result(one.model(), log.to_plain()) for one, log in zip(trainings, logs, strict=True)]

    def _add(self, job: FederationJob, result: Result) -> None:
        """Add the rows and figures of a federation to the run, and a row of its seconds."""
        log = FederationLog()
        log.load(result.data)
        timed = Measure("seconds", log.seconds, self.scale.rounds)
        self.run.show(log.figures)
        self.run.add([*log.rows, row_of(labels_of(job, self.data, self.scale), timed, timing=True)])

    def _exposer(self, job: FederationJob) -> ExposureObserver:
        """Return the attacks on one federation."""
        labels = labels_of(job, self.data, self.scale)
        return ExposureObserver(
            self.attacks,
            self.attacked_data,
            labels,
            FederationLog(),
            job.terms,
            asking=self.asking,
            device=self.device,
        )

    def _round_adder(
        self,
        federations: Sequence[SubmodelFederation],
        exposers: Sequence[ExposureObserver],
        advance: Callable[..., None],
    ) -> Callable[[Any], None]:
        """Return a callback that adds a round's measures to each log, and attacks in the last round."""
        shown = 0

        def add_round(done: Round) -> None:
            nonlocal shown
            for federation, exposer, one in zip(federations, exposers, done.parts or [done], strict=True):
                exposer.log.rows += [row_of(exposer.labels, measure) for measure in one.measures]
                if done.number == self.scale.rounds:
                    exposer.attack(federation)
            advance(done.number - shown, f"round {done.number}")
            shown = done.number

        return add_round


def labels_of(job: FederationJob, data: Dataset, scale: MappScale) -> dict[str, Any]:
    """Return the labels of every row of a federation."""
    case = job.case
    large = CLIENTS if case.submodels == "none" else case.large
    extra = {"submodels": case.submodels, "large_clients": large, "clients": CLIENTS, "uncovered": case.uncovered}
    extra |= {"augment": True} if scale.augment else {}
    return {"model": case.model, "dataset": data.name, "defense": case.defense, "seed": job.seed, "extra": extra}


def _title(jobs: Sequence[FederationJob]) -> str:
    name = jobs[0].case.submodels if len(jobs) == 1 else f"{len(jobs)} federations"
    seeds = sorted({job.seed for job in jobs})
    return f"{name}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
