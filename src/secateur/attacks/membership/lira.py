"""LiRA: likelihood ratio of the model's answer, trained on the example versus not trained on the example."""

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
    Least,
    References,
    ScoreRule,
    average,
    average_sides,
    gather,
    require_models,
    weights,
)
from secateur.catalogue import method
from secateur.errors import WrongInput, unknown
from secateur.inference import ask, true_probability
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, InOut, Shadow

FLOOR = 1e-45  # the smallest float32 above 0: keeps log finite, and the order of all float32 values
NARROWEST = 1e-30  # a deviation of 0 would make a density infinite
MANY = 64  # number of models from which a per-example variance is better than the common one

MODES = ("auto", "online", "offline")
FORMS = ("cdf", "density")
VARIANCES = ("auto", "fixed", "per-example")

# Common standard deviation (Q, 1) of the in models (True) and of the out models (False).
Fixed = dict[bool, Tensor] | None


def margin(answers: Tensor, labels: Tensor) -> Tensor:
    """Return the log odds of the true label, log p_y - log(sum of the others), in float64.

    Log odds are close to Gaussian.
    """
    p = answers.double()
    others = p.scatter(1, labels[:, None], 0).sum(1)
    return true_probability(p, labels).clamp_min(FLOOR).log() - others.clamp_min(FLOOR).log()


def deviation(values: Tensor, chosen: Tensor, common: bool = False) -> Tensor:
    """Return the standard deviation (Q, N) of the chosen models' values (M, Q, N) about each example's mean.

    `common` pools the squares of all examples, (Q, 1), and so does an example of fewer than two models. The result is
    NaN if every example has fewer than two.
    """
    weight = weights(chosen, values)
    mean = average(values, chosen).nan_to_num()
    squares, freedom = (weight * (values - mean) ** 2).sum(0), (weight.sum(0) - 1).clamp_min(0)
    pooled = squares.sum(1, keepdim=True) / freedom.sum(1, keepdim=True)
    variance = pooled if common else torch.where(freedom > 0, squares / freedom, pooled)
    return variance.sqrt().clamp_min(NARROWEST)


def log_density(values: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Return the log density of a Gaussian."""
    return -0.5 * ((values - mean) / scale) ** 2 - scale.log() - 0.5 * math.log(2 * math.pi)


def online(margins: Tensor, others: Tensor, inside: Tensor, fixed: Fixed = None) -> Tensor:
    """Return the log ratio N_in / N_out of margins (Q, N), averaged over queries (Carlini et al. 2022, Algorithm 1)."""
    inner, outer = (log_density(margins, *_gaussian(others, inside, truth, fixed)) for truth in (True, False))
    return (inner - outer).mean(0)


def offline(margins: Tensor, others: Tensor, inside: Tensor, fixed: Fixed = None, form: str = "cdf") -> Tensor:
    """Return a score of how unlikely the margins (Q, N) are under N_out, averaged over the queries.

    `cdf` is the one-sided test of Carlini et al. 2022: -log Pr[Z > margin], which ranks as Pr[Z <= margin] but
    does not saturate at 1. `density` is -log N_out(margin), the two-sided form of their published code.
    """
    mean, scale = _gaussian(others, inside, False, fixed)
    if form == "density":
        return -log_density(margins, mean, scale).mean(0)
    upper: Tensor = log_ndtr((mean - margins) / scale)
    return -upper.mean(0)


def _gaussian(others: Tensor, inside: Tensor, truth: bool, fixed: Fixed) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of one side; a side of single models deviates as the other side does."""
    mean = average_sides(others, inside)[0 if truth else 1]
    scales = [deviation(others, inside == side) if fixed is None else fixed[side] for side in (truth, not truth)]
    return mean, torch.where(scales[0].isnan(), scales[1], scales[0])


@dataclass(frozen=True)
class Lira:
    """LiRA attack: its settings and, after `fit`, the reference models, deviations and thresholds."""

    mode: str
    form: str
    variance: str
    queries: int
    references: References | None = None
    fixed: Fixed = None
    thresholds: dict[str, float] = field(default_factory=dict)  # by mode: online, offline

    def fit(self, shadows: Sequence[Shadow] | InOut, rng: Generator) -> Self:
        """Query the models on their own rows, and learn the common deviation and the thresholds from the answers."""
        models = len(shadows.boxes) if isinstance(shadows, InOut) else len(shadows)
        common = self.variance == "fixed" or (self.variance == "auto" and models < MANY)
        require_models("lira", shadows, self.least)
        known = gather(shadows, partial(_ask, queries=self.queries), rng)
        fixed = None
        if common:
            fixed = {truth: deviation(known.values, known.inside == truth, common) for truth in (True, False)}
        fitted = replace(self, references=known, fixed=fixed)
        return replace(fitted, thresholds=known.thresholds(fitted._score_rule))

    @property
    def least(self) -> Least:
        """Smallest numbers of models: one is always the target, and a per-example variance takes two more a side."""
        return Least(3, 6) if self.variance == "per-example" else Least(2, 4)

    def shortage(self, shadows: int, in_out: int) -> str | None:
        """Return the reason why there are too few disjoint shadows or in-out models; None if there are enough."""
        return self.least.shortage("lira", self.mode, shadows, in_out)

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """Score by the likelihood; decide by the threshold that was best with the attacker's models as targets."""
        if self.references is None:
            raise WrongInput("attack", "fit it on shadow models first")
        mode, note = self.references.mode_for("lira", self.mode, candidates)
        margins = self.references.ask(box, candidates.batch)
        scores = self._score_rule(mode)(margins, *self.references.query(candidates.batch, candidates.ids))
        return Guesses(scores, scores >= self.thresholds[mode] if self.thresholds else None, note)

    def _score_rule(self, mode: str) -> ScoreRule:
        if mode == "online":
            return partial(online, fixed=self.fixed)
        return partial(offline, fixed=self.fixed, form=self.form)


@method("attack", "lira", "-", sees="probabilities", shadows="in-out or disjoint")
def lira(mode: str = "auto", offline: str = "cdf", variance: str = "auto", queries: int = 1) -> Lira:
    """Member where the answer is likelier from models that trained on the example (LiRA, Carlini et al. 2022).

    Equation: `m = log p_y - log(1 - p_y); score = log N(m; in models) - log N(m; out models)`.

    Online mode (`auto` with in-out models) compares the Gaussians of the in and the out models. Offline mode uses only
    models that did not train on the example. With disjoint shadows these are all models, and a note says so. `offline`
    is `cdf` (their paper) or `density` (their code). `variance` is `per-example`, or one pooled over the examples per
    side (`fixed`); `auto` is fixed below 64 models. With 2 `queries` the mirrored image is queried too. The decision
    threshold is the best one when each of the attacker's models serves as the target once.
    """
    for name, value, allowed in (("mode", mode, MODES), ("offline", offline, FORMS), ("variance", variance, VARIANCES)):
        if value not in allowed:
            raise unknown(f"attack lira {name}", value, allowed)
    if queries not in (1, 2):
        raise WrongInput("attack lira queries", f"{queries} is not allowed; must be 1, or 2 for the mirror image too")
    return Lira(mode, offline, variance, queries)


def _ask(box: BlackBox, batch: Batch, queries: int) -> Tensor:
    """Return the margins (Q, N) of the examples, and with two queries of their mirror images."""
    views = [batch.inputs]
    if queries == 2:
        if batch.inputs.ndim != 4:
            raise WrongInput("attack lira queries", "2 needs images to mirror, and the inputs are none; use 1")
        views.append(batch.inputs.flip(-1))
    return torch.stack([ask(box, Batch(view, batch.labels), margin) for view in views])
