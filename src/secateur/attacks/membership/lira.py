"""LiRA: how likely is the model's answer if it trained on the example, and if it did not?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import Generator, Tensor
from torch.special import log_ndtr

from secateur.attacks.membership.reference_models import (
    Judge,
    Least,
    References,
    average,
    gather,
    require_models,
    weights,
)
from secateur.catalogue import method
from secateur.errors import WrongInput, unknown
from secateur.inference import probabilities
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, InOut, Shadow

FLOOR = 1e-45  # the smallest float32 above 0: keeps log finite, and the order of all that float32 can tell apart
NARROWEST = 1e-30  # a deviation of 0 would make a density infinite
MANY = 64  # models from which an example's own variance is better than the common one

MODES = ("auto", "online", "offline")
FORMS = ("cdf", "density")
VARIANCES = ("auto", "fixed", "per-example")

Fixed = dict[bool, Tensor] | None  # (Q, 1) the common deviation of the in (True) and of the out models (False)


def margin(answers: Tensor, labels: Tensor) -> Tensor:
    """The log odds of the true label, log p_y - log(sum of the others), in float64: what Gaussians fit well."""
    p = answers.double()
    true = p.gather(1, labels[:, None]).squeeze(1)
    others = p.scatter(1, labels[:, None], 0).sum(1)
    return true.clamp_min(FLOOR).log() - others.clamp_min(FLOOR).log()


def deviation(values: Tensor, chosen: Tensor, common: bool = False) -> Tensor:
    """The deviation of the chosen models' (M, Q, N) values about each example's mean, (Q, N).

    `common` pools the squares of all examples, (Q, 1). NaN where an example, or all, have fewer than two models.
    """
    weight = weights(chosen, values)
    mean = average(values, chosen).nan_to_num()
    squares, freedom = (weight * (values - mean) ** 2).sum(0), weight.sum(0) - 1
    if common:
        squares, freedom = squares.sum(1, keepdim=True), freedom.clamp_min(0).sum(1, keepdim=True)
    return (squares / freedom).sqrt().clamp_min(NARROWEST)


def log_density(values: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Of a Gaussian."""
    return -0.5 * ((values - mean) / scale) ** 2 - scale.log() - 0.5 * math.log(2 * math.pi)


def online(own: Tensor, others: Tensor, inside: Tensor, fixed: Fixed = None) -> Tensor:
    """The log ratio N_in / N_out of (Q, N) margins, averaged over the queries (Carlini et al. 2022, Algorithm 1)."""
    inner, outer = (log_density(own, *_gaussian(others, inside, truth, fixed)) for truth in (True, False))
    return (inner - outer).mean(0)


def offline(own: Tensor, others: Tensor, inside: Tensor, fixed: Fixed = None, form: str = "cdf") -> Tensor:
    """How unlikely the (Q, N) margins are under N_out, averaged over the queries.

    `cdf` is the one-sided test of Carlini et al. 2022: -log Pr[Z > own], which ranks as Pr[Z <= own] does but never
    saturates at 1. `density` is -log N_out(own), the form of their published code: unlikely on either side.
    """
    mean, scale = _gaussian(others, inside, False, fixed)
    if form == "density":
        return -log_density(own, mean, scale).mean(0)
    upper: Tensor = log_ndtr((mean - own) / scale)
    return -upper.mean(0)


def _gaussian(others: Tensor, inside: Tensor, truth: bool, fixed: Fixed) -> tuple[Tensor, Tensor]:
    side = inside == truth
    return average(others, side), deviation(others, side) if fixed is None else fixed[truth]


@dataclass(frozen=True)
class Lira:
    """The attack with its settings, and after `fit` what it learnt from the attacker's models."""

    mode: str
    form: str
    variance: str
    queries: int
    references: References | None = None
    fixed: Fixed = None
    thresholds: dict[str, float] = field(default_factory=dict)  # by way: online, offline

    def fit(self, shadows: Sequence[Shadow] | InOut, rng: Generator) -> Self:
        """Ask the models about their own rows, and learn the common deviation and the thresholds from the answers."""
        models = len(shadows.boxes) if isinstance(shadows, InOut) else len(shadows)
        common = self.variance == "fixed" or (self.variance == "auto" and models < MANY)
        require_models("lira", shadows, self.least)
        known = gather(shadows, partial(_ask, queries=self.queries), rng)
        fixed = None
        if common:
            fixed = {truth: deviation(known.values, known.inside == truth, common) for truth in (True, False)}
        fitted = replace(self, references=known, fixed=fixed)
        ways = ("offline",) if known.disjoint else ("online", "offline")
        return replace(fitted, thresholds={way: known.threshold(fitted._judge(way)) for way in ways})

    @property
    def least(self) -> Least:
        """One of the models is always the rehearsed target, and a variance of its own takes two more a side."""
        return Least(3, 6) if self.variance == "per-example" else Least(2, 4)

    def shortage(self, shadows: int, in_out: int) -> str | None:
        """Why it cannot run with so many disjoint shadows and in-out models; None where it can."""
        return self.least.shortage("lira", self.mode, shadows, in_out)

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """Rank by the likelihood, decide by the threshold that served best when the attacker's models were targets."""
        if self.references is None:
            raise WrongInput("attack", "fit it on shadow models first")
        way, note = self.references.way("lira", self.mode, candidates)
        own = self.references.ask(box, candidates.batch)
        scores = self._judge(way)(own, *self.references.of(candidates.batch, candidates.ids))
        return Guesses(scores, scores >= self.thresholds[way], note)

    def _judge(self, way: str) -> Judge:
        if way == "online":
            return partial(online, fixed=self.fixed)
        return partial(offline, fixed=self.fixed, form=self.form)


@method("attack", "lira", "-", sees="probabilities", shadows="in-out or disjoint")
def lira(mode: str = "auto", offline: str = "cdf", variance: str = "auto", queries: int = 1) -> Lira:
    """Member where the answer is likelier from models that trained on the example (LiRA, Carlini et al. 2022).

    Online it compares Gaussians of the in and of the out models (mode `auto` with in-out models). Offline it has only
    those that did not train on the example: all of them for disjoint shadows, and the result says that it ran so.
    `offline` is `cdf` (their paper) or `density` (their code). `variance` is each example's own (`per-example`) or one
    per side, pooled over the examples (`fixed`); `auto` is fixed below 64 models. With 2 `queries` an image's mirror
    is asked too. The threshold of the decision is the best one when each of the attacker's models is the target once.
    """
    for name, value, allowed in (("mode", mode, MODES), ("offline", offline, FORMS), ("variance", variance, VARIANCES)):
        if value not in allowed:
            raise unknown(f"attack lira {name}", value, allowed)
    if queries not in (1, 2):
        raise WrongInput("attack lira queries", f"{queries} is not allowed; give 1, or 2 to ask an image's mirror too")
    return Lira(mode, offline, variance, queries)


def _ask(box: BlackBox, batch: Batch, queries: int) -> Tensor:
    """(Q, N) margins of the examples, and of their mirror images."""
    views = [batch.inputs]
    if queries == 2:
        if batch.inputs.ndim != 4:
            raise WrongInput("attack lira queries", "2 asks the mirror image, but the inputs are no images; give 1")
        views.append(batch.inputs.flip(-1))
    return torch.stack([margin(probabilities(box, view), batch.labels) for view in views])
