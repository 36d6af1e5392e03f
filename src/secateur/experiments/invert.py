"""The job of `secateur invert`: attacks reconstruct pictures from a client's updates, and the truth scores them.

evaluation/client.py makes the updates, evaluation/reconstruction.py compares. `ClientExposure` holds one seed and one
defense: the client, the attacked updates, and every attack on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator

from secateur.catalogue import Choice, Defense
from secateur.config import Invert, dump
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.evaluation import gallery
from secateur.evaluation.attack_strength import EMPTY
from secateur.evaluation.calibration import WEIGHTS, Calibration, calibrate, effort_of, is_open, list_weights
from secateur.evaluation.client import AttackedClient, Target, add_cautions, check_attack, check_pictures, guarantee_of
from secateur.evaluation.membership import flat_labels
from secateur.evaluation.reconstruction import (
    NOT_RUN,
    AttackOutcome,
    Scoring,
    attack_labels,
    join_outcomes,
    judge,
    summary_rows,
    target_rows,
    with_extras,
)
from secateur.evaluation.setup import prepare
from secateur.experiments.context import SeedContext, check_installed, file_key
from secateur.experiments.invert_targets import (
    add_trained_generator,
    add_untrained_generator,
    asks_search,
    choose_policies,
    client_of,
    data_of,
    generator_key,
    needs_generator,
    own_rows,
    public_rows,
    rows_of,
    search_policies,
    stage_of,
    targets_of,
    warn_of_labels,
)
from secateur.experiments.rounds_before import split_rows, train_before
from secateur.gpu.determinism import deterministic
from secateur.interfaces import Batch, Gradient, Reconstruction
from secateur.metrics.estimates import mean_of
from secateur.metrics.lpips import load_weights as load_lpips
from secateur.progress import progress
from secateur.report import page_afterwards
from secateur.runs.artifacts import Result, key_of
from secateur.runs.folder import MemoryRun, Run, open_run
from secateur.runs.rows import Row
from secateur.runs.unfinished import NullWatcher, StageWatcher, forget, pack, unpack
from secateur.seeding import derive

TOGETHER = 10  # targets at once on a CPU: more gain little, fewer finish sooner


def run_invert(config: Invert, out: Path) -> list[Row]:
    """Attack every target with every attack, under every defense, for every seed, into the folder `out`."""
    data, device = prepare(config, check_pictures, data_of)
    check_invert(config, data, device)
    opened = open_run(out, "invert", dump(config), device=str(device), seeds=config.seeds, data=data.key)
    with page_afterwards(out), deterministic(config.deterministic), opened as run:
        calibrations: list[dict[Choice, Calibration]] = [{} for _ in config.defense]  # on the first seed, for all
        for seed in config.seeds:
            context = SeedContext(run, config, data, device, seed)
            defenses = [search_policies(defense, config, context) for defense in config.defense]
            exposures = [ClientExposure(config, context, defense) for defense in defenses]
            exposures[0].show_truths()
            for exposure, chosen in zip(exposures, calibrations, strict=True):
                exposure.show_guarantee()
                exposure.calibrations = chosen
                for attack in config.attacks:
                    if exposure.mount(attack):
                        for mounted in exposure.tune(attack):
                            exposure.measure(mounted)
    return run.rows


def plan(config: Invert) -> list[str]:
    """Describe the steps of the job, a line each; refuse the configurations that the job refuses."""
    data, device = prepare(config, check_pictures, data_of)
    check_invert(config, data, device)
    client = client_of(config, data, device, config.seeds[0], choose_policies(config.defense[0]))
    size = f"{config.batch_size} example{'s' if config.batch_size > 1 else ''}"
    many = f"{config.targets} update{'s' if config.targets > 1 else ''}"
    taken = f"{many} of {size} of {data.name}" if config.captured is None else ", ".join(map(str, config.update))
    lines = [f"{config.model} ({stage_of(config)}), seeds {', '.join(map(str, config.seeds))}; for each seed:"]
    lines.append(f"  take {taken}; the client sends its {client.sends}")
    for defense in filter(asks_search, config.defense):
        lines.append(f"  search policies for {defense}")
    lines.append(f"  defend with {', '.join(map(str, config.defense))}")
    if config.rounds_before:
        lines.append(f"  train for {config.rounds_before} rounds under each defense, with {config.users} users")
    if any(map(needs_generator, config.attacks)):
        rows = len(public_rows(config, data, config.seeds[0]))
        lines.append(f"  train a generator for {config.generator_steps} steps on {rows} rows that are no target")
    return lines + [line for attack in config.attacks for line in describe_attack(attack, config, data)]


def describe_attack(attack: Choice, config: Invert, data: Dataset) -> list[str]:
    """Describe the steps of one attack, a line each."""
    line = f"  attack with {attack}: {attack.method.info['threat']}"
    if not is_open(attack):
        return [line]
    if not len(own_rows(config, data, config.seeds[0])):
        return [f"  attack with {mounted}: {attack.method.info['threat']}" for mounted in list_weights(attack)]
    weights = ", ".join(f"{weight:g}" for weight in WEIGHTS)
    effort = effort_of(attack, len(config.seeds) * (config.targets if config.captured is None else 1))
    return [f"  choose the total variation of {attack} among {weights}: {effort}", line]


def check_invert(config: Invert, data: Dataset, device: torch.device) -> None:
    """Refuse before any work: data without pictures, too few rows, an unfit update, an unfit attack."""
    needed = config.targets * config.batch_size
    if config.captured is None and needed > data.train_size:
        many = f"{config.targets} targets of {config.batch_size} need {needed} training rows"
        raise WrongInput("targets", f"{many}, and {config.data} has {data.train_size}; use fewer")
    seed = config.seeds[0]
    if any(map(needs_generator, config.attacks)) and not len(public_rows(config, data, seed)):
        raise WrongInput("targets", "leave no row to train a generator on, which an attack needs; use fewer")
    check_installed(config.defense)
    if config.rounds_before:
        split_rows(config, data, seed)
    targets = targets_of(config, data, device, seed)
    refused = []
    for defense in config.defense:
        client = client_of(config, data, device, seed, choose_policies(defense))
        refused += [refusal_of(attack, client, config, targets[0], seed) for attack in config.attacks]
    if all(error is not None for error in refused) and refused[0] is not None:
        raise refused[0]
    if isinstance(targets[0], Gradient) and "batch_size" not in config.model_fields_set:
        warn_of_labels(targets[0], client.knowledge)


def refusal_of(attack: Choice, client: AttackedClient, config: Invert, target: Target, seed: int) -> WrongInput | None:
    """Return the error of an attack that cannot be mounted on this client, or None; raise one about the client."""
    met = add_untrained_generator(client, config) if needs_generator(attack) else client
    try:
        check_attack(attack, met, target, chance_of(seed, attack)[0])
    except WrongInput as error:
        if error.field in ("targets", "defense"):
            raise
        return error
    return None


@dataclass(eq=False)
class UpdateExposure:
    """A client's attacked updates under one defense, for one seed, and the run of the results."""

    run: Run | MemoryRun
    client: AttackedClient
    targets: Sequence[Target]
    defense: Defense
    attacks: Sequence[Choice]
    labels: dict[str, Any]  # of every row and figure
    together: int | None = None  # targets that are attacked at once; None: all
    images: bool = True
    data_folder: Path | None = None
    pictures: str = "pictures"  # the folder of pictures in the run's folder
    public: Sequence[Batch] = ()  # batches of the attacker's own, which no target is made of
    calibrations: dict[Choice, Calibration] = field(default_factory=dict)  # of attacks whose weight was open

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.labels["seed"])

    def client_under(self, attack: Choice) -> AttackedClient:
        """Return the client as this attack meets it."""
        return self.client

    def show_truths(self) -> None:
        """Show the training pictures, and save them where the page finds them."""
        labels = flat_labels(self._labels(None))
        for number, target in enumerate(self.targets):
            if isinstance(target, Batch):
                pixels = self.client.knowledge.pixels(target.inputs)
                self._show(gallery.truths(labels, number, pixels, target.labels.tolist(), self.images))
        self.run.flush()  # a page then has them while the first attack is still at work

    def show_guarantee(self) -> None:
        """Add the row of the guarantee that the defense gives for an update, if it gives one."""
        if (proved := guarantee_of(self.defense)) is not None:
            labels = self._labels(None)
            labels["extra"] |= dict.fromkeys(("target", "trial", "item"))
            self.run.add([Row(**labels, metric="epsilon", value=proved.epsilon, note=str(proved))])

    def tune(self, attack: Choice) -> list[Choice]:
        """Return the attacks to measure for an attack; one whose weight is open is calibrated first.

        Without pictures of the attacker's own it is measured with every weight, each under its own name.
        """
        if not is_open(attack) or attack in self.calibrations:
            return [attack]
        examples, effort = self.own_examples(), effort_of(attack, self.updates)
        if not examples:
            return list_weights(attack)
        self.calibrations[attack] = calibrate(
            attack, self.client, examples, effort, lambda trial, compute: self.keep_trial(attack, trial, compute)
        )
        return [attack]

    @property
    def updates(self) -> int:
        """The number of attacked updates that one calibration serves."""
        return len(self.targets)

    def own_examples(self) -> Sequence[Batch]:
        """Return batches of the attacker's own, which no target is made of."""
        return self.public

    def keep_trial(self, attack: Choice, trial: Mapping[str, Any], compute: Callable[[], Result]) -> Result:
        """Return the result of one weight of a calibration."""
        return compute()

    def set_weight(self, attack: Choice) -> Choice:
        """Return the attack as it runs: with the weight of its calibration, if it has one."""
        return self.calibrations[attack].attack if attack in self.calibrations else attack

    def measure(self, attack: Choice) -> list[AttackOutcome]:
        """Reconstruct all targets with one attack, group by group; score and return the reconstructions.

        A calibrated attack keeps its name in the rows. The result has an outcome for each comparison of
        `label_comparisons`.
        """
        labels, lpips, calibration = self._labels(attack), load_lpips(self.data_folder), self.calibrations.get(attack)
        client, by_group, against = self.client_under(attack), [], label_comparisons(self.client)
        for group in self.groups():
            guesses, seconds = self.reconstruct_group(attack, client, group)
            score = partial(judge, reconstructions=guesses, knowledge=self.client.knowledge, seconds=seconds)
            truths = [self._truths(group, used) for used in (True, False)[: len(against)]]
            scored = [score(batches, scoring=Scoring(lpips)) for batches in truths]
            self._show(gallery.draw_figures(flat_labels(labels), group, scored[0], self.images))
            for outcome, which in zip(scored, against, strict=True):
                self.run.add(target_rows(with_extras(labels, **which), group, outcome))
            by_group.append(scored)
        knows = client.meet_attack(attack.make()).knows + ("" if calibration is None else ", pictures of its own")
        extras = {"threat": attack.method.info["threat"], "knows": knows}
        guard = self.client.guard
        trained = guard is not None and guard.residual is not None
        residual = self.client.measure_residual(self.targets)
        outcomes = [join_outcomes(groups) for groups in zip(*by_group, strict=True)]
        for which, outcome in zip(against, outcomes, strict=True):
            rows = summary_rows(with_extras(labels, **which, **extras), outcome, derive(self.seed, "bootstrap"))
            if residual:
                mean, *ends, _ = mean_of(residual)
                low, high = ends if len(residual) > 1 else (None, None)
                rows.append(replace(rows[0], metric="residual_ratio", value=mean, low=low, high=high))
            self.run.add(
                add_cautions(rows, self.defense, self.attacks, trained, calibration.note if calibration else None)
            )
            if calibration is not None:
                cost = replace(rows[0], metric="calibration_seconds", value=calibration.seconds, timing=True)
                self.run.add([cost])
        return outcomes

    def reconstruct_group(
        self, attack: Choice, client: AttackedClient, group: range
    ) -> tuple[list[Reconstruction | None], float]:
        """Return the reconstructions of a group of targets, None where there is none, and the seconds they took."""
        return self._run_attack(attack, client, group, NullWatcher)

    def _run_attack(
        self,
        attack: Choice,
        client: AttackedClient,
        group: range,
        watcher: Callable[[Callable[[int], None]], NullWatcher | StageWatcher],
    ) -> tuple[list[Reconstruction | None], float]:
        attacker, done = self.set_weight(attack).make(), {}
        which = f"targets {group.start} to {group.stop - 1}" if len(group) > 1 else f"target {group.start}"
        under = "" if str(self.defense) == "none" else f" under {self.defense}"
        title = f"{attack} on {which}{under}, seed {self.seed}"
        with progress(title, getattr(attacker, "iterations", None), rate=True, unit="iterations") as advance:
            keeper = watcher(advance)
            tampering, starts = chance_of(self.seed, attack, group.start)
            knowledge, views = client.show_targets(attacker, [self.targets[i] for i in group], tampering, group.start)
            for index, reconstruction in attacker.reconstruct(views, knowledge, [starts] * len(views), keeper):
                done[index] = reconstruction
                keeper.draw([reconstruction], [index])
        return [done.get(i) for i in range(len(group))], keeper.seconds

    def groups(self) -> list[range]:
        """Return the groups of targets that are attacked at once."""
        count = len(self.targets)
        size = self.together or count
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def _truths(self, group: range, used: bool = True) -> list[Batch | None]:
        """Return the batches that the client used for its updates, or its raw batches; None for captured updates."""
        targets = [self.client.transform_target(self.targets[i], i) if used else self.targets[i] for i in group]
        return [target if isinstance(target, Batch) else None for target in targets]

    def _show(self, figures: list[gallery.Figure]) -> None:
        self._save(figures)
        self.run.show(figures)

    def _save(self, figures: list[gallery.Figure]) -> None:
        if self.run.folder is not None:
            gallery.save(self.run.folder / self.pictures, figures)

    def _labels(self, attack: Choice | None) -> dict[str, Any]:
        """Return the labels of every row and figure of an attack."""
        weight = self.calibrations[attack].weight if attack in self.calibrations else None
        return attack_labels(self.labels, self.labels["extra"], attack, weight)


class ClientExposure(UpdateExposure):
    """The client, the updates and the attacks of a configuration, under one defense, for one seed."""

    def __init__(self, config: Invert, context: SeedContext, defense: Defense, pictures: str = "pictures") -> None:
        self.config, self.context = config, context
        setting = (context.data, context.device, context.seed)
        client, targets = client_of(config, *setting, defense), targets_of(config, *setting)
        if config.rounds_before:
            client = train_before(client, config, context, defense)
        labels = {"model": config.model, "dataset": context.data.name, "seed": context.seed, "defense": str(defense)}
        extra = {"labels": config.labels, "stage": stage_of(config), "batch_size": config.batch_size}
        labels |= {"extra": extra | {"update": client.sends} | describe_rounds(config, client)}
        together = config.together or (TOGETHER if context.device.type == "cpu" else None)
        shown = (together, config.images, config.data_folder, pictures)
        super().__init__(context.run, client, targets, defense, config.attacks, labels, *shown)

    def client_under(self, attack: Choice) -> AttackedClient:
        """Return the client as this attack meets it, with a trained generator if the attack needs one."""
        return add_trained_generator(self.client, self.config, self.context) if needs_generator(attack) else self.client

    def mount(self, attack: Choice) -> bool:
        """Return True if the attack can be mounted; otherwise add rows that say why not."""
        error = refusal_of(attack, self.client, self.config, self.targets[0], self.seed)
        if error is None:
            return True
        labels = with_extras(self._labels(attack), target=None, trial=None, item=None)
        labels = with_extras(labels, threat=attack.method.info["threat"], knows="nothing, as it was not run")
        note = f"{NOT_RUN}{error.message}"
        self.run.add([Row(**labels, metric=metric, value=None, note=note) for metric in ("psnr", "recognisable")])
        return False

    @property
    def updates(self) -> int:
        """The number of attacked updates that one calibration serves: those of all seeds."""
        return len(self.targets) * len(self.config.seeds)

    def own_examples(self) -> list[Batch]:
        """Return batches of public rows, which no target is made of."""
        return [self.context.rows(rows) for rows in own_rows(self.config, self.context.data, self.seed)]

    def keep_trial(self, attack: Choice, trial: Mapping[str, Any], compute: Callable[[], Result]) -> Result:
        """Return the result of one weight of a calibration, from a stage of the run."""
        depends = self.depends(attack, range(0)) | {"attack": None, "rows": None}
        rows = own_rows(self.config, self.context.data, self.seed).tolist()
        return self.run.stage("calibration", depends | {"own": rows, **trial}, compute)

    def reconstruct_group(
        self, attack: Choice, client: AttackedClient, group: range
    ) -> tuple[list[Reconstruction | None], float]:
        """Return the reconstructions as the base class does, from a stage of the run."""
        folder, depends = self.context.run.folder, self.depends(attack, group)
        watcher = partial(
            StageWatcher, folder, "invert", key_of("invert", depends), draw=self._make_drawer(attack, group)
        )
        result = self.run.stage("invert", depends, lambda: pack(*self._run_attack(attack, client, group, watcher)))
        forget(folder, "invert", result.key)
        return unpack(result), result.data["seconds"]

    def _make_drawer(self, attack: Choice, group: range) -> Callable[..., list[gallery.Figure]]:
        """Return a function that saves the pictures of unfinished reconstructions, and returns their figures."""
        labels, truths = flat_labels(self._labels(attack)), self._truths(group)

        def draw(guesses: Sequence[Reconstruction], numbers: Sequence[int] = range(len(group))) -> list[gallery.Figure]:
            outcome = judge([truths[i] for i in numbers], guesses, self.client.knowledge)
            figures = gallery.draw_figures(labels, [group[i] for i in numbers], outcome, self.images)
            self._save(figures)
            return [figure | {"unfinished": True} for figure in figures]

        return draw

    def depends(self, attack: Choice, group: range) -> dict[str, Any]:
        """Return all values that an attack on a group of targets depends on."""
        config = self.config
        files = {"weights": config.weights, "update": config.captured, "residual": config.residual}
        names = ["labels", "batch_size", "local_steps", "local_batch", "learning_rate", "batchnorm", "statistics"]
        names += ["rounds_before", "users", "batch_before"] if config.rounds_before else []
        names += ["repeats"] if config.repeats > 1 else []
        names += [name for name in ("local_epochs", "optimiser") if name in config.model_fields_set]
        rows = rows_of(config, self.context.data, self.context.seed)[group.start : group.stop]
        depends = self.context.base | {name: getattr(config, name) for name in names}
        depends |= {name: None if path is None else file_key(path) for name, path in files.items()}
        depends |= {"rounds": list(map(file_key, [*config.update[1:], *config.sent]))} if config.update[1:] else {}
        depends |= {
            "attack": str(self.set_weight(attack)),
            "defense": str(self.defense),
            "rows": rows.tolist(),
            "first": group.start,
        }
        return depends | generator_key(attack, config, self.context)


def describe_rounds(config: Invert, client: AttackedClient) -> dict[str, Any]:
    """Return the labels of a client's rounds: those before, the repeated ones, and the state of its residual."""
    labels: dict[str, Any] = {"rounds_before": config.rounds_before} if config.rounds_before else {}
    labels |= {"repeats": config.repeats} if config.repeats > 1 else {}
    if client.guard is None or not client.guard.feeds_back:
        return labels
    return labels | {"residual": EMPTY if client.guard.residual is None else "from training"}


def chance_of(seed: int, attack: Choice, first: int = 0) -> tuple[Generator, Generator]:
    """Return the generators of an attack: for tampering, and for reconstructing the targets from `first` on.

    Both derive from the attack's name without its settings, so an adaptive attacker begins where the plain one does.
    One draw a target makes a target begin at the same point whichever targets are attacked with it.
    """
    starts = derive(seed, "reconstruct", attack.name)
    for _ in range(first):
        torch.randint(2**62, (), generator=starts)
    return derive(seed, "tamper", attack.name), starts


def label_comparisons(client: AttackedClient) -> list[dict[str, str]]:
    """Return the labels of the comparisons: the used pictures, and the raw ones if they differ.

    dgp calls the comparison with the used pictures ATS-R, and the one with the raw pictures ATS-T.
    """
    return [{}] if client.transform is None else [{"against": "used"}, {"against": "raw"}]
