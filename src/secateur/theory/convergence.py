"""Convergence bounds of dgp (Lemma 1, Theorem 2) compared with the measurements of a run.

The bounds are for plain SGD with one learning rate, and uploads with error feedback. gamma_1, G^2 and sigma^2 are the
largest values in the rows of a collaborative training. K is a lower bound of the true constant, which makes the bounds
too small: the one that `estimate_smoothness` finds along the training.

A bound is vacuous if it is no better than the trivial bound of Assumption 3. That is G^2 for the gradient. For the
residual after t rounds it is (t G)^2, since the residual is at most the sum of all gradients. Both bounds are vacuous
for gamma_1 near 1, and error feedback drives DGP there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from secateur.attacks.inversion.updates import gradient_update
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Params
from secateur.theory.gradient_distance import distance

Row = Mapping[str, float]


@dataclass(frozen=True)
class Constants:
    """Constants of a run in the theorems."""

    gamma: float  # gamma_1 of gradient + residual, all tensors together, the largest over users and steps
    gradient_square: float  # G^2, the largest ||gradient||^2 of a user
    variance: float  # sigma^2, between the users of a step
    smoothness: float = math.nan  # K
    gap: float = math.nan  # l0 - l*


def constants(rows: Sequence[Row], smoothness: float = math.nan, gap: float = math.nan) -> Constants:
    """Return the largest values over the rows of a collaborative training; Lemma 1 alone needs no K and no gap."""
    names = ("gamma_1_whole", "gradient_square", "gradient_variance")
    gamma, square, variance = (max(row[name] for row in rows) for name in names)
    return Constants(gamma, square, variance, smoothness, gap)


def full_gradient(net: nn.Module, state: Params, batch: Batch, rows: int = 1024) -> Params:
    """Return the gradient of the mean loss over all examples, `rows` at a time; BatchNorm uses running statistics.

    Training used batch statistics, so with BatchNorm the loss is a different function. The gradient then describes the
    run but does not test Theorem 2.
    """
    total = {name: torch.zeros_like(state[name]) for name, _ in net.named_parameters()}
    for part in torch.split(torch.arange(batch.size, device=batch.labels.device), rows):
        gradient = gradient_update(net, state, batch.take(part)).values
        total = {name: value + gradient[name] * (len(part) / batch.size) for name, value in total.items()}
    return total


def estimate_smoothness(models: Sequence[Params], gradients: Sequence[Params]) -> float:
    """Return the largest ||grad l(W) - grad l(W')|| / ||W - W'|| between neighbours, a lower bound of Assumption 2's K.

    Between the models of consecutive steps it is the K that Eq. 16 needs. Gradients are those of the full loss.
    """
    pairs = zip(models, models[1:], gradients, gradients[1:], strict=False)
    distances = [(distance(before, after), distance(first, second)) for before, after, first, second in pairs]
    ratios = [change / step for step, change in distances if step > 0]
    if not ratios:
        raise WrongInput("models", "do not differ; use at least two different ones, with the gradient at each")
    return max(ratios)


def lemma_1(gamma: float, gradient_square: float) -> float:
    """Return the bound of dgp Lemma 1 (Eq. 3) on E||e_t||^2; infinite at gamma_1 = 1.

    E||e_t||^2 <= 3 gamma_1 (2 + gamma_1) / (2 (1 - gamma_1)^2) G^2.

    Example:
        >>> lemma_1(0.5, 1.0)
        7.5
    """
    return math.inf if gamma >= 1 else 3 * gamma * (2 + gamma) / (2 * (1 - gamma) ** 2) * gradient_square


def lemma_1_tight(gamma: float, gradient_square: float) -> float:
    """Return gamma_1 / (1 - sqrt(gamma_1))^2 G^2, a bound that is never above Lemma 1.

    It is the fixed point of ||e'|| = sqrt(gamma_1) (||e|| + G).

    Example:
        >>> lemma_1_tight(0.25, 1.0), lemma_1(0.25, 1.0)
        (1.0, 1.5)
    """
    return math.inf if gamma >= 1 else gamma / (1 - math.sqrt(gamma)) ** 2 * gradient_square


def theorem_2(problem: Constants, rate: float, rounds: int) -> float:
    """Return the bound of dgp Theorem 2 (Eq. 4) on mean_t E||grad l(W_t)||^2.

    The bound is 4 gap / (eta T) + 2 K eta (G^2 + sigma^2) + 4 eta^2 K^2 Lemma 1.
    """
    start = 4 * problem.gap / (rate * rounds)
    noise = 2 * problem.smoothness * rate * (problem.gradient_square + problem.variance)
    return start + noise + 4 * (rate * problem.smoothness) ** 2 * lemma_1(problem.gamma, problem.gradient_square)


def theorem_2_tight(problem: Constants, rate: float, rounds: int) -> float:
    """Return 2 gap / (eta T) + K eta (G^2 + sigma^2) + eta^2 K^2 E||e||^2, a tighter result of the same proof.

    After step (f) of Eq. 17 there are both ||grad l(V_t)||^2 and ||grad l(W_t)||^2. The proof drops the second, which
    is the one in the theorem. Eq. 20 recovers it at a factor of 2 (of 4 on the residual).
    """
    start = 2 * problem.gap / (rate * rounds)
    noise = problem.smoothness * rate * (problem.gradient_square + problem.variance)
    return start + noise + (rate * problem.smoothness) ** 2 * lemma_1_tight(problem.gamma, problem.gradient_square)


class Checked(NamedTuple):
    """Bound next to the measured value."""

    measured: float
    bound: float  # as printed
    tight: float  # tighter bound from the same assumptions
    trivial: float  # bound from the assumptions without a theorem

    @property
    def holds(self) -> bool:
        """True if the printed bound holds, up to rounding."""
        return self.measured <= self.bound * (1 + 1e-6)

    @property
    def vacuous(self) -> bool:
        """True if the printed bound is no better than the trivial one."""
        return self.bound >= self.trivial


def check_lemma_1(rows: Sequence[Row], rounds: int) -> list[Checked]:
    """Check Lemma 1 on ||e_t||^2 after every row of a collaborative training, with the constants up to that row.

    A row stands for `rounds` rounds.
    """
    checks = []
    for done in range(1, len(rows) + 1):
        observed = constants(rows[:done])
        trivial = (done * rounds) ** 2 * observed.gradient_square
        printed, tight = (bound(observed.gamma, observed.gradient_square) for bound in (lemma_1, lemma_1_tight))
        checks.append(Checked(rows[done - 1]["error_norm"] ** 2, printed, tight, trivial))
    return checks


def check_theorem_2(squares: Sequence[float], problem: Constants, rate: float, rounds: int | None = None) -> Checked:
    """Check Theorem 2 on ||grad l(W_t)||^2 at every step, or at an even sample of `rounds` steps."""
    rounds = len(squares) if rounds is None else rounds
    printed, tight = (bound(problem, rate, rounds) for bound in (theorem_2, theorem_2_tight))
    return Checked(sum(squares) / len(squares), printed, tight, problem.gradient_square)
