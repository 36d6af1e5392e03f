"""Lemma 1, Theorem 2 and Corollary 1 of dgp beside what a run measured, and whether they say anything of it.

They are about plain SGD with one learning rate (`why_not`). gamma_1, G^2 and sigma^2 are the largest that the rows of a
collaborative training hold; K is a lower bound of the true one (`hessian_norm` at some points, `observed_smoothness`
along the way), which flatters the bounds. A bound that is no better than what Assumption 3 gives without any theorem is
vacuous: (t G)^2 for the residual after t rounds, since what is not sent is at most all of it; G^2 for the gradient.
With gamma_1 near 1, where error feedback drives DGP, both are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from secateur.attacks.inversion.updates import gradient_update
from secateur.defenses.error_feedback import ErrorFeedback
from secateur.defenses.uploads import SendAll
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Loss, Params
from secateur.theory.gradient_distance import distance

Row = Mapping[str, float]


@dataclass(frozen=True)
class Constants:
    """What the theorems ask of a run."""

    gamma: float  # gamma_1 of gradient + residual, all tensors together, the largest over users and steps
    gradient_square: float  # G^2, the largest ||gradient||^2 of a user
    variance: float  # sigma^2, between the users of a step
    smoothness: float = math.nan  # K
    gap: float = math.nan  # l0 - l*


def constants(rows: Sequence[Row], smoothness: float = math.nan, gap: float = math.nan) -> Constants:
    """The largest values over the rows of a collaborative training; Lemma 1 alone needs no K and no gap."""
    names = ("gamma_1_whole", "gradient_square", "gradient_variance")
    gamma, square, variance = (max(row[name] for row in rows) for name in names)
    return Constants(gamma, square, variance, smoothness, gap)


def full_gradient(net: nn.Module, state: Params, batch: Batch, rows: int = 1024, loss: Loss = cross_entropy) -> Params:
    """The gradient of the mean loss over all examples, `rows` at a time; BatchNorm by its running statistics.

    These make it another function than the one that was trained by the batches' own: with BatchNorm it is no test of
    Theorem 2 but a description.
    """
    total = {name: torch.zeros_like(state[name]) for name, _ in net.named_parameters()}
    for part in torch.split(torch.arange(batch.size, device=batch.labels.device), rows):
        found = gradient_update(net, state, batch.take(part), loss=loss).values
        total = {name: value + found[name] * (len(part) / batch.size) for name, value in total.items()}
    return total


def observed_smoothness(models: Sequence[Params], gradients: Sequence[Params]) -> float:
    """The largest ||grad l(W) - grad l(W')|| / ||W - W'|| between neighbours: a lower bound of Assumption 2's K.

    Between the models of consecutive steps it is the K that Eq. 16 meets; gradients are those of the whole loss.
    """
    pairs = zip(models, models[1:], gradients, gradients[1:], strict=False)
    moved = [(distance(before, after), distance(first, second)) for before, after, first, second in pairs]
    ratios = [turned / way for way, turned in moved if way > 0]
    if not ratios:
        raise WrongInput("models", "do not differ; give at least two different ones, with the gradient at each")
    return max(ratios)


def lemma_1(gamma: float, gradient_square: float) -> float:
    """E||e_t||^2 <= 3 gamma_1 (2 + gamma_1) / (2 (1 - gamma_1)^2) G^2 (dgp Lemma 1, Eq. 3); infinite at gamma_1 = 1.

    Example:
        >>> lemma_1(0.5, 1.0)
        7.5
    """
    return math.inf if gamma >= 1 else 3 * gamma * (2 + gamma) / (2 * (1 - gamma) ** 2) * gradient_square


def lemma_1_tight(gamma: float, gradient_square: float) -> float:
    """gamma_1 / (1 - sqrt(gamma_1))^2 G^2: the fixed point of ||e'|| = sqrt(gamma_1) (||e|| + G), never above Lemma 1.

    Example:
        >>> lemma_1_tight(0.25, 1.0), lemma_1(0.25, 1.0)
        (1.0, 1.5)
    """
    return math.inf if gamma >= 1 else gamma / (1 - math.sqrt(gamma)) ** 2 * gradient_square


def theorem_2(given: Constants, rate: float, rounds: int) -> float:
    """mean_t E||grad l(W_t)||^2 <= 4 gap / (eta T) + 2 K eta (G^2 + sigma^2) + 4 eta^2 K^2 Lemma 1 (dgp Eq. 4)."""
    start = 4 * given.gap / (rate * rounds)
    noise = 2 * given.smoothness * rate * (given.gradient_square + given.variance)
    return start + noise + 4 * (rate * given.smoothness) ** 2 * lemma_1(given.gamma, given.gradient_square)


def theorem_2_tight(given: Constants, rate: float, rounds: int) -> float:
    """2 gap / (eta T) + K eta (G^2 + sigma^2) + eta^2 K^2 E||e||^2: what Eq. 17 gives when it keeps the other term.

    After (f) both ||grad l(V_t)||^2 and ||grad l(W_t)||^2 stand there; the proof drops the second, which is the one
    that is asked for, and pays a factor of 2 (of 4 on the residual) to get it back in Eq. 20.
    """
    start = 2 * given.gap / (rate * rounds)
    noise = given.smoothness * rate * (given.gradient_square + given.variance)
    return start + noise + (rate * given.smoothness) ** 2 * lemma_1_tight(given.gamma, given.gradient_square)


def corollary_1_rate(given: Constants, rounds: int) -> float:
    """The rate sqrt((l0 - l*) / (K T (G^2 + sigma^2))), as in the proof (dgp Corollary 1 is printed without the root).

    Without the root Theorem 2's first term is 4 K (G^2 + sigma^2) at every T, and nothing converges.
    """
    return math.sqrt(given.gap / (given.smoothness * rounds * (given.gradient_square + given.variance)))


def corollary_1(given: Constants, rounds: int) -> tuple[float, float]:
    """6 sqrt(K (l0 - l*) (sigma^2 + G^2) / T), and what O(1/T) hides: 4 K (l0 - l*) Lemma 1 / (T (G^2 + sigma^2))."""
    noise = given.gradient_square + given.variance
    hidden = 4 * given.smoothness * given.gap * lemma_1(given.gamma, given.gradient_square) / (rounds * noise)
    return 6 * math.sqrt(given.smoothness * given.gap * noise / rounds), hidden


def rounds_needed(given: Constants) -> float:
    """The rounds T from which on Corollary 1 says less than G^2, so something; infinite at gamma_1 = 1."""
    leading, hidden = corollary_1(given, 1)
    if math.isinf(hidden):
        return math.inf
    root = (leading + math.sqrt(leading**2 + 4 * hidden * given.gradient_square)) / (2 * given.gradient_square)
    return root**2


class Checked(NamedTuple):
    """A bound beside what was measured."""

    measured: float
    bound: float  # as printed
    tight: float  # what the same assumptions give
    trivial: float  # what they give without a theorem

    @property
    def holds(self) -> bool:
        """Whether the printed bound held; rounding is let pass."""
        return self.measured <= self.bound * (1 + 1e-6)

    @property
    def vacuous(self) -> bool:
        """Whether the printed bound says nothing."""
        return self.bound >= self.trivial


def check_lemma_1(rows: Sequence[Row], rounds: int) -> list[Checked]:
    """Lemma 1 on ||e_t||^2 after every row of a collaborative training, `rounds` a row, with what was met so far."""
    found = []
    for done in range(1, len(rows) + 1):
        met = constants(rows[:done])
        trivial = (done * rounds) ** 2 * met.gradient_square
        printed, tight = (each(met.gamma, met.gradient_square) for each in (lemma_1, lemma_1_tight))
        found.append(Checked(rows[done - 1]["error_norm"] ** 2, printed, tight, trivial))
    return found


def check_theorem_2(squares: Sequence[float], given: Constants, rate: float, rounds: int | None = None) -> Checked:
    """Theorem 2 on ||grad l(W_t)||^2 at every t, or at some of `rounds` steps, evenly taken."""
    rounds = len(squares) if rounds is None else rounds
    printed, tight = (each(given, rate, rounds) for each in (theorem_2, theorem_2_tight))
    return Checked(sum(squares) / len(squares), printed, tight, given.gradient_square)


def why_not(stated: Mapping[str, Any]) -> str | None:
    """Why Theorem 2 is not about a training, by the plan it stated; None where it is."""
    if stated["momentum"] or stated["weight_decay"]:
        return "Theorem 2 is for plain SGD, and this is momentum or weight decay"
    if len(stated["learning_rates"]) > 1:
        return "Theorem 2 is for one learning rate, and here it changes"
    if not stated["upload"].startswith((ErrorFeedback.__name__, SendAll.__name__)):
        return "Theorem 2 is for error feedback, and here what is not sent is lost"
    return None
