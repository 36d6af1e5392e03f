"""The federations of mapp_fl's studies: their specifications, the runner that measures them, and the plan of a study.

Each study is a number of federations on one data set, and a table. `--data` selects the paper's other data sets, and
`--set rounds=60 --set large=0+1+2` other sizes. `--set augment=false` omits the crops and flips on CIFAR-10. Every
table ends with the effect of scoring batches and of more updates on Yeom's attack.

The paper's setting (Section 5.2): ten clients; the server's network has u = 16, and small clients have half of its
channels. Clients use Adam at rate .001, reset in every round, for one local epoch with batches of 128. There are 150
rounds, three repeats, and a plain average.

LiRA and RMIA learn from whole federations of the attacker, or from shadow clients of one turn (`shadow_federations=0`).

Cells that no client trained become zero, as in the paper's code, or keep their value if a case sets `uncovered`.
Repeats share the dataset sizes and redistribute the images; those of Fig. 1 and Table 3 redraw the sizes too.

Each federation is a stage of the run: one by one on a CPU, several stacked on a GPU. Its result is stored by itself, so
studies in one folder share the federations that they have in common, and an interrupted study resumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from secateur.catalogue import Choice
from secateur.config import Federate, read
from secateur.config.methods import choice, defense_of_clients
from secateur.data.dataset import Dataset
from secateur.data.partition import FEMNIST_GROUPS, dirichlet_sizes, writer_groups
from secateur.errors import WrongInput
from secateur.evaluation.setup import device_of
from secateur.federated.augment import crop_and_flip
from secateur.federated.build import rates_of, submodel_protection
from secateur.federated.checkpoint import STAGE, FederationLog, depends_of, follow
from secateur.federated.result_rows import RecordedFederation, labels_of, record_rounds, row_of
from secateur.federated.spec import Adam, SubmodelSpec
from secateur.federated.submodels.exposure import ExposureObserver
from secateur.federated.submodels.federation import StackedFederations, SubmodelFederation
from secateur.federated.submodels.local_baseline import LocalBaseline
from secateur.federated.submodels.membership_attacks import Asking, ShadowModels
from secateur.federated.submodels.networks import without_statistics
from secateur.federated.submodels.shadow_federations import ShadowRun
from secateur.federated.traffic import Measure
from secateur.metrics.estimates import SMALLEST
from secateur.models.create import create
from secateur.progress import progress
from secateur.report.summary import group_by
from secateur.runs.archive import Archive
from secateur.runs.artifacts import Result, key_of
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.runs.unfinished import forget
from secateur.seeding import derive
from secateur.studies.mapp.tables import YEOM, MappResults, by_query
from secateur.studies.study import SIZES, Request, Scale, Study, StudyPlan, load_pictures, register, run_steps, scale_of
from secateur.studies.table import Tabulated

SIZES_SEED = 41  # with this seed ten clients of CIFAR-10 have the sizes of Table 2
CLIENTS = 10
TESTED = 0.2  # test share of a data set without a test part
ONE = "Intervals (95 %) are over the examples asked about and who is known, of one repeat; another may differ by more."
MANY = "Values are means over repeats, with Student's 95 % intervals over them."


@dataclass(frozen=True)
class Case:
    """A federation: channel rule, the server's network, number of clients with the full network, and a defense."""

    submodels: str
    unit: int = 16  # u of the paper's network
    large: int = 2
    defense: str = "none"
    fresh: bool = False  # every repeat redraws the clients' dataset sizes
    uncovered: Literal["zero", "keep"] = "zero"  # treatment of cells that no client trained
    attacks: tuple[str, ...] = ("yeom",)  # the same in all federations of a study

    @property
    def model(self) -> str:
        """The server's network."""
        return f"mapp-cnn-{self.unit}"


def load_data(scale: Scale, options: Mapping[str, Any]) -> Dataset:
    """Load the data of a study; a data set without a test part gets a fifth of its rows as test part."""
    data = load_pictures(options.get("data") or scale.data, options, scale.examples)
    if data.train_size < len(data.inputs):
        return data
    order = torch.randperm(len(data.inputs), generator=derive(0, "held out"))
    writers = None if data.writers is None else data.writers[order]
    mixed = replace(data, inputs=data.inputs[order], labels=data.labels[order], writers=writers)
    return replace(mixed, train_size=int((1 - TESTED) * len(order)))


def with_augmentation(scale: Scale, data: Dataset) -> Scale:
    """Return the scale with `augment` set: by default True for CIFAR-10, as in the public code.

    The paper does not mention crops and flips.
    """
    return scale if scale.augment is not None else scale.change(augment=data.name == "cifar10")


def shares_of(case: Case, data: Dataset, seed: int) -> list[Tensor]:
    """Return the rows of each of ten clients, largest client first; rows of a known writer stay together."""
    labels = data.labels[: data.train_size]
    if data.writers is not None:
        return writer_groups(data.writers[: data.train_size], FEMNIST_GROUPS, derive(seed, "writers"))
    if case.fresh:
        return dirichlet_sizes(labels, CLIENTS, seed=SIZES_SEED + seed)
    return dirichlet_sizes(labels, CLIENTS, seed=SIZES_SEED, deal=seed)


def terms_of(case: Case, scale: Scale, data: Dataset, seed: int) -> SubmodelSpec:
    """Return the specification of one federation."""
    shares = shares_of(case, data, seed)
    chosen = choice("submodel", case.submodels)
    rule = choice("submodel", f"local:patience={scale.patience}") if chosen.name == "local" else chosen
    return SubmodelSpec(
        shares,
        rule=rule.make(),
        rates=rates_of(shares, case.large),
        rounds=scale.rounds,
        local=Adam(batch_size=scale.batch_size, augment=crop_and_flip(data) if scale.augment else None),
        uncovered=case.uncovered,
        evaluate_every=max(1, scale.rounds // 10),
        **submodel_protection(defense_of_clients(case.defense)),
    )


class FederationJob(NamedTuple):
    """One federation of one seed before its first round."""

    seed: int
    terms: SubmodelSpec
    net: nn.Module
    labels: dict[str, Any]  # of all its rows


@dataclass(frozen=True, eq=False)
class MappRunner:
    """The run of a study's federations, with the data, device and attacks that they share."""

    run: Run
    scale: Scale
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
        return int(self.scale.at_once) if self.device.type == "cuda" else 1

    @property
    def asking(self) -> Asking:
        """The settings of the attacks' queries; only LiRA and RMIA need shadows."""
        scale, learns = self.scale, any(attack.name != YEOM.attack for attack in self.attacks)
        federations = scale.shadow_federations if learns else 0
        return Asking(updates=scale.updates, shadows=scale.shadows, federations=federations, shuffles=scale.shuffles)

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
                yield from zip(group, self._measure(key, [jobs[i] for i in group]), strict=True)
                forget(self.run.folder, STAGE, key)

        self.run.stages(STAGE, depends, compute)
        add(len(jobs))

    def _job(self, case: Case, seed: int) -> FederationJob:
        """Return a federation with the server's initial network."""
        data, rng = self.data, derive(seed, "initialise", "server")
        net, terms = create(case.model, data.input_shape, data.classes, rng), terms_of(case, self.scale, data, seed)
        methods = choice("submodel", case.submodels), defense_of_clients(case.defense)
        return FederationJob(
            seed, terms, without_statistics(net), labels_of(case.model, data.name, seed, *methods, terms)
        )

    def _depends(self, job: FederationJob) -> dict[str, Any]:
        """Return all that the rows of a federation depend on; federations stacked with it do not count."""
        settings: dict[str, Any] = {"alone": job.terms.rule.alone, "attacks": [str(attack) for attack in self.attacks]}
        settings |= {"asking": repr(self.asking), "threads": torch.get_num_threads()}
        return depends_of(job.terms, job.net, self.data, job.seed, self.device) | settings

    def _groups(self, jobs: Sequence[FederationJob], missing: Sequence[int]) -> list[list[int]]:
        """Return the stacks by their first job; clients that train alone end at different times, so are not stacked."""
        alone, most = [i for i in missing if jobs[i].terms.rule.alone], self.at_once
        stacked = [i for i in missing if i not in alone]
        groups = [stacked[start : start + most] for start in range(0, len(stacked), most)]
        return sorted([*groups, *([i] for i in alone)])

    def _measure(self, key: str, jobs: Sequence[FederationJob]) -> list[Result]:
        """Run some federations, stacked if there are several; after a kill they resume by their common key."""
        recorded: list[RecordedFederation] = []
        for job in jobs:
            recorded.append(self._record(job, recorded[0].federation if recorded else None))
        parts, logs = [one.federation for one in recorded], [one.log for one in recorded]
        parts = [LocalBaseline(parts[0])] if jobs[0].terms.rule.alone else parts
        seeds = ", ".join(map(str, sorted({job.seed for job in jobs})))
        title = (
            f"{jobs[0].labels['extra']['submodels'] if len(jobs) == 1 else f'{len(jobs)} federations'}, seed {seeds}"
        )
        with progress(title, self.scale.rounds, rate=True) as advance:
            training = parts[0] if len(jobs) == 1 else StackedFederations(parts)
            follow(self.run.folder, key, training, logs, record_rounds(recorded, advance, title))
        return [Result(part.model(), log.to_plain()) for part, log in zip(parts, logs, strict=True)]

    def _record(self, job: FederationJob, beside: SubmodelFederation | None) -> RecordedFederation:
        """Return a federation that shares its trainer with the one `beside` it, and the attacks on it."""
        seed, terms, net, labels = job
        exposer = ExposureObserver(
            self.attacks, self.attacked_data, labels, FederationLog(), terms, asking=self.asking, device=self.device
        )
        if self.asking.federations:
            exposer.shadows = self._run_shadows(job)
        federation = SubmodelFederation(net, self.data, terms, seed, self.device, observers=[exposer], beside=beside)
        return RecordedFederation(federation, exposer.labels, exposer.log, [exposer])

    def _run_shadows(self, job: FederationJob) -> ShadowModels:
        """Run the attacker's own federations, or load them if the run has them."""
        where = self.device, "auto", self.scale.threads
        shadows = ShadowRun(self.run, lambda: deepcopy(job.net), self.data, job.terms, self.asking, job.seed, *where)
        return shadows.run_all(job.labels["extra"]["submodels"])[0]

    def _add(self, job: FederationJob, result: Result) -> None:
        """Add the rows and figures of a federation to the run, and a row of its seconds."""
        log = FederationLog()
        log.load(result.data)
        timed = Measure("seconds", log.seconds, self.scale.rounds)
        self.run.show(log.figures)
        self.run.add([*log.rows, row_of(job.labels, timed, timing=True)])


def cases_of(study: Study, scale: Scale) -> list[Case]:
    """Return the federations of a study at a scale; cells are kept only beside federations that zero them."""
    cases = study.read_steps(Case, units=scale.units, large=scale.large)
    return [case for case in cases if case.uncovered == "zero" or case.large in scale.large]


def plan(study: Study, request: Request) -> StudyPlan:
    """Return the plan of all federations for every seed."""
    scale, options = scale_of("mapp", request.scale, request.overrides), request.options
    if options.get("model") is not None:
        raise WrongInput("model", "studies of mapp_fl have networks of their own widths; leave it out")
    cases = cases_of(study, scale)
    fields = {"seeds": options.get("seeds") or (scale.draws if cases[0].fresh else scale.repeats)}
    config = read(Federate, None, fields | {"device": options.get("device")})
    device, data = device_of(config), load_data(scale, options)
    scale = with_augmentation(scale, data)
    attacks = cases[0].attacks
    facts: dict[str, Any] = {"data": data.name, "rounds": scale.rounds}
    facts |= {} if scale.examples is None else {"examples": scale.examples}
    facts |= {"augmentation": "crop and flip" if scale.augment else "none"}
    facts |= {"attacks": list(attacks), "seeds": config.seeds}

    def measure(run: Run) -> None:
        chosen = [choice("attack", name) for name in attacks]
        MappRunner(run, scale, data, device, chosen).run_all(cases, config.seeds)

    def tabulate(rows: Sequence[Row]) -> Tabulated:
        results = MappResults(rows, scale.smallest)
        lines, findings = study.tabulate(results)
        return [*lines, *by_query(results)], findings

    return StudyPlan(
        run=lambda: run_steps(request, scale, device, config.seeds, measure, attacks=list(attacks)),
        tabulate=tabulate,
        facts=lambda rows: facts,
        intervals=ONE if len(config.seeds) == 1 else MANY,
    )


def gather(study: Study, archive: Archive) -> dict[str, MappResults]:
    """Return the results of archived federations by data set."""
    smallest = scale_of("mapp", archive.scale).smallest if archive.scale in SIZES else SMALLEST
    by_data = group_by(archive.rows, lambda row: row.dataset)
    return {data: MappResults(rows, smallest) for data, rows in by_data.items()}


register("mapp_fl", "mapp", plan, gather)
