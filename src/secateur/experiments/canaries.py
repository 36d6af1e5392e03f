"""Audit of a private training in one run, by canaries (Steinke, Nasr and Jagielski 2023).

Canaries are members with wrong labels. A fair coin decides for each if the model is trained on it. The attacker then
guesses "in" for a quarter of them, whose labels the model believes most, and "out" for the quarter that it believes
least. The quarters are fixed before any score is seen, so that the bound needs no correction for their choice.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from secateur import tree
from secateur.catalogue import Defense
from secateur.config import PrivacyClaim
from secateur.errors import WrongInput
from secateur.evaluation.limits import CANARY_COUNTS, claim_rows
from secateur.experiments.pipeline import ModelJob, guarantees
from secateur.experiments.threat_models import Compression
from secateur.inference import logits
from secateur.interfaces import Batch
from secateur.metrics.epsilon import one_run_bound
from secateur.runs.artifacts import Result
from secateur.runs.rows import Row
from secateur.seeding import derive

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
