"""RMIA: comparison of an example's likelihood ratio with the ratios of a population."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Generator, Tensor

from secateur.attacks.membership.reference_models import (
    Least,
    References,
    ScoreRule,
    average_sides,
    gather,
    require_models,
)
from secateur.catalogue import method
from secateur.errors import WrongInput, check_number, check_numbers, check_whole, unknown
from secateur.inference import ask, true_probability
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, InOut, Shadow

FLOOR = 1e-300  # P(x) of an example with probability 0 in every model
MODES = ("auto", "online", "offline")
LEAST = Least(2, 4)  # one of the models is always the target


def temper(answers: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the probability of the true label at a temperature: p^(1/T), renormalised, in float64."""
    p = answers.double() ** (1 / temperature)
    return true_probability(p, labels) / p.sum(1)


def ratio(confidences: Tensor, others: Tensor, inside: Tensor, mode: str, a: float) -> Tensor:
    """Return P(x | f) / P(x) of each example, (N,); NaN if no model gives P(x).

    Online P(x) is the mean of the averages of the in and the out models. Offline it is ((1 + a) P_out + (1 - a)) / 2,
    because P_in is unknown and grows with P_out (Zarifzadeh et al. 2024).
    """
    inner, out = (side.clamp(0, 1) for side in average_sides(others, inside))
    prior = (inner + out) / 2 if mode == "online" else ((1 + a) * out + (1 - a)) / 2
    return confidences / prior.clamp_min(FLOOR)


def dominance(ratios: Tensor, population: Tensor, gamma: float) -> Tensor:
    """Return the share of the population whose ratio is more than gamma times below that of each example.

    The cost is O((n + m) log m).

    Example:
        >>> dominance(torch.tensor([4.0, 1.0]), torch.tensor([0.5, 1.0, 2.0]), 2.0).tolist()
        [0.6666666666666666, 0.0]
    """
    # strictly below: ties do not count
    below = torch.searchsorted(population.sort().values, ratios / gamma, side="left")
    return below.double() / population.numel()


@dataclass(frozen=True)
class Rmia:
    """RMIA attack: its settings and, after `fit`, the reference models, population and thresholds."""

    mode: str
    gamma: float
    a: float
    temperature: float
    population: int
    references: References | None = None
    rows: Tensor | None = None  # of the attacker's pool: the population if the candidates have none
    thresholds: dict[str, float] | None = None  # of the ratio, by mode: online, offline

    def fit(self, shadows: Sequence[Shadow] | InOut, rng: Generator) -> Self:
        """Query the models on their own rows, learn the thresholds from the answers and draw the population."""
        require_models("rmia", shadows, LEAST)
        known = gather(shadows, self._ask, rng)
        out_rows = known.models.population
        if out_rows is None:
            out_rows = (~known.inside).any(0).nonzero().squeeze(1).cpu()
        drawn = torch.randperm(len(out_rows), generator=rng)[: self.population]
        return replace(self, references=known, rows=out_rows[drawn], thresholds=known.thresholds(self._score_rule))

    def shortage(self, shadows: int, in_out: int) -> str | None:
        """Return the reason why there are too few disjoint shadows or in-out models; None if there are enough."""
        return LEAST.shortage("rmia", self.mode, shadows, in_out)

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """Score by the share of the population that an example dominates; decide by a threshold on its ratio.

        The share does not decrease with the ratio, so the decision agrees with the ranking.
        """
        if self.references is None or self.thresholds is None:
            raise WrongInput("attack", "fit it on shadow models first")
        mode, note = self.references.mode_for("rmia", self.mode, candidates)
        confidences = self._ask(box, candidates.batch)
        ratios = self._score_rule(mode)(confidences, *self.references.query(candidates.batch, candidates.ids))
        shares = dominance(ratios, self._population(box, candidates.population, mode), self.gamma)
        if len(shares) > 1 and bool((shares == shares[0]).all()):
            tied = f"gamma {self.gamma:g} ranks all examples alike; give one nearer to 1"
            note = tied if note is None else f"{note}; {tied}"
        return Guesses(shares, ratios >= self.thresholds[mode] if self.thresholds else None, note)

    def _population(self, box: BlackBox, population: Batch | None, mode: str) -> Tensor:
        """Return the ratios of the population.

        A population of the candidates is scored offline, because no model trained on it.
        """
        known = self.references
        assert known is not None and self.rows is not None
        if population is not None:
            return self._score_rule("offline")(self._ask(box, population), *known.query(population))
        rows = self.rows.to(known.values.device)
        batch = known.models.pool.take(self.rows.to(known.models.pool.labels.device))
        return self._score_rule(mode)(self._ask(box, batch), known.values[:, rows], known.inside[:, rows])

    def _ask(self, box: BlackBox, batch: Batch) -> Tensor:
        return ask(box, batch, partial(temper, temperature=self.temperature))

    def _score_rule(self, mode: str) -> ScoreRule:
        return partial(ratio, mode=mode, a=self.a)


@method("attack", "rmia", "-", sees="probabilities", shadows="in-out or disjoint")
def rmia(
    mode: str = "auto", gamma: float = 2.0, a: float = 0.3, temperature: float = 2.0, population: int = 10_000
) -> Rmia:
    """Member where P(x|f)/P(x) is gamma times that of much of the population (RMIA, Zarifzadeh et al. 2024).

    Equation: `ratio(x) = P(x|f) / P(x); score = share of the population z with ratio(x) > gamma ratio(z)`.

    Online (mode `auto` with in-out models) P(x) comes from models with and without the example. Offline, as for
    disjoint shadows, it comes from models without the example and from `a`; a note says so. The population is that of
    the candidates, else at most `population` rows of the attacker's own population, else of all its rows. The decision
    threshold is the best ratio when each of the attacker's models serves as the target once.
    """
    if mode not in MODES:
        raise unknown("attack rmia mode", mode, MODES)
    attack = Rmia(mode, gamma, a, temperature, population)
    check_numbers(attack, "(0, inf)", "gamma", "temperature", prefix="attack rmia ")
    check_number("attack rmia a", a, "[0, 1]")
    check_whole("attack rmia population", population)
    return attack
