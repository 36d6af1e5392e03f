"""Exposure of one model: what attacks find out about its members, into a run in a folder or in memory.

A private training is also audited in one run, by canaries (Steinke, Nasr and Jagielski 2023). Canaries are members with
wrong labels. A fair coin decides for each if the model is trained on it. The attacker then guesses "in" for a quarter
of them, whose labels the model believes most, and "out" for the quarter that it believes least. The quarters are fixed
before any score is seen, so that the bound needs no correction for their choice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from secateur import tree
from secateur.catalogue import Choice, Defense
from secateur.config import PrivacyClaim
from secateur.errors import WrongInput
from secateur.evaluation.limits import CANARY_COUNTS, claim_rows
from secateur.evaluation.membership import (
    ModelRecords,
    attack_rows,
    evaluate_guesses,
    flat_labels,
    list_most_exposed,
    worst_groups,
)
from secateur.evaluation.validity import Validity, check_rows, doubt_order, validity_rows
from secateur.experiments.pipeline import ModelJob, guarantees
from secateur.experiments.threat_models import Compression
from secateur.inference import logits, true_probability
from secateur.interfaces import Batch, BlackBox, Candidates, InOut, MembershipAttack, Shadow
from secateur.metrics.epsilon import LEVEL, epsilon_bound, one_run_bound
from secateur.metrics.gaps import portrait
from secateur.metrics.membership import share
from secateur.runs.artifacts import Result
from secateur.runs.folder import MemoryRun, Run
from secateur.runs.rows import Row
from secateur.seeding import derive

RANKING = ("conf", "xent", "entropy", "mentr", "top1-conf", "correctness")  # attacks that need no shadow models


@dataclass(eq=False)
class MembershipExposure:
    """A model's leakage about its members, for one seed: its gaps, and the guesses of attacks.

    The rows and figures go to a run, in a folder or in memory.
    """

    run: Run | MemoryRun
    seed: int
    members: Batch
    nonmembers: Batch
    candidates: Candidates  # the members, then the non-members; or in the order of `truth`
    build_box: Callable[[], BlackBox]  # called when a stage must be computed
    title: str = "the model"
    ids: Tensor | None = None  # (N,) rows of the data set; None: rows of the candidates
    level: float = LEVEL  # of each attack's bound on epsilon
    groups: Sequence[str] | None = None  # (N,) the user's own column
    delta: float = 0.0  # of the claim that the bound is held against
    truth: Tensor | None = None  # (N,) bool; None: the members come first

    @cached_property
    def record(self) -> ModelRecords:
        """The scores of all candidates by all attacks."""
        batch = self.candidates.batch
        ids = torch.arange(batch.size) if self.ids is None else self.ids
        return ModelRecords(self.title, self.seed, ids, batch.labels.cpu(), self.is_member, self.groups)

    @property
    def is_member(self) -> Tensor:
        """(N,) bool: the true membership of the candidates."""
        return self.truth if self.truth is not None else torch.arange(self.candidates.batch.size) < self.members.size

    @cached_property
    def box(self) -> BlackBox:
        """The model."""
        return self.build_box()

    def measure_accuracy(self, labels: dict[str, Any]) -> None:
        """Measure the accuracy on members and on non-members."""
        for name, side in (("train_accuracy", self.members), ("test_accuracy", self.nonmembers)):
            accuracy = share(self.box.predict(side.inputs).argmax(1) == side.labels)
            self.run.add([Row(**labels, metric=name, **accuracy._asdict())])

    def check_validity(self, labels: dict[str, Any], classes: int, key: str = "") -> None:
        """Count the rows, and check them before any verdict; `key` is the key of the data."""

        def compute() -> Result:
            checks = check_rows(self.members, self.nonmembers, classes, self.seed)
            return Result(data={"checks": [list(check) for check in checks]})

        counts = {"members": self.members.size, "nonmembers": self.nonmembers.size}
        self.run.add(Row(**labels, metric=name, value=float(count)) for name, count in counts.items())
        done = self.run.stage("validity", {"data": key, "seed": self.seed, "rows": counts}, compute).data
        self.run.add(validity_rows(labels, [Validity(*check) for check in done["checks"]]))

    def check_order(self, labels: dict[str, Any]) -> None:
        """Doubt members that a model, as it was trained, knows less well than others."""
        answers = [self.box.predict(side.inputs) for side in (self.members, self.nonmembers)]
        true = torch.cat([self.members.labels, self.nonmembers.labels])
        both = torch.cat(answers)
        is_member = torch.arange(len(true)) < self.members.size
        hits, confidence = (side.cpu() for side in (both.argmax(1) == true, true_probability(both, true)))
        self.run.add(validity_rows(labels, doubt_order(hits, confidence, is_member)))

    def measure_gaps(self, labels: dict[str, Any], classes: int, key: str = "") -> None:
        """Measure the gaps between answers for members and for non-members; `key` is the model's stage key."""

        def compute() -> Result:
            rng = derive(self.seed, "portrait")
            gaps, figures = portrait(self.box, self.members, self.nonmembers, classes, rng)
            return Result(data={"gaps": {name: gap._asdict() for name, gap in gaps.items()}, "figures": figures})

        done = self.run.stage("portrait", {"model": key, "seed": self.seed}, compute).data
        self.run.add(Row(**labels, metric=name, **gap) for name, gap in done["gaps"].items())
        self.run.show(flat_labels(labels) | {"attack": None} | figure for figure in done["figures"])

    def measure_attack(
        self, labels: dict[str, Any], fit: Callable[[], MembershipAttack], unmet: str = "", **depends: Any
    ) -> None:
        """Measure how well an attack tells members from non-members; the stage depends on `depends`.

        Args:
            labels: of the rows.
            fit: returns the attack, fitted to the attacker's models.
            unmet: stronger attackers that the model's defense does not meet in this run.
            depends: what the stage depends on.
        """

        def compute() -> Result:
            guesses = fit().score(self.box, self.candidates)
            scores = guesses.scores.detach().cpu()
            data = evaluate_guesses(guesses, self.is_member)
            return Result({"scores": scores}, data | self._measure_exposure(scores))

        depends |= {"attack": labels["attack"], "seed": self.seed, "level": self.level, "delta": self.delta}
        if self.groups is not None:
            depends["groups"] = hashlib.sha256("\n".join(self.groups).encode()).hexdigest()
        done = self.run.stage("attack", depends, compute)
        self.record.scores[name_attacker(labels)] = done.tensors["scores"]
        self.run.add(attack_rows(labels, done.data, unmet))
        exposed = {"kind": "exposed", "records": list_most_exposed(self.record, name_attacker(labels))}
        groups = {"kind": "groups", "records": done.data["measured"]}
        self.run.show(flat_labels(labels) | figure for figure in (done.data["figure"], exposed, groups))

    def _measure_exposure(self, scores: Tensor) -> dict[str, Any]:
        """Return the worst groups of an attack with these scores, and the epsilon that it shows."""
        worst, measured, note = worst_groups(self.record, scores)
        bound = epsilon_bound(scores, self.is_member, derive(self.seed, "epsilon"), self.delta, self.level)
        groups = [[item.measure, item.group, list(item.estimate[:3]), item.groups] for item in worst]
        rows = {"groups": groups, "measured": measured, "small_groups": note}
        return rows | {"bound": bound._asdict() | {"delta": self.delta}}


def name_attacker(labels: dict[str, Any]) -> str:
    """Name an attack, with the compression that its attacker guesses if there is a guess."""
    extra = labels["extra"]
    if "attacker_pruner" not in extra:
        return str(labels["attack"])
    return f"{labels['attack']} guessing {extra['attacker_pruner']} {extra['attacker_sparsity']:g}"


def fit_attack(attack: Choice, known: Sequence[Shadow] | InOut, seed: int) -> MembershipAttack:
    """Return the attack, fitted to the attacker's models."""
    fitted: MembershipAttack = attack.make().fit(known, derive(seed, "attack", str(attack)))
    return fitted


QUARTER = 4  # one canary of four is guessed to be in, and one of four to be out


class Canaries(NamedTuple):
    """Marked training rows: which rows, with which wrong labels, and which of them the model is trained on."""

    rows: Tensor  # (m,) of the data set
    labels: Tensor  # (m,)
    included: Tensor  # (m,) bool


def draw_canaries(rows: Tensor, labels: Tensor, classes: int, count: int, rng: Generator) -> Canaries:
    """Draw canaries among training rows (N,) with true labels (N,): wrong labels, and a coin for each."""
    if 2 * count > len(rows):
        raise WrongInput("canaries", f"{count} is too many for {len(rows)} members; allowed: at most {len(rows) // 2}")
    chosen = torch.randperm(len(rows), generator=rng)[:count]
    shift = torch.randint(1, classes, (count,), generator=rng)
    coins = torch.rand(count, generator=rng) < 0.5
    return Canaries(rows[chosen], (labels[chosen].cpu() + shift) % classes, coins)


def count_right(scores: Tensor, included: Tensor) -> tuple[int, int]:
    """Return the number of guesses and of right ones: the highest quarter of scores (m,) is in, the lowest is out.

    Example:
        >>> count_right(torch.tensor([4.0, 3, 2, 1, 8, 7, 6, 5]), torch.tensor([True, False] * 4))
        (4, 2)
    """
    order, size = scores.argsort(descending=True, stable=True), len(scores) // QUARTER
    right = int(included[order[:size]].sum()) + int((~included[order[len(order) - size :]]).sum())
    return 2 * size, right


def measure_canaries(job: ModelJob, count: int) -> list[Row]:
    """Train one model with canaries by a private defense; return the bound on epsilon beside the claimed one.

    Args:
        job: an original, in the context of a defense of training from scratch.
        count: number of canaries, m.
    """
    context, members, scratch = job.context, job.part.train, job.context.scratch
    assert scratch is not None
    canaries = draw_canaries(
        members, context.rows(members).labels, context.data.classes, count, derive(context.seed, "canaries")
    )
    rest = members[~torch.isin(members, canaries.rows)]
    size = len(rest) + int(canaries.included.sum())
    compression = Compression(defense=Defense((scratch,)))
    (proved,) = guarantees(context, compression, size)

    def compute() -> Result:
        guesses, right = count_right(_train_and_score(job, rest, canaries), canaries.included)
        return Result(data={"guesses": guesses, "right": right})

    depends = job.base | {"canaries": count, "recipe": asdict(context.recipes[0])}
    done = context.run.stage("canaries", depends, compute).data
    counts = (count, done["guesses"], done["right"])
    labels: dict[str, Any] = {"model": context.config.model, "dataset": context.data.name, "seed": context.seed}
    labels |= compression.labels | {"extra": {"original": f"{scratch}, {count} canaries"}}
    note = "{} canaries, {} guesses, {} right; for one example, at 95 % confidence".format(*counts)
    rows = [Row(**labels, metric="epsilon_lower", value=one_run_bound(*counts, delta=proved.delta), note=note)]
    rows += [Row(**labels, metric=name, value=float(n)) for name, n in zip(CANARY_COUNTS, counts, strict=True)]
    return rows + claim_rows(labels, PrivacyClaim(epsilon=proved.epsilon, delta=proved.delta))


def _train_and_score(job: ModelJob, rest: Tensor, canaries: Canaries) -> Tensor:
    """Train on the other members and the included canaries; return (m,) how much the model believes the labels."""
    context = job.context
    marked = Batch(context.rows(canaries.rows).inputs, canaries.labels.to(context.device))
    inside, others = marked.take(canaries.included.to(context.device)), context.rows(rest)
    train = Batch(*(torch.cat(parts) for parts in zip(others, inside, strict=True)))
    task = replace(job.task(tree.state_of(context.initial(job.role))), train=train)
    assert context.scratch is not None
    ((_, fitted),) = context.scratch.make().fit_many(context.net, [task], context.recipes[0])
    answers = logits(context.net, tree.to(fitted.state, context.device), marked.inputs).log_softmax(1)
    return answers.gather(1, marked.labels[:, None]).squeeze(1).cpu()
