"""One seed of `secateur invert`: the client, the updates that are attacked, and every attack on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Generator

from secateur import gallery
from secateur.artifacts import key_of
from secateur.bench import Bench, file_key
from secateur.catalogue import Choice, Defense
from secateur.chance import derive
from secateur.client import Client, Target
from secateur.config import Invert
from secateur.generators import generator_key, needs_generator, with_trained
from secateur.guard import guarantee_of, remarked
from secateur.interfaces import Batch, Reconstruction
from secateur.judging import flat
from secateur.likeness import Scoring, joined, judge, summary_rows, target_rows
from secateur.metrics.lpips import load_weights as load_lpips
from secateur.progress import progress
from secateur.runs import Result, Row
from secateur.targets import client_of, rows_of, stage_of, targets_of
from secateur.watching import Keeper, forget, packed, unpacked

TOGETHER = 10  # targets at once on a CPU: more gain little there, and fewer finish sooner


@dataclass(frozen=True)
class Exposure:
    """A client under one defense and what is attacked, for one seed, and where results go."""

    config: Invert
    bench: Bench
    defense: Defense
    pictures: str = "pictures"  # where they go in the run's folder

    @cached_property
    def client(self) -> Client:
        """Who makes the updates."""
        return client_of(self.config, self.bench.data, self.bench.device, self.bench.seed, self.defense)

    @cached_property
    def targets(self) -> list[Target]:
        """What is attacked."""
        return targets_of(self.config, self.bench.data, self.bench.device, self.bench.seed)

    def attacked_by(self, attack: Choice) -> Client:
        """The client as this attack meets it, which may need a generator first."""
        if not needs_generator(attack):
            return self.client
        return with_trained(self.client, self.config, self.bench)

    def show_truths(self) -> None:
        """Put the training pictures where the page finds them."""
        labels = flat(self._labels(None))
        for number, target in enumerate(self.targets):
            if isinstance(target, Batch):
                pixels = self.client.knowledge.pixels(target.inputs)
                self._show(gallery.truths(labels, number, pixels, target.labels.tolist(), self.config.images))
        self.bench.run.flush()  # so that a page has them while the first attack is still at work

    def show_guarantee(self) -> None:
        """What the defense proves of an update, where it proves anything."""
        if (proved := guarantee_of(self.defense)) is not None:
            labels = self._labels(None)
            labels["extra"] |= dict.fromkeys(("target", "trial", "item"))
            self.bench.run.add([Row(**labels, metric="epsilon", value=proved.epsilon, note=str(proved))])

    def measure(self, attack: Choice) -> None:
        """Reconstruct all targets with one attack, group by group, and judge what comes out."""
        labels, lpips, run = self._labels(attack), load_lpips(self.config.data_folder), self.bench.run
        client, outcomes, against = self.attacked_by(attack), [], compared_with(self.client)
        for group in self.groups():
            made, seconds = self.reconstructed(attack, client, group)
            found = [
                judge(truths, made, self.client.knowledge, seconds, Scoring(lpips))
                for truths in (self._used(group), self._truths(group))[: len(against)]
            ]
            self._show(gallery.shown(flat(labels), group, found[0], self.config.images))
            for outcome, which in zip(found, against, strict=True):
                run.add(target_rows(marked(labels, which), group, outcome))
            outcomes.append(found)
        told = {"threat": attack.method.info["threat"], "knows": client.against(attack.make()).knows}
        for which, judged in zip(against, zip(*outcomes, strict=True), strict=True):
            rng = derive(self.bench.seed, "bootstrap")
            rows = summary_rows(marked(labels, which | told), joined(judged), rng)
            run.add(remarked(rows, self.defense, self.config.attacks, self.config.residual is not None))

    def reconstructed(self, attack: Choice, client: Client, group: range) -> tuple[list[Reconstruction | None], float]:
        """What the attack makes of a group of targets, and in how many seconds; a stage of the run."""
        run, depends = self.bench.run, self.depends(attack, group)
        key = key_of("invert", depends)
        result = run.stage("invert", depends, lambda: self._reconstruct(attack, client, group, key))
        forget(run.folder, "invert", result.key)
        return unpacked(result), result.data["seconds"]

    def _reconstruct(self, attack: Choice, client: Client, group: range, key: str) -> Result:
        made, seed, truths = attack.make(), self.bench.seed, self._used(group)
        labels, folder = flat(self._labels(attack)), self.bench.run.folder

        def draw(numbers: Sequence[int], some: Sequence[Reconstruction]) -> list[gallery.Figure]:
            outcome = judge([truths[i] for i in numbers], some, self.client.knowledge)
            figures = gallery.shown(labels, [group[i] for i in numbers], outcome, self.config.images)
            gallery.save(folder / self.pictures, figures)
            return [figure | {"unfinished": True} for figure in figures]

        found: dict[int, Reconstruction] = {}
        which = f"targets {group.start} to {group.stop - 1}" if len(group) > 1 else f"target {group.start}"
        under = "" if str(self.defense) == "none" else f" under {self.defense}"
        title = f"{attack} on {which}{under}, seed {seed}"
        with progress(title, getattr(made, "iterations", None), rate=True) as advance:
            keeper = Keeper(folder, "invert", key, advance, partial(draw, range(len(group))))
            tampering, starts = chance_of(seed, attack, group.start)
            knowledge, views = client.seen(made, [self.targets[i] for i in group], tampering, group.start)
            for index, reconstruction in made.reconstruct(views, knowledge, [starts] * len(views), keeper):
                found[index] = reconstruction
                draw([index], [reconstruction])
        return packed([found.get(i) for i in range(len(group))], keeper.seconds)

    def depends(self, attack: Choice, group: range) -> dict[str, Any]:
        """All that an attack on a group of targets depends on."""
        config = self.config
        files = {name: getattr(config, name) for name in ("weights", "update", "residual")}
        names = ("labels", "batch_size", "local_steps", "local_batch", "learning_rate", "batchnorm", "statistics")
        rows = rows_of(config, self.bench.data, self.bench.seed)[group.start : group.stop]
        return (
            self.bench.base
            | {name: None if path is None else file_key(path) for name, path in files.items()}
            | {name: getattr(config, name) for name in names}
            | {"attack": str(attack), "defense": str(self.defense), "rows": rows.tolist(), "first": group.start}
            | generator_key(attack, config, self.bench)
        )

    def groups(self) -> list[range]:
        """The targets that are attacked at once."""
        count = len(self.targets)
        size = self.config.together or (TOGETHER if self.bench.device.type == "cpu" else count)
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def _truths(self, group: range) -> list[Batch | None]:
        return [target if isinstance(target, Batch) else None for target in (self.targets[i] for i in group)]

    def _used(self, group: range) -> list[Batch | None]:
        """What the client made its updates of."""
        used = [self.client.used(self.targets[i], i) for i in group]
        return [target if isinstance(target, Batch) else None for target in used]

    def _show(self, figures: list[gallery.Figure]) -> None:
        gallery.save(self.bench.run.folder / self.pictures, figures)
        self.bench.run.show(figures)

    def _labels(self, attack: Choice | None) -> dict[str, Any]:
        """What every row and figure of an attack carries."""
        config = self.config
        labels = {"model": config.model, "dataset": self.bench.data.name, "seed": self.bench.seed}
        labels["defense"] = str(self.defense)
        extra = {"labels": config.labels, "stage": stage_of(config), "batch_size": config.batch_size}
        return attack_labels(labels, extra | {"update": self.client.sends}, attack)


def chance_of(seed: int, attack: Choice, first: int = 0) -> tuple[Generator, Generator]:
    """The chance of an attack: when it tampers, and when it reconstructs the targets from `first` on.

    By the attack's name without its settings, and one draw a target: so an attacker who adapts begins where the plain
    one does, and a target begins at the same place whichever targets are attacked with it.
    """
    starts = derive(seed, "reconstruct", attack.name)
    for _ in range(first):
        torch.randint(2**62, (), generator=starts)
    return derive(seed, "tamper", attack.name), starts


def attack_labels(labels: dict[str, Any], extra: dict[str, Any], attack: Choice | None) -> dict[str, Any]:
    """The labels of an attack's rows: which one, whether it adapts, and its weight of total variation."""
    made = None if attack is None else attack.make()
    adaptive = None if made is None else getattr(made, "adaptive", "none") != "none"
    named = {"attack": None if attack is None else str(attack), "adaptive": adaptive}
    return labels | named | {"extra": extra | {"total_variation": getattr(made, "tv", None)}}


def compared_with(client: Client) -> list[dict[str, str]]:
    """What reconstructions are compared with, as labels: the pictures that were used and the raw ones, if they differ.

    dgp calls the first ATS-R and the second ATS-T.
    """
    return [{}] if client.transform is None else [{"against": "used"}, {"against": "raw"}]


def marked(labels: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Labels with more extras."""
    return labels | {"extra": labels["extra"] | more}
